"""Makes room in a task document that has reached MongoDB's limit of 16 MB.

Many long errors could fill the document of a task whose other nodes still have to run.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from flowkit.adapters.tasks.fields import TRUNCATED, nodes_of
from flowkit.text import truncate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flowkit.core.utils import Fields

SHORT_ERROR_CHARS = 80
"""Length to which errors of nodes are cut in a document that becomes too large."""

_NODES_OF_ONE_UPDATE = 1_000

_MAX_ROUNDS = 3
"""How often nodes may change while their errors are cut."""

_ERRORS: Fields = {
    "_id": 0,
    "graph.nodes.last_error": 1,
    "graph.nodes.status": 1,
    "graph.nodes.attempt_epoch": 1,
}

_logger = logging.getLogger("flowkit.store")


async def make_room(tasks: Any, task_id: str) -> None:
    """Cut the errors of a task's nodes to SHORT_ERROR_CHARS. Try again if nodes change meanwhile."""
    for _ in range(_MAX_ROUNDS):
        stored = await tasks.find_one({"id": task_id}, _ERRORS)
        found = [*_long_errors(nodes_of(stored or {}))]
        if not found:
            return
        _logger.warning(
            "task %s: its document becomes too large; FlowKit cuts the errors of its nodes", task_id
        )
        parts = range(0, len(found), _NODES_OF_ONE_UPDATE)
        done = [await _cut(tasks, task_id, found[start : start + _NODES_OF_ONE_UPDATE]) for start in parts]
        if all(done):
            return


async def _cut(tasks: Any, task_id: str, errors: Sequence[tuple[Fields, Fields]]) -> bool:
    """Cut errors in one update. Return False if a node has changed meanwhile."""
    condition: Fields = {"id": task_id}
    sets: Fields = {TRUNCATED: True}
    for same, cut in errors:
        condition |= same
        sets |= cut
    return bool((await tasks.update_one(condition, {"$set": sets})).matched_count)


def _long_errors(nodes: list[Fields]) -> Iterator[tuple[Fields, Fields]]:
    """Yield, for each node with a long error, the filter for the node as it is and the `$set` that cuts the error."""
    for index, node in enumerate(nodes):
        error = node.get("last_error")
        if isinstance(error, str) and len(error) > SHORT_ERROR_CHARS:
            path = f"graph.nodes.{index}"
            same = {f"{path}.{name}": node.get(name) for name in ("status", "attempt_epoch")}
            yield same, {f"{path}.last_error": truncate(error, SHORT_ERROR_CHARS)}
