"""The check of external roles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.integration.conftest import harness
from tests.integration.handlers import ALL
from tests.integration.harness import eventually

from flowkit.bridge_runner import BridgeRunner
from flowkit.cli.doctor.findings import Severity
from flowkit.cli.doctor.servers import check_external_roles
from flowkit.config import CoordinatorConfig

if TYPE_CHECKING:
    from tests.integration.harness import Harness
    from tests.kafka_server import Broker

__all__ = ["harness"]

pytestmark = pytest.mark.server


async def test_each_role_is_reported(
    harness: Harness, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, native, unserved = f"{harness.queue}-a", f"{harness.queue}-b", f"{harness.queue}-c"
    monkeypatch.setenv("WORKER_TYPES", f"{served},{native},{unserved}")
    worker = await harness.worker({native: ALL["quick"]})
    client = await harness.client()
    runner = BridgeRunner(
        db=harness.db,
        cfg=CoordinatorConfig(queue=harness.queue, kafka_bootstrap=kafka.bootstrap_servers),
        roles=[served],
    )
    await runner.start()

    async def found() -> list[Severity] | None:
        states = [each.state for each in await check_external_roles(client, harness.queue)]
        return states if states == [Severity.OK, Severity.BAD, Severity.NOTE] else None

    try:
        await eventually(found)
        ok, bad, note = await check_external_roles(client, harness.queue)
    finally:
        await runner.stop()
    assert (ok.name, ok.found) == (f"role {served}", "external; a bridge serves it")
    assert worker.worker_id in bad.found
    assert bad.remedy == f"stop these workers, or remove {native} from WORKER_TYPES"
    assert note.remedy == f"start one with `flowkit bridge {unserved} --queue {harness.queue}`"


async def test_without_external_roles_there_is_nothing_to_report(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORKER_TYPES", raising=False)
    assert await check_external_roles(await harness.client(), harness.queue) == []
    monkeypatch.setenv("WORKER_TYPES", "a b")
    (finding,) = await check_external_roles(await harness.client(), harness.queue)
    assert (finding.state, finding.name) == (Severity.BAD, "external roles")
    assert "'a b'" in finding.found
