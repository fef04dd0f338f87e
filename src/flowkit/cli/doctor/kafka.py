"""The check of Kafka, which only external workers need."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from flowkit.cli.doctor.findings import Finding, bad, note, ok
from flowkit.cli.kafka import accepts_connections, describe_brokers
from flowkit.errors import FlowKitError
from flowkit.local.kafka import kafka_program
from flowkit.local.sources import Source, allowed_sources
from flowkit.text import one_line, shown_address

if TYPE_CHECKING:
    from flowkit.local.sources import Program

TIMEOUT_SEC = 2.5
VARIABLE = "KAFKA_BOOTSTRAP_SERVERS"
PURPOSE = "only external workers need it"
SECURED_REMEDY = f"correct {VARIABLE}; if the brokers require TLS or a password, they may still work"


async def check_kafka() -> Finding:
    """Check the brokers of KAFKA_BOOTSTRAP_SERVERS; if it is not set, where a local broker would come from."""
    bootstrap = os.environ.get(VARIABLE)
    if not bootstrap:
        return await asyncio.to_thread(_local_broker)
    address = shown_address(bootstrap)
    found = await _describe(bootstrap)
    if found is not None:
        return ok("kafka", f"responds at {address}: {found}")
    if await accepts_connections(bootstrap, TIMEOUT_SEC):
        text = f"{address} accepts connections, but refuses a client without TLS and password"
        return note("kafka", text, SECURED_REMEDY)
    remedy = f"start it, or correct {VARIABLE}; without external workers, unset it"
    return bad("kafka", f"no broker responds at {address}", remedy)


async def _describe(bootstrap: str) -> str | None:
    try:
        async with asyncio.timeout(TIMEOUT_SEC):
            return await describe_brokers(bootstrap)
    except TimeoutError:
        return None


def _local_broker() -> Finding:
    """Report the local broker. It is optional, so nothing about it is a problem."""
    try:
        program = kafka_program(allowed_sources())
    except FlowKitError as error:
        return ok("kafka here", f"{one_line(error).partition('; ')[0]}; {PURPOSE}")
    return ok("kafka here", f"{_where(program)}; {PURPOSE}")


def _where(program: Program) -> str:
    found = f"{program.source}: {program.description}"
    return (
        f"{found}, which `flowkit up --external ROLE` installs"
        if program.source is Source.DOWNLOAD
        else found
    )
