"""What a gateway reads to find the events of a flow: only what may have changed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from flowkit.gateway import events
from flowkit.gateway.events import EventLog, FlowEvents
from flowkit.gateway.models import FlowNode
from flowkit.gateway.status import read_run, waiting_on
from flowkit.gateway.store import EVENTS, FLOWS, MESSAGES, FlowStore
from flowkit.testing import memory_database

FLOW, TASK = "3:40", "flow:1f2e3d4c:3:40/2"
EARLIER = "flow:1f2e3d4c:3:40/1"
END = datetime(2026, 5, 4, tzinfo=UTC)


class Store(FlowStore):
    """A store that notes how many events it returns, and of which jobs it returns dispatches."""

    def __init__(self, db: Any) -> None:
        super().__init__(db)
        self.read_events = 0
        self.asked: list[list[int]] = []
        self.node_reads = 0

    async def events(self, *given: Any, **options: Any) -> list[dict[str, Any]]:
        """Return the events of a flow."""
        found = await super().events(*given, **options)
        self.read_events += len(found)
        return found

    async def events_of_task(self, *given: Any) -> list[dict[str, Any]]:
        """Return the events of a run."""
        found = await super().events_of_task(*given)
        self.read_events += len(found)
        return found

    async def nodes_of_flow(self, id: str) -> list[dict[str, Any]]:
        """Return the nodes of a flow."""
        self.node_reads += 1
        return await super().nodes_of_flow(id)

    async def dispatches(self, task_id: str, jobs: Any) -> list[dict[str, Any]]:
        """Return dispatches."""
        self.asked.append(sorted(jobs))
        return await super().dispatches(task_id, jobs)


class World:
    """A flow with the jobs 1 and 2 in its second run."""

    def __init__(self) -> None:
        self.db = memory_database()
        self.store = Store(self.db)
        self.events = FlowEvents(self.store)
        self.log = EventLog(FLOW)

    async def prepare(self) -> None:
        """Store the flow."""
        await self.store.prepare()
        nodes = [FlowNode(id=id).model_dump() for id in (1, 2)]
        flow = {"context_id": 3, "id": 40, "task_id": TASK, "run_seq": 1, "nodes": nodes, "last_event": 0}
        await self.store.put(FLOWS, FLOW, {**flow, "version": 1}, 0.0)

    async def write_run(self, status: str, *nodes: str, generation: int = 0) -> None:
        """Write the document of the run, whose nodes have these statuses, and their dispatches."""
        await self.db.tasks.delete_many({"id": TASK})
        own = {
            "id": TASK,
            "run_seq": 1,
            "status": status,
            "finished_at": None if status == "running" else END,
        }
        states = [
            {"node_id": f"{job}", "status": each, "attempt_epoch": 1, "generation": generation}
            for job, each in enumerate(nodes, 1)
        ]
        await self.db.tasks.insert_one({**own, "graph": {"nodes": states}})
        for job, each in enumerate(nodes, 1):
            outcome = "completed" if each == "finished" else None
            fields = {"task_id": TASK, "job_id": job, "generation": generation, "retry": 0, "epoch": 1}
            state = {"state": "Running", "outcome": outcome}
            await self.store.put(MESSAGES, f"{TASK}:{job}:{generation}.0", {**fields, **state}, 0.0)

    async def look(self) -> list[int]:
        """Look at the flow, and return the jobs whose dispatches were read."""
        self.store.asked.clear()
        self.log.next_look = 0.0
        await self.events._look_together(self.log)
        return [job for jobs in self.store.asked for job in jobs]

    async def changes(self) -> list[tuple[int, int | None, str]]:
        """Return the events of the run: their numbers, nodes and new statuses."""
        found = self.db[EVENTS].find({"task_id": TASK}).sort("seq", 1)
        return [(each["seq"], each["node"], each["to"]) async for each in found]


@pytest.fixture
async def world() -> World:
    """A flow that runs."""
    made = World()
    await made.prepare()
    return made


async def test_events_of_earlier_runs_are_not_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_READ_AT_ONCE", 2)
    own = {"flow": FLOW, "task_id": EARLIER, "run_id": EARLIER, "node": None, "to": "Started"}
    await world.db[EVENTS].insert_many([{**own, "_id": f"{FLOW}:{seq}", "seq": seq} for seq in range(1, 101)])
    await world.write_run("running", "running", "queued")
    await world.look()
    assert world.store.read_events == 0
    assert [(seq, to) for seq, _, to in await world.changes()][:2] == [(101, "Started"), (102, "Ready")]
    stored = len(await world.changes())
    world.log = EventLog(FLOW)
    await world.look()
    assert world.store.read_events == len(await world.changes()) == stored
    await world.look()
    assert world.store.read_events == stored


async def test_dispatches_of_jobs_that_have_ended_are_read_once_and_once_more_at_the_end(
    world: World,
) -> None:
    await world.write_run("running", "finished", "running")
    assert [await world.look() for _ in range(3)] == [[1, 2], [2], [2]]
    await world.write_run("finished", "finished", "finished")
    assert [await world.look() for _ in range(3)] == [[2], [1, 2], []]
    passed = ["Ready", "Dispatched", "Running", "Completed"]
    found = await world.changes()
    assert [seq for seq, _, _ in found] == [*range(1, len(found) + 1)]
    for job in (1, 2):
        assert [to for _, node, to in found if node == job] == passed
    assert [to for _, node, to in found if node is None] == ["Started", "Finished"]


async def test_a_job_that_runs_again_is_read_again(world: World) -> None:
    await world.write_run("running", "finished", "running")
    await world.look()
    await world.write_run("running", "running", "running", generation=1)
    assert await world.look() == [1, 2]
    found = await world.changes()
    assert [to for _, node, to in found if node == 1][4:] == ["Ready", "Dispatched", "Running"]


async def test_nodes_of_a_flow_are_read_when_it_has_changed(world: World) -> None:
    await world.write_run("running", "running", "queued")
    await world.look()
    await world.look()
    assert world.store.node_reads == 1
    nodes = [FlowNode(id=id).model_dump() for id in (1, 2, 3)]
    flow = await world.store.flow_without_nodes(FLOW)
    assert flow is not None
    assert "nodes" not in flow
    await world.store.change_flow(flow, {"nodes": nodes}, 0.0)
    await world.write_run("running", "running", "queued", "running")
    assert await world.look() == [1, 3]
    assert world.store.node_reads == 2
    assert (3, "Running") in [(node, to) for _, node, to in await world.changes()]


def test_all_satisfied_prerequisites_count_however_many_actions_a_task_has_had() -> None:
    names = [f"p{number}" for number in range(250)]
    node = FlowNode(id=1, prerequisites=[*names[:20], "other"])
    task = {
        "status": "running",
        "graph": {"nodes": [{"node_id": "1", "status": "queued"}]},
        "coordinator": {"satisfied": names},
    }
    assert waiting_on(node, read_run(task, [])) == ["other"]
