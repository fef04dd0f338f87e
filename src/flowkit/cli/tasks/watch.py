"""Watch a task until it ends."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from flowkit.cli import output
from flowkit.cli.errors import Exit, remedied
from flowkit.cli.screen import screen
from flowkit.cli.servers import servers
from flowkit.cli.tasks.view import TaskReader
from flowkit.client import TaskCancelled, TaskFailed, TaskStillOpen
from flowkit.models import TaskStatus

if TYPE_CHECKING:
    from flowkit.cli.options import Where
    from flowkit.cli.screen import Screen
    from flowkit.cli.servers import Servers
    from flowkit.cli.tasks.view import TaskView

_PAUSE_SEC = 0.5
_NODES_A_SECOND = 500
"""A large task is read less often, because every read returns all its nodes."""
_HINTS_EVERY = 4
"""Number of reads between two checks for missing processes."""

EXITS = {
    TaskStatus.FINISHED: Exit.OK,
    TaskStatus.FAILED: Exit.TASK_FAILED,
    TaskStatus.CANCELLED: Exit.TASK_CANCELLED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """How to watch a task; `timeout` is in seconds."""

    timeout: float | None = None
    as_json: bool = False


async def watch(both: Servers, task_id: str, how: Watch) -> Exit:
    """Show a task until it ends, print its outcome and return the exit code. Raise TaskStillOpen after the timeout."""
    reader = await TaskReader.at(both, task_id)
    ending = asyncio.create_task(_end(both, task_id, how.timeout))
    try:
        with screen(output.console(stderr=how.as_json)) as shown:
            await _follow(reader, ending, shown)
            status, reason = await ending
            last = await reader.view()
            last = replace(last, status=status, reason=last.reason or reason)
            shown.show(last, [])
    except asyncio.CancelledError:
        output.note(f"stopped watching; task {task_id} continues: {again(task_id)}")
        raise
    except TaskStillOpen as error:
        raise remedied(error, again(task_id)) from None
    finally:
        ending.cancel()
    print_view(last, as_json=how.as_json)
    return EXITS[last.status]


async def rejoin(task_id: str, where: Where, how: Watch) -> Exit:
    """Watch an existing task and return the exit code. Raise UnknownTask if the task does not exist."""
    async with servers(where) as both:
        return await watch(both, task_id, how)


async def _end(both: Servers, task_id: str, seconds: float | None) -> tuple[TaskStatus, str | None]:
    """Wait for the end of the task; return its status and its reason."""
    try:
        return (await both.tasks.result(task_id, seconds)).status, None
    except TaskFailed as failed:
        return TaskStatus.FAILED, failed.reason
    except TaskCancelled as cancelled:
        return TaskStatus.CANCELLED, cancelled.reason


async def _follow(reader: TaskReader, ending: asyncio.Task[Any], shown: Screen) -> None:
    reads = 0
    hints: list[str] = []
    while not ending.done():
        view = await reader.view()
        if reads % _HINTS_EVERY == 0:
            hints = await reader.hints(view)
        reads += 1
        shown.show(view, hints)
        await asyncio.wait([ending], timeout=max(_PAUSE_SEC, len(view.nodes) / _NODES_A_SECOND))


def again(task_id: str) -> str:
    """Return the commands that watch the task again or cancel it."""
    name = shlex.quote(task_id)
    return f"`flowkit status {name} --watch` watches it again, `flowkit cancel {name}` cancels it"


def print_view(view: TaskView, *, as_json: bool) -> None:
    """Print the state of a task, or its view as JSON."""
    if as_json:
        output.document(asdict(view))
    else:
        output.echo(outcome(view))


def outcome(view: TaskView) -> str:
    """Return one line with the task, its status and the reason."""
    reason = f": {' '.join(view.reason.split())}" if view.reason else ""
    tolerated = f"; tolerated failures: {', '.join(view.handled_failures)}" if view.handled_failures else ""
    return f"task {view.task_id} {view.status}{reason}{tolerated}"
