"""`Scheduler` compared with the reference model on random graphs whose nodes end in random order."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.unit.property_examples import examples
from tests.unit.random_graphs import graphs, nodes, streamed
from tests.unit.reference_model import FINISHED, End, ends_of, handled, settled, startable, turns_failed

from flowkit.models import (
    Graph,
    NodeState,
    NodeStatus,
    OnNodeFailure,
    SkipReason,
)
from flowkit.workflows.scheduling.scheduler import Scheduler

THOROUGH = settings(max_examples=examples(200), print_blob=True, suppress_health_check=[HealthCheck.too_slow])
LARGE = settings(
    THOROUGH,
    max_examples=examples(20),
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)

ENDS = [
    End(NodeStatus.FINISHED),
    End(NodeStatus.FINISHED),
    End(NodeStatus.FINISHED),
    End(NodeStatus.FAILED),
    End(NodeStatus.CANCELLED),
    *(End(NodeStatus.SKIPPED, why) for why in (SkipReason.ROUTING, SkipReason.CONDITION, SkipReason.USER)),
]
STOPS = [SkipReason.TASK_FAILED, SkipReason.TASK_CANCELLED]


class Move(NamedTuple):
    """One node ends; before that, the scheduler may be rebuilt, and nodes may store batches."""

    pick: int
    end: End
    rebuild: bool
    streams: list[int]
    """Which of the released nodes store a batch."""


def moves(nodes: int) -> st.SearchStrategy[list[Move]]:
    """Return enough moves to end every node."""
    move = st.builds(
        Move,
        st.integers(0, nodes - 1),
        st.sampled_from(ENDS),
        st.integers(0, 7).map(lambda n: n == 7),
        st.lists(st.integers(0, nodes - 1), max_size=3),
    )
    return st.lists(move, min_size=nodes, max_size=nodes)


class Simulation:
    """Compares a scheduler with the model after every move."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ends: list[End | None] = settled(graph, [None] * len(graph.nodes))
        self.streamed: set[int] = set()
        """The nodes that have stored a batch."""
        self.first_unhandled: set[int] = set()
        """The failures that the first event left without anything that can handle them."""
        self.rebuilt = False
        never = {i for i, end in enumerate(self.ends) if end}
        self._start(Scheduler(graph, [NodeState() for _ in graph.nodes]), never)

    def _start(self, scheduler: Scheduler, changed: set[int]) -> None:
        self.scheduler = scheduler
        self.released: list[int] = []
        self.changed = changed
        self.check()

    def rebuild(self) -> None:
        """Rebuild the scheduler from the states alone, as continue-as-new does."""
        self.rebuilt = True
        self._start(Scheduler(self.graph, self.scheduler.states), set())

    def run(self, moves: list[Move]) -> None:
        """Make `moves` until every node has ended."""
        for move in moves:
            if move.rebuild:
                self.rebuild()
            for pick in move.streams:
                if not self.scheduler.done:
                    self.store_batch(pick)
            if not self.scheduler.done:
                self.move(move)

    def store_batch(self, pick: int) -> None:
        """Let one node, which may have ended since, store its first batch, or another one, which changes nothing."""
        index = self.released[pick % len(self.released)]
        assert self.scheduler.add_batch(index) is (index not in self.streamed)
        self.streamed.add(index)
        self.check()

    def move(self, move: Move) -> None:
        """End one running node or, for a skip, any open node."""
        skip = move.end.status is NodeStatus.SKIPPED
        open_ = [i for i, end in enumerate(self.ends) if end is None and (skip or i in self.released)]
        index = open_[move.pick % len(open_)]
        self.scheduler.end(index, *move.end)
        turns = move.end == FINISHED and turns_failed(self.graph, self.ends, index)
        self.ends[index] = End(NodeStatus.FAILED) if turns else move.end
        self.changed |= {index} if turns else set()
        before, self.ends = self.ends, settled(self.graph, self.ends, self.streamed)
        self.changed |= {i for i, end in enumerate(self.ends) if end != before[i]}
        self.first_unhandled = self.first_unhandled or self.failed(handled=False)
        self.check()

    def failed(self, *, handled: bool) -> set[int]:
        """Return the failed nodes whose failures are handled, or those whose failures nothing can handle."""
        failed = [i for i, end in enumerate(self.ends) if end and end.status is NodeStatus.FAILED]
        return {i for i in failed if self._is_handled(i) is handled}

    def _is_handled(self, index: int) -> bool | None:
        return self.graph.nodes[index].allow_failure or handled(self.graph, self.ends, index)

    def check(self) -> None:
        """Compare all results of the scheduler with the model."""
        assert ends_of(self.scheduler.states) == self.ends
        self._check_released(self.scheduler.pop_ready())
        self._check_failures()
        assert self.scheduler.done == (None not in self.ends)
        assert self.scheduler.changed == self.changed
        for status in NodeStatus:
            assert self.scheduler.counts()[status] == sum(
                state.status is status for state in self.scheduler.states
            )

    def _check_released(self, ready: list[int]) -> None:
        self.released += ready
        assert len(set(self.released)) == len(self.released), "a node was released twice"
        still_open = {i for i in self.released if self.ends[i] is None}
        assert still_open == startable(self.graph, self.ends, self.streamed)
        assert all(self.ends[i] is None for i in ready), "an ended node was released"
        assert self.scheduler.done or still_open, "nothing can run although nodes are open"
        for index in ready:
            self.scheduler.states[index].epoch += 1
            self.scheduler.states[index].status = NodeStatus.RUNNING

    def _check_failures(self) -> None:
        unhandled = self.failed(handled=False)
        assert [node.index for node in self.scheduler.failures] == sorted(unhandled)
        assert self.scheduler.handled_failures == [f"n{i}" for i in sorted(self.failed(handled=True))]
        hard = self.scheduler.hard_failure
        if self.graph.on_node_failure is OnNodeFailure.CONTINUE or not unhandled:
            assert hard is None
        else:
            assert hard is not None
            assert hard.index in (unhandled if self.rebuilt else self.first_unhandled)


@st.composite
def scenarios(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> tuple[Graph, list[Move]]:
    """Generate a graph and its moves."""
    graph = draw(graphs(sizes))
    return graph, draw(moves(len(graph.nodes)))


SMALL_SCENARIOS = scenarios(st.integers(1, 12))


@THOROUGH
@given(scenario=SMALL_SCENARIOS)
def test_scheduler_matches_the_model_after_every_end(scenario: tuple[Graph, list[Move]]) -> None:
    graph, moves = scenario
    simulation = Simulation(graph)
    simulation.run([move._replace(rebuild=False) for move in moves])
    assert simulation.scheduler.done


@THOROUGH
@given(scenario=SMALL_SCENARIOS)
def test_scheduler_restored_from_states_continues_the_same_way(scenario: tuple[Graph, list[Move]]) -> None:
    graph, moves = scenario
    simulation = Simulation(graph)
    simulation.run(moves)
    assert simulation.scheduler.done


@st.composite
def streams_of(draw: st.DrawFn) -> tuple[Graph, list[Move]]:
    """Generate a graph in which most nodes stream, and moves in which nodes finish or fail."""
    order = [*range(draw(st.integers(2, 8)))]
    drawn = draw(streamed([draw(nodes(order, position)) for position in order], most=True))
    ends = [FINISHED, FINISHED, End(NodeStatus.FAILED)]
    made = [move._replace(end=draw(st.sampled_from(ends))) for move in draw(moves(len(order)))]
    return Graph(nodes=tuple(drawn), on_node_failure=OnNodeFailure.CONTINUE), made


@THOROUGH
@given(scenario=streams_of())
def test_scheduler_matches_the_model_on_graphs_in_which_most_nodes_stream(
    scenario: tuple[Graph, list[Move]],
) -> None:
    graph, moves = scenario
    simulation = Simulation(graph)
    simulation.run(moves)
    assert simulation.scheduler.done


@LARGE
@given(scenario=scenarios(st.just(40)))
def test_scheduler_matches_the_model_on_large_graphs(scenario: tuple[Graph, list[Move]]) -> None:
    graph, moves = scenario
    simulation = Simulation(graph)
    simulation.run(moves)
    assert simulation.scheduler.done


@THOROUGH
@given(scenario=SMALL_SCENARIOS, played=st.integers(0, 12), reason=st.sampled_from(STOPS))
def test_stop_cancels_started_nodes_and_skips_the_others_with_the_given_reason(
    scenario: tuple[Graph, list[Move]], played: int, reason: SkipReason
) -> None:
    graph, moves = scenario
    simulation = Simulation(graph)
    simulation.run(moves[:played])
    stopped = {i for i, end in enumerate(simulation.ends) if end is None}
    ran, skipped = End(NodeStatus.CANCELLED), End(NodeStatus.SKIPPED, reason)
    expected = [
        end or (ran if i in simulation.released else skipped) for i, end in enumerate(simulation.ends)
    ]
    simulation.scheduler.end_all(NodeStatus.CANCELLED, reason)
    assert ends_of(simulation.scheduler.states) == expected
    assert simulation.scheduler.changed == simulation.changed | stopped
    assert simulation.scheduler.done
    assert simulation.scheduler.pop_ready() == []
