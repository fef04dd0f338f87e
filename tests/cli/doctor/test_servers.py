"""The checks of Temporal and MongoDB."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.duration_pb2 import Duration
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from tests.cli.doctor.conftest import Report
from tests.integration.harness import eventually

from flowkit.cli.doctor.findings import Finding, ok
from flowkit.cli.doctor.servers import INDEXES

if TYPE_CHECKING:
    from tests.cli.conftest import Program
    from tests.cli.doctor.conftest import Doctor
    from tests.integration.harness import Harness


pytestmark = pytest.mark.slow
"""Most tests wait until a connection to an unreachable address times out."""

NOT_REQUIRED = {"ix_slot_requests", "ttl_attempt_logs", "ttl_worker_events"}
"""Indexes that an engine creates seconds after its start, or only if a setting asks for it."""


@pytest.mark.server
async def test_reachable_servers_are_reported_with_engine_and_indexes(
    harness: Harness, program: Program
) -> None:
    output = await program.call("doctor", "--json", env=servers_of(harness))
    document = json.loads(output.out)
    assert (output.code, document["ok"]) == (0, True)
    report = Report(usable=True, findings={each["name"]: Finding(**each) for each in document["findings"]})
    address = harness.environment["TEMPORAL_ADDRESS"]
    assert report["temporal"] == ok("temporal", f"responds at {address}, namespace default")
    assert report["mongo"].state == "ok"
    assert report["engine"].found == f"no engine polls queue {harness.queue}"
    assert report["engine"].remedy == f"start one with `flowkit engine --queue {harness.queue}`"
    assert "uniq_task_id" in report["indexes"].found
    assert report["mongo here"].found == "not needed: MONGO_URL names a server"
    assert not [name for name in report.findings if name.startswith("port")]


@pytest.mark.server
async def test_with_a_running_engine_and_worker_all_server_checks_are_ok(
    harness: Harness, program: Program
) -> None:
    await harness.engine()
    await harness.worker()
    output = await program.call("doctor", "--json", env=servers_of(harness))
    states = {finding["name"]: finding["state"] for finding in json.loads(output.out)["findings"]}
    names = ("temporal", "search attributes", "engine", "mongo", "durability", "indexes")
    assert {name: states[name] for name in names} == dict.fromkeys(names, "ok")
    created_at_start = {index for indexes in INDEXES.values() for index in indexes}
    existing = {name async for name in index_names(harness.db)}
    assert existing - NOT_REQUIRED == created_at_start


@pytest.mark.server
async def test_fix_registers_the_search_attributes_of_a_namespace_that_lacks_them(
    harness: Harness, program: Program
) -> None:
    client = await harness.client()
    namespace = harness.queue
    await client.workflow_service.register_namespace(
        RegisterNamespaceRequest(
            namespace=namespace, workflow_execution_retention_period=Duration(seconds=86_400)
        )
    )
    env = {**servers_of(harness), "TEMPORAL_NAMESPACE": namespace}

    async def state(*options: str) -> str:
        output = await program.call("doctor", "--json", *options, env=env)
        found = {each["name"]: each for each in json.loads(output.out)["findings"]}
        return str(found.get("search attributes", found["temporal"])["state"])

    async def lacks() -> bool:
        return await state() == "note"

    await eventually(lacks)
    assert await state("--fix") == "ok"
    assert await state() == "ok"


def servers_of(harness: Harness) -> dict[str, str]:
    """Return the variables that name servers, database and queue."""
    names = ("TEMPORAL_ADDRESS", "MONGO_URL", "MONGO_DATABASE", "FLOWKIT_QUEUE")
    return {name: harness.environment[name] for name in names}


async def index_names(db: Any) -> Any:
    """Yield the names of all indexes."""
    for collection in await db.list_collection_names():
        for name in await db[collection].index_information():
            if name != "_id_":
                yield name


def test_unreachable_servers_are_reported(doctor: Doctor) -> None:
    """One address refuses connections, the other has no machine and never responds."""
    report = doctor(TEMPORAL_ADDRESS="192.0.2.1:7233", MONGO_URL="mongodb://me:secret@127.0.0.1:1")
    assert not report.usable
    assert report["temporal"].found == "no Temporal server responds at 192.0.2.1:7233"
    assert report["temporal"].remedy.startswith("start it, or correct TEMPORAL_ADDRESS")
    assert report["mongo"].found == "no server responds at mongodb://127.0.0.1:1"
    assert (report["temporal"].state, report["mongo"].state) == ("bad", "bad")


def test_an_invalid_mongo_url_is_reported(doctor: Doctor) -> None:
    report = doctor(MONGO_URL="mangodb://here")
    assert not report.usable
    assert "(mangodb://here) is not a MongoDB address" in report["mongo"].found


def test_an_address_with_which_nothing_confirms_a_write_is_reported(doctor: Doctor) -> None:
    report = doctor(MONGO_URL="mongodb://127.0.0.1:1/?w=0")
    assert not report.usable
    assert "remove w=0 from MONGO_URL" in report["mongo"].found
