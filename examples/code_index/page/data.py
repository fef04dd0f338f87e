"""What the report is made of."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from code_index.chaos import Incident
    from code_index.documents import Documents
    from code_index.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished task of the demo, and around it what the documents do not tell."""

    documents: Documents
    outcome: Outcome
    incident: Incident | None
    web_ui: str
    environment: dict[str, str]

    @property
    def source(self) -> str:
        """The folder that was indexed."""
        listing = self.documents.task["graph"]["nodes"][0]["io"]["input_inline"]
        return str(listing["source"])

    @property
    def began(self) -> datetime:
        """When the task began."""
        return datetime.fromisoformat(self.documents.task["started_at"])

    @property
    def ended(self) -> datetime:
        """When it had finished."""
        finished: datetime = self.documents.task["finished_at"]
        return finished

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.since_start(self.ended)

    def since_start(self, moment: datetime) -> float:
        """Seconds from the task's start to `moment`."""
        return (moment - self.began).total_seconds()
