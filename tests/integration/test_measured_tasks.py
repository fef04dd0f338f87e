"""What engines and workers measure of tasks that run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flowkit.core import instruments
from flowkit.engine import gauges
from flowkit.models import TaskStatus
from tests.integration.counted import Counted
from tests.integration.harness import eventually, node
from tests.unit.measured import measuring

if TYPE_CHECKING:
    from tests.integration.harness import Harness
    from tests.unit.measured import Measured

pytestmark = pytest.mark.server

PAUSE_SEC = 1.0


async def until_state(measured: Measured, gauge: instruments.Gauge, *labels: str) -> float:
    """Wait until a gauge has a value with these labels, and return it."""

    async def look() -> float | None:
        return measured.shown(gauge).get(labels)

    return await eventually(look)


async def test_waits_for_slots_and_workers_are_measured(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauges, "EVERY_SEC", 0.1)
    monkeypatch.setattr(gauges, "_SHARE", 1.0)
    harness.settings["max_type_concurrency"] = {"counted": 1}
    with measuring() as measured:
        await harness.engine()
        await harness.worker({"counted": Counted(harness.db)})
        nodes = [node(name, "counted", inline={"pause": PAUSE_SEC}) for name in ("a", "b", "c")]
        task_id = await harness.create(*nodes, node("d", "unserved"))
        waited_sec = await until_state(measured, instruments.OLDEST_READY, "unserved")
        assert waited_sec > 0
        assert measured.shown(instruments.ROLE_WORKERS)["unserved",] == 0
        assert measured.shown(instruments.SLOTS)["counted", "size"] == 1
        await until_state(measured, instruments.OPEN_NODES, "unserved", "queued")
        await harness.worker({"unserved": Counted(harness.db)})
        assert (await harness.result(task_id)).status is TaskStatus.FINISHED
        node_waits = sorted(measured.observed(instruments.NODE_WAIT)["counted",])
        slot_waits = sorted(measured.observed(instruments.SLOT_WAIT)["counted",])
        for waits in (node_waits, slot_waits):
            first, second, third = waits
            assert first < second
            assert second > PAUSE_SEC / 2
            assert third > second + PAUSE_SEC / 2
        [unserved_sec] = measured.observed(instruments.NODE_WAIT)["unserved",]
        assert unserved_sec > 0.1
