"""Conditions on real servers: nodes and edges with `when`, errors, retries of the evaluation, resets and long tasks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError

from flowkit.adapters.tasks.store import StoredValues, TaskStore
from flowkit.coordinator.adapters import CoordinatorAdapters
from flowkit.errors import StoreUnavailable
from flowkit.models import TaskStatus
from flowkit.workflows import evaluations as conditions
from tests.integration.harness import Harness, eventually, node
from tests.integration.test_cancel_terminate_reset import reset
from tests.integration.test_continue_as_new import histories, replay
from tests.integration.test_large_graphs import run_ids
from tests.integration.test_routing import skip_reasons

if TYPE_CHECKING:
    from temporalio.client import WorkflowHistory

pytestmark = pytest.mark.server

BROKEN = {"failures": 9, "permanent": True}


def call(name: str, fn: str, /, *parents: str, **fn_args: Any) -> dict[str, Any]:
    """Return a node that calls a built-in function."""
    io = {"fn": fn, "fn_args": fn_args}
    return {"node_id": name, "type": "coordinator_fn", "depends_on": list(parents), "io": io}


def edge(parent: str, child: str, when: str) -> dict[str, str]:
    """Return an edge with a condition."""
    return {"from": parent, "to": child, "when": when}


async def servers(harness: Harness) -> None:
    """Start an engine and a worker."""
    await harness.engine()
    await harness.worker()


def evaluations(found: list[WorkflowHistory]) -> int:
    """Return how many activities evaluated conditions."""
    scheduled = [event.activity_task_scheduled_event_attributes for each in found for event in each.events]
    return sum(each.activity_type.name == "evaluate_conditions" for each in scheduled)


async def test_variables_choose_the_branch(harness: Harness) -> None:
    await servers(harness)
    task_id = await harness.create(
        call("set", "vars.set", kv={"routing.sla": "gold"}),
        node("gold_only", "quick", "set", when="vars.routing.sla == 'gold'"),
        node("silver_only", "quick", "set", when="vars.routing.sla == 'silver'"),
        node("join", "quick", "gold_only", "silver_only"),
    )
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert await skip_reasons(harness, task_id) == {"silver_only": "condition"}
    stored = {name: await harness.rows(task_id, name) for name in ("gold_only", "silver_only", "join")}
    assert {name: bool(rows) for name, rows in stored.items()} == {
        "gold_only": True,
        "silver_only": False,
        "join": True,
    }
    found = await histories(harness, task_id)
    assert evaluations(found) == 1
    await replay(found)


async def test_false_edge_counts_as_a_parent_skipped_for_the_condition(harness: Harness) -> None:
    await servers(harness)
    children = {"all": "all", "any": "any", "both": "count:2"}
    task_id = await harness.create(
        node("a"),
        node("b"),
        *(node(name, "quick", "a", "b", fan_in=fan_in) for name, fan_in in children.items()),
        node("neither", "quick", "a"),
        edges_ex=[
            *(edge("a", name, "params.size() > 0") for name in (*children, "neither")),
            edge("b", "any", "true"),
        ],
    )
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert await skip_reasons(harness, task_id) == {"both": "condition", "neither": "condition"}


async def test_condition_reads_how_ancestors_ended(harness: Harness) -> None:
    await servers(harness)
    failed = """nodes["a"].status == 'failed' && nodes["a"].error_code == 'flaky'"""
    task_id = await harness.create(
        node("a", "failing", inline=BROKEN, routing={"on_failure": ["b"]}),
        node("b", inline={"batches": 3}),
        call("sums", "metrics.aggregate", "b", node_id="b"),
        node("after", "quick", "sums", when=f"{failed} && nodes.b.stats.n == 3"),
        node("never", "quick", "after", when="nodes.after.error_code != ''"),
    )
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert await skip_reasons(harness, task_id) == {"never": "condition"}


async def test_error_fails_the_node_and_shows_the_expression_and_its_values(harness: Harness) -> None:
    await servers(harness)
    token = "sk-aB3dE5gH7jK9mN1pQ3rS"
    task_id = await harness.create(
        call("set", "vars.set", kv={"token": token, "n": 3}, block_sensitive=False),
        node("b", "quick", "set", when="vars.token > 1 || vars.n > 5"),
    )
    with pytest.raises(WorkflowFailureError):
        await harness.result(task_id)
    entry = await harness.node(task_id, "b")
    assert (entry["status"], entry["attempt_epoch"]) == ("failed", 0)
    assert entry["last_error"] == (
        "bad_condition: No matching overloads found : _>_(string, int64), in the condition "
        "vars.token > 1 || vars.n > 5; it reads vars.token = (hidden), vars.n = 3"
    )
    assert token not in str((await harness.document(task_id))["reason"])


async def test_remediator_handles_an_error_of_an_edge(harness: Harness) -> None:
    await servers(harness)
    task_id = await harness.create(
        node("a"),
        node("b", "quick", "a", routing={"on_failure": ["remedy"]}),
        node("remedy", inline={}),
        edges_ex=[edge("a", "b", "vars.missing > 1")],
    )
    result = await harness.result(task_id)
    assert (result.status, result.handled_failures) == (TaskStatus.FINISHED, ["b"])
    error = (await harness.node(task_id, "b"))["last_error"]
    assert error.startswith("bad_condition: edge from 'a': Key not found in map: \"missing\"")


async def test_results_of_a_group_apply_once_after_its_last_part(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "_PART_BYTES", 10)
    await servers(harness)
    task_id = await harness.create(
        node("p"),
        node("q", "quick", "p", allow_failure=True),
        node("n", "quick", "p", "q", allow_failure=True),
        edges_ex=[edge("p", "q", "vars.x > 1"), edge("p", "n", "vars.y > 1")],
    )
    assert (await harness.result(task_id)).handled_failures == ["q", "n"]
    found = await histories(harness, task_id)
    assert evaluations(found) == 2
    await replay(found)


@pytest.mark.nightly
async def test_thousands_of_conditions_become_due_together(harness: Harness) -> None:
    await servers(harness)
    texts = [f"nodes.r.status != '' || vars.x == {i}" for i in range(11_999)]
    task_id = await harness.create(
        call("r", "noop"),
        *(node(f"n{i}", "absent", "r", when=text) for i, text in enumerate(texts)),
        node("last", "quick", "r", when="size(vars) == 0"),
    )
    await eventually(lambda: harness.rows(task_id, "last"))
    await (await harness.handle(task_id)).terminate()
    assert evaluations(await histories(harness, task_id)) == 1


async def test_conditions_read_part_of_large_variables(harness: Harness) -> None:
    async def fill(task_id: str) -> None:
        texts = {f"text{i}": "x" * 60_000 for i in range(15)}
        chosen = [{"n": n} for n in range(200)]
        await CoordinatorAdapters(db=harness.db).vars_set(task_id, kv={**texts, "chosen": chosen})

    await harness.engine(fill=fill)
    await harness.worker()
    task_id = await harness.create(
        call("texts", "fill"),
        node("few", "quick", "texts", when="vars.chosen.exists(each, each.n == 150)"),
        node("whole", "quick", "texts", when="size(vars) == 16 && vars.text3.startsWith('xx')"),
        node("none", "quick", "texts", when="has(vars.text15)"),
    )
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert await skip_reasons(harness, task_id) == {"none": "condition"}


async def test_condition_beyond_its_limits_fails_its_node_only(harness: Harness) -> None:
    """The test of the evaluation covers its limit in time, too, which takes three seconds of a processor."""
    await servers(harness)
    greedy = "params.l.map(a, params.l.map(b, params.s + params.s)).size() == 0"
    nodes = [
        node("greedy", when=greedy, allow_failure=True),
        node("quick", when="params.l.exists(a, a == 5)"),
    ]
    task_id = await harness.coordinator.create_task(
        params={"l": list(range(95)), "s": "x" * 600_000}, graph={"nodes": nodes}
    )
    assert (await harness.result(task_id)).handled_failures == ["greedy"]
    last_error = (await harness.node(task_id, "greedy"))["last_error"]
    # On a busy machine, the limit in time may come first.
    assert any(text in last_error for text in ("the evaluation needs too much memory", "takes more than 2 s"))
    assert (await harness.node(task_id, "quick"))["status"] == "finished"


async def test_invalid_condition_of_a_plain_client_fails_the_task(harness: Harness) -> None:
    await servers(harness)
    graph = {"nodes": [node("a"), node("b", "quick", "a", when="nodes.c.status == 'x'")]}
    client = await harness.client()
    handle = await client.start_workflow("Task", {"graph": graph}, id=harness.queue, task_queue=harness.queue)
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    assert "node 'b': when: 'c' is not a node\n  | nodes.c.status == 'x'\n  | ^" in str(caught.value.cause)


async def test_evaluation_is_retried_while_mongodb_does_not_respond(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    read = TaskStore.condition_values

    async def fails_twice(self: TaskStore, task_id: str, **given: bool) -> StoredValues | None:
        calls.append(task_id)
        if len(calls) < 3:
            raise StoreUnavailable("no server is available")
        found: StoredValues | None = await read(self, task_id, **given)
        return found

    monkeypatch.setattr(TaskStore, "condition_values", fails_twice)
    await servers(harness)
    task_id = await harness.create(node("a"), node("b", "quick", "a", when="true"))
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert len(calls) == 3


async def test_cancel_stops_a_task_whose_conditions_are_being_evaluated(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def blocks(self: TaskStore, task_id: str, **given: bool) -> StoredValues | None:
        begun.set()
        await asyncio.Event().wait()
        return None

    monkeypatch.setattr(TaskStore, "condition_values", blocks)
    await servers(harness)
    task_id = await harness.create(node("a"), node("b", "quick", "a", when="true"))
    await begun.wait()
    await harness.coordinator.cancel_task(task_id)
    await harness.until_status(task_id, "cancelled")
    assert await skip_reasons(harness, task_id) == {"b": "task_cancelled"}
    await replay(await histories(harness, task_id))


async def test_reset_keeps_results_before_it_and_evaluates_the_others_again(harness: Harness) -> None:
    await servers(harness)
    task_id = await harness.create(
        call("set", "vars.set", kv={"first": 1}),
        node("a", "quick", "set"),
        node("b", "quick", "a", when="vars.first == 1"),
        node("c", "quick", "b"),
        node("d", "quick", "c", when="vars.first == 1"),
    )
    await harness.result(task_id)
    await CoordinatorAdapters(db=harness.db).vars_set(task_id, first=2)
    await reset(harness, task_id, "c")
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    epochs = {each: (await harness.node(task_id, each))["attempt_epoch"] for each in ("a", "b", "c")}
    assert epochs == {"a": 1, "b": 1, "c": 2}
    status = await (await harness.handle(task_id)).query("status")
    assert [each["status"] for each in status["nodes"]] == [*["finished"] * 4, "skipped"]


async def test_results_pass_to_the_next_run(short_runs: Harness) -> None:
    await servers(short_runs)
    chain = [
        node(f"n{i}", "quick", f"n{i - 1}", when=f"nodes.n{i - 1}.status == 'finished'") for i in range(1, 25)
    ]
    task_id = await short_runs.create(
        node("n0"),
        *chain,
        node("last", "quick", "n0", "n24", fan_in="count:2"),
        node("unlike", "quick", "n0", "n24", fan_in="any"),
        edges_ex=[
            edge("n0", "last", "params.size() == 0"),
            *(edge(p, "unlike", "false") for p in ("n0", "n24")),
        ],
    )
    assert (await short_runs.result(task_id)).status is TaskStatus.FINISHED
    assert len(await run_ids(short_runs, task_id)) > 1
    assert await skip_reasons(short_runs, task_id) == {"unlike": "condition"}
    found = await histories(short_runs, task_id)
    assert evaluations(found) == 25
    await replay(found)


async def test_node_that_waits_for_its_condition_is_queued(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = asyncio.Event()
    read = TaskStore.condition_values

    async def waits(self: TaskStore, task_id: str, **given: bool) -> StoredValues | None:
        await released.wait()
        found: StoredValues | None = await read(self, task_id, **given)
        return found

    monkeypatch.setattr(TaskStore, "condition_values", waits)
    await servers(harness)
    task_id = await harness.create(node("a"), node("b", when="true"), node("c", "quick", "b"))

    async def first_ended() -> bool:
        return bool((await harness.node(task_id, "a"))["status"] == "finished")

    await eventually(first_ended)
    assert (await harness.node(task_id, "b"))["status"] == "queued"
    released.set()
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
