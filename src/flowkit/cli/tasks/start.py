"""Start a task and print the commands that show it."""

from __future__ import annotations

import shlex
import uuid
from typing import TYPE_CHECKING, Any

from flowkit.cli import output
from flowkit.cli.errors import Exit, remedied
from flowkit.cli.servers import servers
from flowkit.cli.tasks.view import describe, missing
from flowkit.cli.tasks.watch import watch
from flowkit.errors import TaskIdTaken

if TYPE_CHECKING:
    from flowkit.cli.inputs import GivenTask
    from flowkit.cli.options import Where
    from flowkit.cli.servers import Servers
    from flowkit.cli.tasks.watch import Watch


async def start(
    task: GivenTask, task_id: str | None, where: Where, how: Watch | None, *, as_json: bool
) -> Exit:
    """Start a task, watch it if `how` is given, and return the exit code. Raise TaskIdTaken if the id is taken."""
    async with servers(where) as both:
        if task_id is not None:
            await _refuse_taken(both, task_id)
        started = await both.tasks.create_task(
            params=task.params, graph=task.graph, task_id=task_id or str(uuid.uuid4())
        )
        if how is None:
            hints = await missing(both.temporal, where.engine_queue, [])
            _print_started(_started(both, started, where), hints, as_json)
            return Exit.OK
        if not as_json:
            output.echo(f"task {started} started on queue {where.engine_queue}")
        return await watch(both, started, how)


async def _refuse_taken(both: Servers, task_id: str) -> None:
    description = await describe(both.temporal, task_id)
    if description is not None or await both.catalog.document(task_id) is not None:
        problem = TaskIdTaken(f"task id {task_id!r} belongs to an earlier task")
        raise remedied(
            problem, f"choose another id, or see that task: `flowkit status {shlex.quote(task_id)}`"
        )


def _started(both: Servers, task_id: str, where: Where) -> dict[str, Any]:
    return {"task_id": task_id, "queue": where.engine_queue, "namespace": both.temporal.namespace}


def _print_started(started: dict[str, Any], hints: list[str], as_json: bool) -> None:
    if as_json:
        return output.document({**started, "hints": hints})
    task_id = started["task_id"]
    name = shlex.quote(task_id)
    output.echo(f"task {task_id} started on queue {started['queue']}")
    output.note(f"  watch it  flowkit status {name} --watch")
    output.note(f"  stop it   flowkit cancel {name}")
    output.note(f"  Web UI    workflow {task_id} in namespace {started['namespace']}")
    for hint in hints:
        output.warn(hint)
    return None
