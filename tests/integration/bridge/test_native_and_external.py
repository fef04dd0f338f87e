"""A role is either native or external: bridges and native workers refuse each other's roles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flowkit.attempt import pollers
from flowkit.bridge import service
from flowkit.errors import ConfigError
from tests.integration.handlers import ALL
from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

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


async def test_a_bridge_waits_until_native_workers_have_stopped(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await external.worker({external.role: ALL["quick"]})
    await external.engine()
    await eventually(lambda: waits_for_native(external, worker.worker_id))
    health = external.coordinator.health()
    assert health.bridge is not None
    waits = next(role.waits_for for role in health.bridge.roles if role.role == external.role)
    assert waits is not None
    assert f"'{external.queue}.{external.role}' ({worker.worker_id})" in waits
    assert "stop these workers, or remove" in waits

    await worker.stop()
    monkeypatch.setattr(pollers, "_RECENT_SEC", 1.0)
    await external.until_served()
    await external.external(one_batch)
    task_id = await external.create(node("a", external.role))
    await external.until_status(task_id, "finished")


async def test_a_bridge_stops_serving_a_role_while_native_workers_run_it(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_CHECK_SEC", 0.2)
    await external.served_engine()
    worker = await external.worker({external.role: ALL["quick"]})
    await eventually(lambda: waits_for_native(external, worker.worker_id))
    await worker.stop()
    monkeypatch.setattr(pollers, "_RECENT_SEC", 1.0)
    await external.until_served()


async def waits_for_native(external: ExternalTasks, worker_id: str) -> bool:
    """Return whether the bridge waits for the native worker."""
    health = external.coordinator.health().bridge
    return health is not None and any(worker_id in (role.waits_for or "") for role in health.roles)
