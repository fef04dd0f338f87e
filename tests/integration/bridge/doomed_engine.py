"""An engine with a bridge that kills itself once each of some roles has reached its point.

Run: `python -m tests.integration.bridge.doomed_engine POINTS`, where POINTS maps roles to points, as JSON. The bridge
does nothing more for a role that has reached its point. One kill therefore leaves each role as a kill at its own point
would. `ENGINE_SETTINGS` holds the settings of the engine as JSON.
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
from flowkit.adapters.dispatches import Dispatch, DispatchStore
from flowkit.adapters.tasks.attempts import Attempts
from flowkit.adapters.tasks.store import TaskStore
from flowkit.bridge.commands import CommandSender
from flowkit.bridge.kafka import consumer
from flowkit.bridge.kafka.consumer import RecordConsumer
from flowkit.bridge.status import StatusEvents
from flowkit.models import ResetNodes

if TYPE_CHECKING:
    from collections.abc import Callable

SESSION_MS = 6_000
"""How long Kafka waits for a killed bridge; brokers accept no shorter time."""

COMMIT_OF_A_BATCH = "before the commit of a batch"
WITHOUT_RECORD = "after the begin, without the record"

Place = tuple[type[Any], str, str]
INSERT = (DispatchStore, "insert")

POINTS: dict[str, Place] = {
    "before the record": (*INSERT, "before"),
    "after the record": (*INSERT, "after"),
    WITHOUT_RECORD: (Attempts, "begin", "after"),
    "before the send": (CommandSender, "send", "before"),
    "after the send": (CommandSender, "send", "after"),
    "before a batch": (ArtifactStore, "store_batch", "before"),
    "after a batch": (ArtifactStore, "store_batch", "after"),
    COMMIT_OF_A_BATCH: (RecordConsumer, "_commit", "before"),
    "before the end": (DispatchStore, "end", "before"),
    "after the end": (DispatchStore, "end", "after"),
    "after the report": (DispatchStore, "mark_reported", "before"),
}
"""Where the engine can be killed: a method, and whether before its call or after its return."""

OF_PULLING_NODES: dict[str, Place] = {"after a child's end": (DispatchStore, "keep", "after")}
"""The same for a node that pulls from others."""

OF_ACTIONS: dict[str, Place] = {
    "before the reset": (TaskStore, "reset_nodes", "before"),
    "after the reset": (TaskStore, "reset_nodes", "after"),
}
"""The same for an action that starts a new generation of a node. The engine has one role then."""

PLACES = POINTS | OF_PULLING_NODES | OF_ACTIONS
FURTHER = {
    INSERT,
    (Attempts, "begin"),
    (StatusEvents, "handle"),
    (RecordConsumer, "_commit"),
    (ArtifactStore, "store_batch"),
}
"""Methods that begin further work for a role, or whose calls the points depend on."""


async def no_return() -> None:
    """Wait forever, also if the caller is cancelled."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


class Doom:
    """Stops the work for each role at its point, and kills the process as `kill -9` does at the last one."""

    def __init__(self, points: dict[str, str]) -> None:
        self._points = points
        self._reached: set[str] = set()
        self._stored: set[str] = set()
        """The roles of which a batch is stored."""
        self._roles: dict[str, str] = {}
        """By the key of a dispatch record."""

    def wrap_methods(self) -> None:
        """Replace the methods of the points, and those that begin further work."""
        used = {PLACES[point][:2] for point in self._points.values()}
        for owner, name in used | FURTHER:
            self._wrap(owner, name)

    def _wrap(self, owner: type[Any], name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        async def wrapped(called: Any, *args: Any, **options: Any) -> Any:
            role = self._role_of(called, args)
            await self._stop_at(role, (owner, name, "before"))
            result = await original(called, *args, **options)
            if name == "store_batch":
                self._stored.add(role)
            await self._stop_at(role, (owner, name, "after"))
            return result

        setattr(owner, name, wrapped)

    def _role_of(self, called: Any, args: tuple[Any, ...]) -> str:
        """Return the role that a call is about, or an empty text."""
        if isinstance(called, RecordConsumer | StatusEvents):
            topics = called._topics if isinstance(called, RecordConsumer) else [args[0][0].topic]
            return next((role for role in self._points for topic in topics if topic.endswith(role)), "")
        first = args[0]
        if isinstance(first, Dispatch):
            self._roles[first.key] = first.attempt.role
            return first.attempt.role
        if isinstance(first, ResetNodes):
            return next(iter(self._points))
        return self._roles[first] if isinstance(first, str) else str(first.role)

    async def _stop_at(self, role: str, place: Place) -> None:
        """Stop here if the role has reached its point, and end the process if all have."""
        point = self._points.get(role)
        if point is None:
            return
        if place == PLACES[point] and (point != COMMIT_OF_A_BATCH or role in self._stored):
            self._reached.add(role)
            if self._reached == self._points.keys():
                os.kill(os.getpid(), signal.SIGKILL)
        if role in self._reached or (point == WITHOUT_RECORD and place[:2] == INSERT):
            await no_return()


async def main(points: str) -> None:
    """Run the engine until it is killed."""
    consumer._SESSION_MS = SESSION_MS
    Doom(json.loads(points)).wrap_methods()
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    db = mongo[os.environ["MONGO_DATABASE"]]
    settings = json.loads(os.environ["ENGINE_SETTINGS"])
    engine = Coordinator(db=db, cfg=CoordinatorConfig(**settings))
    await engine.start()
    await engine.wait_stopped()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
