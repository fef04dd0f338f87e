"""What happened in a worker: every record that it sent, and every step that tests wait for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing that happened in a worker.

    A record that the broker has acknowledged has the kind of its message, such as `TASK_ACCEPTED`, and all fields. A
    step of the worker itself has a kind in lower case; `reason` explains it.
    """

    kind: str
    task_id: str = ""
    node_id: str = ""
    attempt_epoch: int | None = None
    reason: str = ""
    topic: str = ""
    key: str | None = None
    value: bytes | None = None
    """The exact value of the record."""
    message: dict[str, Any] = field(default_factory=dict)
    partition: int = -1
    offset: int = -1

    @property
    def payload(self) -> dict[str, Any]:
        """The payload of the message."""
        return self.message.get("payload") or {}


class Journal:
    """All entries of a worker, across its restarts."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._waiting: list[tuple[Callable[[Entry], bool], asyncio.Future[None]]] = []

    def add(self, entry: Entry) -> None:
        """Record an entry and wake whoever waits for it."""
        self.entries.append(entry)
        for matches, future in self._waiting:
            if not future.done() and matches(entry):
                future.set_result(None)

    def note(self, kind: str, reason: str = "", about: Any = None) -> None:
        """Record a step of the worker. `about` is a run or an envelope."""
        place = {name: getattr(about, name) for name in ("task_id", "node_id", "attempt_epoch") if about}
        self.add(Entry(kind=kind, reason=reason, **place))

    def matching(self, matches: Callable[[Entry], bool]) -> list[Entry]:
        """Return the recorded entries that match."""
        return [entry for entry in self.entries if matches(entry)]

    async def wait_for(
        self, matches: Callable[[Entry], bool], *, count: int = 1, within: float = 30, what: str = "entry"
    ) -> Entry:
        """Return the entry that is the `count`-th match, as soon as it exists. Raise TimeoutError after `within`."""
        try:
            async with asyncio.timeout(within):
                while len(found := self.matching(matches)) < count:
                    await self._next(matches)
        except TimeoutError:
            kinds = ", ".join(entry.kind for entry in self.entries[-30:]) or "nothing"
            raise TimeoutError(
                f"the external worker recorded {len(self.matching(matches))} of {count} {what} within {within} s; "
                f"it recorded: {kinds}"
            ) from None
        return found[count - 1]

    async def _next(self, matches: Callable[[Entry], bool]) -> None:
        waiter = (matches, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            await waiter[1]
        finally:
            self._waiting.remove(waiter)


def about(
    kind: str, task: str | None = None, node: str | None = None, epoch: int | None = None
) -> Callable[[Entry], bool]:
    """Return a condition for entries of a kind, and optionally of a task, a node and an epoch."""
    wanted = {"kind": kind, "task_id": task, "node_id": node, "attempt_epoch": epoch}
    given = {name: value for name, value in wanted.items() if value is not None}
    return lambda entry: all(getattr(entry, name) == value for name, value in given.items())
