"""What the workflow and the engine exchange about the limits across tasks."""

from __future__ import annotations

from dataclasses import field

from pydantic import dataclasses as wire


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The slot of one attempt."""

    node_id: str
    epoch: int
    role: str
    withdrawn: bool = False
    """Whether the attempt may still wait for the slot, so that its request must be removed."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class SlotRequest:
    """Input of `acquire_slot` and `await_slot`. A task has at most one waiting request for each role."""

    task_id: str
    node_id: str
    epoch: int
    role: str
    run_id: str = ""
    """The run that asks. The activity sets it, because Reset copies the input of an earlier run."""
    priority: int = 0
    release: list[Slot] = field(default_factory=list)
    """Slots of the task that become free first, which saves an activity."""
    asked_at: float = 0.0
    """When the workflow began to wait for the slot. 0 if it does not wait."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class SlotReply:
    """Result of `acquire_slot` and `await_slot`."""

    granted: bool
    reason: str = ""
    """Why the slot was not granted, such as `12 of 12`."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseSlots:
    """Input of `release_slots`."""

    task_id: str
    slots: list[Slot] = field(default_factory=list)
    whole_task: bool = False
    """Whether the task ends, so that all of its slots and requests become free."""


def slot_wait_id(node_id: str, epoch: int) -> str:
    """Return the id of the activity `await_slot`. Ids of attempts end in a number, so it is never one of them."""
    return f"{node_id}.{epoch} slot"
