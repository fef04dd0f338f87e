"""Bearer tokens of the HTTP server, and what they permit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from datetime import datetime

MAX_ACTOR = 2**32 - 1
"""The largest number of an actor; the smallest one is 0."""


JOB_ROLE: Final = "job"
"""The role of the nodes of flows. A token may use it in a graph of its own only if it names it."""


class Right(StrEnum):
    """What a token permits. A process ignores rights in the database that it does not know."""

    OPERATOR = "operator"
    """Everything, for every actor."""
    FLOWS = "flows"
    """The flows of the actor that the token names."""
    ADMISSION = "admission"
    """The requests for admission of the actor: to submit, see, cancel and repeat them."""
    TASKS_READ = "tasks.read"
    """To see all tasks of the database, on the page."""
    TASKS_OPERATE = "tasks.operate"
    """To change all tasks of the database, on the page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A token as MongoDB has it: everything but its secret."""

    token_id: str
    actor: int | None
    """The actor for which the token acts; None for an operator who acts for every actor."""
    rights: frozenset[Right]
    roles: frozenset[str] | None
    """The roles and coordinator functions that graphs of the actor may use; None for all but JOB_ROLE."""
    note: str
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None

    def refusal(self, at: datetime) -> str | None:
        """Return why the token is not valid at this time, `revoked` or `expired`; None if it is valid."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and at >= self.expires_at else None
