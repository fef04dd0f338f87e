"""The graphs that the chaos test writes by the methods of a Flow, and its check of contracts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.integration.chaos.contracts import row_problems
from tests.integration.chaos.flows import flow_of
from tests.integration.chaos.plans import BUILT, COUNTER, JSON, READ
from tests.integration.chaos.tasks import task_plan
from tests.integration.chaos.typed import VERSION_KEY

from flowkit.graph.submission import validate_input

if TYPE_CHECKING:
    from flowkit.models import Graph, Node

SEED, TASKS = 1, 60


def meaning(graph: dict[str, Any]) -> Graph:
    """Return what a graph means, without warnings."""
    parsed = validate_input("t", {"params": {}, "graph": graph})
    return replace(parsed, warnings=(), nodes=tuple(map(plain, parsed.nodes)))


def plain(node: Node) -> Node:
    """Return a node without the adapter that a flow names for typed handlers that do not pull."""
    inline = {key: each for key, each in (node.io.input_inline or {}).items() if each != "noop"}
    return replace(node, io=replace(node.io, input_inline=inline or None), io_bytes=0)


def test_graphs_written_in_any_way_mean_the_same() -> None:
    ways: Counter[str] = Counter()
    for number in range(TASKS):
        plan = task_plan(SEED, number)
        ways[plan.written] += 1
        assert meaning(flow_of(plan).to_dict()) == meaning(plan.as_graph()), plan
    assert min(ways[way] for way in (JSON, READ, BUILT)) > TASKS / 6, ways


def row(version: str, announced: str) -> dict[str, Any]:
    """Return the row of a process that hosts a typed role."""
    output = json.dumps({VERSION_KEY: announced})
    return {
        "worker_id": "w-1",
        "handlers": [{"role": COUNTER, "version": version, "contract": "d"}, {"role": "reader"}],
        "contracts": [{"digest": "d", "output": output}],
    }


def test_a_process_must_announce_the_contracts_of_its_own_version() -> None:
    assert [*row_problems(row("2", "2"))] == []
    assert [*row_problems(row("2", "1"))] == ["worker w-1 announces 1 of role counter 2"]
    lost = row("2", "2") | {"contracts": []}
    assert [*row_problems(lost)] == ["worker w-1 announces no contract of role counter"]
