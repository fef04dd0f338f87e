"""`flowkit explain`, which shows where the time of a task went. It imports its dependencies when it runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flowkit.cli import output
from flowkit.cli.options import AnyQueue, AsJson, DeploymentOptions, TaskId, with_options
from flowkit.reading.notes import describe_age, format_seconds
from flowkit.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from flowkit.reading.explain import PathLeg, SpeedUp
    from flowkit.reading.timeline import TaskExplanation

MOST_LEGS = 25
"""Rows of the critical path. Of a longer one, the shortest legs are left out."""

_LEAST_SHARE = 0.01
"""Smallest share of a leg that its row names."""

LABELS = {
    "work": "work",
    "failed_work": "failed attempts",
    "queue": "queue",
    "retry_waits": "retry waits",
    "slots": "slots",
    "people": "people",
    "scheduled": "delays and prerequisites",
    "database_and_temporal": "database and Temporal",
}

_STYLES = {
    "work": "green",
    "failed_work": "red",
    "queue": "yellow",
    "retry_waits": "yellow",
    "slots": "yellow",
    "people": "cyan",
    "scheduled": "cyan",
    "database_and_temporal": "dim",
}


@with_options
def explain(
    task: TaskId,
    as_json: AsJson = False,
    *,
    where: AnyQueue,
) -> None:
    """Show where the time of a task went: its critical path, its parts, and which node to speed up first."""
    explained = asyncio.run(_read(task, where))
    if as_json:
        from flowkit.reading.timeline import to_json

        return output.document(to_json(explained))
    console = output.console()
    for part in draw(explained, wide=console.is_terminal):
        console.print(part, soft_wrap=False)
    for missing in explained.missing:
        output.note(missing)
    return None


async def _read(task_id: str, where: DeploymentOptions) -> TaskExplanation:
    from flowkit.cli.servers import servers
    from flowkit.reading.timeline import explain_task

    async with servers(where) as both:
        return await explain_task(both, task_id)


def draw(explained: TaskExplanation, *, wide: bool) -> Iterator[RenderableType]:
    """Yield the parts of the output; `wide` fills the width of the terminal."""
    from rich.text import Text

    report = explained.report
    age = describe_age(explained.seconds, explained.total_seconds, is_open=explained.is_open)
    yield Text(f"task {explained.task_id}: {explained.status}, {age}")
    if explained.reason:
        yield Text(one_line(explained.reason))
    yield from map(Text, explained.set_aside)
    if explained.waits_for:
        yield Text(f"\n{explained.waits_for}")
    yield ""
    yield _parts_table({part.value: seconds for part, seconds in report.parts.items()}, wide=wide)
    if any(leg.node_id for leg in report.path):
        yield ""
        yield _path_table(report.path, report.began_at, wide=wide)
    if report.speed_ups:
        yield ""
        yield _speed_ups_table(report.speed_ups, wide=wide)


def _parts_table(parts: Mapping[str, float], *, wide: bool) -> Table:
    from rich.text import Text

    from flowkit.cli.screen import plain_table

    table = plain_table("Where the time went", wide=wide)
    table.expand = False
    table.add_column("part", width=max(map(len, LABELS.values())), no_wrap=True)
    table.add_column("time", justify="right", min_width=len("9 h 59 min"), no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    whole = sum(parts.values())
    for part, seconds in parts.items():
        if seconds > 0:
            share = f"{100 * seconds / whole:.0f} %"
            table.add_row(Text(LABELS[part], style=_STYLES[part]), Text(format_seconds(seconds)), Text(share))
    return table


def _path_table(path: Sequence[PathLeg], began_at: float, *, wide: bool) -> Table:
    from rich.text import Text

    from flowkit.cli.screen import add_names, plain_table

    shown = sorted(sorted(path, key=lambda leg: -leg.seconds)[:MOST_LEGS], key=lambda leg: leg.since)
    table = plain_table("Critical path", wide=wide)
    add_names(table, "node", [leg.node_id or "" for leg in shown])
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("spent on", ratio=1 if wide else None, overflow="fold", no_wrap=not wide)
    for leg in shown:
        longest_first = sorted(leg.parts().items(), key=lambda each: -each[1])
        spent = [
            f"{LABELS[part]} {format_seconds(seconds)}"
            for part, seconds in longest_first
            if seconds >= leg.seconds * _LEAST_SHARE
        ]
        since = Text(format_seconds(leg.since - began_at))
        table.add_row(
            Text(leg.node_id or "—"), since, Text(format_seconds(leg.seconds)), Text(", ".join(spent))
        )
    if hidden := len(path) - len(shown):
        rest = sum(leg.seconds for leg in path) - sum(leg.seconds for leg in shown)
        table.add_row(Text(f"… {hidden:,} more", style="dim"), "", Text(format_seconds(rest)), "")
    return table


def _speed_ups_table(speed_ups: Sequence[SpeedUp], *, wide: bool) -> Table:
    from rich.text import Text

    from flowkit.cli.screen import add_names, plain_table

    table = plain_table("Speed up first", wide=wide)
    table.expand = False
    add_names(table, "node", [each.node_id for each in speed_ups])
    table.add_column("gains at most", justify="right", no_wrap=True)
    table.add_column("its attempts took", justify="right", no_wrap=True)
    for each in speed_ups:
        table.add_row(Text(each.node_id), Text(format_seconds(each.gain)), Text(format_seconds(each.work)))
    return table
