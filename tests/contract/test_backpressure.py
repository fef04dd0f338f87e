"""An attempt with `max_ahead` waits for the slowest running node that pulls from it, and for no other node."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.attempt_executors import Returning, role_executor
from tests.contract.builders import AT, RUN, TASK, WORKER, attempt, batches, begun, opened, record, shown
from tests.contract.pulling_node import end
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC
from tests.integration.harness import eventually, wait_seconds
from tests.unit.bridge_records import lease
from tests.unit.bridge_records import record as dispatch_record

from flowkit.activities.batches import backpressure
from flowkit.activities.batches.inputs import InputSettings
from flowkit.activities.batches.puller import ByteBudget, Puller
from flowkit.activities.handlers import BatchResult
from flowkit.adapters.claims import Claims
from flowkit.adapters.dispatches import DispatchState, DispatchStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.errors import StoreUnavailable
from flowkit.graph.input_adapters import PullArgs
from flowkit.models import NodeIO, NodeRecord, NodeStatus

if TYPE_CHECKING:
    from tests.contract.conftest import Steady

    from flowkit.activities.role_attempt import RoleExecutor
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.models import AttemptInput

OK = BatchResult(success=True)
LEASE_SEC = 45.0
UIDS = [f"b{number}" for number in range(9)]
X, Y = attempt("x", index=1), attempt("y", index=2)


def parent(max_ahead: int, *followers: str, epoch: int = 1) -> AttemptInput:
    """Return an attempt that these nodes hold."""
    return replace(attempt("a", epoch=epoch), max_ahead=max_ahead, followers=followers)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a held attempt read ten times a second at least."""
    monkeypatch.setattr(backpressure, "_LONGEST_SEC", 0.1)


async def runs(tasks: TaskStore, node: AttemptInput) -> None:
    """Let a node run with a lease."""
    await begun(tasks, node, deadline_ms=int((time.time() + LEASE_SEC) * 1000))


class Held:
    """An attempt of node `a` that stores the batches of `UIDS`, in the background."""

    def __init__(self, db: Any, limited: AttemptInput, *, inputs: InputSettings | None = None) -> None:
        self._db = db
        self.handler = Returning(OK, *UIDS)
        self.executor: RoleExecutor = role_executor(db, limited, self.handler, inputs=inputs)
        self.running = asyncio.create_task(self.executor.run())

    async def until_stored(self, count: int) -> None:
        """Wait until node `a` has stored this many batches."""

        async def look() -> bool:
            return await self._stored() >= count

        await eventually(look, TIMEOUT_SEC)

    async def until_held(self) -> None:
        """Wait until the attempt has read the claims of its followers and waits for them."""

        async def look() -> bool:
            return self.executor.waits_for() is not None

        await eventually(look, TIMEOUT_SEC)

    async def stops_at(self, count: int) -> None:
        """Wait until `count` batches are stored, and check that no other follows while the parent reads twice more."""
        await self.until_stored(count)
        await wait_seconds(3 * backpressure._LONGEST_SEC)
        assert await self._stored() == count
        assert len(self.handler.got) == count, "the next batch is not processed"
        assert not self.running.done()

    async def stops_again_at(self, count: int) -> None:
        """Like `stops_at`, for a retry, which stores batches of its predecessor again."""
        await self.until_stored(count)
        await wait_seconds(3 * backpressure._LONGEST_SEC)
        assert (await self._stored(), len(self.handler.got)) == (count, count)

    async def finishes(self, count: int = len(UIDS)) -> None:
        """Wait for the end of the attempt."""
        await asyncio.wait_for(self.running, TIMEOUT_SEC)
        assert await self._stored() == count

    async def _stored(self) -> int:
        found: int = await self._db.artifacts.count_documents({"node_id": "a", "status": "partial"})
        return found


def paused(index: int, status: NodeStatus, *, held: bool | None = True) -> NodeRecord:
    """Return what the engine writes of a follower when a pause begins or ends."""
    return NodeRecord(index=index, node_id="axy"[index], status=status, epoch=1, paused=held)


@pytest.fixture
async def prepared(db: Any, tasks: TaskStore, artifacts: ArtifactStore) -> Any:
    """A database with the open task, whose nodes have not begun."""
    await opened(tasks, "a", "x", "y")
    return db


async def test_parent_stays_within_its_limit_of_a_running_child(
    prepared: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    await runs(tasks, X)
    held = Held(prepared, parent(3, "x"))
    await held.stops_at(3)
    await artifacts.claims.make(X, "a", ["b0"], AT)
    await held.stops_at(4)
    await artifacts.claims.make(X, "a", ["b1", "b2", "b3"], AT)
    await held.stops_at(7)
    await artifacts.claims.make(X, "a", UIDS[4:7], AT)
    await held.finishes()


async def test_attempt_shows_for_which_node_it_waits_and_logs_it_once(
    prepared: Any,
    tasks: TaskStore,
    artifacts: ArtifactStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO", "flowkit.worker")
    await runs(tasks, X)
    await runs(tasks, Y)
    await artifacts.claims.make(Y, "a", UIDS[:5], AT)
    held = Held(prepared, parent(2, "x", "y"))
    await held.stops_at(2)
    shown = "node x to claim batches (io.max_ahead is 2)"
    assert held.executor.waits_for() == shown
    await artifacts.claims.make(X, "a", UIDS[:4], AT)
    await held.stops_at(6)
    assert held.executor.waits_for() == shown
    text = "node a of task task-1 has stored 2 batches, of which node x has claimed 0: it waits (io.max_ahead is 2)"
    assert [record.getMessage() for record in caplog.records] == [text]
    await artifacts.claims.make(X, "a", UIDS, AT)
    await artifacts.claims.make(Y, "a", UIDS, AT)
    monkeypatch.setattr(backpressure, "_SHOWN_SEC", 0.1)
    await held.finishes()
    await wait_seconds(0.1)
    assert held.executor.waits_for() is None


async def test_claims_in_the_same_process_release_the_parent_without_another_read(
    prepared: Any, tasks: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_SHORTEST_SEC", "_LONGEST_SEC"):
        monkeypatch.setattr(backpressure, name, 600.0)
    await runs(tasks, X)
    held = Held(prepared, parent(1, "x"))
    await held.until_held()
    for number in range(len(UIDS) - 1):
        await held.until_stored(number + 1)
        await held.executor._artifacts.claims.make(X, "a", [f"b{number}"], AT)
    await held.finishes()


async def test_claims_that_a_read_has_included_do_not_count_again_when_their_notification_arrives(
    prepared: Any, tasks: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await runs(tasks, X)
    held = Held(prepared, parent(1, "x"))
    await held.stops_at(1)
    child, late = held.executor._artifacts, list[Any]()
    notify = child.claims.notifier.notify
    with monkeypatch.context() as patch:
        patch.setattr(child.claims.notifier, "notify", lambda *given: late.append(given))
        await child.claims.make(X, "a", ["b0"], AT)
        await held.stops_at(2)
    for given in late:
        notify(*given)
    await held.stops_at(2)
    await child.claims.make(X, "a", UIDS[1:], AT)
    await held.finishes()


async def test_slowest_running_child_holds_the_parent(
    prepared: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    await runs(tasks, X)
    await runs(tasks, Y)
    held = Held(prepared, parent(2, "x", "y"))
    await held.stops_at(2)
    await artifacts.claims.make(X, "a", ["b0", "b1"], AT)
    await held.stops_at(2)
    await artifacts.claims.make(Y, "a", ["b0"], AT)
    await held.stops_at(3)
    await tasks.record(record(shown("y", NodeStatus.DEFERRED, index=2, epoch=1)))
    await held.stops_at(4)
    await tasks.attempts.finish(X, RUN, AT)
    await held.finishes()


@pytest.mark.parametrize("status", [None, NodeStatus.DEFERRED, NodeStatus.FAILED])
async def test_child_that_does_not_run_holds_no_parent(
    prepared: Any, tasks: TaskStore, status: NodeStatus | None
) -> None:
    if status is not None:
        await runs(tasks, X)
        await tasks.record(record(shown("x", status, index=1, epoch=1)))
    await Held(prepared, parent(1, "x")).finishes()


async def test_child_that_has_lost_its_worker_stops_holding_its_parent_when_its_lease_expires(
    prepared: Any, tasks: TaskStore, steady: Steady
) -> None:
    """Its next attempt may wait for the slot of the parent. The document still shows the child as running."""
    await runs(tasks, X)
    held = Held(prepared, parent(2, "x"))
    await held.stops_at(2)
    steady.forward(LEASE_SEC)
    await held.finishes()


async def test_child_that_is_being_cancelled_still_holds_its_parent(
    prepared: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    """A cancel of the task reaches both. Until then, the parent must not run ahead."""
    await runs(tasks, X)
    held = Held(prepared, parent(2, "x"))
    await held.stops_at(2)
    await tasks.record(record(shown("x", NodeStatus.CANCELLING, index=1, epoch=1)))
    await held.stops_at(2)
    await artifacts.claims.make(X, "a", UIDS, AT)
    await held.finishes()


async def test_parent_without_a_limit_reads_nothing_about_its_children(
    prepared: Any, tasks: TaskStore, reads: list[str]
) -> None:
    await runs(tasks, X)
    await Held(prepared, parent(0)).finishes()
    await Held(prepared, parent(len(UIDS) + 1, "x", epoch=2)).finishes()
    assert reads == []


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the reads of claims."""
    made: list[str] = []
    counts = Claims.counts

    async def counted(self: Claims, task_id: str, from_node: str, *more: Any) -> Any:
        made.append(from_node)
        return await counts(self, task_id, from_node, *more)

    monkeypatch.setattr(Claims, "counts", counted)
    return made


async def test_held_parent_reads_rarely(
    prepared: Any,
    tasks: TaskStore,
    artifacts: ArtifactStore,
    reads: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After 0.05 s, 0.15 s, 0.35 s, and then every 0.3 s."""
    monkeypatch.setattr(backpressure, "_LONGEST_SEC", 0.3)
    await runs(tasks, X)
    began = time.monotonic()
    held = Held(prepared, parent(1, "x"))
    await held.until_stored(1)

    async def read_often() -> bool:
        return len(reads) >= 6

    await eventually(read_often)
    seconds = time.monotonic() - began
    assert len(reads) <= 4 + seconds / 0.3
    await artifacts.claims.make(X, "a", UIDS, AT)
    await held.finishes()


async def test_parent_beyond_its_limit_that_no_running_child_holds_reads_rarely(
    prepared: Any, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backpressure, "_LONGEST_SEC", 600.0)
    await Held(prepared, parent(1, "x")).finishes()
    assert len(reads) == 1


async def test_batches_that_a_retry_stores_again_count_once(
    prepared: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    await batches(artifacts, "a", *UIDS[:5])
    await runs(tasks, X)
    await artifacts.claims.make(X, "a", UIDS[:5], AT)
    held = Held(prepared, parent(2, "x", epoch=2))
    await held.stops_again_at(7)
    await artifacts.claims.make(X, "a", UIDS[5:7], AT)
    await held.finishes()


async def test_claims_of_other_nodes_and_of_other_sources_do_not_count(
    prepared: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    await runs(tasks, X)
    held = Held(prepared, parent(2, "x"))
    await held.until_stored(2)
    await artifacts.claims.make(X, "y", ["b0", "b1"], AT)
    await artifacts.claims.make(Y, "a", ["b0", "b1"], AT)
    await held.executor._artifacts.claims.make(Y, "a", ["b2"], AT)
    await held.stops_at(2)
    await artifacts.claims.make(X, "a", UIDS, AT)
    await held.finishes()


async def test_held_parent_ends_at_a_cancel(prepared: Any, tasks: TaskStore) -> None:
    await runs(tasks, X)
    held = Held(prepared, parent(2, "x"))
    await held.stops_at(2)
    held.executor.cancel("budget is spent", 600)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(held.running, TIMEOUT_SEC)


async def test_held_parent_leaves_its_memory_budget_to_the_child(
    prepared: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    """The second batch of `u` needs the whole budget of the process, which the child needs to read its first one."""
    budget = ByteBudget(100, 2)
    for uid, size in (("b0", 10), ("b1", 1_000)):
        await artifacts.store_batch(attempt("u"), uid, {"text": "x" * size}, WORKER, AT)
    await end(artifacts, "u")
    await runs(tasks, X)
    pulled = NodeIO(
        input_inline={"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["u"]}}
    )
    limited = replace(parent(1, "x"), io=pulled)
    held = Held(prepared, limited, inputs=InputSettings(budget=budget))
    await held.stops_at(1)
    args = PullArgs(from_nodes=("a",), poll_ms=1)
    child = Puller(artifacts=artifacts, tasks=tasks, attempt=X, args=args, budget=budget).batches()
    uid, _ = await asyncio.wait_for(anext(child), TIMEOUT_SEC)
    assert uid == "b0"
    await held.finishes(2)
    await child.aclose()


async def test_held_parent_continues_after_an_outage(
    prepared: Any, tasks: TaskStore, artifacts: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, left = TaskStore.running, [1]

    async def unavailable(self: TaskStore, *args: Any) -> Any:
        if left:
            left.pop()
            raise StoreUnavailable("the primary stepped down")
        return await running(self, *args)

    monkeypatch.setattr(TaskStore, "running", unavailable)
    await runs(tasks, X)
    held = Held(prepared, parent(1, "x"))
    await held.until_stored(1)

    async def over() -> bool:
        return not left

    await eventually(over, TIMEOUT_SEC)
    await held.stops_at(1)
    await artifacts.claims.make(X, "a", UIDS, AT)
    await held.finishes()


@pytest.mark.parametrize(
    ("state", "given", "runs"),
    [
        (DispatchState.OPEN, {"ended": False}, True),
        (DispatchState.OPEN, {"ended": True}, False),
        (DispatchState.FINISHING, {"ended": False}, False),
        (DispatchState.OPEN, None, False),
    ],
    ids=["renewed", "stopped", "finishing", "queued"],
)
async def test_external_node_runs_as_long_as_its_worker_renews_its_lease(
    prepared: Any,
    tasks: TaskStore,
    steady: Steady,
    state: DispatchState,
    given: dict[str, bool] | None,
    runs: bool,
) -> None:
    """The document shows the lease as of the acceptance. The clock of the bridge may be slow."""
    await begun(tasks, X, deadline_ms=int(time.time() * 1000))
    held = None
    if given is not None:
        held = lease(expires_at=time.time() - 300, ended=given["ended"])
    store, record = DispatchStore(prepared), dispatch_record(attempt=X, lease=held, state=state)
    await store.insert(record)
    expected = {"x"} if runs else set()
    assert await tasks.running(TASK, ["x", "y"], LEASE_SEC) == expected
    if held is not None and runs:
        steady.forward(held.ttl_sec)
        renewed = replace(held, expires_at=held.expires_at + held.ttl_sec)
        await store.renew([(replace(record, lease=renewed), 0)], time.time())
        assert await tasks.running(TASK, ["x", "y"], LEASE_SEC) == expected
        steady.forward(2 * held.ttl_sec)
        assert await tasks.running(TASK, ["x", "y"], LEASE_SEC) == set()


@pytest.mark.parametrize("status", [NodeStatus.DEFERRED, NodeStatus.QUEUED])
async def test_paused_child_holds_its_parent_until_it_is_resumed(
    prepared: Any, tasks: TaskStore, status: NodeStatus
) -> None:
    await runs(tasks, X)
    held = Held(prepared, parent(2, "x"))
    await held.stops_at(2)
    await tasks.record(record(paused(1, NodeStatus.CANCELLING, held=False)))
    await tasks.record(record(paused(1, status)))
    await held.stops_at(2)
    await eventually(lambda: says(held, "node x, which is paused, to claim batches (io.max_ahead is 2)"))
    await tasks.record(record(paused(1, status, held=False)))
    await held.finishes()


async def says(held: Held, text: str) -> bool:
    return held.executor.waits_for() == text


async def test_paused_nodes_are_those_that_the_engine_has_marked_before_an_attempt(
    prepared: Any, tasks: TaskStore
) -> None:
    await tasks.record(record(paused(1, NodeStatus.DEFERRED), paused(2, NodeStatus.QUEUED, held=None)))
    assert await tasks.paused(TASK, ["x", "y", "unknown"]) == {"x"}
    await begun(tasks, attempt("x", index=1, epoch=2), deadline_ms=0)
    assert await tasks.paused(TASK, ["x"]) == set()
    assert "paused" not in (await tasks.database.tasks.find_one({"id": TASK}))["graph"]["nodes"][1]


async def test_running_nodes_are_those_with_that_status(prepared: Any, tasks: TaskStore) -> None:
    await runs(tasks, X)
    assert await tasks.running(TASK, ["x", "y", "unknown"], LEASE_SEC) == {"x"}
    assert await tasks.running("unknown", ["x"], LEASE_SEC) == set()


@pytest.mark.parametrize("ahead_sec", [-300.0, 300.0])
async def test_node_runs_until_nobody_renews_its_lease_whatever_the_clock_of_its_worker_says(
    prepared: Any, tasks: TaskStore, steady: Steady, ahead_sec: float
) -> None:
    until = time.time() + ahead_sec + LEASE_SEC
    await begun(tasks, X, deadline_ms=int(until * 1000))
    for _ in range(4):
        assert await tasks.running(TASK, ["x"], LEASE_SEC) == {"x"}
        steady.forward(LEASE_SEC / 2)
        until += LEASE_SEC / 2
        await tasks.attempts.extend_lease(X, RUN, int(until * 1000), time.time())
    assert await tasks.running(TASK, ["x"], LEASE_SEC) == {"x"}
    steady.forward(LEASE_SEC)
    assert await tasks.running(TASK, ["x"], LEASE_SEC) == set()
