"""Actions that carry what their preview has shown: each is rejected once that has changed, and nothing runs twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flowkit.actions.preconditions import run_of
from flowkit.client import TaskClient
from flowkit.errors import ActionRejected, RejectionCause
from flowkit.models import TaskStatus
from tests.integration.harness import Harness, node
from tests.integration.test_generations import BROKEN, Fragile, until_held
from tests.integration.test_pause import Gated

if TYPE_CHECKING:
    from flowkit import Coordinator

pytestmark = pytest.mark.server


async def seen(engine: Coordinator, task_id: str, name: str, **given: Any) -> dict[str, Any]:
    """Return the input of an action as somebody sends it who has seen its preview now."""
    shown = await engine.preview(task_id, name, **given)
    return {**given, "if_revision": shown["revision"], "if_state": shown["state"]}


async def refusal(call: Any) -> str:
    """Return why a call is rejected because what its caller has seen is outdated."""
    with pytest.raises(ActionRejected) as caught:
        await call
    assert caught.value.cause is RejectionCause.OUTDATED
    return str(caught.value)


async def test_what_a_second_operator_has_retried_meanwhile_is_not_retried_again(harness: Harness) -> None:
    """Also if only the state is compared. The same preview is applied as long as nothing has changed."""
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"fragile": Fragile(), "gated": gated})
    task_id = await harness.create(
        node("load", "fragile", inline=BROKEN, hold_on_failure=True),
        node("pay", "gated", "load"),
        node("check", "approval", "pay"),
    )
    await until_held(harness, task_id, "load")
    first = await seen(engine, task_id, "retry_node", node_id="load", input_inline={"broken": False})
    second = await seen(engine, task_id, "retry_node", node_id="load")
    await engine.retry_node(task_id, **first, by="ada")
    gated.gate("pay").set()
    await harness.until_node(task_id, "pay", "finished")
    text = await refusal(engine.retry_node(task_id, **second))
    assert "another action was applied meanwhile (retry_node of load by ada)" in text
    text = await refusal(engine.retry_node(task_id, **second | {"if_revision": None}))
    assert "what the action affects has changed meanwhile: now load is finished (attempt 3)" in text
    assert gated.attempts == [("pay", 1)]
    await engine.decide(task_id, "check", "approve")
    assert await engine.wait(task_id) is TaskStatus.FINISHED


async def test_a_node_that_has_ended_meanwhile_does_not_run_again(harness: Harness) -> None:
    """No action was applied, so the revision is the same."""
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated})
    task_id = await harness.create(node("pay", "gated"), node("other", "gated"))
    await gated.until(("pay", 1), ("other", 1))
    retry = await seen(engine, task_id, "retry_node", node_id="pay", interrupt=True)
    pause = await seen(engine, task_id, "pause", interrupt=True)
    fresh = await seen(engine, task_id, "retry_node", node_id="other", interrupt=True)
    gated.gate("pay").set()
    await harness.until_node(task_id, "pay", "finished")
    assert "now pay is finished (attempt 1);" in await refusal(engine.retry_node(task_id, **retry))
    assert "now other is running (attempt 1);" in await refusal(engine.pause(task_id, **pause))
    await engine.retry_node(task_id, **fresh)
    gated.gate("other").set()
    assert await engine.wait(task_id) is TaskStatus.FINISHED
    assert sorted(gated.attempts) == [("other", 1), ("other", 3), ("pay", 1)]


async def test_a_rerun_meanwhile_outdates_the_preview_of_a_rerun_and_of_a_cancellation(
    harness: Harness,
) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated})
    task_id = await harness.create(node("pay", "gated"), node("free", "gated"))
    tasks = TaskClient(await harness.client(), engine._tasks, queue=harness.queue)
    first_run = run_of((await tasks.look_up(task_id)).first_run_id)
    gated.gate("pay").set()
    gated.gate("free").set()
    assert await engine.wait(task_id) is TaskStatus.FINISHED
    stale = await engine.rerun(task_id, ["pay"], dry_run=True)
    other = await engine.rerun(task_id, ["free"], dry_run=True)
    assert (await engine.rerun(task_id, ["pay"], if_state=stale["state"]))["run_seq"] == 2
    assert await engine.wait(task_id) is TaskStatus.FINISHED
    text = await refusal(engine.rerun(task_id, ["pay"], if_state=stale["state"]))
    assert "now pay is finished (attempt 3)" in text
    await refusal(engine.rerun(task_id, ["free"], if_state=other["state"], dry_run=True))
    gated.gate("pay").clear()
    await engine.rerun(task_id, ["pay"])
    assert "the task has started meanwhile" in await refusal(tasks.cancel_task(task_id, if_state=first_run))
    await gated.until(("pay", 1), ("free", 1), ("pay", 3), ("pay", 5))
    assert await tasks.cancel_task(task_id, if_state=run_of((await tasks.look_up(task_id)).first_run_id))
    assert await engine.wait(task_id) is TaskStatus.CANCELLED
