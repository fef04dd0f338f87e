"""The simulation of tests ends tasks as a real engine does, and `flowkit_env` runs them on one."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.testing import simulate, stub
from flowkit.testing.env import FlowkitEnv
from flowkit.testing.servers import LocalTemporal
from flowkit.worker import BatchResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from flowkit.local import Stack
    from flowkit.testing import GraphRun
    from flowkit.worker import Batch, RunContext

pytestmark = pytest.mark.server

SOME, MANY, SEED = 8, 200, 4
NEVER_SEC, SHORT_SEC, SOON_SEC = 3_600.0, 1.0, 0.05
"""Times that are the same whether a machine is slow or not: never, later than the work of a node, and soon."""


class Flaky(RoleHandler):
    """Fails as often as its input says, permanently or not."""

    role = "flaky"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        given = batch.payload["input_inline"]
        if ctx.attempt_epoch <= given["fails"]:
            return BatchResult(success=False, reason_code="flaky", permanent=given["permanent"])
        return BatchResult(success=True, metrics={"epoch": ctx.attempt_epoch})


def random_graph(choices: random.Random) -> dict[str, Any]:
    """Return a graph with retries, delays, deadlines, allowed failures and joins.

    A failure that stops the whole task would race with the other nodes, so it stops only what depends on it.
    """
    nodes = [_random_node(number, choices) for number in range(choices.randint(3, 8))]
    return {"nodes": nodes, "on_node_failure": "continue"}


def _random_node(number: int, choices: random.Random) -> dict[str, Any]:
    parents = [f"n{each}" for each in range(number) if choices.random() < 0.4]
    common: dict[str, Any] = {"node_id": f"n{number}", "depends_on": parents}
    if parents and choices.random() < 0.3:
        common["fan_in"] = "all_done"
    if choices.random() < 0.2:
        return {**common, "type": "delay", "io": {"input_inline": {"sec": SOON_SEC}}}
    fails, permanent = choices.choice([0, 0, 0, 1, 2, 9]), choices.random() < 0.2
    retries, backoff = choices.randint(0, 2), choices.choice([0, SOON_SEC])
    deadline = choices.choice([None, NEVER_SEC])
    if fails and retries and not permanent and choices.random() < 0.3:
        backoff, deadline = NEVER_SEC, SHORT_SEC
    return {
        **common,
        "type": "flaky",
        "io": {"input_inline": {"fails": fails, "permanent": permanent, "input_adapter": "noop"}},
        "retry_policy": {"max": retries, "backoff_sec": backoff},
        "allow_failure": choices.random() < 0.4,
        **({"deadline_sec": deadline} if deadline is not None else {}),
    }


def ends(run: GraphRun) -> dict[str, Any]:
    """Return how a task and its nodes have ended."""
    nodes = {
        name: (node.status, node.attempts, node.reason_code, node.batches) for name, node in run.nodes.items()
    }
    return {"status": run.status, **nodes}


@pytest.fixture
def env(stack: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FlowkitEnv]:
    """`flowkit_env` with the Temporal of the run, and databases in memory."""
    monkeypatch.delenv("MONGO_URL", raising=False)
    monkeypatch.setenv("TEMPORAL_ADDRESS", stack.temporal_address)
    monkeypatch.setenv("TEMPORAL_UI_URL", "http://ui")
    with LocalTemporal.started(tmp_path) as server:
        yield FlowkitEnv(server)


@pytest.mark.parametrize("count", [SOME, pytest.param(MANY, marks=pytest.mark.nightly)])
@pytest.mark.slow(4)
async def test_random_graphs_end_as_on_a_real_engine(env: FlowkitEnv, count: int) -> None:
    choices = random.Random(SEED)
    graphs = [random_graph(choices) for _ in range(count)]
    async with env.engine(graphs[0], Flaky()) as engine:
        tasks = await asyncio.gather(*(engine.submit(graph=graph) for graph in graphs))
        real = await asyncio.gather(*(engine.wait(task, 200.0) for task in tasks))
    for graph, run in zip(graphs, real, strict=True):
        assert ends(await simulate(graph, Flaky())) == ends(run), graph
    assert {run.status for run in real} == {"finished", "failed"}
    assert {node.reason_code for run in real for node in run.nodes.values()} >= {"flaky", "deadline_exceeded"}
    assert real[0].web_ui == f"http://ui/namespaces/default/workflows/{tasks[0]}"


async def test_a_test_acts_on_a_task_of_a_real_engine(env: FlowkitEnv) -> None:
    graph = {
        "nodes": [{"node_id": "ok", "type": "approval"}, {"node_id": "a", "type": "a", "depends_on": ["ok"]}]
    }
    async with env.engine(graph, stub("a", {"n": 1})) as engine:
        task_id = await engine.submit({"day": "monday"})
        await engine.coordinator.decide(task_id, "ok", "approve")
        run = await engine.wait(task_id)
        assert await engine.status(task_id) == "finished"
    assert run.results("a") == [{"n": 1}]
    run.assert_order("ok", "a")


async def test_a_task_runs_to_its_end_on_a_real_engine(env: FlowkitEnv) -> None:
    graph = {"nodes": [{"node_id": "a", "type": "a", "retry_policy": {"max": 0}}]}
    run = await env.run(graph, stub("a", fails=ConnectionError("x")))
    with pytest.raises(AssertionError, match=r"ConnectionError: x[^$]*Temporal's Web UI: http://ui/"):
        run.assert_finished()
