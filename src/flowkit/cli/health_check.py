"""`flowkit health`: the health check of a container, which reads the health file and asks Temporal who polls."""

import json
import socket
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from flowkit.cli import output
from flowkit.cli.errors import Exit
from flowkit.cli.health import polled_mark
from flowkit.cli.options import DeploymentOptions, HealthPath, Queue, Verbose
from flowkit.core.loops import run
from flowkit.errors import ConfigError, FlowKitError

_FRESH_SECONDS = 30.0
"""A process writes its health file every five seconds."""


class Process(StrEnum):
    """The processes whose health can be checked."""

    ENGINE = "engine"
    WORKER = "worker"
    BRIDGE = "bridge"


def health(
    process: Annotated[Process, typer.Argument(help="What the container runs.")],
    roles: Annotated[
        list[str] | None,
        typer.Argument(
            help="Roles of a worker: each needs a process that polls for it.", metavar="[ROLE]..."
        ),
    ] = None,
    queue: Queue = None,
    file: HealthPath = None,
    verbose: Verbose = False,
) -> int:
    """Check the health of a process on this machine. Exit with code 0 if it is healthy, otherwise with 1."""
    if roles and process is not Process.WORKER:
        raise ConfigError(f"only a worker has roles; call `flowkit health {process}` without {roles[0]!r}")
    if process is Process.WORKER and not roles:
        raise ConfigError(
            "`flowkit health worker` needs the roles of the worker, for example `flowkit health worker NAME`"
        )
    found = find_problem(
        process, roles or [], DeploymentOptions(queue=queue).engine_queue, Path(file) if file else None
    )
    if found:
        output.echo(found)
    return Exit.TASK_FAILED if found else Exit.OK


def find_problem(process: Process, roles: Sequence[str], queue: str, file: Path | None) -> str:
    """Return what is wrong with the process, or an empty string.

    A busy worker polls for nothing and is healthy: once its roles have been polled, and a mark beside its health file
    says so, it only needs a Temporal server that responds. A bridge polls nothing while it waits for Kafka.
    """
    from temporalio.service import RPCError

    if file is not None and (found := own_problem(file)):
        return found
    mark = polled_mark(file) if file is not None and process is Process.WORKER else None
    expected = [] if mark is not None and mark.exists() else roles
    try:
        unpolled = run(_unpolled(process, expected, queue))
    except FlowKitError as error:
        return str(error)
    except RPCError as error:
        return f"Temporal does not respond ({error.status.name}: {error.message})"
    if mark is not None and not unpolled:
        mark.touch()
    return f"not polled: {', '.join(unpolled)}" if unpolled else ""


def own_problem(file: Path) -> str:
    """Return the problem that the process reports in its health file, or an empty string."""
    try:
        reported = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"the health file {file} cannot be read: {error}"
    age = time.time() - reported["at"]
    if age > _FRESH_SECONDS:
        return f"the health file {file} was written {age:.0f} seconds ago: the process hangs or has ended"
    return "" if reported["ok"] else f"not running: {_ended(reported)}"


def _ended(reported: dict[str, Any]) -> str:
    """Return what has ended: loops of the process, some of its several processes, or the process with its error."""
    match reported:
        case {"running": True, "processes": [*processes]}:
            bad = [
                str(n) for n, each in enumerate(processes, 1) if not (isinstance(each, dict) and each["ok"])
            ]
            return f"process {', '.join(bad)} of {len(processes)}"
        case {"running": True, "loops": [*loops]}:
            return ", ".join(loop["name"] for loop in loops if not loop["running"])
    return str(reported.get("error") or "the process has stopped")


async def _unpolled(process: Process, roles: Sequence[str], queue: str) -> list[str]:
    """Return the task queues that no process polls: the roles', and the engine's if no engine on this host does."""
    from flowkit.attempt.pollers import pollers_by_role, recent_pollers
    from flowkit.connection import connect
    from flowkit.models.temporal_names import process_of, role_queue

    client = await connect()
    if process is not Process.ENGINE:
        polled = await pollers_by_role(client, queue, roles)
        return [role_queue(queue, role) for role in roles if not polled[role]]
    engines = map(process_of, await recent_pollers(client, queue, workflows=True))
    return [] if any(each.endswith(f"@{socket.gethostname()}") for each in engines) else [queue]
