"""A role's task queue is leased to native workers or to bridges, and shared by the processes of one kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import AT

from flowkit.adapters.role_leases import RoleHolders, RoleKind, RoleLeases
from flowkit.attempt import role_lease
from flowkit.attempt.role_lease import RoleLease
from flowkit.core.loop_portal import LoopPortal
from flowkit.errors import RoleHeld

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = ("default", "flowkit.indexer")
NATIVE, EXTERNAL = RoleKind.NATIVE, RoleKind.EXTERNAL


@pytest.fixture
def leases(db: Any) -> RoleLeases:
    """The leases of `db`."""
    return RoleLeases(db)


async def test_processes_of_one_kind_share_a_lease_and_the_other_kind_waits_for_the_last(
    leases: RoleLeases,
) -> None:
    assert await leases.take(KEY, NATIVE, "w1", AT, 30) is None
    assert await leases.take(KEY, NATIVE, "w2", AT + 10, 30) is None
    held = await leases.take(KEY, EXTERNAL, "b1", AT + 20, 30)
    assert held == RoleHolders(kind=NATIVE, holders=["w1", "w2"])
    held = await leases.take(KEY, EXTERNAL, "b1", AT + 35, 30)
    assert held == RoleHolders(kind=NATIVE, holders=["w2"])
    assert await leases.take(KEY, EXTERNAL, "b1", AT + 45, 30) is None
    held = await leases.take(KEY, NATIVE, "w2", AT + 50, 30)
    assert held == RoleHolders(kind=EXTERNAL, holders=["b1"])


async def test_renewals_keep_a_lease_and_a_release_ends_it(leases: RoleLeases) -> None:
    for second in range(0, 100, 20):
        assert await leases.take(KEY, NATIVE, "w1", AT + second, 30) is None
        assert await leases.take(KEY, EXTERNAL, "b1", AT + second, 30) is not None
    await leases.release(KEY, EXTERNAL, "w1")
    assert await leases.take(KEY, EXTERNAL, "b1", AT + 81, 30) is not None
    await leases.release(KEY, NATIVE, "w1")
    assert await leases.take(KEY, EXTERNAL, "b1", AT + 82, 30) is None


async def test_namespaces_and_queues_have_leases_of_their_own(leases: RoleLeases) -> None:
    assert await leases.take(KEY, NATIVE, "w1", AT, 30) is None
    assert await leases.take(("other", KEY[1]), EXTERNAL, "b1", AT, 30) is None
    assert await leases.take((KEY[0], "flowkit.enricher"), EXTERNAL, "b1", AT, 30) is None


async def test_processes_that_ended_without_a_release_leave_the_lease(db: Any, leases: RoleLeases) -> None:
    for number in range(5):
        assert await leases.take(KEY, NATIVE, f"w{number}", AT + 20 * number, 30) is None
    [row] = [row async for row in db.role_leases.find()]
    assert [each["id"] for each in row["holders"]] == ["w3", "w4"]


async def test_process_that_was_frozen_past_its_lease_may_begin_no_attempt(
    leases: RoleLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = clock(monkeypatch)
    own, other = lease(leases, NATIVE, "w1"), lease(leases, EXTERNAL, "b1")
    await own.check()
    with pytest.raises(RoleHeld) as refused:
        await other.check()
    text = str(refused.value)
    assert text.startswith("native workers serve its task queue 'flowkit.indexer' (w1 ("), text
    assert "stop them, or remove 'indexer' from the roles of b1 (" in text
    now(role_lease.TTL_SEC + 1)
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


def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that moves the clock of the leases forward."""
    now = [AT]
    monkeypatch.setattr(role_lease, "time", SimpleNamespace(time=lambda: now[0]))

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward
