"""The lines that user code logs in an attempt, and the seam at which a product keeps them.

Each attempt binds a sink to the context of its task, which its coroutines, tasks and hooks on threads have, too.
A handler on Python's root logger passes on each record that is made in such a context. Nothing here keeps lines.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from flowkit.core.log import (
    ROOT,
    FieldLogger,
    bind_context,
    bind_mask,
    bound_fields,
    bound_mask,
    format_fields,
    is_of_driver,
    log_context,
    message_of,
    own_fields,
)
from flowkit.core.user_code import contained
from flowkit.masks import AttemptMask
from flowkit.text import truncate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from flowkit.models import AttemptInput

OFF: Final = "OFF"
"""The level at which no lines are kept."""
HANDLER_LOGGER: Final = "flowkit.handler"
"""The logger of `ctx.log`."""
PRINTED: Final = "stdout"
"""The logger of printed lines."""

_OUR_FOLDER: Final = str(Path(__file__).parents[1])
_COLLECTED_CHARS: Final = 1 << 19
"""Characters of the first lines of a batch in a process of its own, and of its last ones."""
_LINE_CHARS: Final = 100
_NAME_CHARS: Final = 200
"""Longest name of a logger; a longer one loses its end."""
_MAX_LEVEL: Final = 1_000
_NESTED: Final = 3
"""A text may log itself, when `str` is called for it. So many texts are made for each other, and no more."""
_PROGRESS_SEC: Final = 1.0
"""How often a line that is printed again and again, such as a progress bar, becomes a line of the attempt."""
_PRINTED_CHARS: Final = 1 << 16
"""A printed line without an end becomes a line of its own at this length."""


class HandlerLine(NamedTuple):
    """One line of an attempt. A record with a traceback is one line, too."""

    at: float
    """Seconds since the Unix epoch."""
    level: int
    logger: str
    text: str
    batch_uid: str = ""
    """The batch that was being processed; empty if none was."""


class LineSink(Protocol):
    """Takes the lines of one attempt. Its methods can be called on any thread, return at once, and never raise."""

    level: int
    """Lines below this level are not wanted."""
    prints: bool
    """Whether printed lines are wanted."""

    def add(self, line: HandlerLine) -> None:
        """Take a line."""

    def mask(self, values: Any, given: Callable[[], Any]) -> None:
        """Hide `values` in all lines, and the values of keys such as `password` in what `given` returns."""

    def end(self) -> None:
        """Note that the attempt has ended. Its threads may still add lines."""


class LineSinks(Protocol):
    """Takes the lines of all attempts of a process."""

    def sink(self, attempt: AttemptInput, worker_id: str) -> LineSink | None:
        """Return what takes the lines of an attempt; None if those of its role are not wanted."""


class AttemptLines:
    """The lines of one attempt. What takes them is made for the first one, since most attempts log nothing."""

    def __init__(self, create: Callable[[], LineSink | None]) -> None:
        self._create: Callable[[], LineSink | None] | None = create
        self._sink: LineSink | None = None
        self._masks: list[tuple[Any, Callable[[], Any]]] = []

    @property
    def sink(self) -> LineSink | None:
        """What takes the lines; None if they are not wanted."""
        if self._create is not None:
            with _lock:
                self._begin()
        return self._sink

    def _begin(self) -> None:
        create, self._create = self._create, None
        if create is None or (sink := create()) is None:
            return
        for values, given in self._masks:
            sink.mask(values, given)
        self._masks, self._sink = [], sink

    def mask(self, values: Any, given: Callable[[], Any]) -> None:
        """Hide values in the lines, as `LineSink.mask` does."""
        with _lock:
            if self._sink is None:
                self._masks.append((values, given))
            else:
                self._sink.mask(values, given)

    def end(self) -> None:
        """Note that the attempt has ended, if it has logged anything."""
        if self._sink is not None:
            self._sink.end()


_lock = threading.RLock()
_lines: ContextVar[AttemptLines | None] = ContextVar("flowkit_attempt_lines", default=None)


def _current() -> LineSink | None:
    """Return what takes the lines of the running attempt."""
    return None if (lines := _lines.get()) is None else lines.sink


def begin_attempt(attempt: AttemptInput, worker_id: str, run_id: str, sinks: LineSinks | None) -> None:
    """Let all records of the current asyncio task name this attempt, and let what `sinks` returns take them."""
    trace_id = _find_trace_id()
    bind_context(
        task_id=attempt.task_id,
        node_id=attempt.node_id,
        attempt_epoch=attempt.epoch,
        role=attempt.role,
        worker_id=worker_id,
        run_id=run_id,
        **({"shard": attempt.shard} if attempt.shard else {}),
        **({"trace_id": trace_id} if trace_id else {}),
    )
    bind_mask(AttemptMask())
    if sinks is not None:
        restore_capture()
        _lines.set(AttemptLines(lambda: sinks.sink(attempt, worker_id)))


def end_attempt() -> None:
    """Pass on what the attempt has printed without the end of a line, and note its end."""
    if isinstance(sys.stdout, _Stdout) and (sink := _current()) is not None and sink.prints:
        sys.stdout.end_lines(sink)
    if (lines := _lines.get()) is not None:
        lines.end()


def mask_lines(values: Any, given: Callable[[], Any]) -> None:
    """Hide values in the lines of the running attempt, as `LineSink.mask` does."""
    if (lines := _lines.get()) is not None:
        lines.mask(values, given)


@contextmanager
def bound_to(lines: AttemptLines | None, mask: AttemptMask | None = None) -> Iterator[None]:
    """Let what is logged in the block be lines of an attempt, whose secrets `mask` hides in the log of the process."""
    before, mask_before = _lines.set(lines), bound_mask()
    bind_mask(mask or mask_before)
    try:
        yield
    finally:
        _lines.reset(before)
        bind_mask(mask_before)


def _find_trace_id() -> str:
    """Return the id of the active trace of OpenTelemetry, if the program uses it; else an empty string."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    found = 0
    with suppress(Exception):
        found = trace.get_current_span().get_span_context().trace_id
    return f"{found:032x}" if found else ""


class HandlerLogger(FieldLogger):
    """The logger of one attempt. Its lines belong to the attempt on any thread, also one that a handler has started."""

    def __init__(self, batch_uid: Callable[[], str] = str) -> None:
        """`batch_uid` returns the batch that is being processed, which a thread of the handler does not know."""
        super().__init__(logging.getLogger(HANDLER_LOGGER))
        self._fields = bound_fields()
        self._lines = _lines.get()
        self._batch_uid = batch_uid
        self._mask = bound_mask()

    def _emit(self, level: int, text: str, args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        fields["stacklevel"] = fields.get("stacklevel", 1) + 1
        restore_capture()
        if _lines.get() is self._lines and bound_mask() is self._mask:
            super()._emit(level, text, args, {**self._fields, **bound_fields(), **fields})
            return
        batch = {"batch_uid": uid} if (uid := self._batch_uid()) else {}
        with bound_to(self._lines, self._mask), log_context(**batch):
            super()._emit(level, text, args, {**self._fields, **bound_fields(), **fields})


class CaptureHandler(logging.Handler):
    """Passes the records of attempts on to their sinks. It needs no lock: sinks can be called on any thread.

    The one at the logger `flowkit` takes its records, so that a configuration can separate it from the root logger. The
    one at the root logger takes all others.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self._takes_ours = logger.name == ROOT

    def install(self) -> None:
        """Add this to its logger, if it is not there."""
        if self not in self._logger.handlers:
            self._logger.addHandler(self)

    def remove(self) -> None:
        """Remove this from its logger."""
        self._logger.removeHandler(self)

    def handle(self, record: logging.LogRecord) -> bool:
        """Pass on a record that was made in an attempt. Records that libraries make can have attributes of any type."""
        with suppress(Exception):
            if self._takes_ours != (record.name.partition(".")[0] == ROOT):
                return False
            if not self._takes_ours and record.levelno >= logging.WARNING:
                _print_unhandled(record)
            sink = _current()
            if sink is None or record.levelno < sink.level or _is_internal(record):
                return False
            sink.add(to_line(record))
            return True
        return False


def _print_unhandled(record: logging.LogRecord) -> None:
    """Print a record as `logging` does in a program that has not configured it: if no handler but ours takes it."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        if any(not isinstance(each, CaptureHandler) for each in logger.handlers):
            return
        logger = logger.parent if logger.propagate else None
    if logging.lastResort is not None:
        logging.lastResort.handle(record)


def _is_internal(record: logging.LogRecord) -> bool:
    """Return whether FlowKit or a library that it uses says what it does, and nothing that a user should know."""
    if record.levelno >= logging.WARNING or record.name == HANDLER_LOGGER:
        return False
    return is_of_driver(record) or record.pathname.startswith(_OUR_FOLDER)


class _Formatting(threading.local):
    """How many records the current thread is formatting, each for the text of the one before."""

    depth = 0


_formatting = _Formatting()


def to_line(record: logging.LogRecord) -> HandlerLine:
    """Return the line of a record: its message, its fields and its traceback. Never raise."""
    if _formatting.depth >= _NESTED:
        text = "a line that the text of another line has logged"
    else:
        _formatting.depth += 1
        try:
            text = _text_of(record)
        finally:
            _formatting.depth -= 1
    level = min(max(int(record.levelno), 0), _MAX_LEVEL)
    batch_uid = str(bound_fields().get("batch_uid", ""))
    return HandlerLine(_time_of(record), level, truncate(str(record.name), _NAME_CHARS), text, batch_uid)


def _time_of(record: logging.LogRecord) -> float:
    """Return when a record was made. One that was made by hand may have any time."""
    now = time.time()
    return record.created if 0 <= record.created <= now else now


def _text_of(record: logging.LogRecord) -> str:
    text = message_of(record, contained)
    with suppress(Exception), contained:
        shown = format_fields(own_fields(record))
        text = f"{text}  {shown}" if shown else text
    if record.exc_info or record.stack_info:
        text = f"{text}\n{_traceback_of(record)}"
    return text


def _traceback_of(record: logging.LogRecord) -> str:
    with suppress(Exception), contained:
        parts = [_formatter.formatException(record.exc_info)] if record.exc_info else []
        return "\n".join([*parts, *([record.stack_info] if record.stack_info else [])])
    return "its traceback cannot be shown"


_formatter = logging.Formatter()


class _Stdout:
    """Stands in for `sys.stdout`: writes as before, and passes the lines that attempts print on to their sinks."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._rest: dict[tuple[LineSink, int], str] = {}
        """What each thread has printed without the end of a line."""
        self._next_state: dict[tuple[LineSink, int], float] = {}
        """When a line that is printed again and again is shown next, by `time.monotonic`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> Any:
        """Write a text. What a logging handler writes was a record before, so it is no printed line."""
        written = self.stream.write(text)
        sink = _current()
        if sink is not None and sink.prints and sys._getframe(1).f_globals.get("__name__") != "logging":
            self._take(sink, str(text))
        return written

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for each in lines:
            self.write(each)

    def _take(self, sink: LineSink, text: str) -> None:
        key = sink, threading.get_ident()
        *lines, rest = (self._rest.pop(key, "") + text).split("\n")
        for each in lines:
            _add_printed(sink, _last_state(each))
        rest = self._show_progress(key, rest)
        while len(rest) >= _PRINTED_CHARS:
            _add_printed(sink, rest[:_PRINTED_CHARS])
            rest = rest[_PRINTED_CHARS:]
        if rest:
            self._rest[key] = rest

    def _show_progress(self, key: tuple[LineSink, int], text: str) -> str:
        """Return what a later text continues. A carriage return begins the line again, as a progress bar does.

        What the line showed before becomes a line of its own from time to time, so that people see how far it is.
        """
        before, again, rest = text.rpartition("\r")
        if not again:
            return text
        now, state = time.monotonic(), _last_state(before)
        if state and now >= self._next_state.get(key, 0.0):
            self._next_state[key] = now + _PROGRESS_SEC
            _add_printed(key[0], state)
            state = ""
        return f"{state}\r{rest}" if state or rest else ""

    def end_lines(self, sink: LineSink) -> None:
        """Pass on what an attempt has printed without the end of a line."""
        for key in [each for each in [*self._rest] if each[0] is sink]:
            if rest := _last_state(self._rest.pop(key, "")):
                _add_printed(sink, rest)
        for key in [each for each in [*self._next_state] if each[0] is sink]:
            del self._next_state[key]


def _last_state(line: str) -> str:
    """Return what a terminal shows of a line that carriage returns begin again."""
    return line.rstrip("\r").rpartition("\r")[2]


def _add_printed(sink: LineSink, text: str) -> None:
    if logging.INFO >= sink.level:
        record = logging.LogRecord(PRINTED, logging.INFO, "", 0, text, None, None)
        sink.add(to_line(record))


class _Installed:
    """How often this process has been asked to capture lines, and with which handlers it does."""

    handlers: Final = (CaptureHandler(logging.getLogger()), CaptureHandler(logging.getLogger(ROOT)))
    handler_logger: Final = logging.getLogger(HANDLER_LOGGER)
    uses = 0
    prints = 0


def _capture_nothing() -> None:
    """Forget the attempts in a process that user code has forked: nothing writes its lines, and locks may be held."""
    global _lock
    _lock = threading.RLock()
    _lines.set(None)
    _Installed.uses = _Installed.prints = 0
    for each in _Installed.handlers:
        each.remove()


os.register_at_fork(after_in_child=_capture_nothing)


@dataclass(frozen=True, kw_only=True, slots=True)
class LineWish:
    """What another process needs to know to collect the lines of an attempt."""

    level: int
    prints: bool
    fields: dict[str, Any]
    """The fields that name the attempt, and its batch."""

    @classmethod
    def current(cls) -> LineWish | None:
        """Return the wish of the running attempt; None if its lines are not wanted."""
        if (sink := _current()) is None:
            return None
        return cls(level=sink.level, prints=sink.prints, fields=dict(bound_fields()))


class CollectedLines:
    """The lines of one batch in a process of its own: the first ones, and the last ones if there are very many."""

    def __init__(self, wish: LineWish) -> None:
        self.level, self.prints = wish.level, wish.prints
        self._first: list[HandlerLine] = []
        self._last: deque[HandlerLine] = deque()
        self._room = _COLLECTED_CHARS
        self._last_chars = 0
        self._left_out = 0

    def add(self, line: HandlerLine) -> None:
        """Take a line."""
        if len(line.text) > _COLLECTED_CHARS:
            line = line._replace(text=line.text[:_COLLECTED_CHARS])
        if self._room > 0:
            self._room -= len(line.text) + _LINE_CHARS
            self._first.append(line)
            return
        self._last.append(line)
        self._last_chars += len(line.text) + _LINE_CHARS
        while self._last_chars > _COLLECTED_CHARS:
            self._last_chars -= len(self._last.popleft().text) + _LINE_CHARS
            self._left_out += 1

    def mask(self, values: Any, given: Callable[[], Any]) -> None:
        """Do nothing: the worker hides secrets."""

    def end(self) -> None:
        """Do nothing: the lines are passed on at the end."""

    def all(self) -> list[HandlerLine]:
        """Return the lines."""
        if not self._left_out:
            return [*self._first, *self._last]
        at = self._last[0].at if self._last else time.time()
        note = HandlerLine(at, logging.WARNING, HANDLER_LOGGER, f"… {self._left_out:,} lines left out …")
        return [*self._first, note, *self._last]


@contextmanager
def collecting(wish: LineWish | None, take: Callable[[list[HandlerLine]], None]) -> Iterator[None]:
    """Collect the lines that are logged in the block, and pass them to `take` at its end."""
    if wish is None:
        yield
        return
    lines = CollectedLines(wish)
    start_capture(wish.level, prints=wish.prints)
    try:
        with log_context(**wish.fields), bound_to(AttemptLines(lambda: lines)):
            try:
                yield
            finally:
                end_attempt()
                take(lines.all())
    finally:
        stop_capture(prints=wish.prints)


def pass_on(lines: Iterable[HandlerLine]) -> None:
    """Let the sink of the running attempt take the lines that another process has collected."""
    if (sink := _current()) is not None:
        for each in lines:
            sink.add(each)


def start_capture(level: int, *, prints: bool) -> None:
    """Let records reach the sinks of attempts until `stop_capture`, with printed lines if `prints`.

    Loggers without a level of their own have that of the root logger, WARNING by default. It becomes `level` where that
    changes nothing else: if the program has not configured logging, or if its handlers have levels of their own.
    """
    with _lock:
        _Installed.uses += 1
        root = logging.getLogger()
        if root.level > level and all(each.level >= root.level for each in root.handlers):
            root.setLevel(level)
        restore_capture()
        if prints:
            _Installed.prints += 1
            if not isinstance(sys.stdout, _Stdout):
                sys.stdout = _Stdout(sys.stdout)


def restore_capture() -> None:
    """Install the handlers again, and enable the logger of `ctx.log`, if user code has configured logging since."""
    if _Installed.uses:
        for each in _Installed.handlers:
            each.install()
        _Installed.handler_logger.disabled = False


def stop_capture(*, prints: bool) -> None:
    """Undo one `start_capture`. The level of the root logger stays."""
    with _lock:
        _Installed.uses -= 1
        if not _Installed.uses:
            for each in _Installed.handlers:
                each.remove()
        if prints:
            _Installed.prints -= 1
            if not _Installed.prints and isinstance(sys.stdout, _Stdout):
                sys.stdout = sys.stdout.stream
