"""Engines, bridges and workers as child processes, managed like the servers."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowkit.local.process import ServerProcess
from flowkit.ready_line import find_summary


class FlowkitProcess(ServerProcess):
    """One `flowkit engine`, `flowkit bridge` or `flowkit worker`. `name` is unique within the folder and names its log file.

    The process is ready when it polls its task queue. `environment` adds to the environment of the
    current process; set `TEMPORAL_ADDRESS`, `MONGO_URL`, `FLOWKIT_QUEUE` and `MONGO_DATABASE` there to
    choose servers, queue and database.
    """

    usage_error_code = 2

    def __init__(
        self, folder: Path, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._arguments = list(arguments)
        self._environment = dict(environment or {})
        self.summary = ""
        """What the process reports that it runs, from its ready line; empty until it is ready."""
        super().__init__(folder)

    @classmethod
    def install(cls) -> None:
        """Do nothing: `flowkit` is part of this package."""

    def command(self) -> list[str]:
        """Return the command that runs `flowkit` with this Python interpreter."""
        self.summary = ""
        # -P keeps modules in the current folder from replacing modules of Python.
        return [sys.executable, "-P", "-m", "flowkit", *self._arguments]

    def environment(self) -> Mapping[str, str]:
        """Return the given variables; output is unbuffered, so that each log line appears at once."""
        return {"PYTHONUNBUFFERED": "1", **self._environment}

    def is_ready(self) -> bool:
        """Whether the process has logged its ready line since its last start."""
        self.summary = self.summary or find_summary(self.read_log())
        return bool(self.summary)


def engine_process(
    folder: Path,
    *,
    functions: Sequence[str] = (),
    roles: Sequence[str] = (),
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> FlowkitProcess:
    """Return an engine with these coordinator functions (`NAME=module:function`), hosted handlers and command options."""
    given = [part for function in functions for part in ("--function", function)]
    given += [part for role in roles for part in ("--role", role)]
    return FlowkitProcess(folder, "engine", ["engine", *given, *options], environment)


def bridge_process(
    folder: Path,
    roles: Sequence[str],
    *,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> FlowkitProcess:
    """Return a bridge for these roles, with command options. `KAFKA_BOOTSTRAP_SERVERS` chooses the brokers."""
    return FlowkitProcess(folder, "bridge", ["bridge", *options, *roles], environment)


def worker_processes(
    folder: Path,
    handlers: Sequence[str],
    *,
    count: int = 1,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[FlowkitProcess]:
    """Return workers for the same handlers, named `worker-1`, `worker-2`, …, with these command options."""
    names = [f"worker-{number}" for number in range(1, count + 1)]
    return [FlowkitProcess(folder, name, ["worker", *options, *handlers], environment) for name in names]
