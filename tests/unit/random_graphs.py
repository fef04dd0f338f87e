"""Random graphs for property tests of the scheduler."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from flowkit.models import FanIn, Graph, Node, NodeIO, OnNodeFailure, StartWhen


@st.composite
def nodes(draw: st.DrawFn, order: list[int], position: int) -> Node:
    """Return the node at `order[position]`; its parents come earlier in `order`."""
    parents = [i for i in order[:position] if draw(st.integers(0, 9)) < 30 / (position + 7)]
    counts = [FanIn(mode="count", count=n) for n in range(1, len(parents) + 1)]
    return Node(
        node_id=f"n{order[position]}",
        index=order[position],
        type="t",
        depends_on=tuple(f"n{i}" for i in parents),
        fan_in=draw(st.sampled_from([FanIn(), FanIn(mode="any"), *counts])),
        allow_failure=draw(st.booleans()),
    )


@st.composite
def streamed(draw: st.DrawFn, plain: list[Node], *, most: bool = False) -> list[Node]:
    """Let some nodes, or most, start on the first batch of any parent, and let some edges of others stream."""
    made = []
    for node in plain:
        if not most and draw(st.booleans()):
            made.append(node)
        elif node.fan_in.mode != "count" and draw(st.booleans()):
            io = NodeIO(start_when=StartWhen.FIRST_BATCH)
            made.append(replace(node, streams_from=node.depends_on, io=io))
        else:
            some = tuple(parent for parent in node.depends_on if draw(st.booleans()))
            made.append(replace(node, streams_from=some))
    return made


@st.composite
def routed(draw: st.DrawFn, plain: list[Node]) -> list[Node]:
    """Make some nodes the targets of earlier ones; some targets have no router, because their lists are ignored."""
    made = list(plain)
    for position in range(1, len(made)):
        if draw(st.integers(0, 3)) == 0:
            target = made[position] = replace(made[position], conditional=True)
            for earlier in range(position):
                router = made[earlier]
                if router.node_id not in target.depends_on and draw(st.integers(0, 2 + position)) < 4:
                    made[earlier] = draw(st.sampled_from([routes(router, target, kind) for kind in KINDS]))
    return made


KINDS = [(True, False), (False, True), (False, True), (True, True)]


def routes(router: Node, target: Node, kinds: tuple[bool, bool]) -> Node:
    """Return the router with the target in its lists of success and failure, as `kinds` says."""
    success, failure = kinds
    return replace(
        router,
        on_success=(*router.on_success, *[target.node_id] * success),
        on_failure=(*router.on_failure, *[target.node_id] * failure),
    )


@st.composite
def graphs(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> Graph:
    """Generate random DAGs with their nodes in any order, with routing in half of them, and streams in half."""
    order = draw(st.permutations(range(draw(sizes))))
    drawn = [draw(nodes(order, position)) for position in range(len(order))]
    drawn = draw(streamed(drawn)) if draw(st.booleans()) else drawn
    return Graph(
        nodes=tuple(
            sorted(draw(routed(drawn)) if draw(st.booleans()) else drawn, key=lambda node: node.index)
        ),
        on_node_failure=draw(st.sampled_from(OnNodeFailure)),
    )
