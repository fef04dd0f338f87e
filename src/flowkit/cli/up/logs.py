"""`flowkit logs`, which prints the logs of the processes of a `flowkit up`, or the lines of the handlers of a task."""

import asyncio
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from flowkit.cli import output
from flowkit.cli.errors import add_remedy
from flowkit.cli.options import AnyQueue, with_options
from flowkit.cli.tasks.lines import check_options, print_lines
from flowkit.errors import ConfigError
from flowkit.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_SERVERS = ("temporal", "mongo", "kafka")
_COLORS = ("cyan", "green", "magenta", "yellow", "blue")
_PAUSE_SEC = 0.3
_TAIL_BYTES = 1 << 20
"""How much of the end of a log is read first."""

_TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[,.]\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line of a log."""

    process: str
    text: str
    time: str = ""
    """The time in the line, or in the line before; texts sort like times. Empty if there is none."""


@with_options
def logs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Processes: engine, bridge, worker-1, temporal, mongo, … Default: all but the servers. "
            "With --task: a node of the task.",
            metavar="PROCESS|NODE",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="TASK", help="Print what the handlers of a task have logged."),
    ] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="With --task NODE: only this attempt.")
    ] = None,
    level: Annotated[
        str, typer.Option("--level", help="With --task: only lines of this level or above.", metavar="LEVEL")
    ] = "debug",
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Print new lines until Ctrl-C; with --task, until the task has ended."
        ),
    ] = False,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines", "-n", min=0, help="Last lines of each process, 50 by default; with --task, of all."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --task: print a JSON object for each line.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of --data of `flowkit up`. Default: the temporary folder of the running "
            "one, or its folder in the current folder."
        ),
    ] = None,
    *,
    where: AnyQueue,
) -> None:
    """Print the logs of `flowkit up`, oldest line first; --follow prints new lines as they appear.

    With --task, print what the handlers and functions of a task have logged.
    """
    if task is not None:
        given = {"task_id": task, "attempt": attempt, "level": level, "follow": follow, "most": lines}
        options = check_options(names or [], {**given, "as_json": as_json})
        return asyncio.run(print_lines(where, options))
    _refuse_without_task(attempt=attempt is not None, level=level != "debug", json=as_json)
    print_processes(names or [], find_folder(data), follow=follow, lines=50 if lines is None else lines)
    return None


def _refuse_without_task(**given: bool) -> None:
    for name, is_given in given.items():
        if is_given:
            problem = ConfigError(f"--{name} is given without --task")
            raise add_remedy(problem, "name the task, or leave the option out")


def print_processes(names: "Sequence[str]", folder: Path, *, follow: bool, lines: int) -> None:
    """Print the logs of processes in a folder; with `follow`, new lines until Ctrl-C."""
    readers = [LogFile(file, lines) for file in choose_logs(folder, names)]
    width = max(len(reader.process) for reader in readers)
    order = [reader.process for reader in readers]
    while True:
        for line in sort_lines([line for reader in readers for line in reader.read()]):
            color = _COLORS[order.index(line.process) % len(_COLORS)]
            output.echo(Text.assemble((f"{line.process:<{width}} | ", color), line.text))
        if not follow:
            return
        time.sleep(_PAUSE_SEC)


def find_folder(data: Path | None) -> Path:
    """Return the folder with the logs. Raise ConfigError if it is unclear which."""
    from flowkit.local.data_folder import running_folders

    if data is not None:
        if not data.is_dir():
            raise add_remedy(ConfigError(f"there is no folder {data}"), "pass that of `flowkit up --data`")
        return data
    folders = running_folders()
    if not folders:
        problem = ConfigError(
            "no `flowkit up` is running with a temporary folder, or with a folder in the current one"
        )
        raise add_remedy(problem, "pass the folder of `flowkit up` as --data DIR")
    if len(folders) > 1:
        problem = ConfigError(f"{len(folders)} `flowkit up` are running")
        raise add_remedy(problem, f"choose one: {', '.join(f'--data {folder}' for folder in folders)}")
    return folders[0]


def choose_logs(folder: Path, names: "Sequence[str]") -> list[Path]:
    """Return the log files of these processes, or of all but the servers. Raise ConfigError for an unknown one."""
    known = {file.stem: file for file in sorted(folder.glob("*.log"))}
    for name in names:
        if name not in known:
            problem = ConfigError(f"{folder} has no log of {name!r}")
            raise add_remedy(
                problem, did_you_mean(name, known, otherwise=f"it has {', '.join(known) or 'none'}")
            )
    chosen = [*dict.fromkeys(names)] or [name for name in known if name not in _SERVERS] or [*known]
    if not chosen:
        raise add_remedy(ConfigError(f"{folder} has no logs"), "pass the folder of `flowkit up --data`")
    return [known[name] for name in chosen]


class LogFile:
    """Reads the log of one process: first its last lines, then what is added."""

    def __init__(self, file: Path, lines: int) -> None:
        self.process = file.stem
        self._file = file
        self._lines: int | None = lines
        """How many of the last lines the first read returns."""
        self._offset = max(0, file.stat().st_size - _TAIL_BYTES)
        self._time = ""

    def read(self) -> list[LogLine]:
        """Return the lines since the last call. A line without its end stays for the next call."""
        with self._file.open("rb") as log:
            log.seek(self._offset)
            whole, end, _ = log.read().rpartition(b"\n")
        self._offset += len(whole) + len(end)
        texts = whole.decode(errors="replace").splitlines() if end else []
        found = [*self._add_times(texts)]
        if self._lines is not None:
            found, self._lines = found[len(found) - min(self._lines, len(found)) :], None
        return found

    def _add_times(self, texts: "Iterable[str]") -> "Iterator[LogLine]":
        for text in texts:
            if found := _TIME.search(text[:60]):
                self._time = found[0].replace("T", " ").replace(",", ".")
            yield LogLine(process=self.process, text=text, time=self._time)


def sort_lines(lines: "Iterable[LogLine]") -> list[LogLine]:
    """Return lines of several processes in the order of their times; those of one process keep their order."""
    return sorted(lines, key=lambda line: line.time)
