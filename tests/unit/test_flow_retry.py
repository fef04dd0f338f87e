"""A retry of a flow whose run has just ended, while its workflow still closes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from flowkit.adapters.flows import FlowStore
from flowkit.gateway import service
from flowkit.gateway.models import ContextData, FlowRetry
from flowkit.gateway.service import Gateway
from flowkit.models.tokens import Right
from flowkit.server.auth import Caller
from flowkit.server.rpc import Call, StorageError
from flowkit.testing import memory_database

TASK = "flow:3:40/1"


@dataclass
class Description:
    """What Temporal says about the latest run of a workflow."""

    run_id: str
    close_time: datetime | None = None


@dataclass
class Tasks:
    """A task client whose workflow closes after some looks at it."""

    looks: list[Description]
    reruns: list[int] = field(default_factory=list)
    """How many looks were left at each rerun."""

    def handle(self, task_id: str) -> Tasks:
        """Return the handle of the workflow."""
        return self

    async def describe(self) -> Description:
        """Return the next description; the last one again and again."""
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    async def rerun(self, task_id: str, nodes: object, *, by: str) -> dict[str, Any]:
        """Note a rerun."""
        self.reruns.append(len(self.looks))
        return {"run_seq": 2}


CLOSED = datetime.now(UTC)


async def retry(tasks: Any) -> str:
    """Retry a flow whose run has ended, and return the id of the new run."""
    db: Any = memory_database()
    store = FlowStore(db)
    await store.put("flow_contexts", 3, ContextData(id=3).model_dump(), 0.0)
    flow = {"_id": "3:40", "context_id": 3, "id": 40, "caller_id": 11, "version": 1, "nodes": []}
    await db.flows.insert_one({**flow, "task_id": TASK, "run": 1, "run_seq": 1})
    ended = {"status": "failed", "finished_at": CLOSED, "closed_run_id": "first", "run_seq": 1}
    await db.tasks.insert_one({"id": TASK, **ended, "graph": {"nodes": []}})
    nothing: Any = None
    gateway = Gateway(store, tasks, nothing, nothing)
    made = await gateway.flow_retry(
        Call(caller=Caller(actor=None, rights=frozenset({Right.OPERATOR}))), FlowRetry(context_id=3, id=40)
    )
    return made.run_id


@pytest.mark.parametrize(
    "looks",
    [
        [Description("first", CLOSED)],
        [Description("first"), Description("first"), Description("first", CLOSED)],
        [Description("first"), Description("of another retry")],
    ],
)
async def test_retry_waits_until_the_workflow_of_the_ended_run_has_closed(looks: list[Description]) -> None:
    tasks = Tasks(looks)
    assert await retry(tasks) == f"{TASK}.2"
    assert tasks.reruns == [1]


async def test_retry_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_ENGINE_SEC", 0.2)
    tasks = Tasks([Description("first")])
    with pytest.raises(StorageError, match="no engine has closed flow:3:40/1"):
        await retry(tasks)
    assert tasks.reruns == []
