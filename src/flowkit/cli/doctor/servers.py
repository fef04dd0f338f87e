"""What `flowkit doctor` asks Temporal and MongoDB."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from pymongo.errors import PyMongoError
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.service import RPCError

from flowkit.adapters.mongo import words
from flowkit.cli.doctor.findings import Finding, bad, note, ok
from flowkit.cli.errors import flat
from flowkit.cli.looking import missing, polled
from flowkit.cli.servers import database, temporal_client, temporal_place, without_password
from flowkit.errors import FlowKitError
from flowkit.workflows.endings import SEARCH_ATTRIBUTES

if TYPE_CHECKING:
    from temporalio.client import Client

    from flowkit.cli.options import Where

ANSWER_WITHIN_SEC = 2.5
START_ONE = "`flowkit up` starts one here"

INDEXES: dict[str, tuple[str, ...]] = {
    "tasks": ("uniq_task_id", "ix_task_status_updated", "ix_task_started"),
    "artifacts": ("ix_artifacts_task_node", "uniq_artifact_batch_uid"),
    "metrics_raw": ("uniq_metrics_batch",),
    "stream_progress": ("uniq_stream_claim_batch",),
    "worker_registry": ("uniq_worker",),
    "worker_events": ("uniq_worker_event",),
}
"""What engine and worker create at their start."""


async def temporal_findings(where: Where, *, named: bool) -> list[Finding]:
    """Whether Temporal answers; if it does, what FlowKit needs of it. The first finding is about the answer."""
    address, namespace = temporal_place()
    try:
        async with asyncio.timeout(ANSWER_WITHIN_SEC):
            client = await temporal_client()
            there = ok("temporal", f"answers at {address}, namespace {namespace}")
            return [there, await _search_attributes(client), await _engine(client, where)]
    except (FlowKitError, RPCError, TimeoutError) as error:
        return [
            _silent("temporal", named and "TEMPORAL_ADDRESS", _told(error, f"nothing answers at {address}"))
        ]


async def mongo_findings(where: Where, *, named: bool) -> list[Finding]:
    """Whether MongoDB answers; if it does, its version and indexes. The first finding is about the answer."""
    place = without_password(where.mongo_url)
    try:
        async with asyncio.timeout(ANSWER_WITHIN_SEC), database(where) as db:
            build = await db.command("buildInfo")
            there = ok("mongo", f"{_version(build)} answers at {place}")
            return [there, await _indexes(db, where.database)]
    except (FlowKitError, PyMongoError, TimeoutError) as error:
        refused = isinstance(error, PyMongoError) and getattr(error, "code", None) is not None
        told = (
            f"refuses at {place}: {words(error)}" if refused else _told(error, f"nothing answers at {place}")
        )
        return [_silent("mongo", named and "MONGO_URL", told)]


def _told(error: Exception, silence: str) -> str:
    """What to tell of an error; one of the settings has a text of its own."""
    return flat(error) if isinstance(error, FlowKitError) and error.code != "mongo_unavailable" else silence


def _silent(name: str, variable: str | Literal[False], told: str) -> Finding:
    """`variable` names the server that does not answer; without it that is only where one would be."""
    if variable:
        return bad(name, told, f"start it, or correct {variable}; without {variable} {START_ONE}")
    return note(name, told, START_ONE)


async def _search_attributes(client: Client) -> Finding:
    request = ListSearchAttributesRequest(namespace=client.namespace)
    try:
        known = await client.operator_service.list_search_attributes(request)
    except RPCError as error:
        return note(
            "search attributes", f"Temporal does not tell them ({flat(error)})", "ask whoever runs it"
        )
    absent = [name for name in SEARCH_ATTRIBUTES if name not in known.custom_attributes]
    if not absent:
        return ok("search attributes", f"{' and '.join(SEARCH_ATTRIBUTES)} are registered")
    remedy = "an engine registers them at its start if it may; docs/operations.md has the command"
    return note("search attributes", f"{' and '.join(absent)} not registered", remedy)


async def _engine(client: Client, where: Where) -> Finding:
    queue = where.engine_queue
    if await polled(client, queue, workflows=True):
        return ok("engine", f"one polls queue {queue}")
    hint = (await missing(client, queue, []) or [f"no engine polls queue {queue}; start one"])[0]
    found, _, remedy = hint.partition("; ")
    return note("engine", found, remedy)


def _version(build: dict[str, Any]) -> str:
    """The stand-in does not tell what it was made from; MongoDB does."""
    real = "gitVersion" in build
    return f"MongoDB {build['version']}" if real else f"a stand-in for MongoDB {build['version']}"


async def _indexes(db: Any, name: str) -> Finding:
    there: set[str] = set()
    for collection in INDEXES:
        there |= set(await db[collection].index_information())
    absent = [index for indexes in INDEXES.values() for index in indexes if index not in there]
    if not absent:
        return ok("indexes", f"all of database {name} are there")
    found = f"database {name} lacks {', '.join(absent)}"
    return note("indexes", found, "engine and worker create them at their start")
