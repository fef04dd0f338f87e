"""Read the graph and params of a task that `create_task` stored in MongoDB, because they are too large for its input."""

from __future__ import annotations

import json
import zlib
from datetime import timedelta
from typing import Any, TypeGuard

from pydantic import TypeAdapter
from temporalio import workflow

from flowkit import temporal_names
from flowkit.graph import validation
from flowkit.models import ReadStoredGraph, StoredGraph
from flowkit.workflows.engine_calls import UNLIMITED_RETRIES

STORED_GRAPH = "stored_graph"
"""Key of the reference in the input of a task, and in the state that one run hands over to the next."""

LONGER = 4
"""How many times as long the history of such a task becomes. An engine replays 16,000 events in four seconds."""

_PAUSE = timedelta(milliseconds=1)
_READ_TIMEOUT = timedelta(seconds=30)
SUGGESTED_BYTES = 4 * 2**20
SUGGESTED_EVENTS = 4_096
"""Size and length of a history at which Temporal suggests continue-as-new."""


def is_stored(given: object) -> TypeGuard[dict[str, Any]]:
    """Return whether the input of a task refers to a stored graph."""
    return isinstance(given, dict) and isinstance(given.get(STORED_GRAPH), dict)


def input_of(stored: StoredGraph) -> dict[str, Any]:
    """Return the input with which `create_task` starts a task whose graph is stored."""
    return {STORED_GRAPH: TypeAdapter(StoredGraph).dump_python(stored)}


def stored_in(given: dict[str, Any]) -> StoredGraph:
    """Return the reference in an input or a state for which `is_stored` is true."""
    return TypeAdapter(StoredGraph).validate_python(given[STORED_GRAPH])


async def read_task(stored: StoredGraph) -> dict[str, Any]:
    """Return the stored graph and params. Waits while MongoDB is unavailable.

    Each part is the result of an activity, so that a replay reads it from the history.
    """
    parts = [await _read_part(stored, part) for part in range(stored.parts)]
    task: dict[str, Any] = json.loads(zlib.decompress(b"".join(parts)))
    await end_workflow_task()
    return task


async def end_workflow_task() -> None:
    """Continue in another workflow task. One may take two seconds, and each step of opening a large graph takes long."""
    await workflow.sleep(_PAUSE, summary="prepare the graph in steps")


async def _read_part(stored: StoredGraph, part: int) -> bytes:
    content: bytes = await workflow.execute_activity(
        temporal_names.READ_STORED_GRAPH,
        ReadStoredGraph(task_id=workflow.info().workflow_id, stored=stored, part=part),
        result_type=bytes,
        start_to_close_timeout=_READ_TIMEOUT,
        retry_policy=UNLIMITED_RETRIES,
        summary=f"read the graph from MongoDB, part {part + 1} of {stored.parts}",
    )
    return content


def is_mostly_graph(stored: StoredGraph | None) -> bool:
    """Return whether the history is only long because of the stored graph, so that a new run would be as long."""
    info = workflow.info()
    if stored is None or stored.size < SUGGESTED_BYTES // 2:
        return False
    own_bytes = info.get_current_history_size() - stored.size
    return own_bytes < SUGGESTED_BYTES and info.get_current_history_length() < SUGGESTED_EVENTS


def continues_longer(nodes: int) -> bool:
    """Return whether a task with so many nodes continues its run, although Temporal suggests a new one.

    Each run prepares the graph again, while only an engine that takes over the task replays the longer history.
    """
    info = workflow.info()
    return (
        nodes > validation.STEP_NODES
        and info.get_current_history_length() < LONGER * SUGGESTED_EVENTS
        and info.get_current_history_size() < LONGER * SUGGESTED_BYTES
    )
