"""All checks of `flowkit doctor`, at the same time, and what follows from them."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowkit.cli.doctor import machine
from flowkit.cli.doctor.findings import Finding, State, bad, note, ok
from flowkit.cli.doctor.servers import mongo_findings, temporal_findings
from flowkit.cli.errors import flat
from flowkit.cli.options import DEFAULT_MONGO_URL
from flowkit.cli.up.plan import Ports
from flowkit.errors import FlowKitError
from flowkit.local.mongo import mongo_program
from flowkit.local.sources import Program, Source, allowed
from flowkit.local.temporal import temporal_program

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from flowkit.cli.options import Where

INSTALL = "`flowkit up` gets it at its start, `flowkit up --install` now"


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Temporal or MongoDB: one that is named, or one that `flowkit up` would start here."""

    name: str
    variable: str
    """Names a server of others."""
    named: bool
    """Whether one is; then none is started here."""
    find: Callable[[Sequence[Source]], Program]
    ports: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """A server, and what was found of it."""

    answer: list[Finding]
    """Whether it answers, and what is to be told of one that does."""
    here: Finding
    """Where it would come from."""
    ports: list[Finding] = field(default_factory=list)
    needs: tuple[str, ...] = ()
    """Programs without which it cannot be started."""

    @property
    def works(self) -> bool:
        """Whether it answers, or can be started."""
        if self.answer[0].state is not State.NOTE:
            return self.answer[0].state is State.OK
        return self.here.state is not State.BAD and all(port.state is State.OK for port in self.ports)


async def examine(where: Where, port_base: int | None) -> tuple[list[Finding], bool]:
    """All findings, and whether tasks can be run: on the servers that answer, or on those of `flowkit up`."""
    temporal, mongo = servers(where, port_base)
    both = await asyncio.gather(
        _examined(temporal, temporal_findings(where, named=temporal.named)),
        _examined(mongo, mongo_findings(where, named=mongo.named)),
    )
    needed = {need for server in both for need in server.needs}
    machines = await asyncio.gather(
        *(asyncio.to_thread(machine.program_finding, name, needed) for name in machine.PROGRAMS),
        asyncio.to_thread(machine.engine_finding),
        asyncio.to_thread(machine.cache_finding),
    )
    disks = machine.disk_findings()
    findings = [
        *machine.package_findings(),
        *(finding for server in both for finding in server.answer),
        *(server.here for server in both),
        *(finding for server in both for finding in server.ports),
        *machines,
        *disks,
        machine.files_finding(),
    ]
    works = all(server.works for server in both) and all(disk.state is not State.BAD for disk in disks)
    return findings, works


def servers(where: Where, port_base: int | None) -> tuple[Server, Server]:
    """What there is to examine."""
    ports = Ports.at(port_base)
    temporal = Server(
        name="temporal",
        variable="TEMPORAL_ADDRESS",
        named=bool(os.environ.get("TEMPORAL_ADDRESS")),
        find=temporal_program,
        ports={"Temporal": ports.temporal, "the Web UI": ports.ui},
    )
    mongo = Server(
        name="mongo",
        variable="MONGO_URL",
        named=bool(os.environ.get("MONGO_URL")) or where.mongo_url != DEFAULT_MONGO_URL,
        find=mongo_program,
        ports={"MongoDB": ports.mongo},
    )
    return temporal, mongo


async def _examined(server: Server, asking: Awaitable[list[Finding]]) -> Examined:
    name = f"{server.name} here"
    if server.named:
        return Examined(
            answer=await asking, here=ok(name, f"not started, because {server.variable} names one")
        )
    answer, (here, needs) = await asyncio.gather(asking, asyncio.to_thread(_source, name, server))
    return Examined(answer=answer, here=here, needs=needs, ports=machine.port_findings(server.ports))


def _source(name: str, server: Server) -> tuple[Finding, tuple[str, ...]]:
    """Where the server's program would come from, and what that needs."""
    try:
        program = server.find(allowed())
    except FlowKitError as error:
        found, _, remedy = flat(error).partition("; ")
        return bad(name, found, remedy or "correct it"), ()
    return _judged(name, program), program.needs


def _judged(name: str, program: Program) -> Finding:
    found = f"{program.source}: {program.where}"
    absent = [need for need in program.needs if shutil.which(need) is None]
    if absent:
        return bad(name, f"{found}, which needs {', '.join(absent)}", "the lines below say what to install")
    return note(name, found, INSTALL) if program.source is Source.DOWNLOAD else ok(name, found)
