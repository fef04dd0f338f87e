"""What would make the task document too large is rejected on submission, and so are large graphs of external roles."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import bson
import pytest

from flowkit import limits
from flowkit.adapters.tasks.fields import new_task
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.errors import GraphError
from flowkit.graph import submission
from flowkit.graph.submission import document_problem, external_problem, validate_input
from flowkit.graph.validation import parents_by_node
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from temporalio.client import Client


def chain(count: int, role: str = "native", **fields: Any) -> dict[str, Any]:
    """Return a chain of nodes."""
    parents = [[], *([f"n{index}"] for index in range(count - 1))]
    return {
        "nodes": [
            {"node_id": f"n{index}", "type": role, "depends_on": own, **fields}
            for index, own in enumerate(parents)
        ]
    }


def problem(graph: dict[str, Any], params: dict[str, Any] | None = None) -> str | None:
    """Return the problem of the document of a task."""
    return document_problem(params or {}, graph, parents_by_node(graph).values())


def rejected(graph: dict[str, Any], params: dict[str, Any] | None = None, **options: Any) -> str:
    """Return the error of a task that is rejected."""
    with pytest.raises(GraphError) as caught:
        validate_input("t", {"graph": graph, "params": params or {}}, **options)
    return str(caught.value)


def test_largest_document_is_accepted_and_one_more_byte_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(size: int) -> str | None:
        monkeypatch.setattr(submission, "TASK_DOCUMENT_BYTES", size)
        return problem(chain(3), {"text": "x" * 2_000})

    sizes = [size for size in range(3_000, 5_000) if largest(size) is None]
    assert sizes[0] > 3_000
    reported = largest(sizes[0] - 1)
    assert reported is not None
    assert f"the task document would have {sizes[0]:,}, more than {sizes[0] - 1:,}" in reported


@pytest.mark.parametrize("edges", [False, True])
def test_counted_size_covers_the_document_and_the_state_of_its_nodes(
    monkeypatch: pytest.MonkeyPatch, edges: bool
) -> None:
    graph = chain(100)
    if edges:
        graph["edges"] = [[f"n{index}", f"n{index + 1}"] for index in range(99)]
        for node in graph["nodes"]:
            del node["depends_on"]
    document = new_task("t", {"a": 1}, graph, time.time())
    monkeypatch.setattr(
        submission,
        "TASK_DOCUMENT_BYTES",
        len(bson.encode(document)) + 100 * (limits.NODE_STATE_BYTES - 110),
    )
    assert problem(graph, {"a": 1}) is not None


def test_rejection_names_the_field_the_sizes_and_the_remedy() -> None:
    text = rejected(chain(1), {"text": "x" * limits.TASK_DOCUMENT_BYTES})
    for part in ("params has 12,000,016 bytes", "more than 12,000,000", "store and pass a reference"):
        assert part in text
    text = rejected(chain(600, io={"input_inline": {"text": "x" * 20_000}}))
    for part in ("graph has 12,", "more than 12,000,000", "split the task"):
        assert part in text


@pytest.mark.slow
def test_graph_of_more_than_a_megabyte_is_accepted() -> None:
    assert len(validate_input("t", {"graph": chain(limits.MAX_NODES)}).nodes) == limits.MAX_NODES


def test_external_roles_allow_five_thousand_nodes() -> None:
    nodes = chain(limits.EXTERNAL_NODES + 1)["nodes"]
    nodes[7]["type"] = "external"
    assert external_problem({"nodes": nodes[:-1]}, ["external"]) is None
    assert external_problem({"nodes": nodes}, ["other"]) is None
    reported = external_problem({"nodes": nodes}, ["external"])
    assert reported is not None
    for part in ("node 'n7'", "external role 'external'", "5,001 entries, more than 5,000", "split the task"):
        assert part in reported


def test_submission_rejects_a_large_graph_with_an_external_role() -> None:
    graph = chain(limits.EXTERNAL_NODES + 1, "external")
    assert "more than 5,000" in rejected(graph, external_roles=["external"])
    assert validate_input("t", {"graph": graph}, external_roles=["other"]).nodes


@pytest.mark.parametrize(
    ("params", "graph"),
    [({"text": "x" * 20_000}, chain(1)), ({}, chain(40))],
    ids=["params", "graph"],
)
async def test_task_that_is_too_large_is_rejected_before_anything_is_stored(
    params: dict[str, Any], graph: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "TASK_DOCUMENT_BYTES", 10_000)
    db = memory_database()
    no_temporal = cast("Client", object())
    with pytest.raises(GraphError, match="the task document would have .* more than 10,000") as caught:
        await TaskClient(no_temporal, TaskStore(db), queue="q").create_task(params=params, graph=graph)
    assert caught.value.code == "invalid_graph"
    assert await db.list_collection_names() == []
