"""Limit how many attempts of a task are in flight, and queue the attempts that wait for a slot. Pure."""

from __future__ import annotations

from collections import Counter, deque


class Slots:
    """Slots for at most `limit` attempts of a task at once, and at most `window` attempts of one role.

    Waiting roles get free slots in turn. Within a role, the attempt that has waited longest gets the slot. A ticket is
    a number by which the caller identifies an attempt that waits.
    """

    def __init__(self, *, limit: int, window: int) -> None:
        self._limit = limit
        self._window = window
        self._used: Counter[str] = Counter()
        self._waiting: dict[str, deque[int]] = {}
        """Waiting tickets by role. The first role with room in its window gets the next free slot."""

    @property
    def in_use(self) -> int:
        """Number of slots in use."""
        return self._used.total()

    def in_use_by(self, role: str) -> int:
        """Return the number of slots that `role` uses."""
        return self._used[role]

    def try_acquire(self, role: str) -> bool:
        """Use a slot for `role` if one is free. Return whether there was one.

        This never overtakes a waiting attempt: while a slot is free, attempts wait only if the window of their role is
        full.
        """
        if not self._has_room(role):
            return False
        self._used[role] += 1
        return True

    def enqueue(self, role: str, ticket: int) -> None:
        """Add `ticket` to the queue of `role`."""
        self._waiting.setdefault(role, deque()).append(ticket)

    def release(self, role: str) -> list[int]:
        """Free a slot of `role`. Return the tickets that get a slot now."""
        self._used[role] -= 1
        granted: list[int] = []
        while (waiting_role := self._next_role()) is not None:
            granted.append(self._grant(waiting_role))
        return granted

    def cancel_wait(self, role: str, ticket: int) -> bool:
        """Remove `ticket` from the queue. Return False if it already has its slot; the caller must then release it."""
        queue = self._waiting.get(role, deque())
        if ticket not in queue:
            return False
        queue.remove(ticket)
        if not queue:
            del self._waiting[role]
        return True

    def _has_room(self, role: str) -> bool:
        return self.in_use < self._limit and self._used[role] < self._window

    def _next_role(self) -> str | None:
        return next((role for role in self._waiting if self._has_room(role)), None)

    def _grant(self, role: str) -> int:
        queue = self._waiting.pop(role)
        ticket = queue.popleft()
        if queue:
            self._waiting[role] = queue
        self._used[role] += 1
        return ticket
