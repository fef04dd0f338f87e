"""`Scheduler` compared with the model on random graphs with conditions whose results arrive in any order."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from tests.unit import condition_model
from tests.unit.condition_model import FALSE, Place, View
from tests.unit.random_graphs import graphs
from tests.unit.reference_model import End, ends_of
from tests.unit.test_graph_properties import ENDS, LARGE, THOROUGH

from flowkit.models import Graph, Node, NodeState, NodeStatus
from flowkit.workflows.scheduling.conditions import Due
from flowkit.workflows.scheduling.scheduler import Scheduler

FAILED = End(NodeStatus.FAILED)


class Move(NamedTuple):
    """A condition gets its result, None for an error, or a node ends; before that, the scheduler may be rebuilt."""

    pick: int
    result: bool | None
    end: End
    rebuild: bool


MOVES = st.builds(
    Move,
    st.integers(0, 10**6),
    st.sampled_from([True, True, True, False, False, None]),
    st.sampled_from(ENDS[:5]),
    st.integers(0, 7).map(lambda n: n == 7),
)


@st.composite
def conditional(draw: st.DrawFn, plain: Graph) -> Graph:
    """Add conditions to half of the nodes and edges."""
    return replace(plain, nodes=tuple(draw(with_conditions(node)) for node in plain.nodes))


@st.composite
def with_conditions(draw: st.DrawFn, node: Node) -> Node:
    """Add conditions to a node and to its edges."""
    edges = {parent: "e" for parent in node.depends_on if draw(st.booleans())}
    return replace(node, when=draw(st.sampled_from([None, None, "n"])), edge_when=edges)


class Simulation:
    """Compares a scheduler with the model after every move."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.view = View(graph, [None] * len(graph.nodes), {})
        self.view = self.view._replace(ends=condition_model.settled(self.view))
        self.scheduler = Scheduler(graph, [NodeState() for _ in graph.nodes])
        self.rebuild()

    def rebuild(self) -> None:
        """Rebuild the scheduler from the states alone. Evaluations in progress begin again."""
        self.scheduler = Scheduler(self.graph, self.scheduler.states)
        self.released: list[int] = []
        self.asked: list[Place] = []
        self.check()

    def run(self, moves: list[Move]) -> None:
        """Make moves until every node has ended, repeating them if they are too few."""
        while not self.scheduler.done:
            for move in moves:
                if move.rebuild:
                    self.rebuild()
                if not self.scheduler.done:
                    self.move(move)

    def move(self, move: Move) -> None:
        """Give a condition its result, or end a node that runs."""
        running = [i for i in self.released if self.view.ends[i] is None]
        choices: list[int | Place] = [*running, *self.asked]
        chosen = choices[move.pick % len(choices)]
        if isinstance(chosen, int):
            self.scheduler.end(chosen, *move.end)
            self.settle({chosen: move.end})
        else:
            self.asked.remove(chosen)
            self.answer(chosen, move.result)
        self.check()

    def answer(self, place: Place, result: bool | None) -> None:
        """Give a condition its result. One that no longer matters changes nothing."""
        matters = place in condition_model.due(self.view)
        assert self.scheduler.awaits(Due(*place)) == matters
        if result is not None:
            self.scheduler.decide({Due(*place): result})
        elif matters:
            self.scheduler.end(place[0], *FAILED)
        if not matters:
            return
        if result is not None:
            self.view = self.view._replace(results={**self.view.results, place: result})
        ended = FAILED if result is None else FALSE
        self.settle({place[0]: ended} if result is None or (place[1] is None and not result) else {})

    def settle(self, ended: dict[int, End]) -> None:
        """Add ends to the model, with their consequences."""
        ends = [ended.get(i, end) for i, end in enumerate(self.view.ends)]
        self.view = self.view._replace(ends=ends)
        self.view = self.view._replace(ends=condition_model.settled(self.view))

    def check(self) -> None:
        """Compare the results of the scheduler with the model."""
        assert ends_of(self.scheduler.states) == list(self.view.ends)
        ready = self.scheduler.pop_ready()
        self.released += ready
        assert len(set(self.released)) == len(self.released), "a node was released twice"
        assert {i for i in self.released if self.view.ends[i] is None} == condition_model.startable(self.view)
        self.check_due([(each.node, each.parent) for each in self.scheduler.pop_due()])
        assert self.scheduler.done == (None not in self.view.ends)

    def check_due(self, due: list[Place]) -> None:
        """Compare the conditions that are due, of which some have become irrelevant since they were asked for."""
        self.asked += due
        assert len(set(self.asked)) == len(self.asked), "a condition was due twice"
        expected = condition_model.due(self.view)
        assert expected == {place for place in self.asked if self.scheduler.awaits(Due(*place))}
        assert set(due) <= expected
        running = any(self.view.ends[i] is None for i in self.released)
        assert self.scheduler.done or running or expected, "nothing can happen although nodes are open"


@st.composite
def scenarios(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> tuple[Graph, list[Move]]:
    """Generate a graph with conditions, and moves."""
    graph = draw(conditional(draw(graphs(sizes))))
    return graph, draw(st.lists(MOVES, min_size=3, max_size=3 * len(graph.nodes)))


@THOROUGH
@given(scenario=scenarios(st.integers(1, 10)))
def test_scheduler_matches_the_model_after_every_result(scenario: tuple[Graph, list[Move]]) -> None:
    graph, moves = scenario
    simulation = Simulation(graph)
    simulation.run(moves)
    assert simulation.scheduler.done


@LARGE
@given(scenario=scenarios(st.just(30)))
def test_scheduler_matches_the_model_on_large_graphs(scenario: tuple[Graph, list[Move]]) -> None:
    graph, moves = scenario
    simulation = Simulation(graph)
    simulation.run(moves)
    assert simulation.scheduler.done
