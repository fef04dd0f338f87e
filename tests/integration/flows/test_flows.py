"""Flows through the gateway: their runs, results, events and ends."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.testing.supervisor import Misbehavior
from tests.integration.flows.world import CALLER, FLOW, FlowWorld
from tests.integration.harness import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.server


async def events_until_end(events: AsyncIterator[dict[str, Any]], run_id: str) -> list[dict[str, Any]]:
    """Return the events up to the end of a run."""
    found = []
    async for event in events:
        found.append(event)
        if event["run_id"] == run_id and event["node"] is None and event["to"] in {"Finished", "Error"}:
            break
    return found


async def test_a_flow_with_a_prerequisite_runs_and_is_followed(world: FlowWorld) -> None:
    await world.start()
    await world.create(
        {
            501: {"script": "env:RUN", "env_vars": {"REGION": "eu"}},
            502: {"depends": [501], "prerequisites": ["approval:ops", "budget"]},
            503: {"depends": [501, 502], "supervisor_url": world.supervisor.url},
        },
        env_vars={"RUN": "nightly", "REGION": "us"},
    )
    assert (await world.call("flow.load", **world.own))["status"] == "Created"
    begun = await world.call("flow.start", **world.own)
    assert begun == {"started": True, "flow_id": FLOW, "run_id": world.run_id("1"), "status": "Started"}
    assert (await world.call("flow.start", **world.own)) == {**begun, "started": False}
    await world.until_node(501, "Completed")
    dag = await world.call("flow.dag", **world.own)
    assert (dag["edges"], dag["roots"], dag["leaves"]) == ([[501, 502], [501, 503], [502, 503]], [501], [503])
    assert (dag["levels"], dag["completed"]) == ([[501], [502], [503]], [501])
    assert dag["nodes"]["502"]["waiting_on"] == ["approval:ops", "budget"]
    client = await world.client()
    watching = asyncio.create_task(events_until_end(client.events(world.context, FLOW), world.run_id("1")))
    given = {**world.own, "prerequisite": "approval:ops"}
    assert (await world.call("node.satisfy", **given))["satisfied"] is True
    assert (await world.call("node.satisfy", **given))["satisfied"] is False
    await world.call("node.satisfy", **world.own, prerequisite="budget")
    events = await watching
    state = await world.until("Finished")
    assert {node["node_status"] for node in state["nodes"].values()} == {"Completed"}
    assert [each["seq"] for each in events] == [*range(1, len(events) + 1)]
    changes = [(each["from"], each["to"]) for each in events if each["node"] == 502]
    ways = ["Pending", "Ready", "Dispatched", "Running", "Completed"]
    assert changes == [*pairwise(ways)]
    rest = [each async for each in _first(client.events(world.context, FLOW, after=5), len(events) - 5)]
    assert rest == events[5:]
    result = await world.call("job.result", context_id=world.context, id=501)
    assert (result["result"], result["node_status"], result["attempt"]) == ("nightly", "Completed", 1)
    sent = next(
        each for each in world.supervisor.requests if each["params"][0]["job"]["id"] == world.wire_id(501)
    )
    assert sent["params"][0]["job"]["env_vars"] == {"RUN": "nightly", "REGION": "eu"}
    logs = await world.call("job.logs", context_id=world.context, id=501, flow_id=FLOW)
    assert [each["logs"] for each in logs["attempts"]] == [f"echo {world.wire_id(501)}\n"]
    listed = await world.call("message.list", context_id=world.context, flow_id=FLOW)
    assert {each["status"] for each in listed["messages"]} == {"Acknowledged"}
    message = {"context_id": world.context, "caller_id": CALLER, "id": listed["messages"][0]["id"]}
    assert (await world.call("message.status", **message))["transport_status"] == "Delivered"
    assert (await world.call("runner.ping", context_id=world.context, id=71))["runners"] == ["python", "echo"]
    # Jobs of an ended run start again in a new run of the same flow, and the prerequisite stays satisfied.
    assert (await world.call("flow.retry", **world.own, nodes=[502]))["run_id"] == world.run_id("1.2")
    await events_until_end(client.events(world.context, FLOW), world.run_id("1.2"))
    assert world.supervisor.executions == dict.fromkeys(
        [
            world.wire_id(501),
            world.wire_id(502),
            world.wire_id(503),
            world.wire_id(502, "/1.0"),
            world.wire_id(503, "/1.0"),
        ],
        1,
    )
    # Another start is another run, with ids of its own at the supervisor.
    assert (await world.call("flow.start", **world.own))["run_id"] == world.run_id("2")
    await world.until_node(501, "Completed")
    assert world.supervisor.executions[world.wire_id(501, "@40.2")] == 1
    assert (await world.call("flow.cancel", **world.own))["requested"] is True
    state = await world.until("Error")
    assert (state["cause"], state["nodes"]["502"]["cause"]) == ("cancelled", "cancelled")


async def _first(events: AsyncIterator[Any], count: int) -> AsyncIterator[Any]:
    async for event in events:
        yield event
        count -= 1
        if not count:
            return


async def test_failures_retries_and_their_consequences(world: FlowWorld) -> None:
    await world.start()
    world.supervisor.misbehave(world.wire_id(1), Misbehavior.ERROR)
    world.supervisor.misbehave(world.wire_id(2), Misbehavior.NO_JSON)
    await world.create(
        {
            1: {"retries": 1},
            2: {"retries": 1, "script": "fail:for good"},
            3: {"depends": [2]},
            4: {"depends": [1]},
            5: {"supervisor_url": "runner:99", "retries": 0},
        },
        on_failure="continue",
    )
    await world.call("flow.start", **world.own)
    state = await world.until("Error")
    nodes = {id: (node["node_status"], node["cause"]) for id, node in state["nodes"].items()}
    assert nodes == {
        "1": ("Completed", None),
        "2": ("Failed", None),
        "3": ("Cancelled", "upstream_failed"),
        "4": ("Completed", None),
        "5": ("Failed", None),
    }
    assert state["failed_job"] == 2
    assert "no runner 99" in state["nodes"]["5"]["error"]
    assert (await world.call("job.result", context_id=world.context, id=2))["error"] == "for good"
    logs = (await world.call("job.logs", context_id=world.context, id=2))["attempts"]
    assert [each["transport_id"] for each in logs] == [world.wire_id(2), world.wire_id(2, "/0.1")]
    assert ["is not JSON" in logs[0]["error"], logs[1]["error"]] == [True, "for good"]
    client = await world.client()
    events = await events_until_end(client.events(world.context, FLOW), world.run_id("1"))
    changes = [each["to"] for each in events if each["node"] == 1]
    once = ["Ready", "Dispatched", "Running"]
    assert changes == [*once, "Failed", *once, "Completed"]
    # No supervisor was reached for job 5.
    assert [each["to"] for each in events if each["node"] == 5] == ["Ready", "Failed"]
    # A retry runs with the limits that the job has then.
    await world.create_job(2, retries=0, timeout=7)
    world.supervisor.misbehave(world.wire_id(2, "/1.0"), Misbehavior.ERROR)
    again = await world.call("flow.retry", **world.own, nodes=[2])
    await events_until_end(client.events(world.context, FLOW), again["run_id"])
    task = await world.harness.db.tasks.find_one({"id": world.run_id("1")}) or {}
    assert [node["timeout_sec"] for node in task["graph"]["nodes"] if node["node_id"] == "2"] == [67.0]
    logs = (await world.call("job.logs", context_id=world.context, id=2))["attempts"]
    assert [each["transport_id"] for each in logs[2:]] == [world.wire_id(2, "/1.0")]


async def test_after_a_failure_running_jobs_finish_and_no_other_starts(world: FlowWorld) -> None:
    await world.start()
    await world.create({1: {"script": "fail:now"}, 2: {"script": "sleep:0.5"}, 3: {"depends": [2]}})
    await world.call("flow.start", **world.own)
    state = await world.until("Error")
    statuses = {id: (node["node_status"], node["cause"]) for id, node in state["nodes"].items()}
    assert statuses == {"1": ("Failed", None), "2": ("Completed", None), "3": ("Cancelled", "flow_failed")}


async def test_a_cancel_stops_the_job_at_its_supervisor(world: FlowWorld) -> None:
    await world.start()
    await world.create({1: {"script": "sleep:600", "timeout": 700}, 2: {"depends": [1]}})
    await world.call("flow.start", **world.own)
    await world.until_node(1, "Running")
    await world.call("flow.cancel", **world.own, reason="not needed")
    state = await world.until("Error")
    assert {node["node_status"] for node in state["nodes"].values()} == {"Cancelled"}

    async def stopped() -> bool:
        task = world.supervisor.jobs[world.wire_id(1)].task
        return task is not None and task.cancelled()

    await eventually(stopped)


async def test_jobs_are_added_while_a_flow_runs(world: FlowWorld) -> None:
    await world.start()
    await world.create({1: {}, 2: {"depends": [1], "prerequisites": ["go"]}})
    await world.create_job(3)
    await world.call("flow.start", **world.own)
    await world.until_node(1, "Completed")
    dag = await world.call("flow.add_nodes", **world.own, nodes=[{"id": 3, "depends": [1, 2]}])
    assert dag["levels"] == [[1], [2], [3]]
    assert (await world.error("flow.add_nodes", **world.own, nodes=[{"id": 3}])).rpc_code == -32002
    replaced = {"id": FLOW, "caller_id": CALLER, "context_id": world.context, "jobs": [1]}
    assert (await world.error("flow.create", context_id=world.context, flow=replaced)).rpc_code == -32004
    job = {"id": 1, "caller_id": CALLER, "context_id": world.context, "executor": "echo", "script": "new"}
    assert (await world.error("job.create", context_id=world.context, job=job)).rpc_code == -32004
    await world.call("node.satisfy", **world.own, prerequisite="go")
    await world.until("Finished")
    assert (await world.call("job.result", context_id=world.context, id=3))["result"] == "result 3"
    assert (await world.call("flow.create", context_id=world.context, flow=replaced))["status"] == "Created"


async def test_a_flow_starts_although_temporal_knows_a_run_of_a_dropped_database(world: FlowWorld) -> None:
    await world.start()
    for run in ("1", "2"):
        await world.create({1: {}})
        assert (await world.call("flow.start", **world.own))["run_id"] == world.run_id(run)
        state = await world.until("Finished")
        assert state["run_id"] == world.run_id(run)
        await (await world.harness.handle(world.run_id(run))).result()
        for name in ("tasks", "artifacts", "flows", "flow_jobs", "flow_messages"):
            await world.harness.db[name].delete_many({})
    assert world.supervisor.executions == {world.wire_id(1): 1, world.wire_id(1, "@40.2"): 1}


async def test_bad_input_gets_the_codes_of_the_contract(world: FlowWorld) -> None:
    await world.start(engine=False, runs_jobs=False)
    await world.create({1: {}})
    flow = {"id": 41, "caller_id": CALLER, "context_id": world.context}
    cases: list[tuple[int, str, dict[str, Any], str]] = [
        (-32601, "flow.stat", {}, "did you mean 'flow.start'?"),
        (-32602, "flow.status", {"context_id": world.context}, "id"),
        (-32602, "flow.status", {"context_id": "3", "id": 40}, "context_id"),
        (-32602, "actor.create", {"actor": {"id": 2**32}}, "actor.id"),
        (-32602, "actor.create", {"actor": {"id": 1, "name": "x"}}, "actor.name"),
        (-32602, "flow.create", {"context_id": world.context, "flow": flow}, "flow.jobs"),
        (-32602, "flow.create", {"context_id": 4, "flow": {**flow, "jobs": [1]}}, "flow.context_id"),
        (
            -32602,
            "runner.create",
            {"context_id": world.context, "runner": {"id": 1, "address": "x"}},
            "runner.address",
        ),
        (
            -32602,
            "runner.create",
            {"context_id": world.context, "runner": {"id": 1, "address": "http://h", "secret": "s3cr"}},
            "key",
        ),
        (-32001, "flow.status", {"context_id": world.context, "id": 99}, "no flow 99"),
        (-32001, "flow.status", {"context_id": 9, "id": 99}, "no context 9"),
        (-32001, "flow.create", {"context_id": world.context, "flow": {**flow, "jobs": [1, 77]}}, "[77]"),
        (-32001, "node.satisfy", {**world.own, "prerequisite": "x"}, "'x'"),
        (
            -32020,
            "flow.create",
            {"context_id": world.context, "flow": {**flow, "nodes": [{"id": 1, "depends": [7]}]}},
            "does not have",
        ),
        (
            -32021,
            "flow.create",
            {"context_id": world.context, "flow": {**flow, "nodes": [{"id": 1, "depends": [1]}]}},
            "1",
        ),
        (-32004, "flow.retry", world.own, "no run"),
        (-32600, "flow.subscribe", world.own, "WebSocket"),
        (-32030, "runner.ping", {"context_id": world.context, "id": 72}, "no reply"),
    ]
    gone = {"id": 72, "address": "http://127.0.0.1:1"}
    await world.call("runner.create", context_id=world.context, runner=gone)
    client = await world.client()
    for code, method, params, text in cases:
        reply = await client.post({"jsonrpc": "2.0", "id": 7, "method": method, "params": params})
        error = reply["error"]
        assert (reply["id"], error["code"]) == (7, code), reply
        assert text in error["message"] or text in json.dumps(error.get("data")), reply
        assert "s3cr" not in json.dumps(reply)
    message = {
        "id": 1,
        "caller_id": CALLER,
        "context_id": world.context,
        "job": [{"id": 1}],
        "message": "hello",
    }
    made = await world.call("message.create", context_id=world.context, message=message)
    assert (made["status"], made["nodes"]) == ("Created", [])
    assert (await world.error("message.create", context_id=world.context, message=message)).rpc_code == -32002
    three = [
        {"context_id": world.context, "id": 40},
        [{"context_id": world.context, "id": 40}],
        {"params": {"context_id": world.context, "id": 40}},
    ]
    calls = [
        {"jsonrpc": "2.0", "id": n, "method": "flow.status", "params": each} for n, each in enumerate(three)
    ]
    replies = await client.post([*calls, {"jsonrpc": "2.0", "method": "actor.list"}, 5])
    assert [each.get("result", {}).get("flow_id") for each in replies] == [40, 40, 40, None]
    assert replies[3]["error"]["code"] == -32600
    assert await world.status_of("{}", Host="attacker.example") == 403
    assert await world.status_of("{}", Authorization="Bearer fk_no") == 401
