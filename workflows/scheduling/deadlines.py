"""The deadlines of a task and of its nodes: when they are due, and what has exceeded them. Pure.

The deadline of a node begins when its gate opens first, and covers all attempts and waits. Its absolute time is part of
the node's state. The deadline of the task follows from the time at which the task was opened.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from flowkit import reason_codes
from flowkit.models import AttemptFailure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flowkit.models import Graph, Node, NodeState


class Deadlines:
    """The deadlines of one task. Times are seconds since the Unix epoch."""

    def __init__(self, graph: Graph, states: Sequence[NodeState], *, opened_at: float) -> None:
        """Continue with the deadlines in `states`."""
        self._nodes = graph.nodes
        self._states = states
        self._limit_sec = graph.deadline_sec
        self._task_at = None if self._limit_sec is None else opened_at + self._limit_sec
        self._due = [(at, i) for i, state in enumerate(states) if (at := state.deadline_at) is not None]
        heapq.heapify(self._due)

    def begin(self, indexes: Iterable[int], now: float) -> None:
        """Begin the deadlines of the nodes whose gates have opened. A deadline that has begun stays as it is."""
        for index in indexes:
            limit, state = self._nodes[index].deadline_sec, self._states[index]
            if limit is not None and state.deadline_at is None:
                state.deadline_at = now + limit
                heapq.heappush(self._due, (state.deadline_at, index))

    def next_due(self) -> tuple[float, str] | None:
        """Return the earliest deadline that may still be exceeded, and what it limits. None if there is none."""
        while self._due and self._states[self._due[0][1]].status.ended:
            heapq.heappop(self._due)
        found = [(at, self._nodes[index].node_id) for at, index in self._due[:1]]
        found += [(self._task_at, "the task")] if self._task_at is not None else []
        return min(found, default=None)

    def pop_overdue(self, now: float) -> list[int]:
        """Return the indexes of the open nodes that have exceeded their deadlines, each only once."""
        overdue: list[int] = []
        while self._due and self._due[0][0] <= now:
            _, index = heapq.heappop(self._due)
            if not self._states[index].status.ended:
                overdue.append(index)
        return overdue

    def task_failure(self, now: float) -> str | None:
        """Return why the task must fail if it has exceeded its deadline, otherwise None."""
        if self._task_at is None or self._limit_sec is None or now < self._task_at:
            return None
        return f"{reason_codes.DEADLINE_EXCEEDED}: the task took longer than {self._limit_sec:g} s (deadline_sec)"


def node_failure(node: Node) -> AttemptFailure:
    """Return the failure of a node that has exceeded its deadline."""
    message = f"the node took longer than {node.deadline_sec:g} s (deadline_sec) from the opening of its gate"
    return AttemptFailure(
        kind=FailureKind.FAILURE, code=reason_codes.DEADLINE_EXCEEDED, message=message, permanent=True
    )
