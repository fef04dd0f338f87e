"""Streaming with external workers: an external parent, an external child, and both."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.attempt.signals import signal_first_batch
from flowkit.bridge import delivery, supervisor
from flowkit.models import TaskStatus
from flowkit.testing.external import EachBatch, Misbehavior, Result
from tests.integration.bridge.external_tasks import codes
from tests.integration.streaming import Sink, Source, assert_exact, source, streaming

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server


class Pair:
    """A parent `a` and its streaming child `b`. External workers run those of the two that `nodes` names."""

    def __init__(self, external: ExternalTasks, nodes: str, fail_at: int | None = None) -> None:
        self.external = external
        self.nodes = nodes
        self.source = Source()
        self.sink = Sink(fail_at)
        self.read: list[int] = []
        self._fail_at = fail_at
        self._opened = asyncio.Event()

    async def start(self, *, workers: int = 2, **options: Any) -> None:
        """Start an engine and workers. `options` are those of the external workers; each of two serves one role."""
        external, roles = self.external, [self.external.role, self.external.other_role]
        await external.served_engine()
        await external.worker({"source": self.source, "sink": self.sink})
        self.workers = [
            await external.external(*self.handlers, roles=served, **options)
            for served in ([roles[:1], roles[1:]] if workers == 2 else [roles])
        ]

    @property
    def handlers(self) -> tuple[Any, Any]:
        """Return the handlers of external workers: for parents and for children."""
        return self._store, EachBatch(self._pass_on)

    async def create(self, batches: int = 5, **inline: Any) -> str:
        """Create the task."""
        parent = self.external.role if "a" in self.nodes else "source"
        child = self.external.other_role if "b" in self.nodes else "sink"
        return await self.external.create(
            source(batches=batches, role=parent, **inline), streaming("b", child, "a")
        )

    def open(self) -> None:
        """Let the parent continue."""
        self._opened.set()
        self.source.gates["a"].set()

    async def _store(self, run: Any) -> AsyncIterator[Any]:
        """Yield numbered batches, as `Source` does."""
        given = run.input_inline
        for number in range(given["batches"]):
            if number == given.get("hold_at", 1):
                await run.cancellable(self._opened.wait())
            fails = number == given.get("fail_at") and run.attempt_epoch == 1
            yield Result(
                {"n": 1, "number": number},
                f"b{number}",
                success=not fails,
                reason_code="torn" if fails else None,
            )

    def _pass_on(self, payload: dict[str, Any], run: Any) -> Any:
        """Return the number of a batch, as `Sink` does."""
        number = payload["meta"]["number"]
        self.read.append(number)
        if number == self._fail_at and run.attempt_epoch == 1:
            return Result(success=False, reason_code="flaky")
        return {"n": 1, "number": number}

    async def assert_finished(self, task_id: str, batches: int = 5) -> None:
        """Wait until the task finishes, and check that both nodes have counted each batch once."""
        assert (await self.external.result(task_id)).status is TaskStatus.FINISHED
        for name in ("a", "b"):
            await assert_exact(self.external, task_id, name, batches)


@pytest.mark.parametrize("external_nodes", ["a", "b", "ab"], ids=["parent", "child", "both"])
async def test_child_starts_while_its_parent_runs_and_totals_are_exact_when_the_parent_is_retried(
    external: ExternalTasks, external_nodes: str
) -> None:
    pair = Pair(external, external_nodes)
    await pair.start()
    task_id = await pair.create(fail_at=3)
    await external.until_batches(task_id, "b", 1)
    assert (await external.node(task_id, "a"))["status"] == "running"
    pair.open()
    await pair.assert_finished(task_id)
    assert (await external.node(task_id, "a"))["attempt_epoch"] == 2


@pytest.mark.parametrize("external_nodes", ["a", "b"], ids=["parent", "child"])
async def test_totals_are_exact_when_the_child_is_retried(
    external: ExternalTasks, external_nodes: str
) -> None:
    pair = Pair(external, external_nodes, fail_at=2)
    await pair.start()
    task_id = await pair.create(hold_at=3)
    await external.until_node(task_id, "b", "running", epoch=2)
    pair.open()
    await pair.assert_finished(task_id)


async def test_totals_are_exact_with_duplicate_events(external: ExternalTasks) -> None:
    pair = Pair(external, "ab")
    pair.open()
    await pair.start(misbehavior=Misbehavior(duplicate_events=2))
    await pair.assert_finished(await pair.create(20), 20)


async def test_totals_are_exact_when_the_worker_of_the_parent_is_killed(external: ExternalTasks) -> None:
    pair = Pair(external, "ab")
    await pair.start()
    task_id = await pair.create(hold_at=3)
    await external.until_batches(task_id, "b", 3)
    await pair.workers[0].kill()
    pair.open()
    await external.external(*pair.handlers, roles=[external.role])
    await pair.assert_finished(task_id)


async def test_batches_of_an_external_parent_that_has_finished_start_the_child(
    external: ExternalTasks,
) -> None:
    """The end of the parent alone does not open the gate, and may overtake the signal."""
    pair = Pair(external, "a")
    await pair.start()
    parents = [source("fast", role=external.role, hold_at=-1), source("slow", hold_at=0)]
    task_id = await external.create(*parents, streaming("c", "sink", "fast", "slow"))
    await external.until_batches(task_id, "c", 5)
    assert (await external.node(task_id, "slow"))["status"] == "running"
    pair.source.gates["slow"].set()
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    await assert_exact(external, task_id, "c", 5, sources=2)


async def test_next_bridge_signals_what_a_stopped_one_could_not(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*given: Any) -> None:
        """Lose the signal."""

    monkeypatch.setattr(delivery, "signal_first_batch", lost)
    pair = Pair(external, "a")
    await pair.start()
    task_id = await pair.create()
    await external.until_batches(task_id, "a", 1)
    monkeypatch.setattr(delivery, "signal_first_batch", signal_first_batch)
    await external.coordinator.restart()
    await external.until_batches(task_id, "b", 1)
    assert (await external.node(task_id, "a"))["attempt_epoch"] == 1
    pair.open()
    await pair.assert_finished(task_id)


async def test_external_child_yields_the_only_worker_to_the_retry_of_its_parent(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bridge cancels the child, which waits for batches while its parent needs the worker. It uses no retry."""
    monkeypatch.setattr(supervisor, "_IDLE_SEC", 1.0)
    pair = Pair(external, "ab")
    pair.open()
    await pair.start(workers=1)
    parent = source(fail_at=2, role=external.role)
    parent["retry_policy"] = {"max": 1, "backoff_sec": 2}
    child = streaming("b", external.other_role, "a")
    child["retry_policy"] = {"max": 0}
    task_id = await external.create(parent, child)
    await pair.assert_finished(task_id)
    assert set(await codes(external, task_id, "b")) <= {"yielded", "unclaimed_batches", "dispatch_lost", None}
    assert (await external.node(task_id, "a"))["attempt_epoch"] >= 2
