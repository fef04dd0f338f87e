"""What users see of external attempts: what they wait for, and the worker that runs them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.conftest import program
from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.cli.conftest import Program
    from tests.integration.bridge.external_tasks import ExternalTasks

__all__ = ["program"]

pytestmark = pytest.mark.server


async def shown_wait(external: ExternalTasks, task_id: str, node_id: str, part: str) -> str:
    """Wait until the task document shows that the node waits for something with `part`."""

    async def look() -> str | None:
        text: str = (await external.node(task_id, node_id)).get("waits_for", "")
        return text if part in text else None

    return await eventually(look)


async def status(program: Program, external: ExternalTasks, task_id: str) -> dict[str, dict[str, Any]]:
    """Return the nodes of `flowkit status --json` by id."""
    output = await program.call("status", task_id, "--json", env=external.environment)
    assert output.code == 0, output.err
    return {each["node_id"]: each for each in json.loads(output.out)["nodes"]}


async def test_users_see_what_an_attempt_waits_for_and_then_its_worker(
    external: ExternalTasks, program: Program
) -> None:
    opened = asyncio.Event()

    async def gated(run: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"count": 1}
        await run.cancellable(opened.wait())

    await external.served_engine()
    task_id = await external.create(node("a", external.role), node("b", external.role))
    absent = f"an external worker of role {external.role}; none is connected to Kafka"
    assert await shown_wait(external, task_id, "a", "none") == absent
    assert (await status(program, external, task_id))["a"]["waits_for"] == absent

    worker = await external.external(gated)
    accepted = await worker.wait_for("BATCH_OK")
    first, second = ("a", "b") if accepted.node_id == "a" else ("b", "a")
    busy = f"a free external worker of role {external.role} (1 worker connected)"
    assert await shown_wait(external, task_id, second, "free") == busy
    assert "waits_for" not in await external.node(task_id, first)
    nodes = await status(program, external, task_id)
    assert (nodes[first]["worker"], nodes[first]["waits_for"]) == (worker.worker_id, "")
    assert (nodes[second]["worker"], nodes[second]["waits_for"]) == ("", busy)
    table = (await program.call("status", task_id, env=external.environment)).out
    assert f"external worker {worker.worker_id}" in table
    assert f"waits for {busy}" in table

    opened.set()
    await external.until_status(task_id, "finished")
    for each in (await external.document(task_id))["graph"]["nodes"]:
        assert "waits_for" not in each


async def test_a_cancelled_attempt_no_longer_waits(external: ExternalTasks) -> None:
    await external.served_engine()
    task_id = await external.create(node("a", external.role))
    await shown_wait(external, task_id, "a", "none is connected")
    await external.coordinator.cancel_task(task_id)
    await external.until_status(task_id, "cancelled")

    async def gone() -> bool:
        return "waits_for" not in await external.node(task_id, "a")

    await eventually(gone)
