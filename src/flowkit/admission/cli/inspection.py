"""The state of an admission queue and its requests, as fields and on the screen."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from flowkit.admission.cli.submission import open_queue
from flowkit.admission.models import State
from flowkit.cli import output
from flowkit.cli.screen import add_names, add_times, format_time, open_screen, plain_table
from flowkit.models.admission import RANKS
from flowkit.text import format_duration, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console, RenderableType
    from rich.table import Table

    from flowkit.admission.models import QueueStatus, RequestPage, Ticket
    from flowkit.cli.options import DeploymentOptions

_REFRESH_SEC: Final = 1.0
_BAR_CHARS: Final = 20
_NEARLY_FULL: Final = 0.8
_STYLES: Final = {
    State.STARTING: "cyan",
    State.ACTIVE: "cyan",
    State.COMPLETED: "green",
    State.FAILED: "red",
    State.TIMEOUT: "red",
    State.REJECTED: "red",
    State.EXPIRED: "red",
    State.CANCELLED: "yellow",
}


async def read_status(where: DeploymentOptions) -> QueueStatus:
    """Return the state of the queue."""
    async with open_queue(where) as queue:
        return await queue.status()


async def watch_status(where: DeploymentOptions) -> None:
    """Show the state of the queue until Ctrl-C."""
    console = output.console()
    async with open_queue(where) as queue:
        with open_screen(console, _draw_watched, partial(Lines, console)) as shown:
            while True:
                shown.show(await queue.status())
                await asyncio.sleep(_REFRESH_SEC)


class Lines:
    """Prints one line for each change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._since = time.monotonic()
        self._last = ""

    def show(self, status: QueueStatus) -> None:
        """Print the numbers of pending and active requests, if they have changed."""
        bands = ", ".join(f"{count:,} {name}" for name, count in status.by_priority.items())
        line = f"{status.pending:,} pending{f' ({bands})' if bands else ''}, {status.active:,} active"
        if line != self._last:
            self._last = line
            self._console.print(f"{time.monotonic() - self._since:6.1f} s  {line}")


def status_fields(status: QueueStatus) -> dict[str, Any]:
    """Return the state of the queue as JSON fields."""
    shares = {"utilization": status.utilization, "active_utilization": _active_share(status)}
    return {**asdict(status), **shares, "started_per_sec": _rate(status)}


def print_status(status: QueueStatus) -> None:
    """Print the state of the queue."""
    console = output.console()
    for part in _draw(status, wide=console.is_terminal):
        console.print(part)


def _draw_watched(height: int, seconds: float, status: QueueStatus) -> list[RenderableType]:
    title = f"watched for {format_duration(round(seconds))}; Ctrl-C stops"
    return [*_draw(status, wide=True), "", Text(title, style="dim")]


def _draw(status: QueueStatus, *, wide: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [_usage_table(status, wide=wide), "", _band_table(status, wide=wide), ""]
    parts += [Text.assemble((f"{name:<16}", "bold"), text) for name, text in _facts(status)]
    return [*parts, "", _user_table(status, wide=wide)] if status.top_users else parts


def _usage_table(status: QueueStatus, *, wide: bool) -> Table:
    table = plain_table(f"admission queue {status.queue}", wide=wide)
    _add_columns(table, "", "used", "limit", "share")
    table.add_column("", ratio=1, no_wrap=True)
    limits = status.limits
    for name, used, most, share in (
        ("pending", status.pending, limits.max_pending, status.utilization),
        ("active", status.active, limits.max_active, _active_share(status)),
    ):
        style = "red" if share >= 1 else "yellow" if share >= _NEARLY_FULL else "green"
        table.add_row(name, f"{used:,}", f"{most:,}", f"{share:.1%}", _bar(share, style))
    return table


def _band_table(status: QueueStatus, *, wide: bool) -> Table:
    table = plain_table(wide=wide)
    _add_columns(table, "band", "pending", "share")
    table.add_column("", ratio=1, no_wrap=True)
    for name in RANKS:
        count = status.by_priority.get(name, 0)
        share = count / max(1, sum(status.by_priority.values()))
        table.add_row(name, f"{count:,}", f"{share:.1%}", _bar(share, "cyan"))
    return table


def _user_table(status: QueueStatus, *, wide: bool) -> Table:
    table = plain_table(wide=wide)
    add_names(table, "user", [load.user_id for load in status.top_users])
    add_names(table, "tenant", [load.tenant for load in status.top_users])
    for heading in ("pending", "active"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", ratio=1)
    for load in status.top_users:
        table.add_row(Text(load.user_id), Text(load.tenant), f"{load.pending:,}", f"{load.active:,}")
    return table


def _add_columns(table: Table, name: str, *numbers: str) -> None:
    table.add_column(name, no_wrap=True)
    for each in numbers:
        table.add_column(each, justify="right", no_wrap=True)


def _bar(share: float, style: str) -> Text:
    full = min(_BAR_CHARS, max(round(share * _BAR_CHARS), 1 if share else 0))
    return Text.assemble(("█" * full, style), ("░" * (_BAR_CHARS - full), "dim"))


def _facts(status: QueueStatus) -> list[tuple[str, str]]:
    oldest, mean = status.oldest_age_sec, status.mean_service_sec
    return [
        (
            "oldest request",
            "none waits" if oldest is None else f"has waited {format_duration(round(oldest, 1))}",
        ),
        ("started", f"{_rate(status):,.2f} a second ({status.started_last_minute:,} in the last minute)"),
        ("mean run", "unknown yet" if mean is None else format_duration(mean)),
        ("in doubt", _count(status.in_doubt, "change")),
        ("unsent", f"events of {_count(status.unsent_events, 'request')}"),
    ]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _rate(status: QueueStatus) -> float:
    return round(status.started_last_minute / 60, 3)


def _active_share(status: QueueStatus) -> float:
    return status.active / status.limits.max_active


# --- requests


async def read_page(where: DeploymentOptions, wanted: Mapping[str, Any], limit: int) -> RequestPage:
    """Return the newest requests that match."""
    async with open_queue(where) as queue:
        return await queue.page(**wanted, limit=limit)


def print_page(page: RequestPage) -> None:
    """Print a table with a row for each request."""
    if not page.tickets:
        return output.note("no requests")
    console = output.console()
    console.print(_request_table(page, wide=console.is_terminal))
    if page.total > len(page.tickets):
        output.note(f"{len(page.tickets):,} of {page.total:,} requests; `--limit` shows more")
    return None


def _request_table(page: RequestPage, *, wide: bool) -> Table:
    table = plain_table(wide=wide)
    add_names(table, "request", [each.execution_id for each in page.tickets], most=36)
    for heading in ("status", "band"):
        table.add_column(heading, no_wrap=True)
    add_names(table, "user", [each.user_id for each in page.tickets])
    add_names(table, "tenant", [each.tenant for each in page.tickets])
    add_times(table, "requested")
    table.add_column("note", ratio=1 if wide else None, no_wrap=True)
    for each in page.tickets:
        status = Text(each.state, style=_STYLES.get(each.state, ""))
        names = (Text(each.user_id), Text(each.tenant), format_time(each.requested_at), Text(_note(each)))
        table.add_row(Text(each.execution_id), status, each.priority, *names)
    return table


def _note(ticket: Ticket) -> str:
    if ticket.cancel_requested:
        return "its end is requested"
    return one_line(ticket.error or ticket.reason or "")
