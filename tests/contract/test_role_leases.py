"""A role's task queue is leased to native workers or to bridges, and shared by the processes of one kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flowkit.adapters.role_leases import RoleHolders, RoleKind, RoleLeases
from flowkit.attempt import role_lease
from flowkit.attempt.role_lease import RoleLease
from flowkit.core.loop_portal import LoopPortal
from flowkit.errors import RoleHeld

if TYPE_CHECKING:
    from tests.contract.conftest import Steady

KEY = ("default", "flowkit.indexer")
NATIVE, EXTERNAL = RoleKind.NATIVE, RoleKind.EXTERNAL


@pytest.fixture
def leases(db: Any) -> RoleLeases:
    """The leases of `db`."""
    return RoleLeases(db)


async def take(leases: RoleLeases, kind: RoleKind, holder: str) -> RoleHolders | None:
    """Take a lease of 30 seconds."""
    return await leases.take(KEY, kind, holder, 30)


async def test_processes_of_one_kind_share_a_lease_and_the_other_kind_waits_for_the_last(
    db: Any, leases: RoleLeases, steady: Steady
) -> None:
    other = RoleLeases(db)
    assert await take(leases, NATIVE, "w1") is None
    assert await take(leases, NATIVE, "w2") is None
    assert await take(other, EXTERNAL, "b1") == RoleHolders(kind=NATIVE, holders=["w1", "w2"])
    steady.forward(20)
    assert await take(leases, NATIVE, "w2") is None
    assert await take(other, EXTERNAL, "b1") == RoleHolders(kind=NATIVE, holders=["w1", "w2"])
    steady.forward(10)
    assert await take(other, EXTERNAL, "b1") == RoleHolders(kind=NATIVE, holders=["w2"])
    steady.forward(19)
    assert await take(other, EXTERNAL, "b1") == RoleHolders(kind=NATIVE, holders=["w2"])
    assert await take(RoleLeases(db), EXTERNAL, "b2") == RoleHolders(kind=NATIVE, holders=["w1", "w2"])
    steady.forward(1)
    assert await take(other, EXTERNAL, "b1") is None
    assert await take(leases, NATIVE, "w2") == RoleHolders(kind=EXTERNAL, holders=["b1"])


async def test_renewals_keep_a_lease_and_a_release_ends_it(leases: RoleLeases, steady: Steady) -> None:
    for _ in range(5):
        assert await take(leases, NATIVE, "w1") is None
        assert await take(leases, EXTERNAL, "b1") is not None
        steady.forward(20)
    await leases.release(KEY, EXTERNAL, "w1")
    assert await take(leases, EXTERNAL, "b1") is not None
    await leases.release(KEY, NATIVE, "w1")
    assert await take(leases, EXTERNAL, "b1") is None


async def test_namespaces_and_queues_have_leases_of_their_own(leases: RoleLeases) -> None:
    assert await leases.take(KEY, NATIVE, "w1", 30) is None
    assert await leases.take(("other", KEY[1]), EXTERNAL, "b1", 30) is None
    assert await leases.take((KEY[0], "flowkit.enricher"), EXTERNAL, "b1", 30) is None


async def test_processes_that_ended_without_a_release_leave_the_lease(
    db: Any, leases: RoleLeases, steady: Steady
) -> None:
    for number in range(5):
        assert await take(leases, NATIVE, f"w{number}") is None
        steady.forward(20)
    [row] = [row async for row in db.role_leases.find()]
    assert [each["id"] for each in row["holders"]] == ["w3", "w4"]


async def test_process_that_was_frozen_past_its_lease_may_begin_no_attempt(
    db: Any, leases: RoleLeases, steady: Steady, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_lease, "steady_sec", lambda: steady.now)
    own, other = lease(leases, NATIVE, "w1"), lease(RoleLeases(db), EXTERNAL, "b1")
    await own.check()
    with pytest.raises(RoleHeld) as refused:
        await other.check()
    text = str(refused.value)
    assert text.startswith("native workers serve its task queue 'flowkit.indexer' (w1 ("), text
    assert "stop them, or remove 'indexer' from the roles of b1 (" in text
    steady.forward(role_lease.TTL_SEC - 1)
    assert not own.is_held
    steady.forward(1)
    await other.check()
    with pytest.raises(RoleHeld, match=r"bridges serve its task queue 'flowkit.indexer' \(b1 \("):
        await own.check()
    await other.release()
    await own.check()
    assert (own.problem, own.is_held) == (None, True)


def lease(leases: RoleLeases, kind: RoleKind, name: str) -> RoleLease:
    """Return the lease of a process."""
    return RoleLease(
        leases, LoopPortal(), kind, namespace=KEY[0], role="indexer", task_queue=KEY[1], name=name
    )
