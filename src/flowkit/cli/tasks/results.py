"""`flowkit result` and `flowkit batches`, which show what a task and its nodes have stored. They import its
dependencies when it runs."""

import asyncio
import json
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowkit.cli import output
from flowkit.cli.options import (
    AnyQueue,
    AsJson,
    DeploymentOptions,
    NodeId,
    TaskId,
    with_options,
)
from flowkit.cli.tasks.variables import plain
from flowkit.text import one_line, shell_command

if TYPE_CHECKING:
    from rich.table import Table

    from flowkit.adapters.tasks.queries import StoredBatch
    from flowkit.reading.results import BatchPage, NodeResult, ResultView

_MAX_BATCHES = 1_000
_UID_CHARS = 40


@with_options
def result(
    task: TaskId,
    node: NodeId = None,
    limit: Annotated[
        int, typer.Option(min=1, max=_MAX_BATCHES, help="With NODE: maximum number of batches.")
    ] = 20,
    offset: Annotated[int, typer.Option(min=0, help="With NODE: number of older batches to skip.")] = 0,
    as_json: AsJson = False,
    *,
    where: AnyQueue,
) -> None:
    """Show the result of a task: the final metrics of its nodes. With NODE, show that node and its batches."""
    view, page = asyncio.run(_read(task, node, limit, offset, where))
    if as_json:
        return output.document(plain(_to_json(view, page)))
    if page is None:
        _print_task(view)
    else:
        _print_node(view, page)
    return None


@with_options
def batches(
    task: TaskId,
    node: Annotated[str, typer.Argument(help="Id of a node.")],
    failed: Annotated[bool, typer.Option("--failed", help="Only batches that failed.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=_MAX_BATCHES, help="Maximum number of batches.")] = 20,
    offset: Annotated[int, typer.Option(min=0, help="Number of older batches to skip.")] = 0,
    as_json: AsJson = False,
    *,
    where: AnyQueue,
) -> None:
    """Show the batches of a node, oldest first. With --failed, those that failed, and why."""
    _, page = asyncio.run(_read(task, node, limit, offset, where, failed=failed))
    assert page is not None
    if as_json:
        shown = {"task_id": task, "node_id": node, **asdict(page), "next_offset": page.next_offset}
        return output.document(plain(shown))
    if page.batches:
        console = output.console()
        console.print(batches_table(page.batches, wide=console.is_terminal))
    _note_debugging(task, node, page)
    output.note(describe_page(page, "failed batches" if failed else "batches"))
    return None


async def _read(
    task_id: str,
    node_id: str | None,
    limit: int,
    offset: int,
    where: DeploymentOptions,
    *,
    failed: bool = False,
) -> "tuple[ResultView, BatchPage | None]":
    from flowkit.cli.servers import database
    from flowkit.client import TaskCatalog
    from flowkit.reading.results import read_result

    async with database(where) as db:
        return await read_result(TaskCatalog(db), task_id, node_id, limit, offset, failed=failed)


def _to_json(view: "ResultView", page: "BatchPage | None") -> dict[str, Any]:
    if page is None:
        return asdict(view)
    return {
        "task_id": view.task_id,
        **asdict(view.nodes[0]),
        "page": {**asdict(page), "next_offset": page.next_offset},
    }


def _print_task(view: "ResultView") -> None:
    from flowkit.reading.results import set_aside_hints

    reason = f": {one_line(view.reason)}" if view.reason else ""
    output.echo(f"task {view.task_id} {view.status}{reason}")
    console = output.console()
    console.print(results_table(view.nodes, wide=console.is_terminal))
    if not view.ended:
        output.note("the task has not ended; its results can still change")
    for hint in set_aside_hints(view):
        output.note(hint)
    if any(node.batches for node in view.nodes):
        output.note(f"see the batches of a node: `{shell_command('flowkit result', view.task_id, 'NODE')}`")


def _print_node(view: "ResultView", page: "BatchPage") -> None:
    from flowkit.models import NodeStatus

    (node,) = view.nodes
    error = f": {one_line(node.error)}" if node.error else ""
    output.echo(f"node {node.node_id} of task {view.task_id} {node.status}{error}")
    for line in describe_result(node):
        output.echo(f"  {line}")
    if page.batches:
        output.echo("")
        console = output.console()
        console.print(batches_table(page.batches, wide=console.is_terminal))
    if not NodeStatus(node.status).ended:
        output.note("the node has not ended; its result can still change")
    _note_debugging(view.task_id, node.node_id, page)
    output.note(describe_page(page))


def _note_debugging(task_id: str, node_id: str, page: "BatchPage") -> None:
    """Print the command that debugs the first failed batch of a page, if there is one."""
    uid = next((batch.uid for batch in page.batches if batch.status == "failed"), None)
    if uid is not None:
        from flowkit.reading.results import debug_command

        output.note(f"run a failed batch here: `{debug_command(task_id, node_id, uid)}`")


def describe_result(node: "NodeResult") -> list[str]:
    """Return a line for each value of a node's result."""
    parts = (("metrics", node.metrics), ("stats", node.stats), ("artifacts_ref", node.artifacts_ref or {}))
    named = [(f"{part}.{name}", value) for part, values in parts for name, value in values.items()]
    width = max((len(name) for name, _ in named), default=0)
    return [f"{name:<{width}}  {_format(value)}" for name, value in named]


def describe_page(page: "BatchPage", what: str = "batches") -> str:
    """Return which batches a page contains, and how to see the next ones."""
    if not page.total:
        return f"no {what}"
    first, last = page.offset + 1, page.offset + len(page.batches)
    if not page.batches:
        return f"the node has only {page.total:,} {what}; lower --offset"
    more = f"; `--offset {page.next_offset}` shows the next" if page.next_offset is not None else ""
    return f"{what} {first:,} to {last:,} of {page.total:,}{more}"


def results_table(nodes: "list[NodeResult]", *, wide: bool) -> "Table":
    """Return a table with a row for each node; `wide` fills the width of the terminal."""
    from rich.text import Text

    from flowkit.cli.screen import add_names, plain_table
    from flowkit.cli.tasks.display import status_text

    table = plain_table(wide=wide)
    add_names(table, "node", [node.node_id for node in nodes])
    table.add_column("status", width=10, no_wrap=True)
    table.add_column("batches", justify="right", no_wrap=True)
    table.add_column("result", ratio=1 if wide else None, overflow="fold", no_wrap=not wide)
    for node in nodes:
        shown = [_format_values(node.metrics)]
        shown += [f"stats: {_format_values(node.stats)}"] if node.stats else []
        shown += [f"artifacts_ref: {_format_values(node.artifacts_ref)}"] if node.artifacts_ref else []
        text = one_line(node.error) if node.error else "; ".join(filter(None, shown))
        count = f"{node.batches:,}" if node.batches else ""
        table.add_row(Text(node.node_id), status_text(node.status), Text(count), Text(text))
    return table


def batches_table(batches: "list[StoredBatch]", *, wide: bool) -> "Table":
    """Return a table with a row for each batch; `wide` fills the width of the terminal."""
    from rich.text import Text

    from flowkit.cli.screen import add_names, add_times, format_time, plain_table

    table = plain_table(wide=wide)
    add_names(table, "batch", [batch.uid for batch in batches], most=_UID_CHARS)
    table.add_column("status", width=7, no_wrap=True)
    table.add_column("attempt", justify="right", no_wrap=True)
    add_times(table, "stored")
    table.add_column("metrics", ratio=1 if wide else None, overflow="fold", no_wrap=not wide)
    for batch in batches:
        ref = f"artifacts_ref: {_format_values(batch.artifacts_ref)}" if batch.artifacts_ref else ""
        shown = one_line(batch.error) if batch.error else _format_values(batch.metrics)
        shown += (
            f" (set aside after {batch.tries} {'try' if batch.tries == 1 else 'tries'})"
            if batch.tries
            else ""
        )
        at = None if batch.stored_at is None else datetime.fromisoformat(batch.stored_at).timestamp()
        style = {"ok": "green", "skipped": "yellow"}.get(batch.status, "red")
        table.add_row(
            Text(batch.uid),
            Text(batch.status, style=style),
            Text(str(batch.attempt or "")),
            Text(format_time(at)),
            Text("; ".join(filter(None, [shown, ref]))),
        )
    return table


def _format_values(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_format(value)}" for name, value in values.items())


def _format(value: Any) -> str:
    return json.dumps(plain(value), ensure_ascii=False)
