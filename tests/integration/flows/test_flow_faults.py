"""Flows whose engine and job handler are killed; and who sees what."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.gateway import service
from flowkit.gateway.client import GatewayClient
from flowkit.server.token_store import TokenStore
from flowkit.server.tokens import Right
from flowkit.testing.supervisor import Misbehavior
from tests.integration.flows.world import CALLER, FLOW, FlowWorld
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually

if TYPE_CHECKING:
    from tests.fork_server import ForkedProcess

pytestmark = pytest.mark.server


async def test_engine_and_handler_are_killed_and_the_flow_finishes_with_each_job_run_once(
    world: FlowWorld,
) -> None:
    world.harness.settings["lease_ttl_sec"] = 4
    await world.start(engine=False, runs_jobs=False)
    await world.create(
        {
            1: {"script": "sleep:5"},
            2: {"script": "sleep:5", "timeout": 90},
            3: {"depends": [1, 2]},
            4: {"depends": [3], "prerequisites": ["go"]},
        }
    )
    await world.call("flow.start", **world.own)

    def start() -> list[ForkedProcess]:
        return [
            world.harness.engine_process(),
            world.harness.process("gateway", "jobs", "--supervisor-networks", "loopback"),
        ]

    async def both_run() -> bool:
        return len(world.supervisor.executions) == 2

    started = start()
    await eventually(both_run)
    for process in started:
        process.kill()
        process.wait(EVENT_TIMEOUT_SEC)
    await world.harness.release_tasks()
    before = await world.statuses()
    assert {before["1"], before["2"]} <= {"Ready", "Dispatched", "Running"}
    start()
    assert (await world.call("flow.start", **world.own))["run_id"] == world.run_id()
    await world.until_node(3, "Completed")
    assert (await world.call("flow.dag", **world.own))["nodes"]["4"]["waiting_on"] == ["go"]
    await world.call("node.satisfy", **world.own, prerequisite="go")
    await world.until("Finished")
    assert world.supervisor.executions == {world.wire_id(job): 1 for job in (1, 2, 3, 4)}
    for job in (1, 2, 3, 4):
        stored = {"task_id": world.run_id(), "node_id": str(job), "status": "partial"}
        assert await world.harness.db.artifacts.count_documents(stored) == 1


async def test_a_call_that_no_engine_answered_is_repeated_and_takes_effect_once(
    world: FlowWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_ENGINE_SEC", 1.0)
    await world.start(engine=False)
    engine = await world.harness.engine()
    await world.create({1: {}, 2: {"prerequisites": ["go"]}})
    await world.create_job(3)
    await world.call("flow.start", **world.own)
    await world.until_node(1, "Completed")
    await engine.stop()
    added = {**world.own, "nodes": [{"id": 3, "depends": [1]}]}
    for _ in range(2):
        error = await world.error("flow.add_nodes", **added)
        assert error.rpc_code == -32010
        assert "may be applied later" in str(error)
    monkeypatch.setattr(service, "_ENGINE_SEC", 60.0)
    await world.harness.engine()
    assert (await world.call("flow.add_nodes", **added))["edges"] == [[1, 3]]
    await world.until_node(3, "Completed")
    await world.call("node.satisfy", **world.own, prerequisite="go")
    await world.until("Finished")
    assert (await world.call("flow.add_nodes", **added))["status"] == "Finished"
    assert world.supervisor.executions == {world.wire_id(job): 1 for job in (1, 2, 3)}


async def test_the_secret_reaches_the_supervisor_and_nobody_else(
    world: FlowWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cryptography.fernet import Fernet

    from flowkit.gateway.secret_box import SecretBox

    caplog.set_level(logging.DEBUG)
    logging.getLogger("pymongo").setLevel(logging.INFO)
    world.secrets = SecretBox([Fernet.generate_key().decode()])
    await world.start()
    await world.create({1: {"retries": 1}, 2: {"depends": [1], "supervisor_url": "runner:72"}})
    runner = {"id": 72, "address": world.supervisor.url, "secret": FlowWorld.SECRET, "executors": ["other"]}
    answers: list[Any] = [await world.call("runner.create", context_id=world.context, runner=runner)]
    assert answers[0]["secret"] == "***"
    masked = {**runner, "secret": "***"}
    assert (await world.error("runner.create", context_id=world.context, runner=masked)).rpc_code == -32602
    wrong = {**runner, "address": f"http://user:{FlowWorld.SECRET}@host:99999/"}
    error = await world.error("runner.create", context_id=world.context, runner=wrong)
    answers += [str(error), error.data]
    world.supervisor.misbehave(world.wire_id(1), Misbehavior.TELLS_SECRET)
    await world.call("flow.start", **world.own)
    await world.until("Finished")
    assert [
        each["params"][0]["secret"] for each in world.supervisor.requests if "job" in each["params"][0]
    ] == [FlowWorld.SECRET] * 3
    lists = ("runner.list", "job.list", "flow.list", "message.list")
    answers += [await world.call(method, context_id=world.context) for method in lists]
    for job in (1, 2):
        answers += [
            await world.call(f"job.{what}", context_id=world.context, id=job) for what in ("result", "logs")
        ]
    answers += [await world.call(f"flow.{what}", **world.own) for what in ("status", "dag", "load")]
    handle = await world.harness.handle(world.run_id())
    history = (await handle.fetch_history()).to_json()
    names = await world.harness.db.list_collection_names()
    stored = [await world.harness.db[name].find({}).to_list(None) for name in names]
    assert "***" in json.dumps(answers)
    for text in (json.dumps(answers), history, repr(stored), caplog.text):
        assert FlowWorld.SECRET not in text


async def test_tokens_and_contexts_decide_who_may_do_what(world: FlowWorld) -> None:
    await world.start(engine=False, runs_jobs=False)
    await world.create({1: {}})
    tokens = TokenStore(world.harness.db)
    texts = {
        actor: (await tokens.create(actor=actor, rights={Right.FLOWS}))[1] for actor in (CALLER, 12, 13, 14)
    }
    _, operator = await tokens.create(rights={Right.OPERATOR})
    lists = {"admins": [CALLER], "executors": [13], "readers": [12]}
    as_operator = await world.client(operator)
    await as_operator.call("context.create", {"context": {"id": world.context, **lists}})

    async def code(by: int, method: str, **params: Any) -> int:
        client = GatewayClient(world.url, token=texts[by])
        async with client:
            reply = await client.post({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        return int(reply.get("error", {}).get("code", 0))

    own, context = world.own, world.context
    job = {"id": 5, "caller_id": 13, "context_id": context, "executor": "e", "script": "s"}
    replaced = {"id": FLOW, "caller_id": 13, "context_id": context, "jobs": [5]}
    denied = -32003
    assert [await code(actor, "flow.status", **own) for actor in (CALLER, 12, 13, 14)] == [0, 0, 0, denied]
    assert await code(12, "flow.start", **own) == denied
    assert await code(13, "flow.cancel", **own) == denied
    assert await code(CALLER, "flow.cancel", **own) == 0
    assert await code(13, "job.create", context_id=context, job=job) == 0
    assert await code(13, "job.create", context_id=context, job={**job, "caller_id": CALLER}) == denied
    assert await code(13, "flow.create", context_id=context, flow=replaced) == denied
    assert await code(CALLER, "actor.create", actor={"id": 9}) == denied
    assert await code(CALLER, "context.create", context={"id": 9}) == denied
    assert await code(CALLER, "context.create", context={"id": context, **lists}) == 0
    assert await code(14, "flow.status", context_id=context + 1, id=FLOW) == denied
    reference = {"id": 1, "address": "http://h", "secret": "env:PATH"}
    assert await code(CALLER, "runner.create", context_id=context, runner=reference) == -32602


async def test_a_file_is_imported_started_and_followed(world: FlowWorld, tmp_path: Any) -> None:
    await world.start()
    file = tmp_path / "flow.yaml"
    file.write_text(
        f"""
context: {{id: {world.context}, admins: [{CALLER}]}}
runners: [{{id: 71, address: "{world.supervisor.url}", secret: "env:SUPERVISOR_SECRET"}}]
caller: {CALLER}
flow: {{id: {FLOW}}}
jobs:
  - {{id: first, executor: echo, script: hello}}
  - {{id: second, executor: echo, script: "fail:no", depends: [first], prerequisites: [go]}}
"""
    )
    process = world.harness.process(
        "gateway", "import", str(file), "--url", world.url, "--start", "--satisfy", "go"
    )

    async def ended() -> bool:
        return process.poll() is not None

    await eventually(ended)
    assert process.wait(EVENT_TIMEOUT_SEC) == 1
    state = await world.until("Error")
    assert sorted(node["node_status"] for node in state["nodes"].values()) == ["Completed", "Failed"]
