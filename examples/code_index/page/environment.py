"""The machine and the versions of a run."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from temporalio.api.workflowservice.v1 import GetSystemInfoRequest

from flowkit import CoordinatorConfig

if TYPE_CHECKING:
    from temporalio.client import Client

    from code_index.demo import Options
    from flowkit.local import Stack


async def environment(client: Client, db: Any, options: Options, stack: Stack) -> dict[str, str]:
    """Return the environment of a run, which a reader needs to compare two runs."""
    system = await client.workflow_service.get_system_info(GetSystemInfoRequest())
    build = await db.command("buildInfo")
    lease = {"lease_ttl_sec": CoordinatorConfig().lease_ttl_sec, **options.engine_settings}["lease_ttl_sec"]
    return {
        "Machine": f"{os.cpu_count()} processors, {platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "FlowKit": version("flowkit-temporal"),
        "Temporal SDK": version("temporalio"),
        "Temporal server": f"{system.server_version}{_local(stack.temporal is not None)}",
        "MongoDB": f"{build['version']}{_stand_in(stack)}{_local(stack.mongo is not None)}",
        "Database": db.name,
        "Workers": f"{options.workers}, each for all four roles",
        "Files per batch": f"{options.batch_size:,}",
        "Lease of an attempt": f"{lease:g} s",
    }


def _stand_in(stack: Stack) -> str:
    return " (stand-in)" if stack.mongo is not None and stack.mongo.stand_in else ""


def _local(ours: bool) -> str:
    return ", started for this run" if ours else ", already running"
