"""Writes changes of the graph to a task document: new nodes at the next indexes, and changed nodes that
have not started.

One update writes a whole change, so a document never has a part of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.adapters.mongo import moment
from flowkit.adapters.tasks.fields import new_node, nodes_of
from flowkit.errors import Fenced, StoreUnavailable
from flowkit.graph.changes import CHANGEABLE
from flowkit.graph.validation import parents_by_node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowkit.core.utils import Fields
    from flowkit.models import ChangedNode, GraphChange


LATEST = "coordinator.graph_change"
"""Field that identifies the latest change of the graph."""

_READ: Fields = {"_id": 0, LATEST: 1, "graph.nodes.node_id": 1, "graph.nodes.attempt_epoch": 1}


class Extending:
    """Writes changes of graphs to the collection `tasks`."""

    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks

    async def write(self, change: GraphChange, graph: Mapping[str, Any]) -> list[int]:
        """Write the changed `graph`. Return the epochs after which the attempts of the new nodes begin.

        A repetition changes nothing, and returns the same. Raise Fenced if the task has ended or belongs to
        a newer run.
        """
        stored = await self._tasks.find_one(_open_filter(change), _READ)
        new = change.added["nodes"]
        first = len(graph["nodes"]) - len(new)
        entries = nodes_of(stored or {})
        if stored is None or len(entries) < first:
            raise Fenced(f"task {change.task_id!r} has ended, or a newer run has opened it")
        latest = (stored.get("coordinator") or {}).get("graph_change")
        if latest == _identity(change):
            return [entry.get("attempt_epoch") or 0 for entry in entries[first : first + len(new)]]
        epochs = _epochs(new, entries[first:])
        sets = _new_set(graph, first, epochs) | _changed_set(change.changed)
        unsets = _removed_unset(change.changed)
        done = await self._tasks.update_one(
            _open_filter(change)
            | {LATEST: latest, f"graph.nodes.{first - 1}.node_id": entries[first - 1]["node_id"]},
            {
                "$set": {**sets, LATEST: _identity(change), "updated_at": moment(change.at)},
                **({"$unset": unsets} if unsets else {}),
            },
        )
        if not done.matched_count:
            raise StoreUnavailable(f"the document of task {change.task_id!r} has changed meanwhile")
        return epochs


def _open_filter(change: GraphChange) -> Fields:
    return {"id": change.task_id, "run_seq": {"$lte": change.run_seq}, "finished_at": None}


def _identity(change: GraphChange) -> str:
    return f"{change.run_id}/{change.revision}"


def _epochs(new: Sequence[Mapping[str, Any]], left: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the epochs after which the new nodes begin.

    `left` are nodes after those that the workflow knows: a *Reset* of the workflow has undone the action
    that added them. A new node with the id of one of them takes the next epoch, so that attempts which
    still run are outdated.
    """
    begun = {entry.get("node_id"): epoch for entry in left if (epoch := entry.get("attempt_epoch"))}
    return [begun[node["node_id"]] + 1 if node["node_id"] in begun else 0 for node in new]


def _new_set(graph: Mapping[str, Any], first: int, epochs: Sequence[int]) -> Fields:
    parents = parents_by_node({**graph})
    fields: Fields = {}
    for place, epoch in enumerate(epochs):
        node = graph["nodes"][first + place]
        begun = {"attempt_epoch": epoch, "first_epoch": epoch} if epoch else {}
        fields[f"graph.nodes.{first + place}"] = {**new_node(node, parents[node["node_id"]]), **begun}
    return fields | {f"graph.{name}": graph.get(name) or [] for name in ("edges", "edges_ex")}


def _changed_set(changed: Sequence[ChangedNode]) -> Fields:
    fields: Fields = {}
    for each in changed:
        path = f"graph.nodes.{each.index}"
        given = {name: each.node[name] for name in CHANGEABLE if name in each.node}
        fields |= {f"{path}.{name}": value for name, value in given.items()}
        fields[f"{path}.generation"] = each.generation
    return fields


def _removed_unset(changed: Sequence[ChangedNode]) -> Fields:
    return {
        f"graph.nodes.{each.index}.{name}": ""
        for each in changed
        for name in CHANGEABLE
        if name not in each.node
    }
