"""Start, show, watch, list and cancel tasks."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from temporalio.service import RPCError

from flowkit.adapters.role_contracts import RoleContracts
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.pollers import never_polled_roles
from flowkit.cli import output
from flowkit.cli.errors import Exit, add_remedy
from flowkit.cli.following import follow, interruptible
from flowkit.cli.servers import accepts_connections, database, servers
from flowkit.cli.tasks.display import open_task_screen, task_table, tasks_table
from flowkit.client import TaskCancelled, TaskCatalog, TaskFailed, TaskStillOpen, UnknownTask
from flowkit.client.tasks import cancel_reason
from flowkit.connection import temporal_address
from flowkit.errors import ConfigError, FlowKitError, TaskIdTaken
from flowkit.graph.contracts import data_edges
from flowkit.models import APPROVAL, NodeStatus, TaskStatus
from flowkit.reading.notes import describe_age
from flowkit.reading.results import debug_node_command, set_aside_hints
from flowkit.reading.state import (
    TaskReader,
    describe_unknown_roles,
    find_missing_processes,
    list_roles,
    queue_option,
)
from flowkit.text import describe_set_aside, shell_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowkit.cli.json_files import GivenTask
    from flowkit.cli.options import DeploymentOptions
    from flowkit.cli.screen import Screen
    from flowkit.client import TaskSummary
    from flowkit.models import Graph
    from flowkit.products import PendingTask
    from flowkit.reading.state import NodeRow, Servers, TaskView


_WIDE = 110
"""Minimum width of a terminal, in columns, for the reasons in a list; `status` always shows them."""

_PAUSE_SEC = 0.5
_NODES_A_SECOND = 500
"""A large task is read less often, because every read returns all its nodes."""

_CONNECT_SEC = 0.5
_SERVERS_SEC = 3.0
"""How long `validate`, which needs no servers, waits for those that accept connections."""

_DECISIONS = 3
"""Number of nodes for which a hint names the commands that decide."""

_HINTS_EVERY = 4
"""Number of reads between two checks for missing processes."""

EXITS = {
    TaskStatus.FINISHED: Exit.OK,
    TaskStatus.FAILED: Exit.TASK_FAILED,
    TaskStatus.CANCELLED: Exit.TASK_CANCELLED,
}


async def start(
    task: GivenTask, task_id: str | None, where: DeploymentOptions, how: Watch | None, *, as_json: bool
) -> Exit:
    """Start a task, watch it if `how` is given, and return the exit code. Raise TaskIdTaken if the id is taken."""
    async with servers(where) as both:
        if task_id is not None:
            await _refuse_taken(both, task_id)
        started = await both.tasks.create_task(
            params=task.params, graph=task.graph, task_id=task_id or str(uuid.uuid4())
        )
        if how is None:
            hints = await find_missing_processes(
                both.temporal, where.engine_queue, [], tasks=TaskStore(both.db), later=list_roles(task.graph)
            )
            _print_started(_describe_start(both, started, where), hints, as_json)
            return Exit.OK
        if not as_json:
            output.echo(f"task {started} started on queue {where.engine_queue}")
        return await watch(both, started, how)


async def find_hints(graph: Mapping[str, Any], checked: Graph, where: DeploymentOptions) -> list[str]:
    """Return hints at roles of a graph that no worker has ever polled, or whose announced types do not fit.

    Return `[]` if the servers do not respond at once.
    """
    with suppress(FlowKitError, RPCError, TimeoutError):
        async with asyncio.timeout(_SERVERS_SEC):
            if not await accepts_connections(temporal_address()[0], _CONNECT_SEC):
                return []
            async with servers(where) as both:
                found = await never_polled_roles(
                    both.temporal, both.db, where.engine_queue, list_roles(graph)
                )
                unfit = await RoleContracts(both.db, where.engine_queue).warnings(data_edges(checked))
                return [*describe_unknown_roles(found, queue_option(where.engine_queue)), *unfit]
    return []


async def _refuse_taken(both: Servers, task_id: str) -> None:
    """Raise TaskIdTaken if a task of this deployment has an id; `create_task` finds those of others."""
    found = await both.tasks.look_up(task_id)
    if found.description is not None or await both.catalog.document(task_id) is not None:
        problem = TaskIdTaken(f"task id {task_id!r} belongs to an earlier task")
        raise add_remedy(
            problem, f"choose another id, or see that task: `{shell_command('flowkit status', task_id)}`"
        )


def _describe_start(both: Servers, task_id: str, where: DeploymentOptions) -> dict[str, Any]:
    return {"task_id": task_id, "queue": where.engine_queue, "namespace": both.temporal.namespace}


def _print_started(started: dict[str, Any], hints: list[str], as_json: bool) -> None:
    if as_json:
        return output.document({**started, "hints": hints})
    task_id = started["task_id"]
    output.echo(f"task {task_id} started on queue {started['queue']}")
    output.note(f"  watch it  {_watch_command(task_id)}")
    output.note(f"  stop it   {shell_command('flowkit cancel', task_id)}")
    output.note(f"  Web UI    workflow {task_id} in namespace {started['namespace']}")
    for hint in hints:
        output.warn(hint)
    return None


async def show(task_id: str, where: DeploymentOptions, *, as_json: bool) -> None:
    """Print the state of a task, or of its request for admission. Raise UnknownTask if it does not exist."""
    async with servers(where) as both:
        try:
            reader = await TaskReader.at(both, task_id)
        except UnknownTask:
            return _print_pending(task_id, await _find_pending(both, task_id), as_json=as_json)
        view = await reader.view()
        hints = await reader.hints(view)
    if as_json:
        return output.document({**asdict(view), "hints": hints})
    _print_task(view)
    for hint in hints:
        output.warn(hint)
    return None


async def _find_pending(both: Servers, task_id: str) -> PendingTask:
    """Return a task that has not started, as it was submitted. Raise UnknownTask if it was not."""
    pending = await both.tasks.find_pending(task_id)
    if pending is None:
        raise UnknownTask(task_id)
    return pending


def _print_pending(task_id: str, pending: PendingTask, *, as_json: bool) -> None:
    if as_json:
        return output.document({"task_id": task_id, "status": pending.state, pending.product: pending.fields})
    return output.echo(pending.text)


def _print_task(view: TaskView) -> None:
    source = "" if view.source == "workflow" or view.status.closed else " (from its document)"
    age = describe_age(view.seconds, view.total_seconds, is_open=not view.status.closed)
    output.echo(f"{format_outcome(view)}{f' ({age})' if age else ''}{source}")
    for paused in view.paused:
        output.note(f"  {paused}; `{shell_command('flowkit resume', view.task_id)}` continues it")
    if view.nodes:
        console = output.console()
        console.print(task_table(view, wide=console.is_terminal))
    for hint in (*decision_hints(view), *set_aside_hints(view), *debug_hints(view)):
        output.note(f"  {hint}")


async def cancel(task_id: str, reason: str, where: DeploymentOptions) -> str:
    """Request the cancellation of a task and return the reason as it is stored.

    Raise UnknownTask if Temporal has no workflow for the task, and ConfigError if it has ended.
    """
    kept = cancel_reason(reason)
    async with servers(where) as both:
        try:
            reader = await TaskReader.at(both, task_id)
        except UnknownTask:
            pending = await _find_pending(both, task_id)
            if await both.tasks.cancel_task(task_id, reason=kept):
                return kept
            raise _already(task_id, pending.state) from None
        _refuse_ended(await reader.view())
        if not await both.tasks.cancel_task(task_id, reason=kept):
            _refuse_ended(await reader.view())
            raise _explain_missing_workflow(task_id)
    return kept


def _explain_missing_workflow(task_id: str) -> UnknownTask:
    message = f"Temporal has no workflow for task {task_id!r}; only its document exists in MongoDB"
    return add_remedy(UnknownTask(task_id, message), "a running engine soon closes the document")


def _refuse_ended(view: TaskView) -> None:
    if view.status.closed:
        raise _already(view.task_id, view.status)


def _already(task_id: str, status: str) -> ConfigError:
    return add_remedy(ConfigError(f"task {task_id} is already {status}"), "there is nothing to cancel")


async def list_newest(
    status: str | None,
    limit: int,
    where: DeploymentOptions,
    *,
    waits: str | None = None,
    name: str | None = None,
    since: float | None = None,
) -> tuple[list[TaskSummary], bool]:
    """Return the newest tasks, and whether there are more. Raise ConfigError for an unknown status or wait."""
    async with database(where) as db:
        found = await TaskCatalog(db).list_tasks(status, limit + 1, waits=waits, name=name, since=since)
    return found[:limit], len(found) > limit


def print_tasks(tasks: list[TaskSummary]) -> None:
    """Print a table with a row for each task."""
    console = output.console()
    console.print(tasks_table(tasks, wide=console.is_terminal, reasons=console.width >= _WIDE))


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """How to watch a task; `timeout` is in seconds."""

    timeout: float | None = None
    as_json: bool = False


async def watch(both: Servers, task_id: str, how: Watch) -> Exit:
    """Show a task until it ends, print its outcome and return the exit code. Raise TaskStillOpen after the timeout."""
    reader = await TaskReader.at(both, task_id)
    ending = asyncio.create_task(_wait_for_end(both, task_id, how.timeout))
    try:
        with open_task_screen(output.console(stderr=how.as_json)) as shown:
            await _follow(reader, ending, shown)
            status, reason = await ending
            last = await reader.view()
            last = replace(last, status=status, reason=last.reason or reason)
            shown.show(last, [])
    except asyncio.CancelledError:
        output.note(f"stopped watching; task {task_id} continues: {suggest_commands(task_id)}")
        raise
    except TaskStillOpen as error:
        raise add_remedy(error, suggest_commands(task_id)) from None
    finally:
        ending.cancel()
    print_view(last, as_json=how.as_json)
    return EXITS[last.status]


async def watch_existing(task_id: str, where: DeploymentOptions, how: Watch) -> Exit:
    """Watch an existing task and return the exit code. Raise UnknownTask if the task does not exist."""
    async with servers(where) as both:
        try:
            return await watch(both, task_id, how)
        except UnknownTask:
            pending, seconds_left = await _follow_pending(both, task_id, how)
        try:
            return await watch(both, task_id, replace(how, timeout=seconds_left))
        except UnknownTask:
            _print_pending(task_id, pending, as_json=how.as_json)
            return Exit.TASK_CANCELLED if isinstance(pending.error, TaskCancelled) else Exit.TASK_FAILED


async def _follow_pending(both: Servers, task_id: str, how: Watch) -> tuple[PendingTask, float | None]:
    """Show how a submitted task waits until it starts or ends. Return what is known of it, and the time left.

    Raise UnknownTask if it was not submitted, and TaskStillOpen after the timeout.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    find = partial(_find_pending, both, task_id)
    pending = await find()
    try:
        with interruptible(task_id):
            async with asyncio.timeout(how.timeout):
                pending = await follow(
                    pending,
                    find,
                    describe=lambda known: known.text,
                    until=lambda known: known.decided,
                    quiet=how.as_json,
                )
    except TimeoutError:
        raise add_remedy(TaskStillOpen(task_id, how.timeout or 0.0), suggest_commands(task_id)) from None
    return pending, None if how.timeout is None else max(0.0, how.timeout - (clock() - began))


async def _wait_for_end(both: Servers, task_id: str, seconds: float | None) -> tuple[TaskStatus, str | None]:
    """Wait for the end of the task; return its status and its reason."""
    try:
        return (await both.tasks.result(task_id, seconds)).status, None
    except TaskFailed as failed:
        return TaskStatus.FAILED, failed.reason
    except TaskCancelled as cancelled:
        return TaskStatus.CANCELLED, cancelled.reason


async def _follow(
    reader: TaskReader, ending: asyncio.Task[Any], shown: Screen[[TaskView, Sequence[str]]]
) -> None:
    reads = 0
    hints: list[str] = []
    while not ending.done():
        view = await reader.view()
        if reads % _HINTS_EVERY == 0:
            hints = await reader.hints(view)
        reads += 1
        shown.show(view, [*hints, *decision_hints(view)])
        await asyncio.wait([ending], timeout=max(_PAUSE_SEC, len(view.nodes) / _NODES_A_SECOND))


def decision_hints(view: TaskView) -> list[str]:
    """Return a hint for each node that waits for a decision, with the commands that decide; at most four hints."""
    waiting = [node for node in view.nodes if node.awaits_decision]
    hints = [_suggest_decision(view.task_id, node) for node in waiting[:_DECISIONS]]
    if len(waiting) > len(hints):
        hints.append(f"{len(waiting) - len(hints):,} more nodes wait for a decision")
    return hints


def debug_hints(view: TaskView) -> list[str]:
    """Return a hint that names the command which debugs the first failed node of a role; `[]` if there is none."""
    failed = [node for node in view.nodes if node.status == NodeStatus.FAILED]
    commands = [debug_node_command(view.task_id, node.node_id, node.role) for node in failed]
    return [f"run a failed node here: `{each}`" for each in commands if each is not None][:1]


def _suggest_decision(task_id: str, node: NodeRow) -> str:
    if node.role == APPROVAL:
        approve = shell_command("flowkit decide", task_id, node.node_id, "approve")
        return f"{node.node_id} waits for a decision: `{approve}`, or reject"
    retry = shell_command("flowkit retry", task_id, node.node_id)
    return f"{node.node_id} waits for a decision: `{retry}`, or skip, complete or fail"


def suggest_commands(task_id: str) -> str:
    """Return the commands that watch the task again or cancel it."""
    cancels = shell_command("flowkit cancel", task_id)
    return f"`{_watch_command(task_id)}` watches it again, `{cancels}` cancels it"


def _watch_command(task_id: str) -> str:
    return shell_command("flowkit status", task_id, options=["--watch"])


def print_view(view: TaskView, *, as_json: bool) -> None:
    """Print the state of a task, or its view as JSON."""
    if as_json:
        output.document(asdict(view))
    else:
        output.echo(format_outcome(view))


def format_outcome(view: TaskView) -> str:
    """Return one line with the task, its status and the reason, and how many batches its nodes have set aside."""
    reason = f": {' '.join(view.reason.split())}" if view.reason else ""
    tolerated = f"; tolerated failures: {', '.join(view.handled_failures)}" if view.handled_failures else ""
    count = sum(node.failed_batches for node in view.nodes)
    aside = f"; {describe_set_aside(count)}" if count else ""
    return f"task {view.task_id} {view.status}{reason}{tolerated}{aside}"
