"""Large graphs with roles that a bridge of another process serves are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from flowkit.attempt import pollers
from flowkit.attempt.pollers import bridged_problems

NATIVE, BRIDGE = "worker-1", "flowkit-bridge-7"


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The task queues that were described.

    A worker and a bridge poll that of `mixed`, and a worker that of `native`.
    """
    asked: list[str] = []
    served = {"q.mixed": {NATIVE, BRIDGE}, "q.native": {NATIVE}}

    async def found(_: Any, task_queue: str) -> set[str]:
        asked.append(task_queue)
        return served.get(task_queue, set())

    monkeypatch.setattr(pollers, "recent_pollers", found)

    monkeypatch.setattr("flowkit.graph.submission.EXTERNAL_NODES", 2)
    return asked


async def problems(*roles: str, **graph: str) -> list[str]:
    """Return the problems of a graph with a node of each of these roles."""
    client: Any = None
    nodes: list[Any] = [{"node_id": f"n{index}", "type": role} for index, role in enumerate(roles)]
    return await bridged_problems(client, "q", {"nodes": nodes, **graph})


async def test_large_graph_with_a_role_of_a_bridge_is_rejected(described: list[str]) -> None:
    (problem,) = await problems("native", "coordinator_fn", "mixed", "native")
    assert problem.startswith(
        "node 'n2': type is the external role 'mixed', and graph.nodes has 4 entries, more than 2"
    )
    assert sorted(described) == ["q.mixed", "q.native"]


async def test_large_graph_without_such_a_role_is_accepted(described: list[str]) -> None:
    assert await problems("native", "unserved", "coordinator_fn") == []


async def test_small_graph_asks_nothing(described: list[str]) -> None:
    assert await problems("mixed", "mixed") == []
    assert described == []


async def test_role_of_a_bridge_is_rejected_in_a_graph_that_pins_versions(described: list[str]) -> None:
    assert await problems("native", version_policy="pin") == []
    assert await problems("native", "mixed", version_policy="pin") == [
        (
            "node 'n1': type is the external role 'mixed', and graph.version_policy is 'pin', but "
            "FlowKit cannot choose the "
            "version of an external worker: remove version_policy, or run the role with native workers"
        )
    ]
