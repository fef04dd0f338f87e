"""Who may begin an attempt while a task has as many in flight as it may. Pure."""

from __future__ import annotations

from collections import Counter, deque


class Slots:
    """At most `limit` attempts of a task at once, and at most `window` of one role.

    A slot that becomes free goes to the roles that wait, in turn, and within a role to the node that waits longest.
    """

    def __init__(self, *, limit: int, window: int) -> None:
        self._limit = limit
        self._window = window
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[int]] = {}
        """Tickets by role; the roles in the order of their turns."""

    @property
    def in_use(self) -> int:
        """Slots that are taken."""
        return self._taken.total()

    def in_use_by(self, role: str) -> int:
        """Slots that a role has taken."""
        return self._taken[role]

    def take(self, role: str) -> bool:
        """Take a slot if one is free. A free slot that the role may have is one that no waiting node may have."""
        if not self._has_room(role):
            return False
        self._taken[role] += 1
        return True

    def wait(self, role: str, ticket: int) -> None:
        """Queue up for a slot."""
        self._waiting.setdefault(role, deque()).append(ticket)

    def give_back(self, role: str) -> list[int]:
        """Return a slot; returns the tickets that have one now."""
        self._taken[role] -= 1
        granted: list[int] = []
        while (following := self._next_role()) is not None:
            granted.append(self._grant(following))
        return granted

    def leave(self, role: str, ticket: int) -> bool:
        """Stop waiting; False when the ticket has its slot already, which then must be given back."""
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
