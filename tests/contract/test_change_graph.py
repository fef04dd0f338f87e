"""A change of the graph of a running task is one write: repeated ones change nothing, and nothing is half-written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.contract.builders import AT, RUN, TASK, attempt, begun, close, opened, stored, stored_node

from flowkit.adapters.tasks.store import TaskStore
from flowkit.errors import Fenced
from flowkit.graph.changes import change_graph
from flowkit.models import ChangedNode, GraphChange

BASE: dict[str, Any] = {"nodes": [{"node_id": each, "type": "r"} for each in ("a", "b")]}
NEW: dict[str, Any] = {
    "nodes": [{"node_id": "x", "type": "r"}, {"node_id": "y", "type": "r", "depends_on": ["x"]}],
    "edges": [["a", "x"]],
    "edges_ex": [],
}


@pytest.fixture
async def tasks(db: Any) -> TaskStore:
    """A task of the nodes a and b."""
    store = TaskStore(db)
    await store.prepare()
    await opened(store, "a", "b")
    return store


def change(added: dict[str, Any] = NEW, *changed: ChangedNode, **more: Any) -> GraphChange:
    given: dict[str, Any] = {"task_id": TASK, "run_id": RUN, "run_seq": 1, "revision": 1, "at": AT, **more}
    return GraphChange(added=added, changed=[*changed], **given)


async def write(tasks: TaskStore, given: GraphChange, base: dict[str, Any] = BASE) -> list[int]:
    changed = {each.index: each.node for each in given.changed}
    return await tasks.change_graph(given, change_graph(base, given.added, changed))


async def test_new_nodes_follow_the_present_ones_and_changed_ones_have_their_new_fields(
    db: Any, tasks: TaskStore
) -> None:
    node = {"node_id": "b", "type": "r", "timeout_sec": 5, "io": {"input_inline": {"n": 1}}}
    assert await write(tasks, change(NEW, ChangedNode(index=1, node=node, generation=1))) == [0, 0]
    graph = (await stored(db))["graph"]
    assert [(each["node_id"], each["status"], each["depends_on"]) for each in graph["nodes"]] == [
        ("a", "queued", []),
        ("b", "queued", []),
        ("x", "queued", ["a"]),
        ("y", "queued", ["x"]),
    ]
    assert graph["edges"] == [["a", "x"]]
    entry = graph["nodes"][1]
    assert (entry["timeout_sec"], entry["io"], entry["generation"]) == (5, node["io"], 1)
    node = {"node_id": "b", "type": "r"}
    nothing: dict[str, Any] = {"nodes": [], "edges": [], "edges_ex": []}
    again = change(nothing, ChangedNode(index=1, node=node, generation=2), revision=2)
    await write(tasks, again, {"nodes": graph["nodes"]})
    assert not {"timeout_sec", "io"} & (await stored_node(db, 1)).keys()


async def test_a_repeated_change_does_not_touch_nodes_that_have_begun_since(
    db: Any, tasks: TaskStore
) -> None:
    assert await write(tasks, change()) == [0, 0]
    await begun(tasks, attempt(node_id="x", index=2))
    before = await stored(db)
    await write(tasks, change())
    assert await stored(db) == before


async def test_a_change_after_a_reset_of_the_workflow_replaces_what_the_earlier_one_added(
    db: Any, tasks: TaskStore
) -> None:
    await write(tasks, change())
    await begun(tasks, attempt(node_id="x", index=2))
    for _ in range(2):
        assert await write(tasks, change(run_id="another run")) == [2, 0]
    entry = await stored_node(db, 2)
    assert (entry["status"], entry["attempt_epoch"], entry["first_epoch"]) == ("queued", 2, 2)
    assert len((await stored(db))["graph"]["nodes"]) == 4


async def test_an_ended_or_outdated_task_does_not_change(db: Any, tasks: TaskStore) -> None:
    before = await stored(db)
    with pytest.raises(Fenced):
        await write(tasks, change(run_seq=0))
    assert await stored(db) == before
    assert await tasks.close_task(close())
    before = await stored(db)
    with pytest.raises(Fenced):
        await write(tasks, replace(change(), revision=2))
    assert await stored(db) == before
