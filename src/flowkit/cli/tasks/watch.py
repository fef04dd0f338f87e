"""Looking at a task until it has ended."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from flowkit.cli import output
from flowkit.cli.errors import Exit, remedied
from flowkit.cli.screen import screen
from flowkit.cli.servers import servers
from flowkit.cli.tasks.view import Looker
from flowkit.client import TaskCancelled, TaskFailed, TaskStillOpen
from flowkit.models import TaskStatus

if TYPE_CHECKING:
    from flowkit.cli.options import Where
    from flowkit.cli.screen import Screen
    from flowkit.cli.servers import Servers
    from flowkit.cli.tasks.view import TaskView

_PAUSE_SEC = 0.5
_NODES_A_SECOND = 500
"""A large task is looked at less often: every look carries all its nodes."""
_HINTS_EVERY = 4
"""Looks from one search for missing processes to the next."""

EXITS = {
    TaskStatus.FINISHED: Exit.OK,
    TaskStatus.FAILED: Exit.TASK_FAILED,
    TaskStatus.CANCELLED: Exit.TASK_CANCELLED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """How a task is to be watched."""

    timeout: float | None = None
    as_json: bool = False


async def watch(both: Servers, task_id: str, how: Watch) -> Exit:
    """Show a task until it has ended, then tell how; answers the exit code. TaskStillOpen after the timeout."""
    looker = await Looker.at(both, task_id)
    ending = asyncio.create_task(_end(both, task_id, how.timeout))
    try:
        with screen(output.console(stderr=how.as_json)) as shown:
            await _follow(looker, ending, shown)
            status, reason = await ending
            last = await looker.view()
            last = replace(last, status=status, reason=last.reason or reason)
            shown.show(last, [])
    except asyncio.CancelledError:
        output.note(f"no longer watching; task {task_id} goes on: {again(task_id)}")
        raise
    except TaskStillOpen as error:
        raise remedied(error, again(task_id)) from None
    finally:
        ending.cancel()
    tell(last, as_json=how.as_json)
    return EXITS[last.status]


async def rejoin(task_id: str, where: Where, how: Watch) -> Exit:
    """Watch a task that was started before. UnknownTask when there is none."""
    async with servers(where) as both:
        return await watch(both, task_id, how)


async def _end(both: Servers, task_id: str, seconds: float | None) -> tuple[TaskStatus, str | None]:
    """How the task ends, and why."""
    try:
        return (await both.tasks.result(task_id, seconds)).status, None
    except TaskFailed as failed:
        return TaskStatus.FAILED, failed.reason
    except TaskCancelled as cancelled:
        return TaskStatus.CANCELLED, cancelled.reason


async def _follow(looker: Looker, ending: asyncio.Task[Any], shown: Screen) -> None:
    looks = 0
    hints: list[str] = []
    while not ending.done():
        view = await looker.view()
        if looks % _HINTS_EVERY == 0:
            hints = await looker.hints(view)
        looks += 1
        shown.show(view, hints)
        await asyncio.wait([ending], timeout=max(_PAUSE_SEC, len(view.nodes) / _NODES_A_SECOND))


def again(task_id: str) -> str:
    """How to go on with a task that is watched no more."""
    name = shlex.quote(task_id)
    return f"`flowkit status {name} --watch` watches it again, `flowkit cancel {name}` stops it"


def tell(view: TaskView, *, as_json: bool) -> None:
    """How a task has ended, or where it is."""
    if as_json:
        output.document(asdict(view))
    else:
        output.say(outcome(view))


def outcome(view: TaskView) -> str:
    """One line: the task, its status, and why."""
    reason = f": {' '.join(view.reason.split())}" if view.reason else ""
    tolerated = f"; tolerated failures: {', '.join(view.handled_failures)}" if view.handled_failures else ""
    return f"task {view.task_id} {view.status}{reason}{tolerated}"
