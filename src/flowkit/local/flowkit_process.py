"""FlowKit's own processes, engines and workers, as child processes like the servers."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowkit.local.process import ServerProcess
from flowkit.ready_line import find_summary


class FlowkitProcess(ServerProcess):
    """`flowkit` with the given arguments, under a name of its own in the folder.

    It is ready when it polls. `environment` says where the servers are, which queue and which database it uses
    (`TEMPORAL_ADDRESS`, `MONGO_URL`, `FLOWKIT_QUEUE`, `MONGO_DATABASE`); what is not in it comes from this process.
    """

    usage_error_code = 2

    def __init__(
        self, folder: Path, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._arguments = list(arguments)
        self._environment = dict(environment or {})
        self.summary = ""
        """What it says it does, such as `worker serves extract of queue flowkit`; empty before it is ready."""
        super().__init__(folder)

    @classmethod
    def install(cls) -> None:
        """Nothing to do: `flowkit` comes with the package."""

    def command(self) -> list[str]:
        """The `flowkit` of this Python. Modules of the current folder must not take the place of Python's own: -P."""
        self.summary = ""
        return [sys.executable, "-P", "-m", "flowkit", *self._arguments]

    def environment(self) -> Mapping[str, str]:
        """As given; its log is written line by line."""
        return {"PYTHONUNBUFFERED": "1", **self._environment}

    def is_ready(self) -> bool:
        """Whether this start has reported that it polls."""
        self.summary = self.summary or find_summary(self.read_log())
        return bool(self.summary)


def engine_process(
    folder: Path,
    *,
    functions: Sequence[str] = (),
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> FlowkitProcess:
    """An engine with coordinator functions, as `NAME=module:function`; `options` are further ones of the command."""
    function_options = [part for function in functions for part in ("--function", function)]
    return FlowkitProcess(folder, "engine", ["engine", *function_options, *options], environment)


def worker_processes(
    folder: Path,
    handlers: Sequence[str],
    *,
    count: int = 1,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[FlowkitProcess]:
    """Workers `worker-1`, `worker-2`, …, all for the same handlers; `options` are further ones of the command."""
    names = [f"worker-{number}" for number in range(1, count + 1)]
    return [FlowkitProcess(folder, name, ["worker", *options, *handlers], environment) for name in names]
