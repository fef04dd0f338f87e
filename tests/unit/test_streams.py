"""Gates that open on a batch of a parent, and how a node ends whose parents fail after a batch has started it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.graphs import node, pulling

from flowkit import reason_codes
from flowkit.graph.validation import parse_graph
from flowkit.models import NodeState, NodeStatus, SkipReason
from flowkit.workflows.scheduling.scheduler import Scheduler
from flowkit.workflows.state_codec import columns_of, states_of

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST = {"start_when": "first_batch"}


class Game:
    """A scheduler whose nodes are named."""

    def __init__(self, *nodes: dict[str, Any], **graph: Any) -> None:
        self.graph = parse_graph({"nodes": [*nodes], "on_node_failure": "continue", **graph})
        self.start([NodeState() for _ in self.graph.nodes])

    def start(self, states: list[NodeState]) -> None:
        """Build a scheduler from these states."""
        self.scheduler = Scheduler(self.graph, states)
        self.ready: list[str] = []

    def carry(self) -> None:
        """Continue from the encoded states, as a new run of the workflow does."""
        self.start(states_of(columns_of(self.scheduler.states, 100_000)))

    def index(self, name: str) -> int:
        """Return the index of a node."""
        return next(each.index for each in self.graph.nodes if each.node_id == name)

    def state(self, name: str) -> NodeState:
        """Return the state of a node."""
        return self.scheduler.states[self.index(name)]

    def started(self) -> list[str]:
        """Return the nodes whose gates have opened since the last call."""
        return [self.graph.nodes[index].node_id for index in self.scheduler.pop_ready()]

    def batch(self, name: str) -> bool:
        """Note the first batch of a node."""
        return self.scheduler.add_batch(self.index(name))

    def end(self, *names: str, status: NodeStatus = NodeStatus.FINISHED) -> None:
        """End nodes."""
        for name in names:
            self.scheduler.end(self.index(name), status)

    def fail(self, *names: str) -> None:
        """Let nodes fail for good."""
        self.end(*names, status=NodeStatus.FAILED)


def diamond(fan_in: str = "all", io: dict[str, Any] | None = None, **graph: Any) -> Game:
    """Return a game with the parents `a`, `b` and the child `c`."""
    child = node("c", fan_in=fan_in, io=io or {}, **({} if graph else {"depends_on": ["a", "b"]}))
    game = Game(node("a"), node("b"), child, **graph)
    assert game.started() == ["a", "b"]
    return game


def edges(*parents: str) -> list[dict[str, Any]]:
    """Return edges from `a` and `b` to `c`, of which these stream."""
    return [{"from": p, "to": "c", "mode": "async" if p in parents else "sync"} for p in ("a", "b")]


@pytest.mark.parametrize("fan_in", ["all", "any", "all_done"])
def test_first_batch_of_any_parent_opens_the_gate_once(fan_in: str) -> None:
    game = diamond(fan_in, FIRST)
    assert game.batch("b") and game.started() == ["c"]
    assert not game.batch("b") and game.batch("a") and game.started() == []
    game.end("a", "b", "c")
    assert game.scheduler.done and not game.scheduler.failures


def test_first_batch_with_a_count_waits_for_finished_parents() -> None:
    game = diamond("count:2", FIRST)
    game.batch("a")
    game.batch("b")
    game.end("a")
    assert game.started() == []
    game.end("b")
    assert game.started() == ["c"]


def test_gate_for_all_opens_when_each_edge_is_satisfied_by_a_batch_or_an_end() -> None:
    game = diamond(edges_ex=edges("a"))
    game.batch("b")
    game.batch("a")
    assert game.started() == []
    game.end("b")
    assert game.started() == ["c"]


@pytest.mark.parametrize("fan_in, needed", [("any", 1), ("count:1", 1), ("count:2", 2)])
def test_async_edges_count_toward_any_and_count(fan_in: str, needed: int) -> None:
    game = diamond(fan_in, edges_ex=edges("a", "b"))
    game.batch("a")
    assert game.started() == (["c"] if needed == 1 else [])
    game.batch("b")
    assert game.started() == ([] if needed == 1 else ["c"])


def test_parent_that_streams_and_then_finishes_satisfies_its_edge_once() -> None:
    game = diamond("count:2", edges_ex=edges("a", "b"))
    game.batch("a")
    game.end("a")
    assert game.started() == []


def test_parents_without_batches_open_and_close_the_gate_by_their_ends() -> None:
    game = diamond(io=FIRST)
    game.end("a")
    assert game.started() == []
    game.end("b")
    assert game.started() == ["c"]
    game = diamond(io=FIRST)
    game.fail("a")
    assert (game.state("c").status, game.state("c").skip_reason) == (
        NodeStatus.SKIPPED,
        SkipReason.UPSTREAM_FAILED,
    )


def test_signal_that_the_end_of_its_node_overtakes_counts() -> None:
    """A parent may finish before the workflow has received the signal about its first batch."""
    game = diamond("all", FIRST)
    game.end("a")
    assert game.started() == []
    assert game.batch("a") and not game.batch("a")
    assert game.started() == ["c"]


@pytest.mark.parametrize("carried", [False, True])
def test_late_batch_of_a_finished_parent_satisfies_its_edge_once(carried: bool) -> None:
    game = diamond("count:2", edges_ex=edges("a", "b"))
    game.end("a")
    game.batch("a")
    if carried:
        game.carry()
    assert "c" not in game.started()
    game.batch("b")
    assert game.started() == ["c"]


def test_late_batch_of_a_failed_parent_counts_while_the_gate_is_undecided() -> None:
    game = diamond("any", edges_ex=edges("a", "b"))
    game.fail("a")
    game.batch("a")
    assert game.started() == ["c"]


@pytest.mark.parametrize("io, graph", [(FIRST, {}), (None, {"edges_ex": edges("a", "b")})])
def test_gate_that_a_batch_opened_stays_open_when_the_parents_fail(
    io: dict[str, Any] | None, graph: dict[str, Any]
) -> None:
    game = diamond("any", io, **graph)
    game.batch("a")
    game.fail("a", "b")
    assert game.state("c").status is NodeStatus.QUEUED
    assert game.started() == ["c"]


def test_gate_opened_by_a_batch_is_part_of_the_carried_state() -> None:
    game = diamond(io=FIRST)
    game.batch("a")
    game.fail("a")
    game.carry()
    assert "c" in game.started()
    assert game.state("a").streamed and not game.state("b").streamed


def chain(**fields: Any) -> Game:
    """Return a game with the parent `a` and its streaming child `c`, which a batch has started."""
    game = Game(node("a", **fields), node("r"), node("c", depends_on=["a"], io=FIRST))
    game.started()
    game.batch("a")
    assert game.started() == ["c"]
    return game


def test_child_whose_parent_failed_later_fails_when_its_work_is_done() -> None:
    game = chain()
    game.fail("a")
    assert game.state("c").status is NodeStatus.QUEUED
    game.end("c")
    state = game.state("c")
    assert (state.status, state.reason_code) == (NodeStatus.FAILED, reason_codes.UPSTREAM_FAILED)
    assert state.last_error is not None and state.last_error.startswith("upstream_failed: ")
    assert game.index("c") in game.scheduler.changed


def test_child_finishes_if_its_parent_is_still_open() -> None:
    game = chain()
    game.end("c")
    game.fail("a")
    assert game.state("c").status is NodeStatus.FINISHED


@pytest.mark.parametrize("tolerant", [{"allow_failure": True}, {"routing": {"on_failure": ["r"]}}])
def test_child_finishes_if_the_failure_of_its_parent_is_tolerated_or_routed(tolerant: dict[str, Any]) -> None:
    game = chain(**tolerant)
    game.fail("a")
    game.end("c")
    assert game.state("c").status is NodeStatus.FINISHED


def test_own_failure_of_a_child_keeps_its_code() -> None:
    game = chain()
    game.fail("a")
    game.state("c").reason_code = "mine"
    game.fail("c")
    assert game.state("c").reason_code == "mine"


@pytest.mark.parametrize(
    "fan_in, ends, expected",
    [
        ("all", {"a": "finished", "b": "failed"}, "failed"),
        ("any", {"a": "finished", "b": "failed"}, "finished"),
        ("any", {"a": "failed", "b": "failed"}, "failed"),
        ("any", {"a": "failed"}, "finished"),
        ("all", {"a": "failed"}, "failed"),
        ("all", {"a": "finished", "b": "cancelled"}, "failed"),
        ("count:2", {"a": "finished", "b": "failed"}, "failed"),
        ("count:1", {"a": "finished", "b": "failed"}, "finished"),
        ("all_done", {"a": "failed", "b": "failed"}, "finished"),
    ],
)
def test_ends_of_the_parents_decide_how_a_started_child_ends(
    fan_in: str, ends: dict[str, str], expected: str
) -> None:
    game = diamond(fan_in, edges_ex=edges("a", "b"))
    game.batch("a")
    game.batch("b")
    for name, status in ends.items():
        game.end(name, status=NodeStatus(status))
    game.end("c")
    assert game.state("c").status == expected


def stages(names: Sequence[str]) -> Game:
    """Return a chain of nodes, each of which streams from the one before and has started on its batch."""
    below = [node(name, depends_on=[before], io=FIRST) for before, name in pairwise(names)]
    game = Game(node(names[0]), *below)
    for name in names:
        assert game.started() == [name]
        game.batch(name)
    return game


def test_failure_reaches_every_stage_in_whatever_order_the_stages_end() -> None:
    names = ["a", "b", "c", "d"]
    game = stages(names)
    game.fail("a")
    game.end("d", "c", "b")
    assert [game.state(name).status for name in names] == [NodeStatus.FAILED] * 4


def test_open_parent_that_must_fail_does_not_count_as_one_that_may_finish() -> None:
    """`b` streams from `a` and will fail with it, so no parent of `c` can finish."""
    below = node("b", depends_on=["a"], io=FIRST)
    game = Game(node("a"), below, node("x"), node("c", depends_on=["b", "x"], fan_in="any", io=FIRST))
    game.batch("a")
    game.batch("x")
    game.fail("a", "x")
    game.end("c")
    assert game.state("c").status is NodeStatus.FAILED


def test_many_stages_need_no_recursion() -> None:
    names = [f"n{i}" for i in range(3_000)]
    game = stages(names)
    game.fail("n0")
    game.end("n2999")
    assert game.state("n2999").status is NodeStatus.FAILED


def test_followers_are_the_streaming_children_that_pull() -> None:
    children = [
        node("pulls", depends_on=["a"], io=pulling()),
        node("streams", depends_on=["a"], io=FIRST),
        node("both", depends_on=["a"], io={**FIRST, **pulling()}),
    ]
    game = Game(node("a"), *children)
    assert game.scheduler.streams.followers(game.graph.nodes[0]) == ("both",)
    assert game.scheduler.streams.children[0] == [2, 3]
