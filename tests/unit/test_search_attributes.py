"""An engine sets search attributes only when the whole server knows them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from flowkit.engine.worker import find_search_attributes
from flowkit.models.temporal_names import SEARCH_ATTRIBUTES

NAMESPACE_CACHE_SEC = 2.0
"""`system.namespaceCacheRefreshInterval` of Temporal's server."""


class Server:
    """The operator service of a namespace that has these attributes, and may let a client register others."""

    def __init__(self, *known: str, registers: bool = True) -> None:
        self.known = list(known)
        self.registered: list[str] = []
        self._registers = registers

    async def add_search_attributes(self, request: Any) -> None:
        if not self._registers:
            raise RPCError("no permission", RPCStatusCode.PERMISSION_DENIED, b"")
        self.registered = sorted(request.search_attributes)
        self.known += [name for name in self.registered if name not in self.known]

    async def list_search_attributes(self, _: Any) -> Any:
        return SimpleNamespace(custom_attributes=dict.fromkeys(self.known))


async def found(server: Server) -> tuple[tuple[str, ...], list[float]]:
    """Return what an engine finds, and how long it has paused."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    client: Any = SimpleNamespace(namespace="default", operator_service=server)
    return await find_search_attributes(client, pause), pauses


async def test_attributes_that_are_there_are_used_at_once_and_not_registered_again() -> None:
    server = Server(*SEARCH_ATTRIBUTES, "Other")
    assert await found(server) == (SEARCH_ATTRIBUTES, [])
    assert server.registered == []


@pytest.mark.parametrize("known", [(), SEARCH_ATTRIBUTES[:1]])
async def test_an_engine_waits_until_all_processes_of_the_server_know_new_attributes(
    known: tuple[str, ...],
) -> None:
    names, pauses = await found(Server(*known))
    assert names == SEARCH_ATTRIBUTES
    assert len(pauses) == 1
    assert pauses[0] > NAMESPACE_CACHE_SEC


async def test_an_engine_without_permission_sets_what_is_registered() -> None:
    assert await found(Server("Other", SEARCH_ATTRIBUTES[1], registers=False)) == (
        (SEARCH_ATTRIBUTES[1],),
        [],
    )
