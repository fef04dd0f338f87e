"""The rules of routing: which graphs are valid, which nodes start, and which failures are handled."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.unit.graphs import node, pulling, refusal

from flowkit.graph.validation import dependency_path, parse_graph
from flowkit.limits import FAILED_NODES
from flowkit.models import Graph, NodeState, NodeStatus
from flowkit.workflows.display.task_status import failure_text
from flowkit.workflows.retry import note_failure
from flowkit.workflows.scheduling.scheduler import Scheduler
from flowkit.workflows.state_codec import columns_of, states_of

FINISHED, FAILED = NodeStatus.FINISHED, NodeStatus.FAILED


def routes(success: list[str] | None = None, failure: list[str] | None = None) -> dict[str, Any]:
    """Return the `routing` of a node."""
    return {"on_success": success or [], "on_failure": failure or []}


def router(
    node_id: str, success: list[str] | None = None, failure: list[str] | None = None
) -> dict[str, Any]:
    """Return a node that routes."""
    return node(node_id, routing=routes(success, failure))


def graph_of(*nodes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a graph as users write it."""
    return {"nodes": list(nodes), **fields}


REMEDIED = graph_of(
    router("u", ["succ"], ["remed"]), node("succ"), node("remed"), node("below", depends_on=["succ", "remed"])
)
"""A node, what follows its success, its remediator, and a join of both branches."""


class Game:
    """A task whose nodes end as the test says."""

    def __init__(self, graph: dict[str, Any]) -> None:
        self.graph: Graph = parse_graph(graph)
        self.index_of = {node.node_id: node.index for node in self.graph.nodes}
        self.scheduler = Scheduler(self.graph, [NodeState() for _ in self.graph.nodes])

    def started(self) -> list[str]:
        """Return the nodes that may start since the last call."""
        return [self.graph.nodes[index].node_id for index in self.scheduler.pop_ready()]

    def end(self, node_id: str, status: NodeStatus = FINISHED, code: str = "flaky") -> list[str]:
        """End a node, and return the nodes that start as a result."""
        self.started()
        state = self.scheduler.states[self.index_of[node_id]]
        state.epoch += 1
        if status is FAILED:
            note_failure(state, code, "as ordered")
        self.scheduler.end(self.index_of[node_id], status)
        return self.started()

    def skipped(self) -> dict[str, str]:
        """Return the skip reason of each skipped node."""
        states = zip(self.graph.nodes, self.scheduler.states, strict=True)
        return {node.node_id: state.skip_reason.value for node, state in states if state.skip_reason}

    def restore(self) -> None:
        """Continue as a new run does, from the encoded states."""
        states = states_of(columns_of(self.scheduler.states, 10_000))
        self.scheduler = Scheduler(self.graph, states)

    @property
    def hard_failure(self) -> str | None:
        """The id of the node whose failure stops the task."""
        node = self.scheduler.hard_failure
        return None if node is None else node.node_id


# --- targets and branches -----------------------------------------------------------------------------------------


def test_target_does_not_start_on_its_own() -> None:
    assert Game(REMEDIED).started() == ["u"]


def test_success_starts_the_success_branch_and_skips_the_other() -> None:
    game = Game(REMEDIED)
    assert game.end("u") == ["succ"]
    assert game.skipped() == {"remed": "routing"}
    assert game.end("succ") == ["below"]


def test_failure_starts_the_remediator_only_and_joins_follow_the_gate_rules() -> None:
    game = Game(REMEDIED)
    assert game.end("u", FAILED) == ["remed"]
    assert game.skipped() == {"succ": "routing"}
    assert game.hard_failure is None
    assert game.end("remed") == ["below"]
    game.end("below")
    assert game.scheduler.done
    assert (game.scheduler.handled_failures, game.scheduler.failures) == (["u"], [])


def test_descendants_of_a_handled_failure_are_skipped() -> None:
    game = Game(
        graph_of(
            router("u", failure=["remed"]),
            node("remed"),
            node("next", depends_on=["u"]),
            node("last", depends_on=["next"]),
            node("either", depends_on=["u", "remed"], fan_in="any"),
        )
    )
    game.end("u", FAILED)
    assert game.skipped() == {"next": "routing", "last": "routing"}
    assert game.end("remed") == ["either"]


def test_target_of_a_failure_without_a_failure_list_is_skipped_as_upstream_failed() -> None:
    game = Game(graph_of(router("u", ["succ"]), node("succ"), node("v"), on_node_failure="continue"))
    game.end("u", FAILED)
    assert game.skipped() == {"succ": "upstream_failed"}
    assert [failed.node_id for failed in game.scheduler.failures] == ["u"]


def test_target_of_a_skipped_router_has_the_reason_of_the_router() -> None:
    game = Game(
        graph_of(
            node("a", allow_failure=True),
            {**router("u", ["succ"], ["remed"]), "depends_on": ["a"]},
            node("succ"),
            node("remed"),
        )
    )
    game.end("a", FAILED)
    assert game.skipped() == dict.fromkeys(["u", "succ", "remed"], "upstream_failed")


# --- several routers and dependencies -------------------------------------------------------------------------------


def test_shared_target_starts_once_after_all_its_routers_and_handles_every_failure() -> None:
    game = Game(graph_of(router("a", failure=["t"]), router("b", failure=["t"]), node("t")))
    assert game.end("a", FAILED) == []
    assert game.end("b", FAILED, "full") == ["t"]
    game.end("t")
    assert game.scheduler.handled_failures == ["a", "b"]


def test_shared_target_starts_if_only_one_router_fires_it() -> None:
    game = Game(graph_of(router("a", failure=["t"]), router("b", ["t"]), node("t")))
    game.end("a")
    assert game.end("b") == ["t"]


def test_target_with_dependencies_needs_a_route_and_its_parents() -> None:
    game = Game(
        graph_of(router("u", failure=["t"]), node("other"), node("t", depends_on=["other"], fan_in="any"))
    )
    assert game.end("other") == []
    assert game.end("u", FAILED) == ["t"]


def test_target_whose_parents_do_not_finish_does_not_handle_the_failure() -> None:
    nodes = [router("u", failure=["t"]), node("other", allow_failure=True), node("t", depends_on=["other"])]
    game = Game(graph_of(*nodes))
    game.end("other", FAILED)
    assert game.skipped() == {"t": "upstream_failed"}
    game.end("u", FAILED)
    assert game.hard_failure == "u"
    assert game.scheduler.handled_failures == ["other"]


def test_dependency_on_the_own_router_repeats_the_route() -> None:
    targets = [node("remed", depends_on=["u"]), node("succ", depends_on=["u"])]
    game = Game(graph_of(router("u", ["succ"], ["remed"]), *targets))
    assert game.graph.warnings == ()
    assert game.end("u", FAILED) == ["remed"]


def test_target_in_both_lists_starts_in_both_cases() -> None:
    for status in (FINISHED, FAILED):
        game = Game(graph_of(router("u", ["t"], ["t"]), node("t")))
        assert game.end("u", status) == ["t"]


# --- explicit edges -------------------------------------------------------------------------------------------------


def test_explicit_edges_take_precedence_over_the_success_list() -> None:
    game = Game(
        graph_of(
            router("src", ["should_not_run"]),
            node("only_edges", depends_on=["src"]),
            node("should_not_run", depends_on=["src"]),
            edges=[["src", "only_edges"]],
        )
    )
    assert game.skipped() == {"should_not_run": "routing"}
    assert game.end("src") == ["only_edges"]
    game.end("only_edges")
    assert game.scheduler.done
    ignored, never = game.graph.warnings[-2:]
    assert "'src': routing.on_success is ignored" in ignored
    assert "'should_not_run' never starts" in never


def test_every_unreachable_target_is_skipped_for_routing() -> None:
    nodes = [router("src", ["x", "y"]), node("next", depends_on=["src"]), {**router("x", failure=["z"])}]
    game = Game(graph_of(*nodes, node("z"), node("y", depends_on=["src"]), node("last", depends_on=["y"])))
    assert game.skipped() == dict.fromkeys(["x", "y", "z", "last"], "routing")


def test_unreachable_target_below_another_is_skipped_for_routing() -> None:
    nodes = [router("a", ["x"]), node("b", depends_on=["a"]), router("x", ["y"]), router("w", ["y"])]
    below = [node("last", depends_on=["x"]), node("next", depends_on=["w"])]
    game = Game(graph_of(*nodes, *below, node("y", depends_on=["x", "w"])))
    assert game.skipped() == dict.fromkeys(["x", "y", "last"], "routing")


def test_explicit_edges_leave_the_failure_list_in_effect() -> None:
    game = Game(
        graph_of(router("u", ["x"], ["remed"]), node("next", depends_on=["u"]), node("x"), node("remed"))
    )
    assert game.end("u", FAILED) == ["remed"]
    assert game.skipped() == {"next": "routing", "x": "routing"}


@pytest.mark.parametrize("key", ["edges", "edges_ex"])
def test_target_of_an_ignored_list_starts_by_its_own_edge(key: str) -> None:
    pairs = [("src", "t"), ("src", "other")]
    edges = [{"from": a, "to": b} for a, b in pairs] if key == "edges_ex" else [list(pair) for pair in pairs]
    game = Game(graph_of(router("src", ["t"]), node("t"), node("other"), **{key: edges}))
    assert game.end("src") == ["t", "other"]


def test_extended_edges_beside_depends_on_do_not_change_the_parents() -> None:
    nodes = [router("u", ["t"]), node("v"), node("t", depends_on=["v"])]
    game = Game(graph_of(*nodes, edges_ex=[{"from": "u", "to": "t"}]))
    assert game.graph.nodes[2].depends_on == ("v",)
    assert any("depends_on takes precedence" in warning for warning in game.graph.warnings)
    assert game.end("v") == []
    assert game.end("u") == ["t"]


# --- remediators that fail ------------------------------------------------------------------------------------------


def test_failed_remediator_fails_the_task_and_the_reason_names_the_first_failure() -> None:
    game = Game(REMEDIED)
    game.end("u", FAILED)
    game.end("remed", FAILED, "broken")
    assert game.hard_failure == "remed"
    assert game.scheduler.handled_failures == []
    assert failure_text(game.scheduler) == "node 'u' failed: flaky: as ordered (and 1 more failed nodes)"


def test_tolerated_failure_of_the_only_remediator_does_not_handle_anything() -> None:
    game = Game(graph_of(router("u", failure=["remed"]), node("remed", allow_failure=True)))
    game.end("u", FAILED)
    game.end("remed", FAILED)
    assert game.hard_failure == "u"
    assert game.scheduler.handled_failures == ["remed"]


def test_one_finished_remediator_of_two_is_sufficient() -> None:
    game = Game(graph_of(router("u", failure=["a", "b"]), node("a", allow_failure=True), node("b")))
    assert game.end("u", FAILED) == ["a", "b"]
    game.end("a", FAILED)
    game.end("b")
    assert (game.hard_failure, game.scheduler.handled_failures) == (None, ["u", "a"])


@pytest.mark.parametrize(("end", "handled"), [(FINISHED, ["u", "v"]), (FAILED, [])])
def test_remediator_with_a_remediator_handles_both_failures_or_neither(
    end: NodeStatus, handled: list[str]
) -> None:
    game = Game(graph_of(router("u", failure=["v"]), router("v", failure=["w"]), node("w")))
    game.end("u", FAILED)
    assert game.end("v", FAILED) == ["w"]
    assert game.hard_failure is None
    game.end("w", end)
    assert game.scheduler.handled_failures == handled
    assert (game.hard_failure is None) == bool(handled)


def test_failure_that_waits_for_its_remediator_is_not_handled_when_the_task_stops() -> None:
    game = Game(graph_of(router("u", failure=["remed"]), node("remed"), node("other")))
    game.end("u", FAILED)
    assert (game.scheduler.handled_failures, game.scheduler.failures) == ([], [])
    game.end("other", FAILED)
    assert game.hard_failure == "other"


def test_long_chain_of_remediators_is_handled_by_the_last() -> None:
    count = 3_000
    links = [router(f"n{i}", failure=[f"n{i + 1}"]) for i in range(count)]
    game = Game(graph_of(*links, node(f"n{count}")))
    for i in range(count):
        game.end(f"n{i}", FAILED)
    game.end(f"n{count}")
    assert len(game.scheduler.handled_failures) == count


# --- what the remediator receives -----------------------------------------------------------------------------------


def test_remediator_receives_what_failed_and_why_also_in_a_new_run() -> None:
    game = Game(graph_of(router("a", failure=["t"]), router("b", ["t"]), node("t")))
    game.end("a", FAILED, "full")
    game.end("b")
    expected = [{"node_id": "a", "attempt_epoch": 1, "reason_code": "full", "error": "full: as ordered"}]
    assert game.scheduler.failed_nodes(game.graph.nodes[2]) == expected
    game.restore()
    assert game.started() == ["t"]
    assert game.scheduler.failed_nodes(game.graph.nodes[2]) == expected
    assert game.scheduler.failed_nodes(game.graph.nodes[0]) == []


def test_remediator_receives_a_limited_number_of_failures() -> None:
    ids = [f"n{i}" for i in range(FAILED_NODES + 5)]
    game = Game(graph_of(*(router(each, failure=["t"]) for each in ids), node("t")))
    for each in ids:
        game.end(each, FAILED)
    received = game.scheduler.failed_nodes(game.graph.nodes[-1])
    assert [failed["node_id"] for failed in received] == ids[:FAILED_NODES]


# --- rejected graphs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "cycle"),
    [
        (graph_of(node("a"), {**router("b", failure=["a"]), "depends_on": ["a"]}), "a -> b -> a"),
        (graph_of(router("a", ["b"]), router("b", failure=["a"])), "a -> b -> a"),
        (
            graph_of(node("a"), node("b", depends_on=["a"]), {**router("c", ["a"]), "depends_on": ["b"]}),
            "a -> b -> c -> a",
        ),
    ],
    ids=["ancestor", "routes", "far"],
)
def test_cycle_through_routes_is_rejected(graph: dict[str, Any], cycle: str) -> None:
    text = str(refusal(graph))
    found = text.split("has a cycle: ")[1].split(";")[0].split(" -> ")
    assert set(found) == set(cycle.split(" -> "))
    assert text.endswith("remove one of these dependencies or routes")


def test_node_that_pulls_from_its_own_target_is_rejected() -> None:
    waiting = {**router("u", failure=["t"]), "io": pulling(from_nodes=["t"])}
    assert "makes nodes wait for each other" in str(refusal(graph_of(waiting, node("t"))))


def test_count_does_not_include_the_routers_of_a_node() -> None:
    target = node("t", depends_on=["u", "v"], fan_in="count:2")
    text = str(refusal(graph_of(router("u", ["t"]), node("v"), target)))
    assert "the number of parents (1), not counting those that route to it" in text


def test_remediator_can_pull_from_the_failed_node_but_a_proposed_source_must_not_wait_for_it() -> None:
    graph = graph_of(router("u", failure=["t"]), node("t", depends_on=["u"], io=pulling()))
    assert parse_graph(graph).nodes[1].pulls_from == ("u",)
    assert dependency_path(graph, "t", ["u"]) == []
    assert dependency_path(graph, "u", ["t"]) == ["u", "t", "u"]


@pytest.mark.parametrize("failure", [[], ["b"], ["d"]])
@pytest.mark.parametrize("success", [["b"], ["c"], ["b", "c"]])
def test_edges_take_precedence_over_routes(success: list[str], failure: list[str]) -> None:
    for by_edges, by_parents in itertools.product(["", "b", "c", "bc"], repeat=2):
        nodes = [
            node(own, depends_on=["a"] if own in by_parents else [], routing=routes())
            | ({"routing": routes(success, failure)} if own == "a" else {})
            for own in "abcd"
        ]
        graph = {"nodes": nodes, "edges": [["a", own] for own in by_edges]}
        game = Game(graph)
        before = set(game.started())
        assert set(game.end("a")) == expected_starts(graph, "a") - before, graph


def expected_starts(graph: dict[str, Any], ended: str) -> set[str]:
    """Return which targets of one router start after it has finished, from the rules on the page."""
    pairs = {tuple(pair) for pair in graph["edges"]}
    given = {node["node_id"]: node["depends_on"] for node in graph["nodes"]}
    parents = {own: above or [a for a, b in pairs if b == own] for own, above in given.items()}
    routing = next(node["routing"] for node in graph["nodes"] if node["node_id"] == ended)
    children = {own for own, above in parents.items() if ended in above}
    repeated = {own for own in routing["on_success"] if (ended, own) not in pairs} | set(
        routing["on_failure"]
    )
    fired = set() if children - repeated else set(routing["on_success"])
    return fired | (children - repeated)
