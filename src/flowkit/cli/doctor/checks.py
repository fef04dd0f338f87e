"""All checks of `flowkit doctor`, run concurrently, and their overall result."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowkit.cli.doctor import machine
from flowkit.cli.doctor.findings import Finding, Severity, bad, note, ok
from flowkit.cli.doctor.servers import check_kafka, check_mongo, check_temporal
from flowkit.cli.options import DEFAULT_MONGO_URL
from flowkit.cli.up.plan import Ports
from flowkit.errors import FlowKitError
from flowkit.local.mongo import mongo_program
from flowkit.local.sources import Program, Source, allowed_sources
from flowkit.local.temporal import temporal_program
from flowkit.text import one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from flowkit.cli.options import DeploymentOptions

INSTALL_REMEDY = "`flowkit up` installs it when it starts, `flowkit up --install` installs it now"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCheck:
    """A server to check, Temporal or MongoDB: a configured one, or one that `flowkit up` would start."""

    name: str
    variable: str
    """The environment variable that configures it."""
    configured: bool
    """Whether it is configured; `flowkit up` starts no server then."""
    find: Callable[[Sequence[Source]], Program]
    ports: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerReport:
    """The findings about one server."""

    connection: list[Finding]
    """Whether it responds, and details of a server that does; the first finding decides."""
    source: Finding
    """Where `flowkit up` would get its program."""
    ports: list[Finding] = field(default_factory=list)
    requires: tuple[str, ...] = ()
    """Programs that `flowkit up` would need on PATH."""

    @property
    def usable(self) -> bool:
        """Whether it responds, or can be started."""
        if self.connection[0].state is not Severity.NOTE:
            return self.connection[0].state is Severity.OK
        return self.source.state is not Severity.BAD and all(port.state is Severity.OK for port in self.ports)


async def run_checks(
    where: DeploymentOptions, port_base: int | None, *, fix: bool = False
) -> tuple[list[Finding], bool]:
    """Return all findings, and whether tasks can run on these servers or on those of `flowkit up`.

    With `fix`, repair what a command can repair: register the search attributes.
    """
    temporal, mongo = list_servers(where, port_base)
    *reports, kafka = await asyncio.gather(
        _check_server(temporal, check_temporal(where, configured=temporal.configured, fix=fix)),
        _check_server(mongo, check_mongo(where, configured=mongo.configured)),
        check_kafka(),
    )
    required = {name for server in reports for name in server.requires}
    machine_findings = await asyncio.gather(
        *(asyncio.to_thread(machine.check_program, name, required) for name in machine.PROGRAMS),
        asyncio.to_thread(machine.check_container_engine),
        asyncio.to_thread(machine.check_cache),
    )
    disks = machine.check_disk()
    findings = [
        *machine.check_packages(),
        *(finding for server in reports for finding in server.connection),
        *(server.source for server in reports),
        kafka,
        *(finding for server in reports for finding in server.ports),
        *machine_findings,
        *disks,
        machine.check_open_files(),
    ]
    working = all(each.state is not Severity.BAD for each in (kafka, *disks))
    return findings, working and all(server.usable for server in reports)


def list_servers(where: DeploymentOptions, port_base: int | None) -> tuple[ServerCheck, ServerCheck]:
    """Return the servers to check."""
    ports = Ports.from_base(port_base)
    temporal = ServerCheck(
        name="temporal",
        variable="TEMPORAL_ADDRESS",
        configured=bool(os.environ.get("TEMPORAL_ADDRESS")),
        find=temporal_program,
        ports={"Temporal": ports.temporal, "the Web UI": ports.ui},
    )
    mongo = ServerCheck(
        name="mongo",
        variable="MONGO_URL",
        configured=bool(os.environ.get("MONGO_URL")) or where.mongo_url != DEFAULT_MONGO_URL,
        find=mongo_program,
        ports={"MongoDB": ports.mongo},
    )
    return temporal, mongo


async def _check_server(server: ServerCheck, check: Awaitable[list[Finding]]) -> ServerReport:
    name = f"{server.name} here"
    if server.configured:
        return ServerReport(
            connection=await check, source=ok(name, f"not needed: {server.variable} names a server")
        )
    connection, (source, requires) = await asyncio.gather(
        check, asyncio.to_thread(_find_source, name, server)
    )
    return ServerReport(
        connection=connection, source=source, requires=requires, ports=machine.check_ports(server.ports)
    )


def _find_source(name: str, server: ServerCheck) -> tuple[Finding, tuple[str, ...]]:
    """Return where `flowkit up` would get the program, and the programs that it needs on PATH."""
    try:
        program = server.find(allowed_sources())
    except FlowKitError as error:
        found, _, remedy = one_line(error).partition("; ")
        return bad(name, found, remedy or "correct the setting"), ()
    return _report_source(name, program), program.requires


def _report_source(name: str, program: Program) -> Finding:
    found = f"{program.source}: {program.description}"
    missing = [name for name in program.requires if shutil.which(name) is None]
    if missing:
        return bad(name, f"{found}, which needs {', '.join(missing)}", "the lines below show what to install")
    return note(name, found, INSTALL_REMEDY) if program.source is Source.DOWNLOAD else ok(name, found)
