"""The tables and the examples of docs/graphs.md that the code determines: gates, routes, streaming and routing."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, NamedTuple

import pytest
from tests.docs.pages import DOCS

from flowkit.models import FanIn, Graph, Node, NodeState, NodeStatus, SkipReason
from flowkit.workflows.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PAGE = (DOCS / "graphs.md").read_text(encoding="utf-8")


class Parent(NamedTuple):
    """How a parent or a router ended, as the page names it; without a status, it has not ended."""

    text: str
    status: NodeStatus | None = None
    reason: SkipReason | None = None
    on_failure: tuple[str, ...] = ()


OPEN = Parent("open")
FINISHED = Parent("finished", NodeStatus.FINISHED)
FAILED = Parent("failed", NodeStatus.FAILED)
ROUTED = Parent("failed, with `on_failure`", NodeStatus.FAILED, on_failure=("remediator",))
NOT_TAKEN = Parent("skipped: `routing`", NodeStatus.SKIPPED, SkipReason.ROUTING)
UPSTREAM = Parent("skipped: `upstream_failed`", NodeStatus.SKIPPED, SkipReason.UPSTREAM_FAILED)
CANCELLED = Parent("cancelled", NodeStatus.CANCELLED)

GATES = {"`all`": FanIn(), "`any`": FanIn(mode="any"), "`count:2`": FanIn(mode="count", count=2)}


def outcome(nodes: list[Node], parents: Iterable[Parent]) -> str:
    """Return what happens to the last node after the first ones have ended as `parents` says."""
    remediator = Node(node_id="remediator", index=len(nodes), type="t", conditional=True)
    scheduler = Scheduler(Graph(nodes=(*nodes, remediator)), [NodeState() for _ in [*nodes, remediator]])
    scheduler.pop_ready()
    for index, parent in enumerate(parents):
        if parent.status is not None:
            scheduler.end(index, parent.status, parent.reason)
    state = scheduler.states[len(nodes) - 1]
    if state.skip_reason is not None:
        return f"skipped: `{state.skip_reason.value}`"
    return "starts" if len(nodes) - 1 in scheduler.pop_ready() else "waits"


def gate(parents: tuple[Parent, Parent], fan_in: FanIn) -> str:
    """Return what happens to a node with two parents."""
    above = [
        Node(node_id=f"p{i}", index=i, type="t", on_failure=each.on_failure) for i, each in enumerate(parents)
    ]
    child = Node(node_id="child", index=2, type="t", depends_on=("p0", "p1"), fan_in=fan_in)
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
    assert gates() in PAGE, f"docs/graphs.md needs this table:\n{gates()}"


def test_page_has_the_table_of_routes() -> None:
    assert targets() in PAGE, f"docs/graphs.md needs this table:\n{targets()}"


@pytest.mark.parametrize("section", ["Streaming", "Routing", "Conditions"])
def test_example_prints_what_the_page_shows(section: str, tmp_path: Path) -> None:
    text = PAGE.split(f"\n## {section}\n", 1)[1]
    program, printed = re.findall(r"```(?:python|text)\n(.*?)```", text, re.DOTALL)[:2]
    (tmp_path / "example.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == (printed, 0), done.stderr
