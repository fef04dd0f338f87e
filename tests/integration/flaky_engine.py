"""An engine whose functions fail at random after their write. Run: `python -m tests.integration.flaky_engine SEED`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from typing import Any

from motor.motor_asyncio import AsyncIOMotorClient

from flowkit import Coordinator, CoordinatorConfig
from flowkit.coordinator.adapters import CoordinatorAdapters
from flowkit.errors import StoreUnavailable

FAILS, UNCERTAIN = 0.10, 0.05
"""Shares of the calls that fail after their write: with their own error, and with a lost MongoDB response."""


class Flaky(CoordinatorAdapters):
    """Runs a function, and then fails at random."""

    chance = random.Random()

    async def vars_incr(self, task_id: str, *, key: str, by: float = 1) -> dict[str, Any]:
        """Increment the variable, then perhaps fail."""
        response = await super().vars_incr(task_id, key=key, by=by)
        drawn = self.chance.random()
        if drawn < FAILS:
            raise RuntimeError("failed after its write")
        if drawn < FAILS + UNCERTAIN:
            raise StoreUnavailable("the answer was lost")
        return response


async def main(seed: str) -> None:
    """Run the engine until it is killed."""
    Flaky.chance.seed(seed)
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    db = mongo[os.environ["MONGO_DATABASE"]]
    settings = json.loads(os.environ["ENGINE_SETTINGS"])
    config = CoordinatorConfig(queue=os.environ["FLOWKIT_QUEUE"], **settings)
    engine = Coordinator(db=db, cfg=config, adapters={"vars.incr": Flaky(db=db).vars_incr})
    await engine.start()
    await engine.wait_stopped()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
