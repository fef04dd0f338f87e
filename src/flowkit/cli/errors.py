"""Exit codes of commands, and the error report: one line that says what is wrong and how to fix it."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

import typer

from flowkit.cli import output
from flowkit.errors import ConfigError, FlowKitError, GraphError

E = TypeVar("E", bound=Exception)

USAGE_ERRORS = typer.BadParameter.__bases__
"""The errors that typer raises for an invalid command line."""


class Exit(IntEnum):
    """Exit codes of every command; docs/cli.md explains them."""

    OK = 0
    TASK_FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    UNKNOWN_TASK = 4
    TASK_CANCELLED = 5
    UNEXPECTED = 70
    TIMED_OUT = 124
    INTERRUPTED = 130


EPILOG = (
    "Exit codes: 0 success, and the task finished; 1 the task failed; 2 the command line, a file or a setting is invalid; "
    "3 Temporal or MongoDB is unavailable; 4 no such task; 5 the task was cancelled; 70 unexpected error; "
    "124 timeout; 130 interrupted."
)

_LOCAL_SERVER_CODES = (
    *("local_server", "disk_full", "install_failed", "program_missing", "no_network", "wrong_hash"),
    *("server_not_ready", "server_ended"),
)
"""Codes of local server errors that do not depend on the command line. Their messages contain the remedy."""

_ENDS: dict[str, tuple[Exit, str]] = {
    "invalid_graph": (Exit.USAGE, ""),
    "invalid_config": (Exit.USAGE, ""),
    "task_id_taken": (Exit.USAGE, "choose another id"),
    "adapter_error": (Exit.USAGE, "docs/variables.md has the rules of variables"),
    "mongo_unavailable": (Exit.UNREACHABLE, "start MongoDB, or set MONGO_URL"),
    "mongo_denied": (Exit.UNREACHABLE, "check the user and its roles in MONGO_URL"),
    "document_too_large": (Exit.UNREACHABLE, "remove data that the task does not need"),
    "mongo_refused": (Exit.UNREACHABLE, "correct the value that the message names, then try again"),
    "temporal_unavailable": (Exit.UNREACHABLE, "check TEMPORAL_ADDRESS and TEMPORAL_NAMESPACE"),
    "unknown_task": (Exit.UNKNOWN_TASK, "run `flowkit list` to see the existing tasks"),
    "task_failed": (Exit.TASK_FAILED, "`flowkit status` shows its nodes"),
    "task_cancelled": (Exit.TASK_CANCELLED, "start a new one"),
    "task_still_open": (Exit.TIMED_OUT, "set a longer --timeout"),
    "folder_in_use": (Exit.USAGE, ""),
    "folder_not_writable": (Exit.USAGE, ""),
    "port_in_use": (Exit.USAGE, ""),
    "process_misused": (Exit.USAGE, ""),
    **dict.fromkeys(_LOCAL_SERVER_CODES, (Exit.UNREACHABLE, "")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorReport:
    """An error in the form that the command line displays."""

    exit: Exit
    code: str
    message: str
    remedy: str = ""
    problems: list[str] = field(default_factory=list)
    """The problems of an invalid graph; empty for any other error."""
    log_lines: list[str] = field(default_factory=list)
    """The last lines of the log of a process that failed; empty for any other error."""

    @property
    def lines(self) -> list[str]:
        """One line for each problem."""
        if self.problems or not self.message:
            return self.problems
        return [f"{self.message}; {self.remedy}" if self.remedy else self.message]


def remedied(error: E, remedy: str) -> E:
    """Add a remedy to `error` and return it."""
    error.add_note(remedy)
    return error


def described(error: Exception) -> ErrorReport:
    """Return the exit code, message and remedy of an error."""
    remedy = "; ".join(getattr(error, "__notes__", []))
    if isinstance(error, FlowKitError):
        end, usual = _ENDS.get(error.code, (Exit.UNEXPECTED, ""))
        problems = shown_problems(error) if isinstance(error, GraphError) else []
        return ErrorReport(
            exit=end,
            code=error.code,
            message=flat(getattr(error, "headline", error)),
            remedy=remedy or usual,
            problems=problems,
            log_lines=getattr(error, "log_lines", []),
        )
    if isinstance(error, USAGE_ERRORS):
        return _misused(error)
    message = f"unexpected {type(error).__name__}: {flat(error)}"
    more = "add --verbose for the traceback; if this is a bug in FlowKit, please report it"
    return ErrorReport(exit=Exit.UNEXPECTED, code="unexpected_error", message=message, remedy=remedy or more)


def _misused(error: Exception) -> ErrorReport:
    text = getattr(error, "format_message", error.__str__)()
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "flowkit"
    message = " ".join(text.split()).rstrip(".")
    return ErrorReport(
        exit=Exit.USAGE, code=ConfigError.code, message=message, remedy=f"see `{command} --help`"
    )


def flat(error: object) -> str:
    """Return the text of an error on one line."""
    return " ".join(str(error).split())


def shown_problems(error: GraphError) -> list[str]:
    """Return the first ten problems of a graph, and `and more` if there are others, like the text of `GraphError`."""
    shown = [flat(problem) for problem in error.problems[:10]]
    return [*shown, "and more"] if len(error.problems) > len(shown) else shown


def report(error: Exception, *, as_json: bool, verbose: bool) -> Exit:
    """Print an error to stderr, or to stdout as the command's JSON document. Return the exit code."""
    if verbose:
        traceback.print_exception(error, file=sys.stderr)
    found = described(error)
    if as_json:
        fields = {"code": found.code, "message": found.message, "remedy": found.remedy}
        output.document({"error": {**fields, **({"problems": found.problems} if found.problems else {})}})
    else:
        for line in found.lines:
            output.error(line)
        for line in found.log_lines:
            output.note(f"  {line}")
    return found.exit
