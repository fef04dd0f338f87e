"""`flowkit explain` on a task with a failed attempt, an approval and a killed worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from flowkit.cli.app import app
from tests.integration.handlers import Gated
from tests.integration.harness import EVENT_TIMEOUT_SEC, node
from tests.integration.test_handler_versions import printed

if TYPE_CHECKING:
    from tests.integration.harness import Harness

RETRY = {"retry_policy": {"max": 1, "backoff_sec": 0.3}}
LEASE_SEC = 4.0


def check_sums(report: dict[str, Any]) -> None:
    """Check that the parts sum to the whole, and the legs of the path follow each other."""
    assert sum(report["parts"].values()) == pytest.approx(report["seconds"], abs=0.001)
    bounds = [at for leg in report["path"] for at in (leg["since"], leg["until"])]
    assert bounds[0] == 0
    assert bounds[-1] == pytest.approx(report["seconds"], abs=0.001)
    assert bounds[1:-1:2] == bounds[2::2]
    assert min(report["parts"].values()) >= 0


@pytest.mark.server
async def test_retries_approvals_and_kills_are_parts_of_the_time_of_a_task(harness: Harness) -> None:
    harness.settings |= {"lease_ttl_sec": LEASE_SEC}
    await harness.engine()
    await harness.worker()
    killed = harness.worker_process("Gated")
    task_id = await harness.create(
        node("load", "failing", inline={"failures": 1}, **RETRY),
        node("check", "approval", "load"),
        node("clean", "gated", "check"),
        node("side", "paced", inline={"pause": 0.05}),
    )
    await harness.until_node(task_id, "check", "deferred", epoch=0)
    asked = await printed(harness, "explain", task_id)
    check_sums(asked)
    assert asked["open"]
    assert "Node check is deferred: waits for a decision: approve or reject." in asked["waits_for"]
    assert [leg["node_id"] for leg in asked["path"]] == ["load", "check"]

    await harness.coordinator.decide(task_id, "check", "approve")
    await harness.until_node(task_id, "clean", "running")
    killed.kill()
    killed.wait(EVENT_TIMEOUT_SEC)
    opened = Gated()
    opened.gate.set()
    await harness.worker({"gated": opened})
    await harness.result(task_id)
    await harness.until_status(task_id, "finished")

    found = await printed(harness, "explain", task_id)
    check_sums(found)
    assert found["waits_for"] == ""
    assert all("attempt 1 of clean" in each for each in found["missing"]), (
        "its log may have reached MongoDB, or not"
    )
    assert [leg["node_id"] for leg in found["path"]] == ["load", "check", "clean", None]
    load, check, clean = (leg["parts"] for leg in found["path"][:3])
    assert 0.25 < load["retry_waits"] < load["retry_waits"] + load["failed_work"] + load["work"]
    assert [*check] == ["people"]
    assert clean["failed_work"] > LEASE_SEC / 2
    first = found["speed_ups"][0]
    assert (first["node_id"], first["gain"]) == ("clean", first["work"])
    shown = await asyncio.to_thread(CliRunner(env={**harness.environment}).invoke, app, ["explain", task_id])
    assert f"task {task_id}: finished, took " in shown.output
    assert "failed attempts" in shown.output
