"""The lines of handlers, for `flowkit logs --task`. It imports its dependencies when it runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from flowkit import products
from flowkit.cli import output
from flowkit.cli.errors import add_remedy
from flowkit.errors import ConfigError, StoreDenied, StoreUnavailable, UnknownTask
from flowkit.models import TaskStatus
from flowkit.text import clean, format_duration, one_line, printable, shorten, visible

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.cli.options import DeploymentOptions
    from flowkit.client import TaskCatalog
    from flowkit.products import KeptLine, LogReader

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_PAUSE_SEC: Final = 1.0
_LAST_LINES_SEC: Final = 3.0
"""How long the lines of the last second of a task may take to arrive after its end."""
_STYLES: Final = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LineOptions:
    """Which lines are printed, and how."""

    task_id: str
    node_id: str | None = None
    attempt: int | None = None
    level: str = "debug"
    follow: bool = False
    most: int | None = None
    """How many of the last lines are printed first; None for all."""
    as_json: bool = False


def check_options(names: list[str], options: dict[str, Any]) -> LineOptions:
    """Return the options of `flowkit logs --task`. Raise ConfigError, which names an invalid one."""
    if len(names) > 1:
        problem = ConfigError(f"--task prints the lines of one node or of all, not of {', '.join(names)}")
        raise add_remedy(problem, "name one node, or none")
    if options["attempt"] is not None and not names:
        raise add_remedy(ConfigError("--attempt is given without a node"), "name the node before --task")
    if options["level"].lower() not in LEVELS:
        raise ConfigError(f"--level is {options['level']!r}; it must be one of {', '.join(LEVELS)}")
    return LineOptions(node_id=names[0] if names else None, **options)


async def print_lines(where: DeploymentOptions, options: LineOptions) -> None:
    """Print the lines of a task, of a node or of an attempt; with `follow`, until the task has ended."""
    from flowkit.cli.servers import database
    from flowkit.client import TaskCatalog

    if (logs := products.logs()) is None:
        raise products.missing("`flowkit logs --task`", "observe")
    async with database(where) as db:
        catalog, reader = TaskCatalog(db), logs.reader(db)
        document = await _find_task(catalog, options)
        if not await _print_found(catalog, reader, options) and not options.as_json:
            output.note(await _explain_none(reader, document, options))


async def _find_task(catalog: TaskCatalog, options: LineOptions) -> dict[str, Any]:
    from flowkit.reading.results import require_node

    document = await catalog.document(options.task_id)
    if document is None:
        raise UnknownTask(options.task_id)
    require_node(document, options.node_id)
    return document


async def _print_found(catalog: TaskCatalog, reader: LogReader, options: LineOptions) -> int:
    """Print lines, and return their number."""
    found = reader.lines(
        options.task_id, options.node_id, attempt=options.attempt, level=options.level.upper()
    )
    printer = _Printer(options)
    if not options.follow:
        await printer.print_present(found)
        return printer.count
    until, waits = None, False
    while True:
        try:
            await printer.print_present(found)
            if until is not None and time.monotonic() > until:
                return printer.count
            if until is None and await _has_ended(catalog, options.task_id):
                until = time.monotonic() + _LAST_LINES_SEC
            waits = False
        except StoreDenied:
            raise
        except StoreUnavailable as error:
            if not waits:
                output.note(f"waiting for MongoDB: {one_line(error)}")
            until, waits = None, True  # The last lines, too, have to wait for MongoDB.
        await asyncio.sleep(_PAUSE_SEC)


class _Printer:
    """Prints the lines that there are, at first perhaps only the last ones of them, and counts them."""

    def __init__(self, options: LineOptions) -> None:
        self.count = 0
        self._options = options
        self._last: deque[KeptLine] = deque(maxlen=options.most)

    async def print_present(self, found: AsyncIterator[list[KeptLine]]) -> None:
        """Print the lines that there are at present. If this fails, another call continues."""
        async for lines in found:
            if not lines:
                break
            self.count += len(lines)
            self._last.extend(lines)
            if self._last.maxlen is None:
                _print_all(self._last, self._options)
        _print_all(self._last, self._options)
        self._last = deque()


def _print_all(lines: deque[KeptLine], options: LineOptions) -> None:
    for each in lines:
        if options.as_json:
            output.echo(visible(clean(json.dumps(to_json(each), ensure_ascii=False))))
        else:
            _print_line(each)
    lines.clear()


def to_json(line: KeptLine) -> dict[str, Any]:
    """Return a line as a JSON object."""
    given = {name: value for name, value in asdict(line).items() if name != "place"}
    return {**given, "at": format_moment(line.at)}


def format_moment(at: float) -> str:
    """Return a time in seconds since the epoch as `2026-01-31T12:00:00.123Z`."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _print_line(line: KeptLine) -> None:
    """Print a line. Its further lines are indented, so that a text cannot look like another line."""
    if line.left_out:
        output.echo(Text(f"… {line.left_out:,} lines of {_name_attempt(line)} left out …", "dim"))
    text = clean(line.text).replace("\n", "\n    ")
    batch = f" [{printable(shorten(line.batch_uid))}]" if line.batch_uid else ""
    output.echo(
        Text.assemble(
            (f"{format_moment(line.at)} ", "dim"),
            (f"{line.level:<8} ", _STYLES.get(line.level, "")),
            (f"{_name_attempt(line)}{batch} ", "cyan"),
            text,
        )
    )


def _name_attempt(line: KeptLine) -> str:
    shard = f"/{line.shard}" if line.shard else ""
    return f"{printable(line.node_id)}#{line.attempt}{shard}"


async def _has_ended(catalog: TaskCatalog, task_id: str) -> bool:
    """Return whether a task has ended, or has been deleted. Its document may be large, so only its mark is read."""
    mark = await catalog.change_mark(task_id)
    return mark is None or TaskStatus(mark["status"]).closed


async def _explain_none(reader: LogReader, document: dict[str, Any], options: LineOptions) -> str:
    """Return why there are no lines, as far as it is known."""
    from flowkit.adapters.entries import utc

    node = f"node {options.node_id!r} of " if options.node_id else ""
    what = f"no lines of {node}task {options.task_id!r} are kept"
    nodes = [each for each in document["graph"]["nodes"] if options.node_id in (None, each["node_id"])]
    attempts = max((each.get("attempt_epoch") or 0 for each in nodes), default=0)
    if not attempts:
        return f"{what}: no attempt has begun"
    if options.attempt is not None and options.attempt > attempts:
        return f"{what} in attempt {options.attempt}: its last attempt is {attempts}"
    ended, kept_sec = document.get("finished_at"), await reader.kept_sec()
    if ended is not None and kept_sec is not None:
        ago = time.time() - utc(ended).timestamp()
        if ago > kept_sec:
            age, kept = format_duration(ago), format_duration(kept_sec)
            return f"{what}: it ended {age} ago, and lines are kept for {kept} (attempt_logs_ttl_sec)"
    least = "" if options.level.lower() == "debug" else f" of level {options.level.lower()} or above"
    return (
        f"{what}: its handlers have logged none{least}, or its workers keep none "
        "(kept_log_level is OFF for the role, or their FlowKit lacks the product observe); "
        "the log of a process has its own lines"
    )
