"""The data of the report."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from code_index.chaos import Incident
    from code_index.documents import Documents
    from code_index.result import IndexResult


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """A finished task of the demo, with data that its documents do not contain."""

    documents: Documents
    result: IndexResult
    incident: Incident | None
    web_ui: str
    environment: dict[str, str]

    @property
    def source(self) -> str:
        """The indexed folder."""
        return str(self.documents.task["params"]["source"])

    @property
    def started_at(self) -> datetime:
        """Start of the task."""
        return datetime.fromisoformat(self.documents.task["started_at"])

    @property
    def finished_at(self) -> datetime:
        """End of the task."""
        finished_at: datetime = self.documents.task["finished_at"]
        return finished_at

    @property
    def seconds(self) -> float:
        """Duration of the task."""
        return self.since_start(self.finished_at)

    def since_start(self, moment: datetime) -> float:
        """Return the seconds from the start of the task to `moment`."""
        return (moment - self.started_at).total_seconds()
