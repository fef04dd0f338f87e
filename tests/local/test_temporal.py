"""The local Temporal server keeps its state, accepts settings and survives cancelled requests."""

import asyncio
import http.client
import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, ListWorkflowExecutionsRequest
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes
from temporalio.service import RPCError
from tests.integration.harness import EVENT_TIMEOUT_SEC

from flowkit.local.ports import is_listening
from flowkit.local.temporal import NAMESPACE, SQLITE_DRIVER, TemporalServer, temporal_cli


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


def send(port: int, method: str, path: str, headers: dict[str, str]) -> int:
    """Return the status of a request with exactly these headers, and of a POST with the start of a workflow."""
    body = json.dumps({"workflowType": {"name": "Any"}, "taskQueue": {"name": "unpolled"}, "requestId": "r"})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body if method == "POST" else None, headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.server
async def test_no_web_page_starts_or_reads_a_workflow(tmp_path: Path) -> None:
    """Not by a request that needs no permission of the server, and not by a name that leads to this machine."""
    forms = ("text/plain", "application/x-www-form-urlencoded", "application/json")
    with TemporalServer(tmp_path) as server:
        path = f"/api/v1/namespaces/{NAMESPACE}/workflows/of-a-page"
        for port in (server.http_port, server.ui_port):
            hosts = ["evil.example"] if port == server.http_port else []
            for host in (f"127.0.0.1:{port}", f"localhost:{port}", *hosts):
                headers = {"Host": host, "Origin": "http://evil.example"}
                for kind in forms:
                    assert send(port, "POST", path, {**headers, "Content-Type": kind}) in (400, 403)
        assert send(server.http_port, "GET", f"/api/v1/namespaces/{NAMESPACE}", {}) == 403
        client = await Client.connect(server.address)
        with pytest.raises(RPCError, match="not found"):
            await client.get_workflow_handle("of-a-page").describe()


def has_built_driver() -> bool:
    """Return whether the server's SQLite driver is the one that FlowKit builds it with."""
    go = shutil.which("go")
    if go is None:
        return False
    command = [go, "version", "-m", temporal_cli()]
    modules = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    module, version = SQLITE_DRIVER.split("@")
    return any(line.split()[1:3] == [module, version] for line in modules.splitlines())


async def cancel_requests(client: Client, names: Iterator[str], chance: random.Random) -> None:
    """Send requests that read and write, with deadlines that pass while the server works."""
    service = client.workflow_service
    for name in names:
        for send in (
            partial(client.start_workflow, "Any", id=name, task_queue="unpolled"),
            client.get_workflow_handle(name).describe,
        ):
            await asyncio.gather(send(rpc_timeout=deadline(chance)), return_exceptions=True)
        for read in (
            partial(service.describe_namespace, DescribeNamespaceRequest(namespace="default")),
            partial(service.list_workflow_executions, ListWorkflowExecutionsRequest(namespace="default")),
        ):
            await asyncio.gather(read(timeout=deadline(chance)), return_exceptions=True)


def deadline(chance: random.Random) -> timedelta:
    """Return a time in which the server may or may not respond."""
    return timedelta(milliseconds=chance.uniform(0.5, 15))


@pytest.mark.server
async def test_server_works_after_hundreds_of_cancelled_requests(tmp_path: Path) -> None:
    """With an older SQLite driver, one of them made the server fail all later requests."""
    if not has_built_driver():
        pytest.skip("the Temporal CLI was not built with Go and the newer SQLite driver")
    names, chance = (f"cancelled-{number}" for number in range(400)), random.Random(9)
    with TemporalServer(tmp_path) as server:
        client = await Client.connect(server.address)
        await asyncio.gather(*(cancel_requests(client, names, chance) for _ in range(24)))
        async with asyncio.timeout(EVENT_TIMEOUT_SEC):
            await until_started(client, "afterwards")
        assert await is_running(server, "afterwards")


async def until_started(client: Client, workflow_id: str) -> None:
    """Start a workflow as soon as the server has finished the cancelled requests."""
    while True:
        try:
            await client.start_workflow("Any", id=workflow_id, task_queue="unpolled")
        except RPCError:
            continue
        return
