"""Reads what the conditions of a task can read from its document: params, variables and the stats of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit.adapters.durability import durable
from flowkit.adapters.mongo import translate_errors
from flowkit.adapters.tasks import fields as task_fields

if TYPE_CHECKING:
    from flowkit.adapters.mongo import Database

_VALUES = {
    "_id": 0,
    "params": 1,
    "coordinator.vars": 1,
    "graph.nodes.node_id": 1,
    "graph.nodes.stats": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredValues:
    """The values that a task document holds for conditions."""

    params: dict[str, Any]
    variables: dict[str, Any]
    node_ids: list[str]
    """The ids of all nodes, in the order of the graph."""
    stats: dict[str, dict[str, Any]]
    """The stats of each node that has some, by node id."""


class ConditionReads:
    """Reads of the collection `tasks`. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._tasks = durable(db).tasks

    @translate_errors
    async def values(self, task_id: str) -> StoredValues | None:
        """Return the values of a task; None if there is no document."""
        stored = await self._tasks.find_one({"id": task_id}, _VALUES)
        if stored is None:
            return None
        nodes = task_fields.nodes_of(stored)
        return StoredValues(
            params=stored.get("params") or {},
            variables=(stored.get("coordinator") or {}).get("vars") or {},
            node_ids=[node["node_id"] for node in nodes],
            stats={node["node_id"]: node["stats"] for node in nodes if node.get("stats")},
        )
