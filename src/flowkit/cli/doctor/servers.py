"""Checks of Temporal, MongoDB, Kafka and external roles."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Literal

from pymongo.errors import PyMongoError
from temporalio.service import RPCError

from flowkit import reason_codes
from flowkit.adapters.mongo import durable, weaknesses, words
from flowkit.attempt.pollers import native_pollers, recent_pollers
from flowkit.cli.doctor.findings import Finding, bad, note, ok
from flowkit.cli.servers import accepts_connections, connect_temporal, database, describe_brokers
from flowkit.config import DEFAULT_QUEUE, CoordinatorConfig
from flowkit.connection import (
    register_search_attributes,
    registered_search_attributes,
    temporal_address,
)
from flowkit.errors import ConfigError, FlowKitError
from flowkit.local.kafka import kafka_program
from flowkit.local.sources import Source, allowed_sources
from flowkit.models.temporal_names import SEARCH_ATTRIBUTES, role_queue
from flowkit.reading.state import find_missing_processes
from flowkit.text import one_line, shell_word, shown_address

if TYPE_CHECKING:
    from temporalio.client import Client

    from flowkit.cli.options import DeploymentOptions
    from flowkit.local.sources import Program


TIMEOUT_SEC = 2.5
START_REMEDY = "`flowkit up` starts one"

ROLES_VARIABLE = "WORKER_TYPES"
KAFKA_VARIABLE = "KAFKA_BOOTSTRAP_SERVERS"
PURPOSE = "only external workers need it"
SECURED_REMEDY = f"correct {KAFKA_VARIABLE}; if the brokers require TLS or a password, they may still work"

INDEXES: dict[str, tuple[str, ...]] = {
    "tasks": ("uniq_task_id", "ix_task_status_updated", "ix_task_started", "ix_task_open"),
    "artifacts": ("ix_artifacts_task_node", "uniq_artifact_batch_uid"),
    "metrics_raw": ("uniq_metrics_batch",),
    "stream_progress": ("uniq_stream_claim_batch",),
    "worker_registry": ("uniq_worker",),
    "worker_events": ("uniq_worker_event",),
    "stored_graphs": ("ix_stored_graphs_task",),
    "input_values": ("ix_input_values_task",),
    "map_items": ("ix_map_items_task",),
    "node_shards": ("ix_node_shards_node",),
    "batch_tries": ("ix_batch_tries_node",),
}
"""Indexes that engines and workers create when they start."""


async def check_temporal(where: DeploymentOptions, *, configured: bool, fix: bool = False) -> list[Finding]:
    """Check whether Temporal responds, and what FlowKit needs of it. The first finding is the response.

    With `fix`, register the search attributes.
    """
    fallback = ""
    try:
        address, namespace = temporal_address()
        address = shown_address(address)
        fallback = f"no server responds at {address}"
        async with asyncio.timeout(TIMEOUT_SEC):
            client = await connect_temporal()
            connected = ok("temporal", f"responds at {address}, namespace {namespace}")
            return [
                connected,
                await _check_search_attributes(client, fix=fix),
                await _check_engine(client, where),
                *await check_external_roles(client, where.engine_queue),
            ]
    except (FlowKitError, RPCError, TimeoutError) as error:
        return [
            _report_unreachable(
                "temporal", configured and "TEMPORAL_ADDRESS", _explain_error(error, fallback)
            )
        ]


async def check_mongo(where: DeploymentOptions, *, configured: bool) -> list[Finding]:
    """Check whether MongoDB responds, its version and its indexes. The first finding is the response."""
    address = shown_address(where.mongo_url)
    try:
        async with asyncio.timeout(TIMEOUT_SEC), database(where) as db:
            durable(db)
            build = await db.command("buildInfo")
            connected = ok("mongo", f"{_format_version(build)} responds at {address}")
            return [connected, _check_durability(db), await _check_indexes(db, where.database)]
    except (FlowKitError, PyMongoError, TimeoutError) as error:
        refused = isinstance(error, PyMongoError) and getattr(error, "code", None) is not None
        text = (
            f"the server at {address} rejects the request: {words(error)}"
            if refused
            else _explain_error(error, f"no server responds at {address}")
        )
        return [_report_unreachable("mongo", configured and "MONGO_URL", text)]


def _explain_error(error: Exception, fallback: str) -> str:
    """Return the text of a FlowKit error, such as a wrong setting; otherwise the fallback."""
    return (
        one_line(error)
        if isinstance(error, FlowKitError) and error.code != reason_codes.MONGO_UNAVAILABLE
        else fallback
    )


def _report_unreachable(name: str, variable: str | Literal[False], text: str) -> Finding:
    """`variable` configures the server. Without it, an unreachable server is no problem."""
    if variable:
        return bad(name, text, f"start it, or correct {variable}; if {variable} is not set, {START_REMEDY}")
    return note(name, text, START_REMEDY)


async def _check_search_attributes(client: Client, *, fix: bool) -> Finding:
    """Check whether the search attributes are registered. With `fix`, register them first."""
    name = "search attributes"
    try:
        if fix:
            await register_search_attributes(client)
        registered = await registered_search_attributes(client)
    except RPCError as error:
        refused = "register" if fix else "list"
        problem = f"Temporal does not {refused} them ({one_line(error)})"
        return note(name, problem, "ask the operator of the Temporal server")
    missing = [each for each in SEARCH_ATTRIBUTES if each not in registered]
    if not missing:
        return ok(name, f"{' and '.join(SEARCH_ATTRIBUTES)} are registered")
    remedy = "`flowkit doctor --fix` registers them, as an engine does when it starts"
    return note(name, f"{' and '.join(missing)} not registered", remedy)


async def _check_engine(client: Client, where: DeploymentOptions) -> Finding:
    queue = where.engine_queue
    if await recent_pollers(client, queue, workflows=True):
        return ok("engine", f"an engine polls queue {queue}")
    hint = (await find_missing_processes(client, queue, []) or [f"no engine polls queue {queue}; start one"])[
        0
    ]
    found, _, remedy = hint.partition("; ")
    return note("engine", found, remedy)


def _format_version(build: dict[str, Any]) -> str:
    """Return product and version. Only MongoDB itself reports a `gitVersion`."""
    is_mongodb = "gitVersion" in build
    return f"MongoDB {build['version']}" if is_mongodb else f"a stand-in for MongoDB {build['version']}"


def _check_durability(db: Any) -> Finding:
    """Check whether the settings of MONGO_URL are weaker than those of FlowKit's own reads and writes."""
    found = "FlowKit reads from the primary; its writes wait until a majority has journaled them"
    weak = weaknesses(db)
    if not weak:
        return ok("durability", found)
    remedy = "remove these settings; a failover could lose what other programs write with them"
    return note("durability", f"{found}, although MONGO_URL has {', '.join(weak)}", remedy)


async def _check_indexes(db: Any, name: str) -> Finding:
    existing: set[str] = set()
    for collection in INDEXES:
        existing |= set(await db[collection].index_information())
    missing_names = [index for indexes in INDEXES.values() for index in indexes if index not in existing]
    if not missing_names:
        return ok("indexes", f"database {name} has all indexes")
    found = f"database {name} lacks {', '.join(missing_names)}"
    return note("indexes", found, "engines and workers create them when they start")


async def check_external_roles(client: Client, queue: str) -> list[Finding]:
    """Check each role of WORKER_TYPES: whether a bridge serves it, and no native worker."""
    try:
        roles = CoordinatorConfig.load().worker_types if os.environ.get(ROLES_VARIABLE) else []
    except ConfigError as error:
        return [bad("external roles", one_line(error), f"correct {ROLES_VARIABLE}, or unset it")]
    return list(await asyncio.gather(*(_check_role(client, queue, role) for role in roles)))


async def _check_role(client: Client, queue: str, role: str) -> Finding:
    name, polls = f"role {role}", role_queue(queue, role)
    native = await native_pollers(client, polls)
    if native:
        found = f"external ({ROLES_VARIABLE}), but native workers poll its queue: {', '.join(native)}"
        return bad(name, found, f"stop these workers, or remove {role} from {ROLES_VARIABLE}")
    if await recent_pollers(client, polls):
        return ok(name, "external; a bridge serves it")
    option = "" if queue == DEFAULT_QUEUE else f" --queue {shell_word(queue)}"
    found = f"external ({ROLES_VARIABLE}), but no bridge serves it"
    return note(name, found, f"start one with `flowkit bridge {shell_word(role)}{option}`")


async def check_kafka() -> Finding:
    """Check the brokers of KAFKA_BOOTSTRAP_SERVERS; if it is not set, where a local broker would come from."""
    bootstrap = os.environ.get(KAFKA_VARIABLE)
    if not bootstrap:
        return await asyncio.to_thread(_report_local_broker)
    address = shown_address(bootstrap)
    found = await _describe(bootstrap)
    if found is not None:
        return ok("kafka", f"responds at {address}: {found}")
    if await accepts_connections(bootstrap, TIMEOUT_SEC):
        text = f"{address} accepts connections, but refuses a client without TLS and password"
        return note("kafka", text, SECURED_REMEDY)
    remedy = f"start it, or correct {KAFKA_VARIABLE}; without external workers, unset it"
    return bad("kafka", f"no broker responds at {address}", remedy)


async def _describe(bootstrap: str) -> str | None:
    try:
        async with asyncio.timeout(TIMEOUT_SEC):
            return await describe_brokers(bootstrap)
    except TimeoutError:
        return None


def _report_local_broker() -> Finding:
    """Report the local broker. It is optional, so nothing about it is a problem."""
    try:
        program = kafka_program(allowed_sources())
    except FlowKitError as error:
        return ok("kafka here", f"{one_line(error).partition('; ')[0]}; {PURPOSE}")
    return ok("kafka here", f"{_describe_program(program)}; {PURPOSE}")


def _describe_program(program: Program) -> str:
    found = f"{program.source}: {program.description}"
    return (
        f"{found}, which `flowkit up --external ROLE` installs"
        if program.source is Source.DOWNLOAD
        else found
    )
