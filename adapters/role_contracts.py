"""What the workers of an engine queue announce about the input and output of their roles."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from flowkit.adapters.worker_registry import WorkerRegistry
from flowkit.graph.contracts import Contract, find_unfit, unknown_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from flowkit.adapters.mongo import Database
    from flowkit.adapters.worker_registry import AnnouncedContract, RegisteredWorker
    from flowkit.graph.contracts import DataEdge, Schema

_KEPT_SEC = 5.0
"""For how long a result is used again: a program may submit many tasks with one graph."""
_KEPT = 200
"""How many results, and how many contracts, are kept."""


class RoleContracts:
    """Compares the edges of graphs with the contracts of roles, as the workers that are online announce them.

    A result is kept for a few seconds, and a contract longer, because its digest identifies it.
    """

    def __init__(self, db: Database, queue: str, now: Callable[[], float] = time.monotonic) -> None:
        self._registry = WorkerRegistry(db)
        self._queue = queue
        self._now = now
        self._found: dict[tuple[DataEdge, ...], tuple[float, list[str]]] = {}
        self._contracts: dict[str, Contract] = {}

    async def warnings(self, edges: tuple[DataEdge, ...]) -> list[str]:
        """Return a warning for each pair of roles that does not fit. A role without workers fits.

        A call during another one for the same edges, or within five seconds of a failed one, returns none. Raise
        StoreUnavailable.
        """
        if not edges:
            return []
        until, found = self._found.get(edges, (0.0, []))
        if self._now() >= until:
            _make_room(self._found)
            until = self._now() + _KEPT_SEC
            self._found[edges] = until, []
            contracts = await self._read(frozenset(role for edge in edges for role in edge.roles))
            found = [each.describe() for each in find_unfit(edges, contracts)]
            self._found[edges] = until, found
        return found

    async def unknown_fields(self, role: str, meta: Mapping[str, Any]) -> list[str]:
        """Return the fields of a stored batch that the results of its role lack now, in each version of the role.

        A role without workers, or without types, lacks none. Raise StoreUnavailable.
        """
        outputs = [each.output for each in (await self._read(frozenset([role])))[role]]
        found = [[] if each is None else unknown_fields(meta, each) for each in outputs]
        return [field for field in found[0] if all(field in each for each in found)] if found else []

    async def _read(self, roles: frozenset[str]) -> Mapping[str, Sequence[Contract]]:
        workers = await self._registry.find_online(self._queue, roles)
        digests = {
            role: {each.contracts.get(role, "") for each in workers if role in each.handlers}
            for role in roles
        }
        _make_room(self._contracts)
        missing = {each for found in digests.values() for each in found if each} - self._contracts.keys()
        self._contracts |= await read_contracts(self._registry, workers, missing)
        return {
            role: [self._contracts.get(each, Contract()) for each in sorted(found)]
            for role, found in digests.items()
        }


def _make_room(kept: dict[Any, Any]) -> None:
    if len(kept) >= _KEPT:
        kept.clear()


async def read_contracts(
    registry: WorkerRegistry, workers: Iterable[RegisteredWorker], digests: Iterable[str]
) -> dict[str, Contract]:
    """Return the contracts with these digests, each from one of the workers that announce it.

    A contract is missing if its row has changed meanwhile. Raise StoreUnavailable.
    """
    missing, asked = {*digests}, []
    for worker in workers:
        own = missing.intersection(worker.contracts.values())
        if own:
            missing -= own
            asked.append(worker.worker_id)
    found = await registry.read_contracts(asked) if asked else {}
    return {digest: _parse(each) for digest, each in found.items()}


def _parse(announced: AnnouncedContract) -> Contract:
    taken, returned = _parse_schema(announced.input), _parse_schema(announced.output)
    return Contract(input=taken, output=returned, is_source=announced.is_source)


def _parse_schema(text: str) -> Schema | None:
    try:
        found = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
