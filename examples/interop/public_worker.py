"""Runs the handlers of this folder on a public worker: `PYTHONPATH=examples $WORKER_PYTHON
examples/interop/public_worker.py`.

The environment needs the SDK of the worker and Motor, but not this package. `KAFKA_BOOTSTRAP_SERVERS`, `MONGO_URL`,
`MONGO_DATABASE` and `INTEROP_WORKER_ID` describe the deployment.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from importlib.util import find_spec
from typing import Any

from motor.motor_asyncio import AsyncIOMotorClient

from flowkit.worker.runner import Worker, WorkerConfig
from interop.handlers import HANDLERS


async def main() -> None:
    """Run until SIGTERM."""
    if find_spec("flowkit.bridge"):
        sys.exit(
            f"{sys.executable} runs FlowKit on Temporal, whose workers use no Kafka: name a public worker's Python"
        )
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"], tz_aware=True)
    settings: dict[str, Any] = {
        "kafka_bootstrap": os.environ["KAFKA_BOOTSTRAP_SERVERS"],
        "roles": list(HANDLERS),
        "worker_id": os.environ["INTEROP_WORKER_ID"],
        "lease_ttl_sec": 10,
        "hb_interval_sec": 2,
    }
    handlers: dict[str, Any] = {role: handler() for role, handler in HANDLERS.items()}
    worker = Worker(db=mongo[os.environ["MONGO_DATABASE"]], cfg=WorkerConfig(**settings), handlers=handlers)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await worker.start()
    await stopping.wait()
    await worker.stop()


if __name__ == "__main__":
    asyncio.run(main())
