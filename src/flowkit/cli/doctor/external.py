"""The check of external roles, which bridges serve."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from flowkit.attempt.pollers import native_pollers, recent_pollers
from flowkit.cli.doctor.findings import Finding, bad, note, ok
from flowkit.config import DEFAULT_QUEUE, CoordinatorConfig
from flowkit.errors import ConfigError
from flowkit.temporal_names import role_queue
from flowkit.text import one_line

if TYPE_CHECKING:
    from temporalio.client import Client

VARIABLE = "WORKER_TYPES"


async def check_external_roles(client: Client, queue: str) -> list[Finding]:
    """Check each role of WORKER_TYPES: whether a bridge serves it, and no native worker."""
    try:
        roles = CoordinatorConfig.load().worker_types if os.environ.get(VARIABLE) else []
    except ConfigError as error:
        return [bad("external roles", one_line(error), f"correct {VARIABLE}, or unset it")]
    return list(await asyncio.gather(*(_check_role(client, queue, role) for role in roles)))


async def _check_role(client: Client, queue: str, role: str) -> Finding:
    name, polls = f"role {role}", role_queue(queue, role)
    native = await native_pollers(client, polls)
    if native:
        found = f"external ({VARIABLE}), but native workers poll its queue: {', '.join(native)}"
        return bad(name, found, f"stop these workers, or remove {role} from {VARIABLE}")
    if await recent_pollers(client, polls):
        return ok(name, "external; a bridge serves it")
    option = "" if queue == DEFAULT_QUEUE else f" --queue {queue}"
    found = f"external ({VARIABLE}), but no bridge serves it"
    return note(name, found, f"start one with `flowkit bridge {role}{option}`")
