"""Graphs as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from flowkit.errors import GraphError
from flowkit.graph.validation import parse_graph

PULL = "pull.from_artifacts"
RECHUNK = "pull.from_artifacts.rechunk:size"


def node(node_id: str = "extract", **fields: Any) -> dict[str, Any]:
    """Return a node of the role `crawler`."""
    return {"node_id": node_id, "type": "crawler", **fields}


def one(**fields: Any) -> dict[str, Any]:
    """Return a graph with the single node `extract`."""
    return {"nodes": [node(**fields)]}


def two(**fields: Any) -> dict[str, Any]:
    """Return a graph with `extract` and its child `load`, which has these fields."""
    return {"nodes": [node(), node("load", **{"depends_on": ["extract"], **fields})]}


def pulling(adapter: object = PULL, **input_args: Any) -> dict[str, Any]:
    """Return the `io` of a node that receives its input through an adapter."""
    return {"input_inline": {"input_adapter": adapter, "input_args": input_args}}


def refusal(graph: object, **options: Any) -> GraphError:
    """Return the error with which `graph` is rejected."""
    with pytest.raises(GraphError) as caught:
        parse_graph(graph, **options)
    return caught.value
