"""Changing the graph of a running task on real servers: new nodes, and other fields of nodes that have not started."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from flowkit import limits
from flowkit.activities.tasks import TaskActivities
from flowkit.errors import ActionRejected
from flowkit.models import TaskStatus
from tests.integration.handlers import Quick, Relay
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, eventually, node
from tests.integration.test_cancel_terminate_reset import reset
from tests.integration.test_continue_as_new import chain, histories, replay
from tests.integration.test_generations import puller
from tests.integration.test_large_graphs import run_ids
from tests.integration.test_pause import CHAIN, Gated

if TYPE_CHECKING:
    from flowkit.models import GraphChange, GraphChanged

pytestmark = pytest.mark.server


class Held:
    """Holds the activity that validates changes, before it writes, until the test lets it continue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.continues = asyncio.Event(), asyncio.Event()
        change = TaskActivities._change

        async def held(of: TaskActivities, given: GraphChange, namespace_id: str) -> GraphChanged:
            self.reached.set()
            await self.continues.wait()
            return await change(of, given, namespace_id)

        monkeypatch.setattr(TaskActivities, "_change", held)


async def test_new_nodes_run_after_ended_running_and_new_ones(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated, "quick": Quick(), "relay": Relay()})
    task_id = await harness.create(
        node("done", inline={"batches": 3}), node("a", "gated"), node("b", "quick", "a"), name="grows"
    )
    await harness.until_node(task_id, "done", "finished")
    await gated.until(("a", 1))
    new = [puller("from_done", "done"), node("x", "quick"), node("y", "quick", "x", "from_done")]
    preview = await engine.preview(task_id, "change_graph", nodes=new, edges=[["a", "x"]])
    result = await engine.change_graph(task_id, nodes=new, edges=[["a", "x"]], by="ada", reason="more")
    assert result["affected"] == preview["affected"]
    assert [(each["node_id"], each["from"], each["to"]) for each in result["affected"]] == [
        ("from_done", "new", "queued"),
        ("x", "new", "queued"),
        ("y", "new", "queued"),
    ]
    await harness.until_node(task_id, "from_done", "finished")
    assert len(await harness.rows(task_id, "from_done")) == 3
    assert (await harness.node(task_id, "x"))["status"] == "queued"
    gated.gate("a").set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    document = await harness.document(task_id)
    entries = document["graph"]["nodes"]
    assert [each["node_id"] for each in entries] == ["done", "a", "b", "from_done", "x", "y"]
    assert {each["status"] for each in entries} == {"finished"}
    assert [each["depends_on"] for each in entries[4:]] == [["a"], ["x", "from_done"]]
    assert document["graph"]["edges"] == [["a", "x"]]
    assert [each["action"] for each in document["coordinator"]["actions"]] == ["change_graph"]
    await replay(await histories(harness, task_id))
    await engine.rerun(task_id, ["x"])
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert [each["attempt_epoch"] for each in (await harness.document(task_id))["graph"]["nodes"]] == [
        *(1, 1, 1),
        *(1, 3, 3),
    ]


async def test_a_new_node_streams_from_one_that_runs_already(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated, "relay": Relay()})
    task_id = await harness.create(node("a", "gated", inline={"batches": 2}))
    await gated.until(("a", 1))
    follower = puller("b", "a")
    follower["io"]["start_when"] = "first_batch"
    await engine.change_graph(task_id, nodes=[follower])
    await harness.until_node(task_id, "b", "running")
    gated.gate("a").set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert len(await harness.rows(task_id, "b")) == 2
    await replay(await histories(harness, task_id))


async def test_a_node_changes_before_it_starts(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated, "quick": Quick()})
    task_id = await harness.create(
        node("a", "gated"),
        node("b", "quick", "a", inline={"batches": 1, "old": {"x": 1, "y": 2}}, timeout_sec=9),
        node("c", "quick", "a"),
    )
    await gated.until(("a", 1))
    await engine.pause(task_id, ["node:b"])
    gated.gate("a").set()
    await harness.until_node(task_id, "c", "finished")
    changes: dict[str, Any] = {
        "b": {
            "io": {"input_inline": {"batches": 3, "old": {"x": None}}},
            "timeout_sec": None,
            "deadline_sec": 600,
            "when": "nodes.a.status == 'finished'",
        }
    }
    result = await engine.change_graph(task_id, changes=changes)
    assert result["affected"] == [{"node_id": "b", "from": "queued", "to": "queued, changed"}]
    with pytest.raises(ActionRejected, match="node 'c' is finished, and change_graph changes only"):
        await engine.change_graph(task_id, changes={"c": {"timeout_sec": 5}})
    await engine.resume(task_id)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    entry = await harness.node(task_id, "b")
    assert entry["io"]["input_inline"] == {"batches": 3, "old": {"y": 2}}
    assert (entry["deadline_sec"], entry["generation"], entry["attempt_epoch"]) == (600, 1, 1)
    assert "timeout_sec" not in entry
    assert len(await harness.rows(task_id, "b")) == 3
    await replay(await histories(harness, task_id))


DEFINED = ("node_id", "type", "depends_on", "fan_in", "when", "deadline_sec", "timeout_sec", "io", "routing")


async def definitions(harness: Harness, task_id: str) -> tuple[Any, ...]:
    """Return what the document of a task says about its graph, without what its attempts change while they run."""
    graph = (await harness.document(task_id))["graph"]
    return (
        [[each.get(name) for name in DEFINED] for each in graph["nodes"]],
        graph["edges"],
        graph["edges_ex"],
    )


async def test_a_change_that_is_not_valid_changes_nothing(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated, "quick": Quick()})
    task_id = await harness.create(
        node("a", "gated"), node("b", "quick", "a", deadline_sec=600), node("c", "quick", when="true")
    )
    await gated.until(("a", 1))
    await harness.until_node(task_id, "c", "finished")
    before = await definitions(harness, task_id)
    wrong: dict[str, dict[str, Any]] = {
        "there is no node 'aa'; did you mean 'a'": {
            "nodes": [node("x", "quick", "b")],
            "edges": [["aa", "x"]],
        },
        "depends_on names 'nobody'": {"nodes": [node("x", "quick", "nobody")]},
        "names the unknown function 'no_such'": {
            "nodes": [node("x", "coordinator_fn", io={"fn": "no_such"})]
        },
        "node 'x': when": {"nodes": [node("x", "quick", "a", when="nodes.zz.status == 'x'")]},
        "wait for each other|the graph has a cycle": {
            "nodes": [node("x", "quick", "b")],
            "changes": {"b": puller("b", "x")["io"] and {"io": puller("b", "x")["io"]}},
        },
        "a new node can route only to new nodes": {
            "nodes": [node("x", "quick", routing={"on_failure": ["b"]})]
        },
        "timeout_sec": {"changes": {"b": {"timeout_sec": -1}}},
    }
    for problem, given in wrong.items():
        with pytest.raises(ActionRejected, match=problem):
            await engine.change_graph(task_id, **given)
    assert await definitions(harness, task_id) == before
    assert "revision" not in (await harness.document(task_id))["coordinator"]
    gated.gate("a").set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    await replay(await histories(harness, task_id))


async def test_a_task_does_not_end_before_an_accepted_change(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, gated = Held(monkeypatch), Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated, "quick": Quick()})
    task_id = await harness.create(node("a", "gated"))
    await gated.until(("a", 1))
    change = asyncio.create_task(engine.change_graph(task_id, nodes=[node("b", "quick", "a")]))
    await held.reached.wait()
    with pytest.raises(ActionRejected, match="an earlier change of the graph is in progress"):
        await engine.change_graph(task_id, nodes=[node("c")])
    gated.gate("a").set()
    await harness.until_node(task_id, "a", "finished")
    held.continues.set()
    assert (await change)["revision"] == 1
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert await harness.statuses(task_id) == {"a": "finished", "b": "finished"}
    await replay(await histories(harness, task_id))


async def test_a_task_that_is_cancelled_during_a_change_ends_with_its_new_nodes_skipped(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, gated = Held(monkeypatch), Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated})
    task_id = await harness.create(node("a", "gated"), node("w", "quick", "a"))
    await gated.until(("a", 1))
    change = asyncio.create_task(
        engine.change_graph(task_id, nodes=[node("b", "quick")], changes={"w": {"timeout_sec": 5}})
    )
    await held.reached.wait()
    await engine.cancel_task(task_id)
    await harness.until_node(task_id, "a", "cancelling")
    held.continues.set()
    assert (await change)["revision"] == 1
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.CANCELLED
    assert await harness.statuses(task_id) == {"a": "cancelled", "w": "skipped", "b": "skipped"}
    await replay(await histories(harness, task_id))


async def test_a_changed_graph_survives_new_runs_and_becomes_stored_when_it_is_large(
    short_runs: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = Gated()
    engine = await short_runs.engine()
    await short_runs.worker({"gated": gated, "quick": Quick()})
    task_id = await short_runs.create(node("a", "gated"), node("b", "quick", "a"))
    await gated.until(("a", 1))
    await engine.change_graph(task_id, nodes=[node("side", "gated"), *chain(CHAIN)])
    monkeypatch.setattr(limits, "INPUT_NODES", 10)
    await engine.change_graph(
        task_id, nodes=[node("last", "quick", "b")], changes={"b": {"io": {"input_inline": {"batches": 2}}}}
    )
    assert await short_runs.db.stored_graphs.count_documents({"task_id": task_id}) == 1
    await engine.change_graph(task_id, nodes=[node("end", "quick", "last")])
    assert await short_runs.db.stored_graphs.count_documents({"task_id": task_id}) == 2
    for name in ("a", "side"):
        gated.gate(name).set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert len(await run_ids(short_runs, task_id)) > 1
    assert set((await short_runs.statuses(task_id)).values()) == {"finished"}
    assert len(await short_runs.rows(task_id, "b")) == 2
    await replay(await histories(short_runs, task_id))


async def test_a_reset_of_the_workflow_applies_the_change_again(harness: Harness) -> None:
    gated = Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated, "quick": Quick()})
    task_id = await harness.create(node("a", "quick"), node("g", "gated", "a"))
    await gated.until(("g", 1))
    await engine.change_graph(task_id, nodes=[node("b", "quick", "a")])
    await harness.until_node(task_id, "b", "finished")
    await reset(harness, task_id, "a")

    async def look() -> bool:
        entry = await harness.node(task_id, "b")
        return bool(entry["status"] == "finished" and entry["attempt_epoch"] > 1)

    await eventually(look)
    gated.gate("g").set()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert await harness.statuses(task_id) == {"a": "finished", "g": "finished", "b": "finished"}
