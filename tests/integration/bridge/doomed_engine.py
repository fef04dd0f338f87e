"""An engine with a bridge that kills itself at a chosen point. Run: `python -m tests.integration.bridge.doomed_engine POINT`.

`ENGINE_SETTINGS` holds the settings of the engine as JSON.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient

from flowkit import Coordinator, CoordinatorConfig
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.dispatches.store import DispatchStore
from flowkit.adapters.tasks.task_store import TaskStore
from flowkit.bridge.command_sender import CommandSender
from flowkit.bridge.event_log import EventLog
from flowkit.bridge.kafka import consumer
from flowkit.protocol.kinds import EventKind

if TYPE_CHECKING:
    from collections.abc import Callable

SESSION_MS = 6_000
"""How long Kafka waits for a killed bridge; brokers accept no shorter time."""

NEVER = "never"
POINTS: dict[str, tuple[type[Any], str, str]] = {
    "before the record": (DispatchStore, "insert", "before"),
    "after the record": (DispatchStore, "insert", "after"),
    "after the begin, without the record": (TaskStore, "begin_attempt", "after"),
    "before the send": (CommandSender, "send", "before"),
    "after the send": (CommandSender, "send", "after"),
    "before a batch": (ArtifactStore, "store_batch", "before"),
    "after a batch": (ArtifactStore, "store_batch", "after"),
    "before the commit of a batch": (EventLog, "write", "before"),
    "before the end": (DispatchStore, "end", "before"),
    "after the end": (DispatchStore, "end", "after"),
    "after the report": (DispatchStore, "reported", "before"),
}
"""Where the engine can kill itself: a method, and whether before its call or after its return."""

OF_PULLING_NODES: dict[str, tuple[type[Any], str, str]] = {
    "after a child's end": (DispatchStore, "hold", "after"),
}
"""The same for a node that pulls from others."""


NEVER_RETURN: dict[str, tuple[type[Any], str]] = {
    "after the begin, without the record": (DispatchStore, "insert"),
}
"""Methods that do nothing and do not return while the engine waits for its point."""


async def no_return(*_: Any) -> None:
    """Wait forever."""
    await asyncio.Event().wait()


def die() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def doom(owner: type[Any], name: str, when: str) -> None:
    """Make a method kill the process before it is called or after it has returned."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    async def doomed(*args: Any, **options: Any) -> Any:
        if owner is EventLog and not any(
            row.payload["kind"] == EventKind.BATCH_OK for row in args[0].unwritten
        ):
            return await original(*args, **options)
        if when == "before":
            die()
        await original(*args, **options)
        return die()

    setattr(owner, name, doomed)


async def main(point: str) -> None:
    """Run the engine until it is killed."""
    consumer._SESSION_MS = SESSION_MS
    if point in NEVER_RETURN:
        setattr(*NEVER_RETURN[point], no_return)
    if point != NEVER:
        doom(*{**POINTS, **OF_PULLING_NODES}[point])
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    db = mongo[os.environ["MONGO_DATABASE"]]
    settings = json.loads(os.environ["ENGINE_SETTINGS"])
    engine = Coordinator(db=db, cfg=CoordinatorConfig(**settings))
    await engine.start()
    await engine.wait_stopped()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
