"""Limit how many attempts of a task are in flight, and queue the nodes that wait for a slot. Pure."""

from __future__ import annotations

from collections import Counter, deque


class Slots:
    """Slots for at most `limit` attempts of a task at once, and at most `window` attempts of one role.

    Waiting roles get free slots in turn. Within a role, the node that has waited longest gets the slot.
    """

    def __init__(self, *, limit: int, window: int) -> None:
        self._limit = limit
        self._window = window
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[int]] = {}
        """Waiting tickets by role; roles are in the order of their turns."""

    @property
    def in_use(self) -> int:
        """Number of slots in use."""
        return self._taken.total()

    def in_use_by(self, role: str) -> int:
        """Return the number of slots that `role` uses."""
        return self._taken[role]

    def take(self, role: str) -> bool:
        """Take a slot, and return whether one was free.

        If one is free, no waiting node can use it, because the roles that wait have used up their windows.
        """
        if not self._has_room(role):
            return False
        self._taken[role] += 1
        return True

    def wait(self, role: str, ticket: int) -> None:
        """Add `ticket` to the nodes of `role` that wait for a slot."""
        self._waiting.setdefault(role, deque()).append(ticket)

    def give_back(self, role: str) -> list[int]:
        """Free a slot of `role`. Return the tickets that get a slot now."""
        self._taken[role] -= 1
        granted: list[int] = []
        while (following := self._next_role()) is not None:
            granted.append(self._grant(following))
        return granted

    def leave(self, role: str, ticket: int) -> bool:
        """Stop waiting. Return False if the ticket already has its slot; the caller must then give it back."""
        queue = self._waiting.get(role, deque())
        if ticket not in queue:
            return False
        queue.remove(ticket)
        if not queue:
            del self._waiting[role]
        return True

    def _has_room(self, role: str) -> bool:
        return self.in_use < self._limit and self._taken[role] < self._window

    def _next_role(self) -> str | None:
        return next((role for role in self._waiting if self._has_room(role)), None)

    def _grant(self, role: str) -> int:
        queue = self._waiting.pop(role)
        ticket = queue.popleft()
        if queue:
            self._waiting[role] = queue
        self._taken[role] += 1
        return ticket
