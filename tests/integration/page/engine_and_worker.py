"""Run an engine and a worker for the tasks of the chaos test, apart from the process that watches the page.

Call `python -m tests.integration.page.engine_and_worker CONCURRENCY SETTINGS`, with the settings of the engine as JSON.
Servers, database and queue are those of the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient

from flowkit import Coordinator, CoordinatorConfig, WorkerConfig
from flowkit.worker import Worker
from tests.integration.chaos import typed
from tests.integration.chaos.handlers import Planned, touch
from tests.integration.chaos.plans import INLINE_ROLE, PRINTER, ROLES, TOUCH

if TYPE_CHECKING:
    from flowkit.worker import RoleHandler


async def run(concurrency: int, settings: dict[str, Any]) -> None:
    """Run both until the process is killed. Their handlers never end or block their process."""
    typed.BEHAVES = True
    handlers: dict[str, RoleHandler] = {
        each.role: each for each in (*(Planned(role, behaves=True) for role in ROLES), *typed.TYPED)
    }
    inline = {role: handlers.pop(role) for role in (INLINE_ROLE, PRINTER)}
    database: Any = AsyncIOMotorClient(os.environ["MONGO_URL"], tz_aware=True)
    db, queue = database[os.environ["MONGO_DATABASE"]], os.environ["FLOWKIT_QUEUE"]
    cfg = CoordinatorConfig(queue=queue, **settings)
    await Coordinator(db=db, cfg=cfg, adapters={TOUCH: touch}, handlers=inline).start()
    of_worker = WorkerConfig(roles=list(handlers), queue=queue, max_concurrent=concurrency)
    await Worker(db=db, cfg=of_worker, handlers=handlers).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), json.loads(sys.argv[2])))
