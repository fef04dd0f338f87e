"""The roles that workers, engines and external workers serve: their versions, and the types that they announce."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowkit.adapters.role_contracts import read_contracts
from flowkit.adapters.worker_registry import WorkerRegistry
from flowkit.graph.contracts import type_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flowkit.adapters.mongo import Database
    from flowkit.adapters.worker_registry import RegisteredWorker
    from flowkit.graph.contracts import Contract, Schema


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleTypes:
    """The types that some versions of a role announce."""

    versions: Sequence[str]
    input: Schema | None
    output: Schema | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleView:
    """A role of an engine queue, with what its workers have announced."""

    role: str
    queue: str
    """The engine queue; empty for a role of external workers, which do not announce it."""
    runs_in: Sequence[str]
    """Where it runs: `engine`, `worker`, `external`."""
    online: int
    """The number of its workers that are online."""
    versions: Mapping[str, int]
    """The number of workers of each version: those that are online, or all if none is."""
    types: Sequence[RoleTypes] = field(default=())
    """The types of its versions; empty if none announces any."""

    @property
    def input(self) -> str:
        """The names of the input types, joined by commas; empty for a role without types."""
        return _names(each.input for each in self.types)

    @property
    def output(self) -> str:
        """The names of the output types, joined by commas; empty for a role without types."""
        return _names(each.output for each in self.types)


def _names(schemas: Iterable[Schema | None]) -> str:
    return ", ".join(dict.fromkeys(type_name(each) for each in schemas if each is not None))


async def read_roles(db: Database, queue: str | None = None) -> list[RoleView]:
    """Return the roles that have ever had a worker, sorted by name and queue.

    With `queue`, return only those of this engine queue and those of external workers. Raise StoreUnavailable.
    """
    registry = WorkerRegistry(db)
    workers = [each for each in await registry.list_workers() if queue is None or each.queue in (queue, "")]
    contracts: dict[str, Contract] = {}
    wanted = {digest for each in workers for digest in each.contracts.values()}
    while missing := wanted - contracts.keys():
        found = await read_contracts(registry, workers, missing)
        if not missing.intersection(found):
            break
        contracts |= found
    return make_roles(workers, contracts)


def make_roles(workers: Iterable[RegisteredWorker], contracts: Mapping[str, Contract]) -> list[RoleView]:
    """Return the roles of the workers, with the types of those contracts that are known, by digest."""
    served: dict[tuple[str, str], list[RegisteredWorker]] = {}
    for worker in workers:
        for role in worker.roles:
            served.setdefault((role, worker.queue), []).append(worker)
    return [_view(role, queue, each, contracts) for (role, queue), each in sorted(served.items())]


def _view(
    role: str, queue: str, workers: Sequence[RegisteredWorker], contracts: Mapping[str, Contract]
) -> RoleView:
    online = [each for each in workers if each.online]
    versions: dict[str, int] = {}
    typed: dict[str, list[str]] = {}
    for worker in online or workers:
        version = worker.handlers.get(role, "")
        versions[version] = versions.get(version, 0) + 1
        if worker.contracts.get(role) in contracts:
            typed.setdefault(worker.contracts[role], []).append(version)
    return RoleView(
        role=role,
        queue=queue,
        runs_in=sorted({_kind(each) for each in online or workers}),
        online=len(online),
        versions=dict(sorted(versions.items())),
        types=[_types(contracts[digest], found) for digest, found in sorted(typed.items())],
    )


def _types(contract: Contract, versions: Iterable[str]) -> RoleTypes:
    return RoleTypes(versions=sorted({*versions}), input=contract.input, output=contract.output)


def _kind(worker: RegisteredWorker) -> str:
    if worker.external:
        return "external"
    return "engine" if worker.in_engine else "worker"
