"""A page lists the modules that run for one node, so that a reader can follow it from file to file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.bridge.conftest import Names
from tests.integration.bridge.external_tasks import ExternalTasks
from tests.integration.handlers import Quick
from tests.integration.harness import Harness, node
from tests.tools.way_of_a_node import CHAIN, Way, documented, leave_undisturbed, not_listed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.local import Stack
    from flowkit.worker import Batch, BatchResult
    from flowkit.worker.context import RunContext
    from tests.kafka_server import Broker

pytestmark = pytest.mark.server

MOST_FILES = {"an ordinary node": 20, "an inline node": 21, "a function": 20, "an external node": 31}


class Noted(Quick):
    """Notes where the way from one node of the chain to the next begins and ends."""

    def __init__(self, way: Way) -> None:
        self._way = way

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return one metrics row."""
        self._way.note(ctx.node_id)
        return await super().process_batch(batch, ctx)


class NotedInline(Noted):
    """The same inside the engine."""

    inline = True


def chain(role: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the nodes, which run in sequence."""
    before = [(), *((name,) for name in CHAIN)]
    return [node(name, role, *after, **fields) for name, after in zip(CHAIN, before, strict=False)]


async def ordinary(harness: Harness, way: Way) -> list[dict[str, Any]]:
    """Start what runs ordinary nodes, and return a chain of them."""
    await harness.engine()
    await harness.worker({"noted": Noted(way)})
    return chain("noted")


async def inline(harness: Harness, way: Way) -> list[dict[str, Any]]:
    """Start what runs inline nodes, and return a chain of them."""
    await harness.engine({"noted": NotedInline(way)})
    return chain("noted")


async def function(harness: Harness, way: Way) -> list[dict[str, Any]]:
    """Start what runs functions, and return a chain of calls."""

    async def noted(task_id: str, node_id: str) -> None:
        way.note(node_id)

    await harness.engine(noted=noted)
    nodes = chain("coordinator_fn")
    return [{**each, "io": {"fn": "noted", "fn_args": {"node_id": each["node_id"]}}} for each in nodes]


async def external(harness: Harness, way: Way) -> list[dict[str, Any]]:
    """Start what runs external nodes, and return a chain of them."""
    assert isinstance(harness, ExternalTasks)

    async def noted(run: Any) -> AsyncIterator[dict[str, Any]]:
        way.note(run.node_id)
        yield {"count": 1}

    await harness.served_engine()
    await harness.external(noted, announce_interval_sec=3600)
    return chain(harness.role)


STARTS = {
    "an ordinary node": ordinary,
    "an inline node": inline,
    "a function": function,
    "an external node": external,
}


@pytest.mark.parametrize("kind", STARTS)
async def test_contributing_lists_the_files_on_the_way_of_a_node(
    kind: str, stack: Stack, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = {"temporal": stack.temporal_address, "mongo": stack.mongo_url}
    external = kind == "an external node"
    harness = ExternalTasks(Names(kafka.bootstrap_servers), **servers) if external else Harness(**servers)
    leave_undisturbed(harness, monkeypatch)
    way = Way()
    with way.recorded():
        nodes = await STARTS[kind](harness, way)
        result = await harness.result(await harness.create(*nodes))
        await harness.close()
    assert result.status == "finished"
    assert way.modules() - not_listed() == set(documented()[kind])


def test_no_way_is_longer_than_a_reader_can_follow() -> None:
    listed = documented()
    assert {kind: len(files) for kind, files in listed.items() if len(files) > MOST_FILES[kind]} == {}
    assert len(not_listed()) <= 23
