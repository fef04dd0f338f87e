"""What the end of a node that an external worker runs waits for, and what counts if a cancel flag is set
just before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.bridge_side import kafka_record
from tests.contract.bridges import UNUSED, Parts, context_of
from tests.contract.builders import AT, TASK, begun, documents_of, opened
from tests.contract.test_dispatch_renewals import accepted
from tests.contract.test_round_trips import RoundTrips
from tests.unit import bridge_records
from tests.unit.event_loop import until

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.dispatches import DispatchStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.bridge.commands import CommandWatch
from flowkit.bridge.delivery import Delivery
from flowkit.bridge.status import StatusEvents
from flowkit.bridge.supervisor import AttemptSupervisor
from flowkit.errors import Fenced
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.adapters.dispatches import Dispatch


class Temporal:
    """Records how activities end, and what `seen` returns then."""

    def __init__(self, seen: Callable[[], int]) -> None:
        self.ends: list[tuple[str, int]] = []
        self._seen = seen

    def get_async_activity_handle(self, **_: Any) -> Temporal:
        """Return the handle of the activity."""
        return self

    async def complete(self, *_: Any, **__: Any) -> None:
        """Record the end."""
        self.ends.append(("done", self._seen()))

    async def report_cancellation(self, **_: Any) -> None:
        """Record the end."""
        self.ends.append(("cancelled", self._seen()))


class Status:
    """The names of the topics."""

    def status(self, role: str) -> str:
        """Return the name of a role's status topic."""
        return f"status.{role}"


class Bridge:
    """The parts of a bridge that handle the end of a node, on a database that responds in rounds."""

    def __init__(self) -> None:
        self.db = memory_database()
        self.trips = RoundTrips(self.db)
        self.store = DispatchStore(self.db)
        self.temporal = Temporal(lambda: self.trips.count)
        context = context_of(self.trips, self.temporal, AT)
        names: Any = Status()
        parts: Any = Parts()
        context.topics, context.roles = names, ("crawler",)
        delivery = Delivery(context)
        self.supervisor = AttemptSupervisor(
            context, delivery=delivery, signals=parts, inputs=UNUSED, commands=CommandWatch(context)
        )
        own: dict[str, Any] = {"delivery": delivery, "supervisor": self.supervisor, "signals": parts}
        self.status = StatusEvents(context, **own, inputs=UNUSED, first_batches=UNUSED)

    async def running(self) -> Dispatch:
        """Let a worker run the node `a`, and write its complete marker."""
        tasks, artifacts = TaskStore(self.db), ArtifactStore(self.db)
        await artifacts.prepare()
        await opened(tasks, "a")
        record = await accepted(self.store, "a")
        await begun(tasks, record.attempt)
        await self.db.artifacts.insert_one({"task_id": TASK, "node_id": "a", "status": "complete"})
        self.supervisor.watch(record)
        return record

    async def done(self) -> None:
        """Handle the TASK_DONE of the worker, and wait until it is reported."""
        value = bridge_records.value(
            "TASK_DONE", {"worker_id": "w-1", "metrics": {}}, task_id=TASK, node_id="a", step_type="crawler"
        )
        await self.status.handle([kafka_record("status.crawler", value)])
        await until(lambda: bool(self.temporal.ends))


async def test_end_of_an_external_node_waits_for_two_round_trips() -> None:
    bridge = Bridge()
    await bridge.running()
    await bridge.done()
    assert bridge.temporal.ends == [("done", 2)]


@pytest.mark.parametrize("is_flag", [True, False], ids=["flag", "request"])
async def test_end_after_a_cancel_that_this_bridge_has_not_read_yet_counts_as_cancelled(
    is_flag: bool,
) -> None:
    """H11. The flag is read, and the request stored, while the outcome is stored."""
    bridge = Bridge()
    record = await bridge.running()
    if is_flag:
        flag = {"coordinator.cancelled": True, "coordinator.cancel_reason": "budget"}
        await bridge.db.tasks.update_one({"id": TASK}, {"$set": flag})
    else:
        await bridge.store.request_cancel(record.key, "budget", AT)
    await bridge.done()
    assert [end for end, _ in bridge.temporal.ends] == ["cancelled"]
    stored = (await bridge.store.find_all([record.key]))[record.key]
    assert (stored.outcome and stored.outcome.kind, stored.cancel and stored.cancel.reason) == (
        "cancelled",
        "budget",
    )


async def test_marker_that_should_exist_is_written_if_it_does_not(db: Any, artifacts: ArtifactStore) -> None:
    await artifacts.mark_complete(TASK, "a", 2, {"n": 1}, AT, exists=True)
    await artifacts.mark_complete(TASK, "a", 3, {"n": 2}, AT, exists=True)
    with pytest.raises(Fenced):
        await artifacts.mark_complete(TASK, "a", 2, {"n": 1}, AT, exists=True)
    (row,) = await documents_of(db.artifacts)
    assert (row["attempt_epoch"], row["meta"]) == (3, {"n": 2})
