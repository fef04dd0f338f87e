"""The tables of docs/graphs that the code determines (gates and routes), and the examples there, which run."""

from __future__ import annotations

import os
from itertools import combinations_with_replacement, pairwise
from typing import TYPE_CHECKING, NamedTuple

import pytest
from tests.docs.pages import DOCS, Block, blocks, place
from tests.fork_server import fork_server
from tests.integration.harness import EVENT_TIMEOUT_SEC

from flowkit.models import FanIn, Graph, Node, NodeState, NodeStatus, SkipReason
from flowkit.workflows.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

BRANCHES, DATA = DOCS / "graphs/branches.md", DOCS / "graphs/data.md"
PAGE = BRANCHES.read_text(encoding="utf-8")


class Parent(NamedTuple):
    """How a parent or a router ended, as the page names it; without a status, it has not ended."""

    text: str
    status: NodeStatus | None = None
    reason: SkipReason | None = None
    on_failure: tuple[str, ...] = ()
    streams: bool = False
    """Whether the edge is async, and the parent has stored a batch."""


OPEN = Parent("open")
FINISHED = Parent("finished", NodeStatus.FINISHED)
FAILED = Parent("failed", NodeStatus.FAILED)
ROUTED = Parent("failed, with `on_failure`", NodeStatus.FAILED, on_failure=("remediator",))
NOT_TAKEN = Parent("skipped: `routing`", NodeStatus.SKIPPED, SkipReason.ROUTING)
UPSTREAM = Parent("skipped: `upstream_failed`", NodeStatus.SKIPPED, SkipReason.UPSTREAM_FAILED)
CANCELLED = Parent("cancelled", NodeStatus.CANCELLED)
STREAMED = Parent("open, with a batch", streams=True)

GATES = {
    "`all`": FanIn(),
    "`any`": FanIn(mode="any"),
    "`count:2`": FanIn(mode="count", count=2),
    "`all_done`": FanIn(mode="all_done"),
}

SAME = [
    (FINISHED, STREAMED),
    (FAILED, CANCELLED),
    (FAILED, UPSTREAM),
    (NOT_TAKEN, Parent("skipped: `condition`", NodeStatus.SKIPPED, SkipReason.CONDITION)),
    (NOT_TAKEN, Parent("skipped: `user`", NodeStatus.SKIPPED, SkipReason.USER)),
]
"""Ends of which the page shows only the first, and says that the second has the same effect."""


def outcome(nodes: list[Node], parents: Iterable[Parent]) -> str:
    """Return what happens to the last node after the first ones have ended as `parents` says."""
    remediator = Node(node_id="remediator", index=len(nodes), type="t", conditional=True)
    scheduler = Scheduler(Graph(nodes=(*nodes, remediator)), [NodeState() for _ in [*nodes, remediator]])
    scheduler.pop_ready()
    for index, parent in enumerate(parents):
        if parent.streams:
            scheduler.add_batch(index)
        if parent.status is not None:
            scheduler.end(index, parent.status, parent.reason)
    state = scheduler.states[len(nodes) - 1]
    if state.skip_reason is not None:
        return f"skipped: `{state.skip_reason.value}`"
    return "starts" if len(nodes) - 1 in scheduler.pop_ready() else "waits"


def gate(parents: Sequence[Parent], fan_in: FanIn) -> str:
    """Return what happens to a node with these parents."""
    above = [
        Node(node_id=f"p{i}", index=i, type="t", on_failure=each.on_failure) for i, each in enumerate(parents)
    ]
    ids = tuple(each.node_id for each in above)
    streams = tuple(node_id for node_id, each in zip(ids, parents, strict=True) if each.streams)
    child = Node(
        node_id="child", index=len(above), type="t", depends_on=ids, fan_in=fan_in, streams_from=streams
    )
    return outcome([*above, child], parents)


def route(router: Parent, lists: tuple[str, ...]) -> str:
    """Return what happens to the target of one router."""
    own = {key: ("target",) if key in lists else () for key in ("on_success", "on_failure")}
    failure = (*own["on_failure"], *router.on_failure)
    above = Node(node_id="router", index=0, type="t", on_success=own["on_success"], on_failure=failure)
    return outcome([above, Node(node_id="target", index=1, type="t", conditional=True)], [router])


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    lines = [list(header), *([cell for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(
        ("|" + "|".join(line) + "|") if "---" in line else f"| {' | '.join(line)} |" for line in lines
    )


def gates() -> str:
    """Return the table of gates by how two parents ended."""
    kinds = [FINISHED, OPEN, NOT_TAKEN, FAILED, ROUTED]
    pairs = [pair for pair in combinations_with_replacement(kinds, 2) if pair != (OPEN, OPEN)]
    rows = [[a.text, b.text, *(gate((a, b), fan_in) for fan_in in GATES.values())] for a, b in pairs]
    return table(["One parent", "The other parent", *GATES], rows)


def targets() -> str:
    """Return the table of routes by how the router ended."""
    lists = [("on_success",), ("on_failure",), ("on_success", "on_failure")]
    routed = ROUTED._replace(text="failed, and routes its failure")
    kinds = [FINISHED, FAILED, routed, NOT_TAKEN, UPSTREAM, CANCELLED]
    header = ["The router", *(f"target in {' and '.join(f'`{name}`' for name in names)}" for names in lists)]
    return table(header, [[kind.text, *(route(kind, names) for names in lists)] for kind in kinds])


def test_page_has_the_table_of_gates() -> None:
    assert gates() in PAGE, f"docs/graphs/branches.md needs this table:\n{gates()}"


@pytest.mark.parametrize(("shown", "other"), SAME, ids=[other.text for _, other in SAME])
@pytest.mark.parametrize("fan_in", GATES.values(), ids=GATES)
def test_ends_that_are_not_in_the_table_have_the_effect_that_the_page_names(
    shown: Parent, other: Parent, fan_in: FanIn
) -> None:
    for kind in (FINISHED, OPEN, shown):
        expected, found = gate((kind, shown), fan_in), gate((other if kind is shown else kind, other), fan_in)
        if other.reason is not None and other.reason is not SkipReason.UPSTREAM_FAILED:
            expected = expected.replace(SkipReason.ROUTING.value, other.reason.value)
        assert found == expected


def test_page_has_the_table_of_routes() -> None:
    assert targets() in PAGE, f"docs/graphs/branches.md needs this table:\n{targets()}"


def examples() -> list[tuple[Block, Block]]:
    """Return the programs of the pages, each with the block that shows its output."""
    pages = [
        [each for each in blocks(page) if each.language in ("python", "text")] for page in (BRANCHES, DATA)
    ]
    return [pair for page in pages for pair in pairwise(page) if "asyncio.run(" in pair[0].text]


@pytest.mark.parametrize(("program", "shown"), examples(), ids=[place(program) for program, _ in examples()])
def test_example_prints_what_the_page_shows(program: Block, shown: Block, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(program.text, encoding="utf-8")
    code, printed, errors = fork_server().run([], tmp_path, os.environ, EVENT_TIMEOUT_SEC, module="example")
    assert (printed, code) == (shown.text, 0), errors


@pytest.mark.parametrize(
    ("page", "heading"),
    [(BRANCHES, "When a node starts"), (BRANCHES, "Routing"), (BRANCHES, "Conditions"), (DATA, "Streaming")],
    ids=["start", "routing", "conditions", "streaming"],
)
def test_feature_has_an_example_that_runs(page: Path, heading: str) -> None:
    text = page.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    assert [program for program, _ in examples() if program.text in text]
