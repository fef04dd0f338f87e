"""A model of deadlines, written from docs/graphs/failures.md. It shares no code with FlowKit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.fuzz.plans import Plan

DEADLINE_EXCEEDED = "deadline_exceeded"


class TimeLimits:
    """When the deadlines of one task began. Times are seconds since the task was opened."""

    def __init__(self, plan: Plan) -> None:
        self._limits = {step.name: step.deadline for step in plan.steps if step.deadline is not None}
        self._task = plan.deadline
        self._ends: dict[str, float] = {}
        """When a node must have ended."""
        self.stopping: set[str] = set()
        """Nodes that have exceeded their deadlines and fail when their attempts have ended."""
        self.is_overdue = False
        """Whether the task has exceeded its deadline."""

    def begin(self, startable: Collection[str], now: float) -> None:
        """Begin the deadlines of the nodes that may start. A deadline never moves."""
        for name in startable:
            if name in self._limits:
                self._ends.setdefault(name, now + self._limits[name])

    def begun(self, open_nodes: Collection[str]) -> dict[str, float]:
        """Return when the open nodes must have ended whose deadlines have begun."""
        return {name: at for name, at in self._ends.items() if name in open_nodes}

    def next(self, open_nodes: Collection[str]) -> float | None:
        """Return the next moment at which a deadline passes."""
        ahead = [at for name, at in self.begun(open_nodes).items() if name not in self.stopping]
        return min([*ahead, *([] if self._task is None else [self._task])], default=None)

    def pass_until(self, now: float, open_nodes: Collection[str], running: Collection[str]) -> list[str]:
        """Return the waiting nodes that fail now. Running ones are `stopping` from now on."""
        passed = {name for name, at in self.begun(open_nodes).items() if at <= now}
        self.stopping |= passed & set(running)
        self.is_overdue = self._task is not None and self._task <= now
        return sorted(passed - set(running))
