"""What task documents show of external attempts, and what queries return about them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import AT, RUN, TASK, attempt, opened, stored_node

from flowkit.activities.batches import puller
from flowkit.adapters.dispatches import Dispatch, DispatchStore, Outcome, OutcomeKind, WorkerLease
from flowkit.adapters.tasks.queries import ExternalRun, TaskQueries
from flowkit.adapters.worker_registry import BRIDGE_PREFIX
from flowkit.models.waits import for_worker

if TYPE_CHECKING:
    from flowkit.adapters.tasks.store import TaskStore

BRIDGE = f"{BRIDGE_PREFIX}1"
QUEUE = "flowkit"
LEASE = {"worker_id": "w-1", "lease_id": "l", "deadline_ts_ms": 5}


@pytest.fixture(autouse=True)
async def _begun(tasks: TaskStore) -> None:
    """Begin the first attempt of two nodes, as a bridge does."""
    await opened(tasks, "a", "b")
    for index, node_id in enumerate("ab"):
        lease = {"worker_id": BRIDGE, "lease_id": "x", "deadline_ts_ms": 1}
        await tasks.attempts.begin(attempt(node_id, index=index), RUN, lease, AT)


async def show(tasks: TaskStore, text: str | None, *, epoch: int = 1, run: str = RUN) -> None:
    """Show what node `a` waits for."""
    await tasks.attempts.show_wait(
        attempt(epoch=epoch), run, None if text is None else for_worker(text), holders=BRIDGE_PREFIX
    )


def dispatch(node_id: str = "a", index: int = 0) -> Dispatch:
    """Return the record of a first attempt."""
    return Dispatch(
        attempt=attempt(node_id, index=index),
        run_id=RUN,
        queue=QUEUE,
        topic="cmd",
        partition=0,
        end_offset=0,
        dedup_id="d",
        cancel_token="c",
        owner=BRIDGE,
        created_at=AT,
    )


async def test_holder_of_an_attempt_is_who_has_begun_it(tasks: TaskStore) -> None:
    assert await tasks.attempts.find_holder(attempt()) == (BRIDGE, "")
    assert await tasks.attempts.find_holder(attempt("b", index=1)) == (BRIDGE, "")
    assert await tasks.attempts.find_holder(attempt(epoch=2)) is None
    await tasks.attempts.show_lease(attempt(), RUN, LEASE, AT, AT)
    assert await tasks.attempts.find_holder(attempt()) == ("w-1", "")
    assert await tasks.attempts.find_holder(attempt("unknown")) is None


async def test_wait_is_shown_until_a_worker_accepts_the_attempt(db: Any, tasks: TaskStore) -> None:
    await show(tasks, "a worker")
    node = await stored_node(db)
    assert (node["waits_for"], node["wait_kind"]) == ("a worker", "worker")
    assert "waits_for" not in await stored_node(db, 1)
    await tasks.attempts.show_lease(attempt(), RUN, LEASE, AT, AT)
    assert not {"waits_for", "wait_kind"} & (await stored_node(db)).keys()
    await show(tasks, "too late")
    assert "waits_for" not in await stored_node(db)


async def test_wait_of_another_attempt_is_not_shown(db: Any, tasks: TaskStore) -> None:
    await show(tasks, "a worker", epoch=2)
    await show(tasks, "a worker", run="another run")
    assert "waits_for" not in await stored_node(db)


async def test_wait_disappears_after_the_end_and_with_the_next_attempt(db: Any, tasks: TaskStore) -> None:
    await show(tasks, "a worker")
    await tasks.attempts.finish(attempt(), RUN, AT)
    await show(tasks, None)
    assert "waits_for" not in await stored_node(db)
    await tasks.attempts.show_wait(attempt("b", index=1), RUN, for_worker("a worker"), holders=BRIDGE_PREFIX)
    await tasks.attempts.begin(attempt("b", index=1, epoch=2), RUN, LEASE, AT)
    assert "waits_for" not in await stored_node(db, 1)


async def test_query_returns_the_worker_or_the_wait_of_open_attempts(db: Any, tasks: TaskStore) -> None:
    store, queries = DispatchStore(db), TaskQueries(db)
    first, second = dispatch(), dispatch("b", 1)
    assert await queries.external_runs(TASK) == {}
    for record in (first, second):
        await store.insert(record)
    lease = WorkerLease(worker_id="w-1", lease_id="l", ttl_sec=5, expires_at=AT + 5, worker_ts_ms=1)
    await store.accept(second, lease, AT)
    await store.renew([(replace(second, lease=lease), 3)], AT)
    await show(tasks, "a worker")
    assert await queries.external_runs(TASK) == {
        ("a", 1): ExternalRun(worker_id=None, batches=0, waits_for="a worker"),
        ("b", 1): ExternalRun(worker_id="w-1", batches=3, waits_for="", heard_at=AT, lease_until=AT + 5),
    }
    await store.end(second.key, Outcome(kind=OutcomeKind.DONE, at=AT))
    assert set(await queries.external_runs(TASK)) == {("a", 1)}


async def test_unfinished_attempts_are_counted_with_an_example(db: Any) -> None:
    store = DispatchStore(db)
    assert await store.find_unfinished("crawler", QUEUE) == (0, None)
    first, second = dispatch(), dispatch("b", 1)
    await store.insert(first)
    await store.insert(second)
    count, example = await store.find_unfinished("crawler", QUEUE)
    assert (count, example in (first, second)) == (2, True)
    assert await store.find_unfinished("crawler", "another") == (0, None)
    assert await store.find_unfinished("another", QUEUE) == (0, None)
    done = Outcome(kind=OutcomeKind.DONE, at=AT)
    await store.keep(first.key, done)
    assert (await store.find_unfinished("crawler", QUEUE))[0] == 2
    await store.end(first.key, done)
    assert await store.find_unfinished("crawler", QUEUE) == (1, second)


async def test_attempt_that_a_bridge_has_begun_does_not_run_before_it_has_a_record(
    tasks: TaskStore, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bridge begins an attempt while it stores the record, or waits for a worker of an earlier attempt before."""
    monkeypatch.setattr(puller, "_YIELD_AFTER_SEC", -1.0)
    sources = puller.Sources(tasks, attempt("sink"), ["a"])
    await sources.find_end({})
    assert await tasks.running(TASK, ["a"], 45.0) == set()
    await DispatchStore(db).insert(dispatch())
    with pytest.raises(puller.SourcesIdle):
        await sources.check_idle()
