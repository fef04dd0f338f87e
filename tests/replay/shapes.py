"""The tasks whose histories are recorded: one shape of graph each."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

from temporalio.client import WorkflowFailureError

from flowkit import limits
from flowkit.errors import ActionRejected
from flowkit.models import SilenceReport, SilentAttempt, temporal_names
from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.integration.harness import Harness

SOON = {"retry_policy": {"max": 2, "backoff_sec": 0.1}}
BROKEN: dict[str, Any] = {"inline": {"failures": 9, "permanent": True}}
LONG: dict[str, Any] = {"inline": {"pause": 60}}
LATER: dict[str, Any] = {"inline": {"failures": 9}, "retry_policy": {"max": 9, "backoff_sec": 60}}
RUNS_AFTER = 80
"""Number of events after which the recording server suggests continue-as-new; only one shape has more."""


def call(node_id: str, *parents: str, io: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return a node that calls a coordinator function; without `io` it calls `noop`."""
    given = {"io": io} if io else {}
    return {"node_id": node_id, "type": "coordinator_fn", "depends_on": list(parents), **given, **more}


def incr(key: str) -> dict[str, Any]:
    """Adds 1 to a variable."""
    return {"fn": "vars.incr", "fn_args": {"key": key}}


PULL = {"input_adapter": "pull.from_artifacts"}


def streams(node_id: str, parent: str) -> dict[str, Any]:
    """Return a node that starts on the first batch of its parent."""
    io = {"input_inline": PULL, "start_when": "first_batch"}
    return {**node(node_id, "quick", parent), "io": io}


GRAPHS: dict[str, dict[str, Any]] = {
    "backfill": {"nodes": [node("a")]},
    "chain": {"nodes": [node("a"), node("b", "quick", "a"), node("c", "quick", "b")]},
    "diamond": {
        "name": "diamond",
        "nodes": [
            node("top"),
            node("left", "quick", "top"),
            node("right", "paced", "top", inline={"pause": 0.3}),
            node("third", "quick", "top"),
            node("any", "quick", "left", "right", fan_in="any"),
            node("two", "quick", "left", "right", "third", fan_in="count:2"),
            node("bottom", "quick", "any", "two", "right"),
        ],
    },
    "pinned": {"version_policy": "pin", "nodes": [node("a"), node("b", "quick", "a")]},
    "retry": {"nodes": [node("a", "failing", inline={"failures": 2}, **SOON), node("b", "quick", "a")]},
    "hard_failure": {
        "nodes": [
            node("first"),
            node("a", "failing", "first", **BROKEN),
            node("below", "quick", "a"),
            node("aside", "paced", "first", **LONG),
        ]
    },
    "continue_after_failure": {
        "on_node_failure": "continue",
        "nodes": [
            node("a", "failing", **BROKEN),
            node("below", "quick", "a"),
            node("aside", "paced", inline={"pause": 0.5}),
            node("later", "quick", "aside"),
        ],
    },
    "skip_cascade": {
        "nodes": [
            node("a", "failing", allow_failure=True, **BROKEN),
            node("b", "quick", "a"),
            node("c", "quick", "b"),
            node("d", "quick", "c", "b", fan_in="any"),
            node("other", "paced", inline={"pause": 0.5}),
        ]
    },
    "routing": {
        "nodes": [
            node("u", "failing", **BROKEN, routing={"on_success": ["succ"], "on_failure": ["remed"]}),
            node("succ"),
            node("remed", "quick", inline={}),
            node("behind", "quick", "succ", "remed", routing={"on_success": ["never"]}),
            node("never"),
            node("last", "quick", "behind"),
        ]
    },
    "conditions": {
        "nodes": [
            call("set", io={"fn": "vars.set", "fn_args": {"sla": "gold"}}),
            node("gold", "quick", "set", when="vars.sla == 'gold'"),
            node("silver", "quick", "set", when="vars.sla == 'silver'"),
            node("wrong", "quick", "set", when="vars.missing > 1", allow_failure=True),
            node("join", "quick", "gold", "silver", "set"),
            node("first", "quick", "gold", "set", fan_in="any"),
        ],
        "edges_ex": [
            {"from": "gold", "to": "join", "when": "nodes.gold.status == 'finished'"},
            {"from": "set", "to": "join", "when": "has(params.more)"},
            {"from": "set", "to": "first", "when": "false"},
        ],
    },
    "values": {
        "nodes": [
            call("set", io={"fn": "vars.set", "fn_args": {"failures": {"$cel": "1"}, "n": 2}}),
            node(
                "a",
                "failing",
                "set",
                inline={"failures": {"$cel": "vars.failures"}, "n": {"$cel": "vars.n"}},
                **SOON,
            ),
            node("wrong", "quick", "set", inline={"n": {"$cel": "vars.missing"}}, allow_failure=True),
            node("last", "quick", "a", "wrong", fan_in="all_done", inline={"n": {"$cel": "nodes.a.status"}}),
        ]
    },
    "redrawn": {
        "nodes": [
            node("a", "failing", allow_failure=True, **BROKEN),
            *(node(f"below{i}", "quick", "a") for i in range(40)),
            node("other", "paced", inline={"pause": 1.5}),
            node("another", "paced", "other", inline={"pause": 1.5}),
            node("last", "quick", "another"),
        ]
    },
    "coordinator_function": {"nodes": [call("f"), node("a", "quick", "f"), call("g", "a")]},
    "functions": {
        "nodes": [
            call("set", io={"fn": "vars.set", "fn_args": {"text": "x"}}),
            call("refused", "set", io=incr("text"), allow_failure=True),
            *(call(f"beside{i}", "set", io=incr("n")) for i in range(3)),
            call("last", "beside0", "beside1", "beside2", io=incr("n")),
        ]
    },
    "pull": {"nodes": [node("up"), node("down", "quick", "up", inline={"input_adapter": "pull.from_artifacts"})]},
    "streaming": {
        "on_node_failure": "continue",
        "nodes": [
            node("a", "paced", inline={"batches": 3, "pause": 0.3}),
            streams("b", "a"),
            node("c", "quick", inline=PULL),
            node("torn", "relay", inline={"batches": 9}, retry_policy={"max": 0}),
            streams("drains", "torn"),
            node("below", "quick", "drains"),
        ],
        "edges_ex": [{"from": "b", "to": "c", "mode": "async"}],
    },
    "yielding": {
        "nodes": [
            node("first", "solo"),
            node("later", "paced", inline={"pause": 2}),
            node("second", "solo", "later"),
            node("z", "solo", "first", "second", fan_in="any", inline={"input_adapter": "pull.from_artifacts"}),
        ],
    },
    "continue_as_new": {
        "nodes": [node("n0"), *(node(f"n{i}", "quick", f"n{i - 1}") for i in range(1, 18))],
    },
    "deadlines": {
        "deadline_sec": 600,
        "nodes": [
            node("slow", "paced", deadline_sec=1, allow_failure=True, **LONG),
            node("again", "failing", deadline_sec=2, allow_failure=True, **LATER),
            node("aside", "paced", deadline_sec=60, inline={"pause": 3}),
            node("last", "quick", "aside", deadline_sec=60),
        ],
    },
    "overdue": {"deadline_sec": 1.5, "nodes": [node("a"), node("b", "paced", "a", **LONG), node("c", "quick", "b")]},
    "silence": {"nodes": [node("a", "paced", inline={"pause": 4}), node("b", "quick", "a")]},
    "cancel": {"nodes": [node("a"), node("b", "paced", "a", **LONG), node("c", "quick", "b")]},
    "pause": {
        "deadline_sec": 600,
        "nodes": [node("a", "paced", deadline_sec=60, inline={"pause": 3}), node("b", "quick", "a")],
    },
    "decisions": {
        "on_node_failure": "hold",
        "nodes": [
            node("a", "failing", inline={"failures": 9, "permanent": True}),
            node("below", "quick", "a"),
            node("ok", "approval", inline={"text": "sure?"}),
            node("wait", "delay", "ok", inline={"sec": 0.5}),
            node("other", "failing", "wait", inline={"failures": 9, "permanent": True}, prerequisites=["data"]),
            node("runs", "paced", "below", inline={"pause": 60}),
            node("last", "quick", "runs", "other"),
        ],
    },
    "changed_graph": {"nodes": [node("a", "paced", inline={"pause": 3}), node("b", "quick", "a", timeout_sec=5)]},
    "shards": {
        "nodes": [
            node("a", inline={"batches": 12}),
            node("w", "failing", "a", inline={**PULL, "failures": 2}, parallel=3, **SOON),
            node("b", "quick", "w"),
            node("m", "quick", "b", map={"over": "[1, 2, 3]", "batch_size": 2, "parallel": 2}),
        ],
    },
    "rerun": {"nodes": [node("a"), node("b", "failing", "a", **BROKEN), node("c", "quick", "b")]},
    "native_loss": {"nodes": [node("a", "stubborn", inline={"pause": 60}), node("b", "quick", "a")]},
    "limits": {
        "nodes": [
            node("a", "paced", inline={"pause": 0.5}),
            node("b", "paced", inline={"pause": 0.1}),
            call("last", "a", "b"),
        ]
    },
    "inline": {
        "nodes": [
            node("n0", "inline", inline={"pause": 0.4}),
            *(node(f"n{i}", "inline", f"n{i - 1}", inline={"pause": 0.4}) for i in range(1, 5)),
            node("again", "inline", "n4", inline={"failures": 1}, **SOON),
            *(node(f"wide{i}", "inline", "again") for i in range(3)),
            call("f", "wide0", "wide1", "wide2"),
            node("beside", "inline", "f"),
            node("ordinary", "quick", "f"),
            node("slow", "inline", "beside", "ordinary", inline={"pause": 2.5}),
            node("last", "inline", "slow"),
        ]
    },
    "inline_failure": {
        "nodes": [
            node("broken", "inline", **BROKEN),
            node("beside", "inline", inline={"pause": 1}),
            node("below", "inline", "beside"),
        ]
    },
    "refused": {"nodes": [node("a", "quick", "ghost")]},
    "stored_graph": {"nodes": [node("a"), call("count", "a", io=incr("n")), node("b", "quick", "count")]},
}  # fmt: skip


async def ran(harness: Harness, name: str) -> None:
    """Start the task and wait until it has ended, with any outcome."""
    await harness.coordinator.create_task(params={"shape": name}, graph=GRAPHS[name], task_id=name)
    await ended(harness, name)


async def ended(harness: Harness, name: str) -> None:
    """Wait for the task's end."""
    with contextlib.suppress(WorkflowFailureError):
        await harness.result(name)


async def cancelled(harness: Harness, name: str) -> None:
    """Cancel the task with a reason while a node runs."""
    await harness.coordinator.create_task(params={}, graph=GRAPHS[name], task_id=name)
    await harness.until_node(name, "b", "running")
    await harness.coordinator.cancel_task(name, reason="no longer wanted")
    await ended(harness, name)


async def paused(harness: Harness, name: str) -> None:
    """Pause the task and interrupt its running node, which runs again after the pause."""
    await harness.coordinator.create_task(params={}, graph=GRAPHS[name], task_id=name)
    await harness.until_node(name, "a", "running")
    await harness.coordinator.pause(name, interrupt=True, reason="maintenance", by="ada")
    await harness.until_node(name, "a", "deferred")
    await harness.coordinator.resume(name, by="ada")
    await ended(harness, name)
    assert (await harness.node(name, "a"))["attempt_epoch"] == 2


async def decided(harness: Harness, name: str) -> None:
    """Decide about two held nodes and an approval, satisfy a prerequisite, and start a finished node again."""
    operator = harness.coordinator
    await operator.create_task(params={}, graph=GRAPHS[name], task_id=name)
    await harness.until_node(name, "a", "deferred")
    await operator.retry_node(name, "a", input_inline={"failures": 0}, by="ada")
    await harness.until_node(name, "runs", "running")
    await operator.retry_node(name, "below", interrupt=True)
    await harness.until_node(name, "runs", "running", epoch=3)
    await operator.skip_node(name, "runs", interrupt=True)
    await operator.decide(name, "ok", "approve", comment="yes")
    await operator.satisfy(name, "data")
    await harness.until_node(name, "other", "deferred")
    await operator.complete_node(name, "other", metrics={"n": 1})
    await ended(harness, name)
    states = {each["node_id"]: each["status"] for each in (await harness.document(name))["graph"]["nodes"]}
    assert states == dict.fromkeys(states, "finished") | {"runs": "skipped"}


async def changed(harness: Harness, name: str) -> None:
    """Add two nodes, and change one that has not started; another change is not valid."""
    operator = harness.coordinator
    await operator.create_task(params={}, graph=GRAPHS[name], task_id=name)
    await harness.until_node(name, "a", "running")
    with contextlib.suppress(ActionRejected):
        await operator.change_graph(name, nodes=[node("x", "quick", "nobody")])
    puller = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["a"]}}
    more = [node("c", "quick", "a", inline=puller), node("d", "quick", "b", "c", when="false")]
    await operator.change_graph(name, nodes=more, changes={"b": {"io": {"input_inline": {"batches": 2}}}})
    await ended(harness, name)
    assert (await harness.statuses(name)) == {
        "a": "finished",
        "b": "finished",
        "c": "finished",
        "d": "skipped",
    }


async def rerun(harness: Harness, name: str) -> None:
    """Run a failed task again, with another input of the node that failed."""
    await ran(harness, name)
    await harness.coordinator.rerun(name, inputs={"b": {"failures": 0}}, by="ada")
    await ended(harness, name)
    assert (await harness.document(name))["status"] == "finished"


async def lost(harness: Harness, name: str) -> None:
    """Kill the worker of a running node; another worker takes over and finishes the node."""
    from tests.integration.handlers import Quick

    process = harness.worker_process("Stubborn")
    await harness.coordinator.create_task(params={}, graph=GRAPHS[name], task_id=name)
    await harness.until_node(name, "a", "running")
    process.kill()
    await harness.worker({"stubborn": Quick()})
    await ended(harness, name)


async def yielded(harness: Harness, name: str) -> None:
    """A pulling node holds the only slot of its role and yields it to its source."""
    from tests.integration.handlers import Quick

    await harness.worker({"solo": Quick()}, concurrency=1)
    await ran(harness, name)
    assert (await harness.node(name, "z"))["attempt_epoch"] > 1


async def streamed(harness: Harness, name: str) -> None:
    """One parent finishes, and another one fails after its child has started."""
    from tests.integration.handlers import Relay

    await harness.worker({"relay": Relay()})
    await ran(harness, name)
    states = [(await harness.node(name, each))["status"] for each in ("c", "drains", "below")]
    assert states == ["finished", "failed", "skipped"]


async def silent(harness: Harness, name: str) -> None:
    """Report a running attempt as silent. The next sweep finds that it is not."""
    await harness.coordinator.create_task(params={}, graph=GRAPHS[name], task_id=name)
    await harness.until_node(name, "a", "running")
    handle = await harness.handle(name)
    run_id = (await handle.describe()).run_id or ""
    report = SilenceReport(run_id=run_id, silent=[SilentAttempt(node_id="a", epoch=1)])
    await handle.execute_update(temporal_names.REPORT_SILENCE, report)

    async def was_deferred() -> bool:
        changes = (await harness.document(name))["status_history"]
        return [change["to"] for change in changes][-2:] == ["deferred", "running"]

    await eventually(was_deferred)
    await ended(harness, name)


async def limited(harness: Harness, name: str) -> None:
    """Run the task on a queue whose engine has a limit, so that a node waits for its slot."""
    queue, harness.queue = harness.queue, f"{harness.queue}-limited"
    harness.settings["max_type_concurrency"] = {"paced": 1}
    engine = await harness.engine()
    await harness.worker()
    await engine.create_task(params={"priority": 1}, graph=GRAPHS[name], task_id=name)
    await ended(harness, name)
    del harness.settings["max_type_concurrency"]
    harness.queue = queue


async def inlined(harness: Harness, name: str) -> None:
    """Run the task inside an engine. One of its nodes falls back."""
    await hosted(harness, name)
    epochs = [(await harness.node(name, each))["attempt_epoch"] for each in ("n4", "beside", "slow")]
    assert epochs == [1, 1, 2]


async def inline_failed(harness: Harness, name: str) -> None:
    """Run the task inside an engine. A node fails and cancels the attempt beside it."""
    await hosted(harness, name)
    states = [(await harness.node(name, each))["status"] for each in ("broken", "beside", "below")]
    assert states == ["failed", "cancelled", "skipped"]


async def hosted(harness: Harness, name: str) -> None:
    """Run the task on a queue whose engine hosts an inline role."""
    from tests.integration.handlers import InlineQuick

    queue, harness.queue = harness.queue, f"{harness.queue}-inline"
    engine = await harness.engine(handlers={"inline": InlineQuick()})
    await harness.worker()
    await engine.create_task(params={}, graph=GRAPHS[name], task_id=name)
    await ended(harness, name)
    harness.queue = queue


async def refused(harness: Harness, name: str) -> None:
    """Start an invalid graph with a Temporal client, because `create_task` would reject it."""
    client = await harness.client()
    task = await client.start_workflow("Task", {"graph": GRAPHS[name]}, id=name, task_queue=harness.queue)
    with contextlib.suppress(WorkflowFailureError):
        await task.result()


async def stored(harness: Harness, name: str) -> None:
    """Store the graph in MongoDB, as `create_task` does with large ones."""
    with mock.patch.object(limits, "TASK_INPUT_BYTES", 0):
        await ran(harness, name)


async def backfilled(harness: Harness, name: str) -> None:
    """Run a backfill of two nominal times, one of which fails and starts again."""
    schedules = await harness.coordinator.schedules()
    failing = {"nodes": [node("a", "failing", inline={"failures": 9, "permanent": True})]}
    await schedules.create(name, graph=failing, cron="0 2 * * *")
    await schedules.pause(name)
    backfills = await harness.coordinator.backfills()
    await backfills.create(name, start="2026-11-01", end="2026-11-03", backfill_id=name)
    await (await harness.client()).get_workflow_handle(WORKFLOW_IDS[name]).result()
    await schedules.update(name, graph=GRAPHS[name])
    await backfills.retry_failed(name)
    await (await harness.client()).get_workflow_handle(WORKFLOW_IDS[name]).result()
    await schedules.delete(name)


WORKFLOW_IDS = {"backfill": temporal_names.backfill_workflow_id("backfill")}
"""The ids of the workflows whose histories are recorded, of those shapes that are no task."""

WAYS: dict[str, Callable[[Harness, str], Awaitable[None]]] = {
    **dict.fromkeys(GRAPHS, ran),
    "backfill": backfilled,
    "cancel": cancelled,
    "inline": inlined,
    "inline_failure": inline_failed,
    "limits": limited,
    "native_loss": lost,
    "changed_graph": changed,
    "decisions": decided,
    "pause": paused,
    "rerun": rerun,
    "refused": refused,
    "streaming": streamed,
    "silence": silent,
    "stored_graph": stored,
    "yielding": yielded,
}
