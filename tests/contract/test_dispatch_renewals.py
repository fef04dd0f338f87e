"""The leases of many dispatch records are renewed in one call, each under its own conditions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.contract.builders import AT, RUN, attempt

from flowkit.adapters.dispatches import Dispatch, DispatchStore, Outcome, OutcomeKind, WorkerLease

LEASE = WorkerLease(worker_id="w-1", lease_id="l-1", ttl_sec=5, expires_at=AT + 5, worker_ts_ms=10)


async def dispatched(store: DispatchStore, node_id: str, **fields: Any) -> Dispatch:
    """Store a record of an attempt that no worker has accepted, with these fields, and return it."""
    record = Dispatch(
        attempt=attempt(node_id),
        run_id=RUN,
        queue="flowkit",
        topic="cmd",
        partition=0,
        end_offset=0,
        dedup_id="d",
        cancel_token="c",
        owner="bridge-1",
        created_at=AT,
    )
    return await store.insert(replace(record, **fields))


async def accepted(store: DispatchStore, node_id: str, **fields: Any) -> Dispatch:
    """Store a record whose run a worker owns, with these fields, and return it."""
    record = await dispatched(store, node_id, **fields)
    await store.accept(record, LEASE, AT)
    return replace(record, lease=LEASE, accepted_at=AT)


def later(record: Dispatch, seconds: float) -> Dispatch:
    """Return the record with a lease that ends so much later."""
    lease = replace(LEASE, expires_at=LEASE.expires_at + seconds, worker_ts_ms=10 + int(seconds))
    return replace(record, lease=lease)


async def stored(store: DispatchStore, record: Dispatch) -> tuple[float | None, int]:
    """Return by how much the stored lease was extended, and the number of batches."""
    found = (await store.find_all([record.key]))[record.key]
    assert found.lease is not None
    return found.lease.expires_at - LEASE.expires_at, found.batches


async def test_all_leases_of_a_poll_are_renewed_with_their_batches(db: Any) -> None:
    store = DispatchStore(db)
    first, second = await accepted(store, "a"), await accepted(store, "b")
    assert await store.renew([(later(first, 3), 2), (later(second, 4), 0)], AT)
    assert await store.renew([(later(first, 1), 1)], AT)
    assert [await stored(store, first), await stored(store, second)] == [(3, 3), (4, 0)]


async def test_renewal_leaves_ended_attempts_and_those_of_other_workers_unchanged(db: Any) -> None:
    store = DispatchStore(db)
    ended, taken, running = [await accepted(store, name) for name in ("ended", "taken", "running")]
    await store.end(ended.key, Outcome(kind=OutcomeKind.DONE, at=AT))
    await store.accept(taken, replace(LEASE, worker_id="w-2", lease_id="l-2"), AT)
    assert not await store.renew([(later(each, 3), 1) for each in (ended, taken, running)], AT)
    found = [await stored(store, each) for each in (ended, taken, running)]
    assert found == [(0, 0), (0, 0), (3, 1)]


async def test_records_without_a_lease_are_not_renewed(db: Any) -> None:
    store = DispatchStore(db)
    record = await accepted(store, "a")
    assert await store.renew([(replace(record, lease=None), 1)], AT)
    assert await stored(store, record) == (0, 0)
