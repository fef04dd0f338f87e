"""The graph of the task: a chain of four nodes, each with its own role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from code_index.faults import Fault

if TYPE_CHECKING:
    from pathlib import Path

INDEX, ENRICH, GROUP, ANALYZE = "index", "enrich", "group", "analyze"

BATCH_SIZE = 40
"""Files per batch: large enough to keep all processors busy, small enough to show progress."""

MAX_SHARDS = 16
"""Shards of `enrich`, at most: more than the workers have slots, so that a worker that starts later takes part."""

_RETRY = {"max": 5, "backoff_sec": 1.0}


def index_graph(
    source: Path, batch_size: int = BATCH_SIZE, fault: Fault = Fault.FLAKY_DISK
) -> dict[str, Any]:
    """Return the graph: index `source`, enrich the files, group them by package, analyze the packages."""
    inline = {"source": str(source), "batch_size": batch_size, "fault": fault.value}
    return {
        "schema_version": "1.0",
        "name": "code_index",
        "nodes": [
            {"node_id": INDEX, "type": "indexer", "io": {"input_inline": inline}, "retry_policy": _RETRY},
            {**_pulling(ENRICH, "enricher", source=INDEX), "parallel": MAX_SHARDS},
            _pulling(GROUP, "grouper", source=ENRICH),
            _pulling(ANALYZE, "analyzer", source=GROUP),
        ],
    }


def _pulling(node_id: str, role: str, *, source: str) -> dict[str, Any]:
    """Return a node that starts after `source` and pulls its batches."""
    pull = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": [source]}}
    return {
        "node_id": node_id,
        "type": role,
        "depends_on": [source],
        "io": {"input_inline": pull},
        "retry_policy": _RETRY,
    }
