"""The fields by which a coordinator function begins, takes effect exactly once and finishes, in one update if possible.

An effect counts once for each (node, generation). The update that has the effect marks the node's entry, and its filter
checks the mark. Retries and attempts after a crash or a reset therefore see the mark. A rerun has a new generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowkit.adapters.tasks import fields as task_fields

if TYPE_CHECKING:
    from flowkit.models import AttemptInput

MARK = "applied_generation"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWrite:
    """Filters and fields for the writes of one attempt of a coordinator function."""

    attempt: AttemptInput
    run_id: str
    lease: dict[str, Any] = field(default_factory=dict)
    at: float = 0.0

    @property
    def path(self) -> str:
        """Return the path of the node's entry in the document."""
        return f"graph.nodes.{self.attempt.index}"

    @property
    def may_begin(self) -> dict[str, Any]:
        """Return the filter for documents that are neither closed nor flagged and in which the attempt may begin.

        For other documents, call `TaskStore.begin_attempt` first.
        """
        return task_fields.open_attempt_filter(self.attempt, self.run_id)

    @property
    def not_applied(self) -> dict[str, Any]:
        """Return the filter for documents in which this generation of the node has had no effect yet."""
        return {f"{self.path}.{MARK}": {"$not": {"$gte": self.attempt.generation}}}

    @property
    def done(self) -> dict[str, Any]:
        """Return the `$set` that begins and finishes the attempt and counts its effect."""
        begun = task_fields.attempt_begun(self.attempt, self.run_id, self.lease, self.at)
        finished = task_fields.attempt_finished(self.attempt, self.at)
        return begun | finished | {f"{self.path}.{MARK}": self.attempt.generation}

    @property
    def unsets(self) -> dict[str, Any]:
        """Return the `$unset` for fields that an earlier end of the node has left."""
        left = task_fields.attempt_unset(self.attempt)
        return {path: "" for path in left if path != f"{self.path}.finished_at"}

    def applied(self, document: dict[str, Any]) -> bool:
        """Return True if, according to the document, this generation has had its effect."""
        marked = self._entry(document).get(MARK)
        return isinstance(marked, int) and marked >= self.attempt.generation

    def finished(self, document: dict[str, Any]) -> bool:
        """Return True if, according to the document, this attempt has finished the node."""
        entry, attempt = self._entry(document), self.attempt
        held = (entry.get("attempt_epoch"), entry.get("run_id"), entry.get("status"))
        return held == (attempt.epoch, self.run_id, "finished")

    def _entry(self, document: dict[str, Any]) -> dict[str, Any]:
        nodes = document.get("graph", {}).get("nodes", [])
        entry: dict[str, Any] = nodes[self.attempt.index] if self.attempt.index < len(nodes) else {}
        return entry if entry.get("node_id") == self.attempt.node_id else {}
