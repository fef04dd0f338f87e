"""The largest tasks that validation accepts."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from flowkit.graph.validation import parse_graph
from flowkit.limits import LAST_ERROR_CHARS, REASON_CODE_CHARS, TASK_INPUT_BYTES
from flowkit.models import Graph, NodeState, NodeStatus
from flowkit.workflows.payloads import json_size
from flowkit.workflows.scheduling.scheduler import Scheduler

FOUR_BYTES = "".join(map(chr, range(0x1F300, 0x1F600)))
ASCII = "".join(map(chr, range(32, 127)))


@cache
def _noise(alphabet: str) -> str:
    return "".join(random.Random(1).choices(alphabet, k=100_000))


def words(rng: random.Random, alphabet: str, length: int) -> str:
    """Return a piece of random text."""
    start = rng.randrange(100_000 - length)
    return _noise(alphabet)[start : start + length]


def many_nodes(count: int = 5_000) -> dict[str, Any]:
    """Return a graph of `count` nodes whose ids, of four-byte characters, use up the byte limit of a graph."""
    rng = random.Random(7)
    bare = [{"node_id": "", "type": "r", "allow_failure": True} for _ in range(count)]
    room = (TASK_INPUT_BYTES - json_size({"nodes": bare, "on_node_failure": "continue"}) - 100) // count
    ids = [f"{index}{words(rng, FOUR_BYTES, (room - 5) // 4)}" for index in range(count)]
    nodes = [{**node, "node_id": node_id} for node, node_id in zip(bare, ids, strict=True)]
    return {"nodes": nodes, "on_node_failure": "continue"}


def longest_ids() -> dict[str, Any]:
    """Return a graph with as many nodes as fit, with ids of 200 four-byte characters."""
    rng = random.Random(8)
    size = json_size({"node_id": "x" * 800, "type": "r", "allow_failure": True}) + 2
    count = TASK_INPUT_BYTES // size - 1
    ids = [f"{index:05}{words(rng, FOUR_BYTES, 195)}" for index in range(count)]
    return {"nodes": [{"node_id": node_id, "type": "r", "allow_failure": True} for node_id in ids]}


def all_failed(count: int, *, chars: int = LAST_ERROR_CHARS, alphabet: str = FOUR_BYTES) -> list[NodeState]:
    """Return states in which every node has failed, each with a different error and code."""
    rng = random.Random(9)
    return [
        NodeState(
            status=NodeStatus.FAILED,
            epoch=3,
            failures=3,
            losses=index % 3,
            last_error=words(rng, alphabet, chars),
            reason_code=words(rng, alphabet, min(chars, REASON_CODE_CHARS)),
        )
        for index in range(count)
    ]


def failed_scheduler(graph: dict[str, Any]) -> tuple[Graph, Scheduler]:
    """Return a scheduler for a graph in which every node has failed."""
    parsed = parse_graph(graph, params={})
    return parsed, Scheduler(parsed, all_failed(len(parsed.nodes)))
