"""Exit codes of commands, and the error report: one line that says what is wrong and how to fix it."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from flowkit import reason_codes
from flowkit.cli import output
from flowkit.errors import ConfigError, FlowKitError, GraphError
from flowkit.text import EXCERPT, one_line

if TYPE_CHECKING:
    from collections.abc import Callable

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
    "Exit codes: 0 success, and the task finished; 1 the task failed; 2 the command line, a file or "
    "a setting is invalid; "
    "3 Temporal or MongoDB is unavailable; 4 no such task; 5 the task was cancelled; 70 unexpected error; "
    "124 timeout; 130 interrupted."
)

_LOCAL_SERVER_CODES = (
    reason_codes.LOCAL_SERVER,
    reason_codes.DISK_FULL,
    reason_codes.INSTALL_FAILED,
    reason_codes.PROGRAM_MISSING,
    reason_codes.NO_NETWORK,
    reason_codes.WRONG_HASH,
    reason_codes.SERVER_NOT_READY,
    reason_codes.SERVER_ENDED,
)
"""Codes of local server errors that do not depend on the command line. Their messages contain the remedy."""

_ENDS: dict[str, tuple[Exit, str]] = {
    reason_codes.INVALID_GRAPH: (Exit.USAGE, ""),
    reason_codes.CONDITIONS_TOO_LARGE: (Exit.USAGE, ""),
    reason_codes.INVALID_CONFIG: (Exit.USAGE, ""),
    reason_codes.CHECKS_BUSY: (Exit.TIMED_OUT, "try again"),
    reason_codes.ACTION_REJECTED: (Exit.USAGE, ""),
    reason_codes.ACTION_UNANSWERED: (Exit.TIMED_OUT, ""),
    reason_codes.TASK_ID_TAKEN: (Exit.USAGE, "choose another id"),
    reason_codes.ADAPTER_ERROR: (Exit.USAGE, "docs/variables.md has the rules of variables"),
    reason_codes.MONGO_UNAVAILABLE: (Exit.UNREACHABLE, "start MongoDB, or set MONGO_URL"),
    reason_codes.MONGO_DENIED: (Exit.UNREACHABLE, "check the user and its roles in MONGO_URL"),
    reason_codes.DOCUMENT_TOO_LARGE: (Exit.UNREACHABLE, "remove data that the task does not need"),
    reason_codes.MONGO_REFUSED: (
        Exit.UNREACHABLE,
        "correct the value that the message names, then try again",
    ),
    reason_codes.TEMPORAL_UNAVAILABLE: (Exit.UNREACHABLE, "check TEMPORAL_ADDRESS and TEMPORAL_NAMESPACE"),
    reason_codes.GATEWAY_UNAVAILABLE: (
        Exit.UNREACHABLE,
        "start one with `flowkit gateway`, or set COORDINATOR_URL",
    ),
    reason_codes.CALL_FAILED: (Exit.USAGE, "docs/flows.md explains the error"),
    reason_codes.ADMISSION_REJECTED: (Exit.TASK_FAILED, ""),
    reason_codes.UNKNOWN_TASK: (Exit.UNKNOWN_TASK, "run `flowkit list` to see the existing tasks"),
    reason_codes.TASK_FAILED: (Exit.TASK_FAILED, "`flowkit status` shows its nodes"),
    reason_codes.TASK_CANCELLED: (Exit.TASK_CANCELLED, "start a new one"),
    reason_codes.TASK_STILL_OPEN: (Exit.TIMED_OUT, "set a longer --timeout"),
    reason_codes.FOLDER_IN_USE: (Exit.USAGE, ""),
    reason_codes.FOLDER_NOT_WRITABLE: (Exit.USAGE, ""),
    reason_codes.PORT_IN_USE: (Exit.USAGE, ""),
    reason_codes.PROCESS_MISUSED: (Exit.USAGE, ""),
    **dict.fromkeys(_LOCAL_SERVER_CODES, (Exit.UNREACHABLE, "")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorReport:
    """An error in the form that the command line displays."""

    exit: Exit
    code: str
    message: str
    remedy: str = ""
    excerpt: str = ""
    """The line of a file where the error is, with a caret below it; each line begins with EXCERPT."""
    problems: list[str] = field(default_factory=list)
    """The problems of an invalid graph; empty for any other error."""
    log_lines: list[str] = field(default_factory=list)
    """The last lines of the log of a process that failed; empty for any other error."""

    @property
    def lines(self) -> list[str]:
        """One line for each problem, with its excerpt, and what is to be said of all of them."""
        if self.problems or not self.message:
            return [*self.problems, *filter(None, [self.remedy])]
        return [(f"{self.message}; {self.remedy}" if self.remedy else self.message) + self.excerpt]


def add_remedy(error: E, remedy: str) -> E:
    """Add a remedy to `error` and return it."""
    error.add_note(remedy)
    return error


def describe_error(error: Exception) -> ErrorReport:
    """Return the exit code, message and remedy of an error."""
    remedy = "; ".join(getattr(error, "__notes__", []))
    if isinstance(error, FlowKitError):
        end, usual = _ENDS.get(error.code, (Exit.UNEXPECTED, ""))
        problems = shown_problems(error) if isinstance(error, GraphError) else []
        message, *excerpt = str(getattr(error, "headline", error)).split(EXCERPT)
        return ErrorReport(
            exit=end,
            code=error.code,
            message=one_line(message),
            remedy=remedy or usual,
            excerpt="".join(f"{EXCERPT}{line}" for line in excerpt),
            problems=problems,
            log_lines=getattr(error, "log_lines", []),
        )
    if isinstance(error, USAGE_ERRORS):
        return _describe_misuse(error)
    message = f"unexpected {type(error).__name__}: {one_line(error)}"
    more = "add --verbose for the traceback; if this is a bug in FlowKit, please report it"
    return ErrorReport(
        exit=Exit.UNEXPECTED, code=reason_codes.UNEXPECTED_ERROR, message=message, remedy=remedy or more
    )


def _describe_misuse(error: Exception) -> ErrorReport:
    text = getattr(error, "format_message", error.__str__)()
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "flowkit"
    message, remedy = one_line(text).rstrip("."), f"see `{command} --help`"
    option = getattr(error, "option_name", "--")
    if not option.startswith("--") and _takes_arguments(context):
        remedy += ", or put `--` before the arguments if one of them begins with a dash"
    return ErrorReport(exit=Exit.USAGE, code=ConfigError.code, message=message, remedy=remedy)


def _takes_arguments(context: Any) -> bool:
    return bool(context) and any(each.param_type_name == "argument" for each in context.command.params)


def shown_problems(error: GraphError) -> list[str]:
    """Return the first ten problems of a graph, and `and more` if there are others, like the text of `GraphError`."""
    shown = [_add_excerpt(problem) for problem in error.problems[:10]]
    return [*shown, "and more"] if len(error.problems) > len(shown) else shown


def _add_excerpt(problem: str) -> str:
    """Return a problem on one line, with the excerpt and the caret below it that a condition's problem has."""
    text, *excerpt = problem.split(EXCERPT)
    return EXCERPT.join([one_line(text), *excerpt])


def report(error: Exception, *, as_json: bool, verbose: bool) -> Exit:
    """Print an error to stderr, or to stdout as the command's JSON document. Return the exit code."""
    if verbose:
        output.note("".join(traceback.format_exception(error)).rstrip("\n"))
    described = describe_error(error)
    if as_json:
        fields = {"code": described.code, "message": described.message, "remedy": described.remedy}
        output.document(
            {"error": {**fields, **({"problems": described.problems} if described.problems else {})}}
        )
    else:
        for line in described.lines:
            output.error(line)
        for line in described.log_lines:
            output.note(f"  {line}")
    return described.exit


def exit_code_of(call: Callable[[], object], *, as_json: bool, verbose: bool) -> int:
    """Call `call` and return the exit code for its result. An error prints one line with a remedy."""
    try:
        ended = call()
    except typer.Abort:
        return Exit.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - users get one line for every error, not a traceback
        return report(error, as_json=as_json, verbose=verbose)
    return ended if isinstance(ended, int) else Exit.OK


def exit_process(code: int) -> NoReturn:
    """Exit immediately: a thread of Temporal's client that still runs may abort the interpreter as it shuts down."""
    logging.shutdown()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or Exit.UNEXPECTED
    os._exit(code)
