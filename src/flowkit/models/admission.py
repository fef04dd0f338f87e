"""For whom a task is submitted, and with which priority: what `create_task(admit=…)` takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_TENANT: Final = "default"


class Priority(StrEnum):
    """The bands of the queue, the most urgent one first."""

    CRITICAL = "critical"
    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"
    BACKGROUND = "background"

    @property
    def rank(self) -> int:
        """1 for the most urgent band to 5, which is also Temporal's priority key."""
        return RANKS[self]


RANKS: Final[Mapping[str, int]] = {each.value: rank for rank, each in enumerate(Priority, 1)}
BY_RANK: Final[Mapping[int, Priority]] = {rank: Priority(name) for name, rank in RANKS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """For whom a task is submitted to the admission queue, and with which priority."""

    user_id: str
    tenant: str = DEFAULT_TENANT
    priority: Priority | str = Priority.NORMAL
