"""The graph of the task: a chain of four nodes, each with its own role."""

from pathlib import Path
from typing import Any

from code_index import handlers
from code_index.faults import Fault
from flowkit import Flow

INDEX, ENRICH, GROUP, ANALYZE = "index", "enrich", "group", "analyze"

BATCH_SIZE = 40
"""Files per batch: large enough to keep all processors busy, small enough to show progress."""

MAX_SHARDS = 16
"""Shards of `enrich`, at most: more than the workers have slots, so that a worker that starts later takes part."""


def index_graph(
    source: Path, batch_size: int = BATCH_SIZE, fault: Fault = Fault.FLAKY_DISK
) -> dict[str, Any]:
    """Return the graph: index `source`, enrich the files, group them by package, analyze the packages."""
    flow = Flow("code_index")
    index = flow.node(INDEX, handlers.index).input(source=str(source), batch_size=batch_size, fault=fault)
    enrich = flow.node(ENRICH, handlers.enrich).pulls(index).parallel(MAX_SHARDS)
    group = flow.node(GROUP, handlers.group).pulls(enrich)
    flow.node(ANALYZE, handlers.analyze).pulls(group)
    for node in flow.nodes.values():
        node.retry(5, backoff_sec=1)
    return flow.to_dict()
