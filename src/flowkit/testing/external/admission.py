"""Decides which commands a worker executes. The order of the checks is part of the protocol."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowkit.testing.external.settings import ExternalSettings
    from flowkit.testing.external.wire import Incoming


class Seen:
    """The `dedup_id`s of recent commands, bounded in number and age."""

    def __init__(self, size: int, ttl_ms: int) -> None:
        self._size = size
        self._ttl_ms = ttl_ms
        self._ids: OrderedDict[str, int] = OrderedDict()

    def add(self, dedup_id: str, now_ms: int) -> bool:
        """Record an id, and return whether it is new."""
        while self._ids and next(iter(self._ids.values())) <= now_ms - self._ttl_ms:
            self._ids.popitem(last=False)
        if dedup_id in self._ids:
            return False
        self._ids[dedup_id] = now_ms
        if len(self._ids) > self._size:
            self._ids.popitem(last=False)
        return True


class Admission:
    """The checks of a command before its payload is read."""

    def __init__(self, settings: ExternalSettings) -> None:
        self._seen = Seen(settings.dedup_cache_size, settings.dedup_ttl_ms)

    def refusal(self, command: Incoming, role: str, now_ms: int) -> str | None:
        """Return why the worker ignores a command of a role's topic, or None. Remembers every `dedup_id`."""
        if not self._seen.add(command.dedup_id, now_ms):
            return "duplicate"
        if (command.msg_type, command.role) != ("cmd", "coordinator"):
            return "not_a_command"
        if command.step_type != role:
            return "other_role"
        if command.payload.get("cmd") not in ("TASK_START", "TASK_CANCEL"):
            return "unknown_command"
        return None
