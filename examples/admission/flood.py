"""The user `flood` submits thirty tasks at once, which is more than its limit."""

import asyncio
import os
from typing import Any

from motor.motor_asyncio import AsyncIOMotorClient

from flowkit import Admission, Coordinator, CoordinatorConfig
from flowkit.errors import AdmissionRejected

GRAPH = {"nodes": [{"node_id": "work", "type": "delay", "io": {"input_inline": {"sec": 10}}}]}


async def main() -> None:
    mongo: Any = AsyncIOMotorClient(os.environ.get("MONGO_URL", "mongodb://localhost:27017"), tz_aware=True)
    database = mongo[os.environ.get("MONGO_DATABASE", "flowkit")]
    settings = CoordinatorConfig(queue=os.environ.get("FLOWKIT_QUEUE", "flowkit"))
    coordinator = Coordinator(db=database, cfg=settings)
    queued, rejected, reason = 0, 0, ""
    for _ in range(30):
        try:
            await coordinator.create_task(params={}, graph=GRAPH, admit=Admission(user_id="flood"))
            queued += 1
        except AdmissionRejected as error:
            rejected, reason = rejected + 1, f": {error}"
    print(f"{queued} queued, {rejected} rejected{reason}")


if __name__ == "__main__":
    asyncio.run(main())
