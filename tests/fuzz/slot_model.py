"""A model of the concurrency limits, written from docs/concurrency.md. It shares no code with FlowKit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Attempt(NamedTuple):
    """One attempt of a node."""

    task: str
    node: str
    epoch: int
    role: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a waiting attempt."""

    attempt: Attempt
    turn: int
    priority: int
    since: float

    @property
    def order(self) -> tuple[int, int, float]:
        """Whose turn is earlier, then the higher priority, then the longer wait."""
        return self.turn, -self.priority, self.since


@dataclass
class SlotModel:
    """Which attempts hold a slot, and which wait for one."""

    total: int | None
    by_role: dict[str, int]
    served: set[str]
    """Roles with a worker."""
    holders: set[Attempt] = field(default_factory=set)
    places: dict[tuple[str, str], Place] = field(default_factory=dict)
    """The waiting attempts: one for each task and role."""
    turn: int = 0
    overtaken: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """For each waiting attempt, the tasks that got a slot of its role after a wait meanwhile."""

    def in_use(self, role: str | None = None) -> int:
        """Return the number of slots that a role uses, or all roles together."""
        return sum(role in {None, attempt.role} for attempt in self.holders)

    def order(self) -> list[Attempt]:
        """Return the waiting attempts, the first one first."""
        return [place.attempt for place in sorted(self.places.values(), key=lambda place: place.order)]

    def refusal(self, attempt: Attempt) -> str | None:
        """Return why an attempt that asks for a slot must wait. If it need not, it holds one from now on."""
        rivals = [each for each in self.places.values() if each.attempt.role != attempt.role]
        is_first = len(rivals) == len(self.places) and not any(
            self._may_have(each.attempt.role) for each in rivals
        )
        if attempt in self.holders or (is_first and self._may_have(attempt.role)):
            self.holders.add(attempt)
            return None
        return self._reason(attempt.role)

    def refusals(self, attempts: list[Attempt]) -> list[str | None]:
        """Return the refusals of attempts that ask in one call.

        The first refusal of a role applies to the later ones.
        """
        known: dict[str, str] = {}
        found = []
        for attempt in attempts:
            held = attempt in self.holders
            refusal = None if held else known.get(attempt.role) or self.refusal(attempt)
            if refusal is not None:
                known[attempt.role] = refusal
            found.append(refusal)
        return found

    def wait(self, attempt: Attempt, priority: int, now: float) -> None:
        """Let an attempt wait. It takes the place of another attempt of the same task and role."""
        if attempt in self.holders:
            return
        key = (attempt.task, attempt.role)
        turn, since = self.turn + 1, now
        if key in self.places:
            turn, since = self.places[key].turn, self.places[key].since
        self.places[key] = Place(attempt=attempt, turn=turn, priority=priority, since=since)
        self.overtaken.setdefault(key, [])

    def grant(self) -> list[Attempt]:
        """Give the free slots to the attempts that wait. Return those that got one."""
        granted = []
        for attempt in self.order():
            if self._may_have(attempt.role):
                granted.append(attempt)
                place = self.places.pop((attempt.task, attempt.role))
                self._note_overtaken(attempt)
                self.turn = max(self.turn, place.turn)
                self.holders.add(attempt)
        return granted

    def _note_overtaken(self, attempt: Attempt) -> None:
        del self.overtaken[attempt.task, attempt.role]
        for (_, role), tasks in self.overtaken.items():
            if role == attempt.role:
                tasks.append(attempt.task)

    def most_overtaken(self) -> int:
        """Return how often one task has overtaken the same waiting attempt."""
        return max((tasks.count(task) for tasks in self.overtaken.values() for task in tasks), default=0)

    def release(self, attempt: Attempt, *, withdrawn: bool = False) -> None:
        """Free the slot of an attempt if it holds one. If it is `withdrawn`, it no longer waits either."""
        self.holders.discard(attempt)
        if withdrawn:
            self.drop([key for key, place in self.places.items() if place.attempt == attempt])

    def release_task(self, task: str) -> None:
        """Free all slots of a task, and let none of its attempts wait."""
        self.holders = {attempt for attempt in self.holders if attempt.task != task}
        self.drop([key for key in self.places if key[0] == task])

    def drop(self, keys: list[tuple[str, str]]) -> None:
        """Let these attempts wait no longer."""
        for key in keys:
            del self.places[key]
            del self.overtaken[key]

    def _is_full(self, role: str) -> bool:
        return role in self.by_role and self.in_use(role) >= self.by_role[role]

    def _may_have(self, role: str) -> bool:
        """Return whether a slot of the role is free, and the role has workers or needs none."""
        limited = self.total is not None or role in self.by_role
        full = self._is_full(role) or (self.total is not None and self.in_use() >= self.total)
        return not full and (role in self.served or not limited)

    def _reason(self, role: str) -> str:
        if self._is_full(role):
            return f"{self.in_use(role)} of {self.by_role[role]}"
        if self.total is not None and self.in_use() >= self.total:
            return f"{self.in_use()} of {self.total} over all roles"
        limited = self.total is not None or role in self.by_role
        return "no worker serves the role" if limited and role not in self.served else "other tasks are first"
