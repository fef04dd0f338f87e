"""The lines of one attempt that wait for MongoDB, within their bounds: the first part of a log, and its last part."""

from __future__ import annotations

import secrets
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flowkit.core.instruments import LOG_LINES_DROPPED
from flowkit.core.user_code import contained
from flowkit.limits import ATTEMPT_LOG_BYTES, LOG_LINE_BYTES
from flowkit.masks import Mask
from flowkit.text import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from flowkit.core.handler_lines import HandlerLine
    from flowkit.models import AttemptInput

HEAD_BYTES: Final = ATTEMPT_LOG_BYTES // 2
TAIL_BYTES: Final = ATTEMPT_LOG_BYTES - HEAD_BYTES
MAX_PROCESS_BYTES: Final = 32 << 20
"""Most bytes of lines that wait in one process while MongoDB is unavailable."""
ROW_BYTES: Final = 64 << 10
"""Most bytes of the lines in one document."""
LINE_OVERHEAD: Final = 100
"""Bytes that MongoDB needs for a line beside its text."""
ROW_OVERHEAD: Final = 400
"""Bytes that MongoDB needs for a document beside its lines."""

BOUND: Final = "bound"
OUTAGE: Final = "outage"
REFUSED: Final = "refused"
"""Why lines are not kept."""

_LEVELS: Final = ((50, "CRITICAL"), (40, "ERROR"), (30, "WARNING"), (20, "INFO"))
_END_BYTES: Final = 4 << 10
"""How much of the end of a long line is kept."""
_MARGIN: Final = 4 << 10
"""Characters beside each end that are kept until secrets are hidden: a cut could make a secret unrecognizable."""
_CUT: Final = f"\x00{secrets.token_hex(8)}\x00"
"""Marks the place of what a long line has lost, with its number of characters, until secrets are hidden.

No text of a handler contains it, since it differs in each process.
"""


class _Numbered(NamedTuple):
    number: int
    size: int
    line: HandlerLine


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """Lines of an attempt that become one document."""

    document: dict[str, Any]
    size: int
    role: str
    levels: dict[int, int] = field(default_factory=dict)
    """Number of its lines by level."""
    may_go: Callable[[], bool] = lambda: False
    """Returns whether later lines of the attempt may replace this document."""


@dataclass(slots=True)
class WaitingBytes:
    """The bytes of all lines of a process that wait."""

    used: int = 0


class LineBuffer:
    """The lines of one attempt that wait. `add` can be called on any thread; it needs some microseconds."""

    def __init__(
        self,
        attempt: AttemptInput,
        worker_id: str,
        *,
        level: int,
        prints: bool,
        lock: AbstractContextManager[Any],
        room: WaitingBytes,
        changed: Callable[[LineBuffer], None],
    ) -> None:
        """Prepare the buffer. `lock` guards the buffers of a process, and `room` counts what waits in all of them.

        The lock is reentrant: the finalizer of a user's object, which Python may call at any time, may log.
        `changed` is called, under the lock, when the first line begins to wait.
        """
        self.level = level
        self.prints = prints
        self.role = attempt.role
        self._place = {
            "task_id": attempt.task_id,
            "node_id": attempt.node_id,
            "attempt_epoch": attempt.epoch,
            "shard": attempt.shard,
            "worker_id": worker_id,
        }
        self._lock = lock
        self._room = room
        self._changed = changed
        self._head: list[_Numbered] = []
        self._tail: deque[_Numbered] = deque()
        self._head_left = HEAD_BYTES
        self._tail_bytes = 0
        self._number = 0
        self._last_at = 0.0
        self._dropped = 0
        self.has_ended = False
        """Whether the attempt has ended."""
        self._mask = Mask()
        self._inputs: list[Callable[[], Any]] = []
        """Return what may hold secrets. They are called when there are lines."""
        self._id = ""
        self._rows = 0
        self._stored_tail: deque[tuple[str, int]] = deque()
        """The documents of the last part: their ids and sizes."""
        self._stored_bytes = 0
        """The sum of their sizes."""

    def mask(self, values: Any, given: Callable[[], Any]) -> None:
        """Hide `values`, and the values of keys such as `password` in what `given` returns."""
        if values:
            self._mask.add_values(values)
        self._inputs.append(given)

    def add(self, line: HandlerLine) -> None:
        """Take a line, or count it if there is no room."""
        text = _cut(line.text, max(_MARGIN, self._mask.longest))
        size = LINE_OVERHEAD + (len(text) if text.isascii() else len(text.encode("utf-8", "replace")))
        with self._lock:
            self._number = number = self._number + 1
            if self._room.used + size > MAX_PROCESS_BYTES:
                LOG_LINES_DROPPED.add(self.role, OUTAGE)
                return
            self._last_at = at = max(line.at, self._last_at)
            self._room.used += size
            if text is not line.text or at != line.at:
                line = line._replace(text=text, at=at)
            taken = _Numbered(number, size, line)
            if self._head_left > 0:
                self._head_left -= size if self._head else size + ROW_OVERHEAD
                self._head.append(taken)
            else:
                self._add_to_tail(taken)
            self._changed(self)

    def _add_to_tail(self, taken: _Numbered) -> None:
        self._tail.append(taken)
        self._tail_bytes += taken.size
        while self._tail_bytes > TAIL_BYTES and len(self._tail) > 1:
            gone = self._tail.popleft()
            self._tail_bytes -= gone.size
            self._room.used -= gone.size
            self._dropped += 1

    def end(self) -> None:
        """Note the end of the attempt: what is stored of the last part stays, unless threads log more."""
        with self._lock:
            self.has_ended = True
            if self._stored_tail:
                self._changed(self)

    def take(self) -> tuple[list[LogRow], list[str]]:
        """Return what waits, as documents, and the ids of those that have to go because of them.

        Count the lines that did not wait for this call. The caller counts the others, once their documents are stored,
        refused or deleted.
        """
        with self._lock:
            head, self._head = self._head, []
            tail, self._tail = self._tail, deque()
            self._tail_bytes = 0
            dropped, self._dropped = self._dropped, 0
        self._read_inputs()
        rows = [self._make_row(lines) for lines in _split(head)]
        gone: list[str] = []
        for lines in _split(tail):
            row = replace(self._make_row(lines), may_go=lambda: not self.has_ended)
            rows.append(row)
            self._stored_tail.append((row.document["_id"], row.size + ROW_OVERHEAD))
            self._stored_bytes += row.size + ROW_OVERHEAD
            while self._stored_bytes > TAIL_BYTES and len(self._stored_tail) > 1:
                row_id, size = self._stored_tail.popleft()
                self._stored_bytes -= size
                gone.append(row_id)
        if dropped:
            LOG_LINES_DROPPED.add(self.role, BOUND, amount=dropped)
        return rows, gone

    def stored_tail(self) -> list[str]:
        """Return the ids of the documents of the last part."""
        return [row_id for row_id, _ in self._stored_tail]

    def _read_inputs(self) -> None:
        """Look for secrets in the inputs, once."""
        inputs, self._inputs = self._inputs, []
        for each in inputs:
            with suppress(Exception), contained:
                self._mask.add(each())

    def _make_row(self, lines: list[_Numbered]) -> LogRow:
        self._id = self._id or secrets.token_hex(8)
        self._rows += 1
        described = [self._describe(each) for each in lines]
        levels: dict[int, int] = {}
        for each in lines:
            levels[each.line.level] = levels.get(each.line.level, 0) + 1
        document = {
            "_id": f"{self._id}-{self._rows:08d}",
            **self._place,
            "at": described[0]["at"],
            "until": described[-1]["at"],
            "lines": described,
        }
        return LogRow(
            document=document,
            size=sum(each.size for each in lines),
            role=self.role,
            levels=levels,
        )

    def _describe(self, taken: _Numbered) -> dict[str, Any]:
        line = taken.line
        described = {
            "n": taken.number,
            "at": _moment(line.at),
            "level": line.level,
            "logger": clean(line.logger),
            "text": _shorten(clean(self._mask.text(line.text))),
        }
        if line.batch_uid:
            described["batch_uid"] = clean(line.batch_uid)
        return described


def _split(lines: Iterable[_Numbered]) -> Iterator[list[_Numbered]]:
    """Yield the lines in groups for one document each."""
    group: list[_Numbered] = []
    size = 0
    for each in lines:
        if group and size + each.size > ROW_BYTES:
            yield group
            group, size = [], 0
        group.append(each)
        size += each.size
    if group:
        yield group


def _cut(text: str, margin: int) -> str:
    """Return a text without the middle of a very long one, but with `margin` characters more than are kept."""
    start, end = LOG_LINE_BYTES - _END_BYTES + margin, _END_BYTES + margin
    if len(text) <= start + end:
        return text
    return f"{text[:start]}{_CUT}{len(text) - start - end}{_CUT}{text[-end:]}"


def _shorten(text: str) -> str:
    """Return a text within the bound of a line, with a note in place of its middle."""
    start, found, rest = text.partition(_CUT)
    lost, _, end = rest.partition(_CUT) if found else ("0", "", start)
    whole = start if not found else start + end
    if not found and len(text.encode()) <= LOG_LINE_BYTES:
        return text
    head = start.encode()[: LOG_LINE_BYTES - _END_BYTES].decode("utf-8", "ignore")
    last = end.encode()[-_END_BYTES:].decode("utf-8", "ignore")
    left_out = len(whole) + int(lost) - len(head) - len(last)
    return f"{head}\n… {left_out:,} characters left out …\n{last}"


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def level_name(level: int) -> str:
    """Return the name of a level; that of the next lower standard level for any other."""
    return next((name for number, name in _LEVELS if level >= number), "DEBUG")
