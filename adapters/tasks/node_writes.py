"""The writes by which a coordinator function takes a node, does its work once and ends, in one update if it can.

An effect is counted once for each (node, generation): the mark stands on the node's own entry, and the update that
does the work tests it. A retry of the node, another attempt after a crash or a reset finds it; a rerun has a new
generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowkit.adapters.tasks import task_fields

if TYPE_CHECKING:
    from flowkit.models import AttemptInput

MARK = "applied_generation"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWrite:
    """One attempt of a function node, as its writes need it."""

    attempt: AttemptInput
    run_id: str
    lease: dict[str, Any] = field(default_factory=dict)
    at: float = 0.0

    @property
    def path(self) -> str:
        """Where the node's entry stands in the document."""
        return f"graph.nodes.{self.attempt.index}"

    @property
    def may_begin(self) -> dict[str, Any]:
        """Filter: the attempt may begin in a document that is neither closed nor flagged; else TaskStore.begin_attempt comes first."""
        return task_fields.open_attempt_filter(self.attempt, self.run_id)

    @property
    def not_applied(self) -> dict[str, Any]:
        """Filter: this generation of the node has had no effect yet."""
        return {f"{self.path}.{MARK}": {"$not": {"$gte": self.attempt.generation}}}

    @property
    def done(self) -> dict[str, Any]:
        """`$set`: begun and finished at once, and the effect is counted."""
        begun = task_fields.attempt_begun(self.attempt, self.run_id, self.lease, self.at)
        finished = task_fields.attempt_finished(self.attempt, self.at)
        return begun | finished | {f"{self.path}.{MARK}": self.attempt.generation}

    @property
    def forgets(self) -> dict[str, Any]:
        """`$unset`: what an earlier end of the node has left."""
        left = task_fields.attempt_unset(self.attempt)
        return {path: "" for path in left if path != f"{self.path}.finished_at"}

    def applied(self, document: dict[str, Any]) -> bool:
        """Whether the document says that this generation has had its effect."""
        marked = self._entry(document).get(MARK)
        return isinstance(marked, int) and marked >= self.attempt.generation

    def finished(self, document: dict[str, Any]) -> bool:
        """Whether the document says that this very attempt has finished the node."""
        entry, attempt = self._entry(document), self.attempt
        held = (entry.get("attempt_epoch"), entry.get("run_id"), entry.get("status"))
        return held == (attempt.epoch, self.run_id, "finished")

    def _entry(self, document: dict[str, Any]) -> dict[str, Any]:
        nodes = document.get("graph", {}).get("nodes", [])
        entry: dict[str, Any] = nodes[self.attempt.index] if self.attempt.index < len(nodes) else {}
        return entry if entry.get("node_id") == self.attempt.node_id else {}
