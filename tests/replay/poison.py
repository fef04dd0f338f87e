"""Poisoned histories, which no version of the workflow can have written: recorded ones with one change. Pure."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

History = dict[str, Any]

_SCHEDULED = "activityTaskScheduledEventAttributes"


def _scheduled(history: History, activity_id: str) -> dict[str, Any]:
    found = (event[_SCHEDULED] for event in history["events"] if _SCHEDULED in event)
    return next(each for each in found if each["activityId"] == activity_id)


def _other_id(chain: History) -> None:
    _scheduled(chain, "b.1")["activityId"] = "b.2"


def _other_type(chain: History) -> None:
    _scheduled(chain, "b.1")["activityType"]["name"] = "slow"


def _other_order(diamond: History) -> None:
    left, third = _scheduled(diamond, "left.1"), _scheduled(diamond, "third.1")
    kept = dict(left)
    left.update(third)
    third.update(kept)


POISONS: dict[str, tuple[str, Callable[[History], None]]] = {
    "activity_id": ("chain", _other_id),
    "activity_type": ("chain", _other_type),
    "order": ("diamond", _other_order),
}
"""Name of the poisoned history: its original shape, and the function that changes it."""


def poisoned(name: str, histories: dict[str, History]) -> History:
    """Return a poisoned copy of a recorded history."""
    shape, change = POISONS[name]
    history = copy.deepcopy(histories[shape])
    change(history)
    return history
