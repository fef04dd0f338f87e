"""Tasks with a clock that skips what they wait for, and tests that steer them."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.handler_runs import call, node

from flowkit.actions.preconditions import digest
from flowkit.errors import ActionRejected, ConfigError
from flowkit.testing import TaskStuck, simulate, stub
from flowkit.testing.simulation import server
from flowkit.testing.simulation.clock import VirtualClock
from flowkit.testing.simulation.messages import fill
from flowkit.worker import BatchResult, RoleHandler

if TYPE_CHECKING:
    from flowkit.testing import GraphRun, SimulatedTask
    from flowkit.worker import Batch, RunContext

DAY = 86_400.0
ONCE = {"retry_policy": {"max": 0}}


class Sleeper(RoleHandler):
    """Waits on the clock for the seconds in its input."""

    role = "sleeper"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        await ctx.clock.sleep_ms(batch.payload["input_inline"]["sec"] * 1000)
        return BatchResult(success=True)


class Hanging(RoleHandler):
    """Waits for something else than the clock, until it is cancelled."""

    role = "hanging"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        await ctx.cancellable(asyncio.Event().wait())
        raise AssertionError("no code sets that event")


def sleeper(node_id: str, *parents: str, sec: float, **fields: Any) -> dict[str, Any]:
    """Return a node that waits."""
    return node(node_id, "sleeper", *parents, inline={"sec": sec}, **fields)


def delay(node_id: str, *parents: str, sec: float) -> dict[str, Any]:
    """Return a delay."""
    return node(node_id, "delay", *parents, inline={"sec": sec})


def statuses(run: GraphRun) -> dict[str, str]:
    """Return the status of each node."""
    return {node_id: each.status for node_id, each in run.nodes.items()}


async def test_a_month_of_waiting_takes_no_time() -> None:
    retry = {"max": 3, "backoff_sec": 300, "backoff_coefficient": 1, "jitter": 0}
    nodes = [
        delay("month", sec=30 * DAY),
        node("flaky", "flaky", "month", retry_policy=retry, deadline_sec=DAY),
    ]
    run = await simulate({"nodes": nodes}, stub("flaky", fails=ConnectionError("x"), times=3))
    run.assert_finished()
    run.node("flaky").assert_attempts(4)
    assert run.seconds == 30 * DAY + 900


async def test_a_deadline_ends_what_waits_for_a_retry() -> None:
    late = node("late", "late", retry_policy={"max": 9, "backoff_sec": 3600}, deadline_sec=600)
    run = await simulate({"nodes": [late]}, stub("late", fails=ConnectionError("x")))
    run.node("late").assert_failed(reason="deadline_exceeded")
    assert run.seconds == 600


async def test_a_time_limit_ends_an_attempt_that_waits_on_the_clock() -> None:
    run = await simulate({"nodes": [sleeper("a", sec=DAY, timeout_sec=60, **ONCE)]}, Sleeper())
    run.node("a").assert_failed(reason="timeout", error="took longer than 60 s (timeout_sec)")
    assert run.seconds == 60


async def test_a_time_limit_ends_an_attempt_that_hangs() -> None:
    hanging = node("a", "hanging", timeout_sec=3600, **ONCE)
    run = await simulate({"nodes": [hanging]}, Hanging(), hangs_after_sec=0.05)
    run.node("a").assert_failed(reason="timeout")


async def test_what_does_not_run_because_the_machine_is_busy_does_not_hang() -> None:
    clock, is_waiting = VirtualClock(0.0), asyncio.Event()

    async def works() -> None:
        with clock.party("works"):
            is_waiting.set()
            await yields(1)
            threading.Event().wait(0.3)  # No thread of the process runs.
            await yields(100)

    working = asyncio.create_task(works())
    await is_waiting.wait()
    assert await clock.settle(0.2)
    assert working.done()


async def yields(turns: int) -> None:
    """Let others run so many times."""
    for _ in range(turns):
        turn = asyncio.Event()
        asyncio.get_running_loop().call_soon(turn.set)
        await turn.wait()


async def test_time_stands_still_while_a_handler_works() -> None:
    """The work of one node takes real time, and the delay of the other does not pass meanwhile."""
    seen: list[datetime] = []

    class Works(RoleHandler):
        role = "works"

        def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            seen.append(ctx.clock.now_dt())
            threading_wait()
            seen.append(ctx.clock.now_dt())
            return BatchResult(success=True)

    run = await simulate({"nodes": [delay("d", sec=60), node("w", "works")]}, Works())
    assert seen[0] == seen[1]
    run.assert_order("w", "d")


def threading_wait() -> None:
    """Block a thread for a moment."""
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        pass


async def test_nodes_end_in_the_order_of_their_times() -> None:
    nodes = [sleeper("slow", sec=20), sleeper("quick", sec=10), sleeper("next", "quick", sec=5)]
    run = await simulate({"nodes": nodes}, Sleeper(), start=datetime(2030, 1, 1, tzinfo=UTC))
    assert run.events == [
        ("slow", "begins"),
        ("quick", "begins"),
        ("quick", "ends"),
        ("next", "begins"),
        ("next", "ends"),
        ("slow", "ends"),
    ]
    assert run.document["started_at"].startswith("2030-01-01")


async def test_a_node_that_streams_does_not_hold_up_the_clock() -> None:
    class Source(RoleHandler):
        role = "source"

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            await ctx.artifacts.upsert_partial("a", {"n": 1})
            await ctx.clock.sleep_ms(3_600_000)
            return BatchResult(success=True, metrics={"n": 2})

    pull = {"input_inline": {"input_adapter": "pull.from_artifacts"}, "start_when": "first_batch"}
    nodes = [node("s", "source"), {**node("p", "sink", "s"), "io": pull}]
    run = await simulate({"nodes": nodes}, Source(), sink := stub("sink", {}))
    run.assert_finished()
    assert (run.seconds, sink.calls) == (3600, [{"n": 1}, {"n": 2}])


# --- decisions ---------------------------------------------------------------------------------------------------


ASK = {"nodes": [node("ok", "approval"), node("a", "a", "ok")]}


def test_who_polls_looks_again_soon_after_a_change_and_then_lets_time_pass() -> None:
    clock, found = VirtualClock(0.0), list[tuple[bool, bool]]()

    def poll() -> None:
        with clock.polling() as limit:
            found.append((limit is not None, clock.working == []))

    with clock.party("reader"):
        poll()
        poll()
        clock.note_change()
        poll()
        poll()
    assert found == [(True, False), (False, True), (True, False), (False, True)]


@pytest.mark.parametrize(("decision", "ends"), [("approve", "finished"), ("reject", "failed")])
async def test_the_test_decides_approvals(decision: str, ends: str) -> None:
    run = await simulate(ASK, stub("a"), decide={"ok": decision})
    assert (run.nodes["ok"].status, run.nodes["a"].status == "finished") == (ends, ends == "finished")


async def test_a_function_decides_approvals() -> None:
    asked: list[str] = []

    async def approve(node_id: str) -> str:
        asked.append(node_id)
        return "approve"

    run = await simulate(ASK, stub("a"), decide=approve)
    assert (run.status, asked) == ("finished", ["ok"])


async def test_an_approval_without_decision_waits_for_its_deadline() -> None:
    ask = node("ok", "approval", inline={"default": "approve"}, deadline_sec=7 * DAY)
    run = await simulate({"nodes": [ask]})
    assert (run.status, run.seconds) == ("finished", 7 * DAY)


async def test_a_task_that_waits_forever_says_for_what() -> None:
    with pytest.raises(TaskStuck, match=r"node 'ok' waits for a decision.*decide=\{\.\.\.\}"):
        await simulate(ASK, stub("a"))


async def test_a_task_whose_attempt_hangs_says_which() -> None:
    with pytest.raises(TaskStuck, match=r"a\.1 neither ended nor waited on the clock.*timeout_sec"):
        await simulate(
            {"nodes": [node("a", "hanging"), delay("b", sec=DAY)]}, Hanging(), hangs_after_sec=0.05
        )


async def test_attempts_that_wait_for_each_other_forever_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_IDLE_SEC", 0.3)
    endless = {"input_adapter": "pull.from_artifacts", "input_args": {"eof_on_task_done": False}}
    with pytest.raises(TaskStuck, match="node 'b' waits"):
        await simulate({"nodes": [node("a", "a"), node("b", "b", "a", inline=endless)]}, stub("a"), stub("b"))


async def test_a_handler_may_block_the_event_loop() -> None:
    class Blocking(RoleHandler):
        role = "blocking"

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            threading_wait()
            return BatchResult(success=True)

    run = await simulate({"nodes": [node("a", "blocking")]}, Blocking(), hangs_after_sec=0.01)
    run.assert_finished()


async def test_a_decision_for_a_node_that_is_no_approval_is_an_error() -> None:
    with pytest.raises(ConfigError, match="decide has 'okay', which is no approval of the graph; it has ok"):
        await simulate(ASK, stub("a"), decide={"okay": "approve"})


async def test_a_bad_decision_is_an_error_of_the_test() -> None:
    with pytest.raises(ActionRejected, match="perhaps"):
        await simulate(ASK, stub("a"), decide={"ok": "perhaps"})


async def test_prerequisites_are_satisfied_or_not() -> None:
    graph = {"nodes": [node("a", "a", prerequisites=["paid"])]}
    (await simulate(graph, stub("a"), satisfied=["paid"])).assert_finished()
    with pytest.raises(TaskStuck, match="paid"):
        await simulate(graph, stub("a"))


async def test_a_failure_is_held_until_its_time_has_passed() -> None:
    held = node("a", "a", hold_on_failure=True, hold_sec=600)
    run = await simulate({"nodes": [held]}, stub("a", fails=ValueError("bad")))
    run.node("a").assert_failed(reason="bad_input", error="bad")
    assert run.seconds == 600


# --- scripts -----------------------------------------------------------------------------------------------------


async def test_a_script_retries_a_held_node() -> None:
    async def script(task: SimulatedTask) -> None:
        await task.until("a", "deferred")
        await task.advance(60)
        await task.retry_node("a")

    held = node("a", "a", hold_on_failure=True, hold_sec=600)
    run = await simulate({"nodes": [held]}, stub("a", fails=ValueError("bad"), times=1), script=script)
    assert (run.status, run.seconds) == ("finished", 60)


async def test_an_operator_who_has_seen_a_held_node_does_not_retry_it_once_the_hold_is_over() -> None:
    """No action was applied meanwhile, so the revision is the same."""
    seen = {"if_revision": 0, "if_state": digest(1, [("a", "held", 1, 0)])}

    async def script(task: SimulatedTask) -> None:
        await task.until("a", "deferred")
        with pytest.raises(ActionRejected, match="if_revision is 1"):
            await task.skip_node("a", **seen | {"if_revision": 1})
        await task.advance(61)
        with pytest.raises(ActionRejected, match=r"now a is failed \(attempt 1\); look at what"):
            await task.retry_node("a", **seen)
        await task.retry_node("a", if_revision=0, if_state=digest(1, [("a", "failed", 1, 0)]))

    nodes = [node("a", "a", hold_on_failure=True, hold_sec=60), sleeper("b", sec=600)]
    roles = stub("a", fails=ValueError("bad"), times=1), Sleeper()
    run = await simulate({"nodes": nodes, "on_node_failure": "finish_running"}, *roles, script=script)
    assert (run.status, run.seconds) == ("finished", 600)


async def test_a_script_skips_completes_and_fails_nodes() -> None:
    async def script(task: SimulatedTask) -> None:
        await task.until("skipped", "deferred")
        await task.skip_node("skipped")
        await task.complete_node("completed", metrics={"n": 1})
        await task.fail_node("failed")

    policy = {"retry_policy": {"max": 1, "backoff_sec": 60}, "allow_failure": True}
    nodes = [node(each, "a", **policy) for each in ("skipped", "completed", "failed")]
    run = await simulate({"nodes": nodes}, stub("a", fails=ConnectionError("x")), script=script)
    assert statuses(run) == {"skipped": "skipped", "completed": "finished", "failed": "failed"}
    assert run.final("completed") == {"n": 1}


async def test_a_script_pauses_and_resumes() -> None:
    async def script(task: SimulatedTask) -> None:
        await task.pause("node:b")
        await task.until("a", "finished")
        await task.advance(3600)
        await task.resume()

    run = await simulate({"nodes": [node("a", "a"), node("b", "a", "a")]}, stub("a"), script=script)
    assert (run.status, run.seconds) == ("finished", 3600)


async def test_a_script_cancels_the_task_at_a_point() -> None:
    async def script(task: SimulatedTask) -> None:
        await task.until("b", "running")
        await task.cancel("no longer needed")

    nodes = [node("a", "a"), sleeper("b", "a", sec=DAY), node("c", "a", "b")]
    run = await simulate({"nodes": nodes}, stub("a"), Sleeper(), script=script)
    run.assert_cancelled()
    assert statuses(run) == {"a": "finished", "b": "cancelled", "c": "skipped"}
    assert (run.reason, run.seconds) == ("no longer needed", 30), "it has 30 seconds to stop"


async def test_a_script_extends_the_graph() -> None:
    async def script(task: SimulatedTask) -> None:
        await task.until("a", "running")
        await task.change_graph(nodes=[node("b", "a")], edges=[["a", "b"]])

    run = await simulate({"nodes": [sleeper("a", sec=60)]}, Sleeper(), stub("a"), script=script)
    assert statuses(run) == {"a": "finished", "b": "finished"}


async def test_the_error_of_a_script_ends_the_run() -> None:
    async def script(task: SimulatedTask) -> None:
        await task.until("ok", "deferred")
        raise LookupError("the script is wrong")

    with pytest.raises(LookupError, match="the script is wrong"):
        await simulate(ASK, stub("a"), script=script)


async def test_a_script_that_waits_for_what_never_happens_is_told_so() -> None:
    async def script(task: SimulatedTask) -> None:
        await task.until("a", "failed")

    with pytest.raises(TaskStuck, match="the task ended before node 'a' is 'failed'"):
        await simulate({"nodes": [node("a", "a")]}, stub("a"), script=script)


async def test_a_script_that_never_ends_is_an_error() -> None:
    async def script(task: SimulatedTask) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TaskStuck, match=r"the script has not ended 0\.05 s after the task"):
        await simulate({"nodes": [node("a", "a")]}, stub("a"), script=script, hangs_after_sec=0.05)


async def test_an_action_that_the_task_rejects_is_an_error() -> None:
    async def script(task: SimulatedTask) -> None:
        await task.skip_node("unknown")

    with pytest.raises(ActionRejected, match="unknown"):
        await simulate({"nodes": [sleeper("a", sec=60)]}, Sleeper(), script=script)


async def test_functions_and_variables_work_as_on_servers() -> None:
    async def note(task_id: str, *, level: str) -> None:
        assert level == "high"

    graph = {
        "nodes": [
            call("set", "vars.set", args={"kv": {"n": 1}}),
            call("note", "note", "set", args={"level": "high"}),
        ]
    }
    run = await simulate(graph, functions={"note": note})
    run.assert_finished()
    run.assert_order("set", "note")
    assert run.vars == {"n": 1}


async def test_the_pauses_before_tries_of_a_batch_take_no_time() -> None:
    batches = {"on_batch_failure": {"attempts": 6, "then": "quarantine"}}
    flaky = stub("a", fails=ConnectionError("x"), times=5)
    run = await simulate({"nodes": [node("a", "a", **batches)]}, flaky)
    assert (run.status, run.nodes["a"].attempts, run.seconds) == ("finished", 1, 1 + 2 + 4 + 8 + 16)


async def test_shards_and_maps_take_part() -> None:
    class Shard(RoleHandler):
        role = "shard"

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            await ctx.clock.sleep_ms(60_000)
            return BatchResult(success=True, metrics={"items": batch.payload["items"]})

    mapped = node("m", "shard", map={"over": "params.items", "parallel": 2})
    run = await simulate({"nodes": [mapped]}, Shard(), params={"items": [1, 2, 3, 4]})
    assert (run.status, sorted(each["items"] for each in run.results("m"))) == (
        "finished",
        [[1], [2], [3], [4]],
    )
    assert 60 <= run.seconds < 600


async def test_actions_at_one_moment_are_all_applied() -> None:
    async def script(task: SimulatedTask) -> None:
        await task.until("a", "running")
        await asyncio.gather(task.pause("node:b"), task.pause("node:c"))
        await asyncio.gather(task.resume("node:b"), task.resume("node:c"))

    nodes = [sleeper("a", sec=60), node("b", "b", "a"), node("c", "b", "a")]
    run = await simulate({"nodes": nodes}, Sleeper(), stub("b"), script=script)
    run.assert_finished()


async def test_handlers_end_with_the_run() -> None:
    ended: list[str] = []

    class Stubborn(RoleHandler):
        role = "stubborn"

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(ctx.node_id)
            raise AssertionError("no code sets that event")

    nodes = [node("s", "stubborn"), node("a", "a", **ONCE)]
    run = await simulate({"nodes": nodes}, Stubborn(), stub("a", fails=ValueError("x")), hangs_after_sec=0.05)
    assert statuses(run) == {"s": "cancelled", "a": "failed"}
    assert (ended, run.seconds) == (["s"], 30)


@dataclass(frozen=True)
class Details:
    """A dataclass of another release of the SDK."""

    known: int
    new: object
    with_default: int = 7


def test_another_release_of_the_sdk_may_have_other_fields() -> None:
    assert fill(Details, known=1, gone=2) == Details(1, None, 7)


async def test_a_node_that_streams_from_one_that_hangs_ends_with_it() -> None:
    """The second node looks for batches again and again, which is no reason to wait longer for the first one."""
    pull = {"input_inline": {"input_adapter": "pull.from_artifacts"}, "start_when": "first_batch"}

    class Stalled(RoleHandler):
        role = "stalled"

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            await ctx.artifacts.upsert_partial("a", {"n": 1})
            await ctx.cancellable(asyncio.Event().wait())
            raise AssertionError("no code sets that event")

    nodes = [node("s", "stalled", timeout_sec=3600, **ONCE), {**node("p", "sink", "s"), "io": pull}]
    run = await simulate({"nodes": nodes}, Stalled(), sink := stub("sink", {}), hangs_after_sec=0.8)
    run.node("s").assert_failed(reason="timeout")
    assert sink.calls == [{"n": 1}]
