"""Clients see why the engine rejects a task, whichever activity reports it."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.common import TypedSearchAttributes
from temporalio.exceptions import ApplicationError, TimeoutType
from temporalio.exceptions import TimeoutError as ActivityTimeout
from tests.unit.activity_errors import wrapped

from flowkit.graph.submission import NewTask
from flowkit.models import StoredGraph
from flowkit.workflows import document, engine_calls
from flowkit.workflows.document import open_document

REJECTION = ApplicationError("task id 't' belongs to another task", type="task_id_taken", non_retryable=True)
LOCAL_TIMEOUT = ActivityTimeout("timed out", type=TimeoutType.SCHEDULE_TO_CLOSE, last_heartbeat_details=[])
INFO = SimpleNamespace(
    workflow_id="t",
    first_execution_run_id="r",
    run_id="r",
    typed_search_attributes=TypedSearchAttributes.empty,
)


@pytest.mark.parametrize(
    ("stored", "local"),
    [
        (None, REJECTION),
        (None, LOCAL_TIMEOUT),
        (StoredGraph(graph_id="s", parts=1, size=1, deployment=""), None),
    ],
    ids=["local", "regular after a local timeout", "stored graph"],
)
async def test_rejection_of_a_task_keeps_its_text_and_type(
    monkeypatch: pytest.MonkeyPatch, stored: StoredGraph | None, local: BaseException | None
) -> None:
    async def locally(*args: Any, **options: Any) -> None:
        assert local is not None
        raise wrapped(local)

    async def regularly(*args: Any, **options: Any) -> None:
        raise wrapped(REJECTION)

    workflow = SimpleNamespace(
        info=lambda: INFO,
        now=lambda: datetime(2026, 1, 1, tzinfo=UTC),
        execute_local_activity=locally,
        execute_activity=regularly,
    )
    monkeypatch.setattr(document, "workflow", workflow)
    monkeypatch.setattr(engine_calls, "workflow", workflow)
    with pytest.raises(ApplicationError) as caught:
        await open_document(NewTask(params={}, graph={}, stored=stored))
    assert caught.value is REJECTION
