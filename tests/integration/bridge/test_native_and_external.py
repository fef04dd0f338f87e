"""A role is either native or external: bridges and native workers refuse each other's roles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flowkit.adapters.role_leases import RoleKind, RoleLeases
from flowkit.attempt import role_lease
from flowkit.errors import ConfigError
from flowkit.models.temporal_names import role_queue
from tests.integration.handlers import ALL
from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.attempt.role_lease import RoleLease
    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server


async def one_batch(run: Any) -> AsyncIterator[dict[str, Any]]:
    yield {"count": 1}


async def test_a_native_worker_refuses_a_role_with_external_attempts(external: ExternalTasks) -> None:
    await external.served_engine()
    task_id = await external.create(node("a", external.role), node("b", external.role))
    await external.dispatch(task_id, "a")
    await external.dispatch(task_id, "b")
    with pytest.raises(ConfigError) as refused:
        await external.worker({external.role: ALL["quick"]})
    text = str(refused.value)
    assert f"role '{external.role}' of queue '{external.queue}' is external: 2 of its attempts have" in text
    assert f"of task '{task_id}'" in text
    assert "remove it from this worker's roles" in text

    await external.coordinator.cancel_task(task_id)
    await external.until_status(task_id, "cancelled")
    await external.coordinator.stop()
    await external.worker({external.role: ALL["quick"]})


async def test_a_bridge_waits_until_native_workers_have_stopped(external: ExternalTasks) -> None:
    worker = await external.worker({external.role: ALL["quick"]})
    await external.engine()
    await eventually(lambda: waits_for_native(external, worker.worker_id))
    health = external.coordinator.health()
    assert health.bridge is not None
    waits = next(role.waits_for for role in health.bridge.roles if role.role == external.role)
    assert waits is not None
    assert waits.startswith(
        f"native workers serve its task queue '{external.queue}.{external.role}' ({worker.worker_id} "
    )
    assert f"stop them, or remove '{external.role}' from the roles of {external.bridge.bridge_id}" in waits

    await worker.stop()
    await external.until_served()
    await external.external(one_batch)
    task_id = await external.create(node("a", external.role))
    await external.until_status(task_id, "finished")


async def test_a_native_worker_polls_nothing_until_the_bridge_has_stopped(external: ExternalTasks) -> None:
    await external.served_engine()
    await external.external(one_batch)
    bridge = external.bridge.bridge_id
    worker = await external.worker({external.role: ALL["quick"]})
    tasks = [await external.create(node("a", external.role)) for _ in range(12)]
    for task_id in tasks:
        await external.until_status(task_id, "finished")
        assert (await external.dispatch(task_id, "a"))["owner"] == bridge
    lease = worker._leases[external.role]
    assert f"bridges serve its task queue '{external.queue}.{external.role}' ({bridge} " in (
        lease.problem or ""
    )

    await external.coordinator.stop()
    holders = [row["holders"] async for row in external.db.role_leases.find({"kind": "external"})]
    assert holders, (
        "the bridge has served the role of the tasks; it may have stopped before it served the other one"
    )
    assert not any(holders)
    external.roles = [external.other_role]
    await external.engine()
    task_id = await external.create(node("a", external.role))
    await external.until_status(task_id, "finished")
    assert (await external.node(task_id, "a"))["lease"]["worker_id"] == worker.worker_id


async def test_a_worker_that_lost_its_lease_while_frozen_yields_without_using_a_retry(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds out before its next attempt, and stops polling."""
    monkeypatch.setattr(role_lease, "RENEWAL_SEC", 600.0)
    await external.engine()
    frozen = await external.worker({"quick": ALL["quick"]})
    lease = frozen._leases["quick"]
    lease.held_until, queue = 0.0, role_queue(external.queue, "quick")
    key, leases = ((await external.client()).namespace, queue), RoleLeases(external.db)
    await leases.take(key, RoleKind.EXTERNAL, "bridge", 0.0)
    assert await leases.take(key, RoleKind.EXTERNAL, "bridge", 0.0) is None

    task_id = await external.create(node("a", "quick", retry_policy={"max": 0}))
    await eventually(lambda: finds_bridges(lease))

    await leases.release(key, RoleKind.EXTERNAL, "bridge")
    other = await external.worker({"quick": ALL["quick"]})
    await external.until_status(task_id, "finished")
    assert (await external.node(task_id, "a"))["lease"]["worker_id"] == other.worker_id


async def finds_bridges(lease: RoleLease) -> bool:
    """Return whether a process has found that bridges hold the lease."""
    return "bridges serve its task queue" in (lease.problem or "")


async def waits_for_native(external: ExternalTasks, worker_id: str) -> bool:
    """Return whether the bridge waits for the native worker."""
    health = external.coordinator.health().bridge
    return health is not None and any(worker_id in (role.waits_for or "") for role in health.roles)
