"""Subscriptions to the events of flows: how many a connection may have, and what they cost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from flowkit.gateway import events
from flowkit.gateway.events import LOOKS, FlowEvents
from flowkit.server.connection import MAX_SUBSCRIPTIONS, Connection
from tests.unit.event_loop import until

if TYPE_CHECKING:
    import pytest

SUBSCRIBERS = 50


class Store:
    """Flows without runs, each with one stored event. Counts the queries, and holds those for flows while closed."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self.looks = 0
        self.waiting = 0
        self.reads = 0

    async def flow_without_nodes(self, flow_id: str) -> dict[str, Any]:
        """Return a flow."""
        self.looks += 1
        self.waiting += 1
        await self.opened.wait()
        self.waiting -= 1
        return {"_id": flow_id, "task_id": None, "version": 1}

    async def nodes_of_flow(self, flow_id: str) -> list[dict[str, Any]]:
        """Return the nodes of a flow."""
        return []

    async def last_event(self, flow_id: str) -> int:
        """Return the number of the event of a flow."""
        self.reads += 1
        return 1

    async def events(self, flow_id: str, after: int, limit: int) -> list[dict[str, Any]]:
        """Return the event of a flow."""
        self.reads += 1
        return [] if after else [event_of(flow_id)]


def event_of(flow_id: str) -> dict[str, Any]:
    """Return the stored event of a flow."""
    ids = {"flow": flow_id, "context_id": 3, "flow_id": 4, "run_id": "r", "task_id": "r", "node": None}
    change = {"from_": "Created", "to": "Started", "attempt": 0, "generation": 0, "retry": 0}
    return {"seq": 1, **ids, **change, "at": 1.0, "filled": False}


class Followers:
    """Subscribers of flows, and what they have received."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(events, "IDLE_LOOK_SEC", 0.01)
        given: Any = store
        self.events = FlowEvents(given)
        self.received = 0
        self.tasks: list[asyncio.Task[None]] = []

    def follow(self, flow_id: str) -> None:
        """Subscribe to a flow."""
        self.tasks.append(asyncio.create_task(self.events.send(flow_id, 0, self._notify)))

    async def _notify(self, method: str, params: Any) -> None:
        self.received += 1

    async def stop(self) -> None:
        """End all subscriptions."""
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)


async def test_subscribers_of_a_flow_share_what_the_gateway_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    followers = Followers(store, monkeypatch)
    for _ in range(SUBSCRIBERS):
        followers.follow("3:4")
    await until(lambda: followers.received == SUBSCRIBERS)
    looks, reads = store.looks, store.reads
    await until(lambda: store.looks >= looks + 5)
    assert store.reads - reads <= store.looks - looks + 1
    await followers.stop()


async def test_a_gateway_looks_at_few_flows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    store.opened.clear()
    followers = Followers(store, monkeypatch)
    for number in range(SUBSCRIBERS):
        followers.follow(f"3:{number}")
    await until(lambda: store.waiting >= LOOKS)
    assert store.waiting == LOOKS
    store.opened.set()
    await until(lambda: followers.received == SUBSCRIBERS)
    await followers.stop()


async def test_a_second_subscription_replaces_the_first_and_their_number_is_bounded() -> None:
    nothing: Any = None
    connection = Connection(nothing)
    begun: list[str] = []
    ended: list[str] = []

    async def follow(name: str) -> None:
        begun.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    assert connection.subscribe("flow", follow("first"))
    await until(lambda: begun == ["first"])
    assert connection.subscribe("flow", follow("second"))
    await until(lambda: begun == ["first", "second"])
    assert ended == ["first"]
    more = [connection.subscribe(f"{number}", follow("other")) for number in range(MAX_SUBSCRIPTIONS)]
    assert more == [True] * (MAX_SUBSCRIPTIONS - 1) + [False]
    assert connection.subscribe("flow", follow("third"))
    await connection._cancel_spawned()
    assert ended == ["first", "second"]
