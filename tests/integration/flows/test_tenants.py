"""Two tenants of one gateway: neither reaches anything of the other, whether or not it knows an id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flowkit.gateway.permissions import PERMISSIONS
from flowkit.server.tokens import Right
from tests.integration.flows.world import CALLER, FLOW, NEIGHBOR, RUNNER
from tests.tenants import create_tenants

if TYPE_CHECKING:
    from tests.integration.flows.world import FlowWorld

pytestmark = pytest.mark.server

DENIED = -32003
OF_EVERY_ACTOR = {"rpc.discover", "actor.load", "actor.list", "context.list"}
OF_OPERATORS = {"actor.create"}
OF_WEBSOCKETS = {"flow.subscribe"}


def calls_about(context: int) -> dict[str, dict[str, Any]]:
    """Return a call of each method about a context, and about what `FlowWorld.create` creates there."""
    where = {"context_id": context}
    own = {"caller_id": NEIGHBOR, **where}
    entities = {
        "runner": {"id": 5, "address": "http://10.0.0.1"},
        "job": {**own, "id": 5, "executor": "echo", "script": "x"},
        "flow": {**own, "id": 5, "jobs": [1]},
        "message": {**own, "id": 5, "job": [{"id": 1}], "message": "x"},
    }
    flow = {**where, "id": FLOW}
    job = {**where, "caller_id": CALLER, "id": 1}
    created = {f"{name}.create": {**where, name: each} for name, each in entities.items()}
    listed = {f"{name}.list": where for name in entities}
    about_flow = ("load", "status", "dag", "start", "cancel", "retry")
    return {
        "context.create": {"context": {"id": context, "admins": [NEIGHBOR]}},
        "context.load": {"id": context},
        **created,
        **listed,
        **{f"runner.{what}": {**where, "id": RUNNER} for what in ("load", "ping")},
        "job.load": job,
        **{f"job.{what}": {**where, "id": 1, "flow_id": FLOW} for what in ("result", "logs")},
        **{f"flow.{what}": flow for what in about_flow},
        "flow.add_nodes": {**flow, "nodes": [{"id": 1}]},
        "node.satisfy": {**flow, "prerequisite": "go"},
        **{f"message.{what}": job for what in ("load", "status")},
    }


async def test_a_tenant_reaches_nothing_of_another_one(world: FlowWorld, neighbor: FlowWorld) -> None:
    await world.start(engine=False, runs_jobs=False)
    await world.create({1: {"prerequisites": ["go"]}})
    await neighbor.create({1: {}})
    tenants = await create_tenants(world.harness.db, first=CALLER, second=NEIGHBOR)
    await world.authenticate(tenants.first[Right.FLOWS])
    await neighbor.authenticate(tenants.second[Right.FLOWS])
    before = await world.call("flow.status", **world.own)
    foreign, absent = calls_about(world.context), calls_about((world.context + 1) % 2**32)
    assert foreign.keys() == PERMISSIONS.keys() - OF_EVERY_ACTOR - OF_OPERATORS - OF_WEBSOCKETS - {
        "flow.replace"
    }
    for method, params in foreign.items():
        refused = await neighbor.error(method, **params)
        assert (method, refused.rpc_code) == (method, DENIED)
        guessed = await neighbor.error(method, **absent[method])
        assert (method, guessed.rpc_code) == (method, DENIED)
    listed = await neighbor.call("context.list")
    assert [each["id"] for each in listed["contexts"]] == [neighbor.context]
    assert await world.call("flow.status", **world.own) == before
    assert neighbor.supervisor.requests == world.supervisor.requests == []
