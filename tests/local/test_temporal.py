"""The local Temporal server keeps its state and accepts settings."""

from pathlib import Path

import pytest
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes

from flowkit.local.ports import is_listening
from flowkit.local.temporal import TemporalServer


async def start_workflow(server: TemporalServer, workflow_id: str) -> None:
    client = await Client.connect(server.address)
    attribute = SearchAttributePair(SearchAttributeKey.for_keyword("FlowkitPipeline"), "books")
    await client.start_workflow(
        "Any", id=workflow_id, task_queue="unpolled", search_attributes=TypedSearchAttributes([attribute])
    )


async def is_running(server: TemporalServer, workflow_id: str) -> bool:
    client = await Client.connect(server.address)
    description = await client.get_workflow_handle(workflow_id).describe()
    return description.status == WorkflowExecutionStatus.RUNNING


@pytest.mark.server
async def test_workflows_survive_a_stop_and_a_kill(tmp_path: Path) -> None:
    with TemporalServer(tmp_path) as server:
        address = server.address
        await start_workflow(server, "before-stop")

        server.restart()
        assert await is_running(server, "before-stop")

        await start_workflow(server, "before-kill")
        server.kill()
        assert not server.running
        assert not is_listening(server.port)

        server.restart()
        assert server.address == address
        assert await is_running(server, "before-kill")
        assert is_listening(server.ui_port)


@pytest.mark.server
def test_dynamic_config_adds_and_replaces_settings(tmp_path: Path) -> None:
    settings = {"limit.historyCount.suggestContinueAsNew": 50, "history.timerProcessorMaxTimeShift": "1s"}
    with TemporalServer(tmp_path, dynamic_config=settings) as server:
        command = server.command()
    assert "limit.historyCount.suggestContinueAsNew=50" in command
    assert 'history.timerProcessorMaxTimeShift="1s"' in command
    assert "matching.numTaskqueueReadPartitions=1" in command
