"""What must change so that the schedules of a deployment are those of a file. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from flowkit.core.utils import same_json
from flowkit.text import printable, truncate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flowkit.schedules.times import ScheduleTimes

_SHOWN_CHARS = 60
_TITLE_CHARS = 100


class ScheduleStep(StrEnum):
    """What `apply` does with a schedule."""

    CREATE = "create"
    UPDATE = "update"
    KEEP = "keep"
    """It is as the file says."""
    DELETE = "delete"
    UNLISTED = "unlisted"
    """The file does not name it, and `apply` leaves it as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleDefinition:
    """A schedule as a file describes it."""

    graph: dict[str, Any]
    params: dict[str, Any]
    times: ScheduleTimes

    @property
    def title(self) -> str | None:
        """The name of the graph, as Temporal's Web UI shows it beside each task; None without a name."""
        name = self.graph.get("name")
        return truncate(name, _TITLE_CHARS) if isinstance(name, str) else None

    def starts_same(self, other: ScheduleDefinition) -> bool:
        """Return whether tasks of both have the same graph and params."""
        return same_json([self.graph, self.params], [other.graph, other.params])

    @property
    def is_lost(self) -> bool:
        """Whether the collection stored_graphs no longer has the graph and the params."""
        return not self.graph


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleChange:
    """What `apply` does, or would do, with a schedule."""

    name: str
    step: ScheduleStep
    differences: tuple[str, ...] = ()
    """What an update changes, one line each."""

    def as_json(self) -> dict[str, Any]:
        """Return the change in JSON types."""
        return {"name": self.name, "step": self.step.value, "differences": list(self.differences)}


def plan_changes(
    wanted: Mapping[str, ScheduleDefinition], present: Mapping[str, ScheduleDefinition], *, prune: bool
) -> list[ScheduleChange]:
    """Return a change for each wanted and each present schedule. Only `prune` deletes those that are not wanted."""
    changes = []
    for name, definition in wanted.items():
        if name not in present:
            changes.append(ScheduleChange(name=name, step=ScheduleStep.CREATE))
            continue
        differences = tuple(find_differences(present[name], definition))
        step = ScheduleStep.UPDATE if differences else ScheduleStep.KEEP
        changes.append(ScheduleChange(name=name, step=step, differences=differences))
    extra = ScheduleStep.DELETE if prune else ScheduleStep.UNLISTED
    return [*changes, *(ScheduleChange(name=name, step=extra) for name in present if name not in wanted)]


def find_differences(before: ScheduleDefinition, after: ScheduleDefinition) -> Iterator[str]:
    """Yield one line for each option and each param that differs, and one for the graph."""
    old, new = ({**each.times.as_json(), "edited": None} for each in (before, after))
    if before.times.edited and not after.times.edited:
        yield f"its times in Temporal are not those of a cron expression or every; they become {after.times.text}"
    yield from _differences("", old, new)
    yield from _differences("params.", before.params, after.params)
    if not same_json(before.graph, after.graph):
        nodes = [len(each.graph.get("nodes") or ()) for each in (before, after)]
        counts = f", {nodes[0]} → {nodes[1]} nodes" if nodes[0] != nodes[1] else ""
        yield f"the graph changes{counts}"


def _differences(prefix: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys([*old, *new]):
        if (key in old) != (key in new) or not same_json(old.get(key), new.get(key)):
            yield f"{prefix}{key}: {_show(old, key)} → {_show(new, key)}"


def _show(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "(default)"
    return printable(truncate(json.dumps(values[key], ensure_ascii=False), _SHOWN_CHARS))
