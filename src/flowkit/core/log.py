"""Structured logging on top of the standard library: fields become attributes of the log record (docs/monitoring.md).

FlowKit writes no logs until the application configures logging or calls `enable_stdout_logging`. Importing this module
adds a NullHandler to the logger `flowkit`, and sets its level to DEBUG unless it already has one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flowkit.errors import ConfigError
from flowkit.masks import hide_named
from flowkit.text import kind_of, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from types import TracebackType

    from flowkit.masks import AttemptMask


__all__ = [
    "FieldLogger",
    "bind_context",
    "configure_from_env",
    "disable_stdout_logging",
    "enable_stdout_logging",
    "get_logger",
    "log_context",
    "set_level",
    "swallow",
    "warn_once",
]

ROOT = "flowkit"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_STANDARD_ATTRIBUTES = frozenset([*vars(logging.makeLogRecord({})), "message", "asctime"])
"""Attributes that every log record has."""

_CALLER_FRAMES = 3
"""Stack frames between the call of the standard logger and the caller of FieldLogger."""

ATTEMPT_FIELDS = (
    *("task_id", "node_id", "attempt_epoch", "shard", "batch_uid", "trace_id"),
    *("role", "worker_id", "run_id"),
)
"""The fields that name an attempt. All records have them that are made in one."""
_SHOWN_IN_TEXT = ATTEMPT_FIELDS[:6]
"""Those in text lines. The others are the same for most lines of a process, or long."""

_NO_GUARD = nullcontext()
_FORMATS = ("text", "json")
_FORMAT = "FLOWKIT_LOG_FORMAT"

_MAX_WARNED_KEYS = 1_000
"""Maximum number of keys that `warn_once` remembers; it forgets the oldest ones first."""


_bound: ContextVar[Mapping[str, Any]] = ContextVar("flowkit_log_context", default=MappingProxyType({}))
_warned: dict[str, None] = {}


_mask: ContextVar[AttemptMask | None] = ContextVar("flowkit_attempt_mask", default=None)


def bind_mask(mask: AttemptMask | None) -> None:
    """Hide the secrets of an attempt in all later records of the current asyncio task and of those it creates."""
    _mask.set(mask)


def bound_mask() -> AttemptMask | None:
    """Return what hides the secrets of the running attempt; None outside of one."""
    return _mask.get()


def _masked(text: str) -> str:
    mask = _mask.get()
    return text if mask is None else mask.text(text)


class FieldLogger:
    """A logger whose methods accept any keywords. Keywords and bound context become attributes of the log record.

    `exc_info` and `stack_info` work as in the standard library. A keyword that is also a standard attribute of log
    records (`name`, `args`, `message`, …) gets the prefix `field_`.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger

    @property
    def name(self) -> str:
        """Full name of the underlying standard logger."""
        return self.logger.name

    def isEnabledFor(self, level: int, /) -> bool:
        """Return whether the logger processes records of this level."""
        return self.logger.isEnabledFor(level)

    def debug(self, text: str, /, *args: Any, **fields: Any) -> None:
        """Log at level DEBUG."""
        self._emit(logging.DEBUG, text, args, fields)

    def info(self, text: str, /, *args: Any, **fields: Any) -> None:
        """Log at level INFO."""
        self._emit(logging.INFO, text, args, fields)

    def warning(self, text: str, /, *args: Any, **fields: Any) -> None:
        """Log at level WARNING."""
        self._emit(logging.WARNING, text, args, fields)

    def error(self, text: str, /, *args: Any, **fields: Any) -> None:
        """Log at level ERROR."""
        self._emit(logging.ERROR, text, args, fields)

    def exception(self, text: str, /, *args: Any, **fields: Any) -> None:
        """Log the exception that is currently handled, at level ERROR."""
        self._emit(logging.ERROR, text, args, {"exc_info": True, **fields})

    def critical(self, text: str, /, *args: Any, **fields: Any) -> None:
        """Log at level CRITICAL."""
        self._emit(logging.CRITICAL, text, args, fields)

    def log(self, level: int, text: str, /, *args: Any, **fields: Any) -> None:
        """Log at the given level."""
        self._emit(level, text, args, fields)

    def _emit(self, level: int, text: str, args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        if not self.logger.isEnabledFor(level):
            return
        exc_info, stack_info = fields.pop("exc_info", None), fields.pop("stack_info", False)
        depth = fields.pop("stacklevel", 1) - 1 + _CALLER_FRAMES
        extra = {**(fields.pop("extra", None) or {}), **fields}
        self.logger.log(
            level,
            text,
            *args,
            exc_info=exc_info,
            stack_info=stack_info,
            stacklevel=depth,
            extra=_make_attributes({**_bound.get(), **extra}),
        )


def _make_attributes(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"field_{name}" if name in _STANDARD_ATTRIBUTES else name: value for name, value in fields.items()
    }


def get_logger(name: str = "") -> FieldLogger:
    """Return the logger `flowkit.<name>`. The names `flowkit` and `flowkit.…` are used unchanged."""
    own = not name or name == ROOT or name.startswith(f"{ROOT}.")
    return FieldLogger(logging.getLogger((name or ROOT) if own else f"{ROOT}.{name}"))


def bind_context(**fields: Any) -> None:
    """Add these fields to all later records of the current asyncio task and of the tasks it creates."""
    _bound.set(MappingProxyType({**_bound.get(), **fields}))


@contextmanager
def log_context(**fields: Any) -> Iterator[None]:
    """Add these fields to all records logged within the `with` block."""
    before = _bound.get()
    bind_context(**fields)
    try:
        yield
    finally:
        _bound.set(before)


def bound_fields() -> Mapping[str, Any]:
    """Return the fields that are bound to the current context."""
    return _bound.get()


def own_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a record, without those that name its attempt. Hide values of keys such as `password`.

    A field that the user has given the name of one of these, with another value, stays.
    """
    bound = _bound.get()
    return {
        name: _hide_secrets(name, value)
        for name, value in vars(record).items()
        if name not in _STANDARD_ATTRIBUTES
        and not (name in ATTEMPT_FIELDS and bound.get(name, value) is value)
    }


def _hide_secrets(name: str, value: Any) -> Any:
    with suppress(Exception):
        return hide_named(name, value)
    return kind_of(value)


def format_fields(fields: Mapping[str, Any]) -> str:
    """Return fields as text on one line: `page=3 rows=40`."""
    return " ".join(f"{name}={_format_value(value)}" for name, value in fields.items()) if fields else ""


def swallow(
    *,
    logger: FieldLogger | None = None,
    code: str = "swallowed",
    msg: str = "an error was ignored",
    level: int = logging.WARNING,
    expected: bool = False,
    **fields: Any,
) -> AbstractContextManager[None, bool]:
    """Log an exception raised in the `with` block with the event `code`, and continue after the block.

    An `expected` exception is logged without its traceback. A BaseException that is not an Exception, such as a
    cancellation or a keyboard interrupt, is not caught.
    """
    return _Swallowing(logger or get_logger(), level, msg, expected, {"event": code, **fields})


@dataclass(frozen=True)
class _Swallowing(AbstractContextManager[None, bool]):
    logger: FieldLogger
    level: int
    text: str
    expected: bool
    fields: dict[str, Any]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        what = {"error": str(error), "error_type": type(error).__name__, **self.fields}
        exc_info = None if self.expected else error
        self.logger.log(self.level, self.text, exc_info=exc_info, stacklevel=2, **what)
        return True


def warn_once(
    key: str,
    text: str = "",
    *,
    logger: FieldLogger | None = None,
    level: int = logging.WARNING,
    **fields: Any,
) -> bool:
    """Log `text`, or `key` if it is empty, once per process and `key`. Return whether this call logged it."""
    if key in _warned:
        return False
    _warned[key] = None
    while len(_warned) > _MAX_WARNED_KEYS:
        del _warned[next(iter(_warned))]
    (logger or get_logger()).log(level, text or key, stacklevel=2, **{"event": key, **fields})
    return True


def set_level(level: int | str) -> None:
    """Set the minimum level of log records for all of FlowKit's loggers."""
    logging.getLogger(ROOT).setLevel(_read_level(level, "the level"))


def enable_stdout_logging(
    level: int | str | None = None, *, pretty: bool = False, stack: bool = False
) -> None:
    """Write records to stdout: one JSON object per line or, with `pretty`, readable text. `stack` adds tracebacks.

    `level` applies to stdout only. Another call replaces the previous configuration.
    """
    handler = StdoutHandler(Layout(bound=_bound.get, taken=_STANDARD_ATTRIBUTES, pretty=pretty, stack=stack))
    handler.setLevel(logging.NOTSET if level is None else _read_level(level, "the level"))
    disable_stdout_logging()
    logging.getLogger(ROOT).addHandler(handler)


def disable_stdout_logging() -> None:
    """Undo `enable_stdout_logging`."""
    root = logging.getLogger(ROOT)
    for handler in root.handlers[:]:
        if isinstance(handler, StdoutHandler):
            root.removeHandler(handler)


def configure_from_env() -> None:
    """Apply `FLOWKIT_LOG_STDOUT`, `_LEVEL`, `_PRETTY` and `_STACK`; without `_PRETTY`, `FLOWKIT_LOG_FORMAT`.

    A variable that is not set has no effect. Raise ConfigError, which names the variable, for an invalid value.
    """
    level = os.environ.get("FLOWKIT_LOG_LEVEL") or None
    stdout = _read_switch("FLOWKIT_LOG_STDOUT", os.environ.get("FLOWKIT_LOG_STDOUT"))
    pretty = _read_switch("FLOWKIT_LOG_PRETTY", os.environ.get("FLOWKIT_LOG_PRETTY"))
    if pretty is None and os.environ.get(_FORMAT):
        pretty = read_format() == "text"
    stack = _read_switch("FLOWKIT_LOG_STACK", os.environ.get("FLOWKIT_LOG_STACK"))
    number = None if level is None else _read_level(level, "FLOWKIT_LOG_LEVEL")
    if number is not None:
        set_level(number)
    if stdout:
        enable_stdout_logging(
            logging.INFO if number is None else number, pretty=bool(pretty), stack=bool(stack)
        )
    elif stdout is False:
        disable_stdout_logging()


def read_format() -> str:
    """Return the format of the log of processes that `FLOWKIT_LOG_FORMAT` names: `text` by default, or `json`."""
    given = os.environ.get(_FORMAT) or "text"
    if given.lower() not in _FORMATS:
        raise ConfigError(f"{_FORMAT} is {given!r}; it must be text or json")
    return given.lower()


def read_level(default: int) -> int:
    """Return the level that `FLOWKIT_LOG_LEVEL` names, or the default."""
    given = os.environ.get("FLOWKIT_LOG_LEVEL")
    return _read_level(given, "FLOWKIT_LOG_LEVEL") if given else default


def log_what_python_prints() -> None:
    """Let warnings, and exceptions that nothing catches, be records, which Python would print as plain text."""
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    if error is None or issubclass(kind, (KeyboardInterrupt, SystemExit)):
        return
    logging.getLogger(ROOT).error("an exception was not caught", exc_info=(kind, error, trace))


def message_of(record: logging.LogRecord, guard: AbstractContextManager[Any] = _NO_GUARD) -> str:
    """Return the text of a record. One whose arguments do not fit keeps its format. User code runs within `guard`."""
    with suppress(Exception), guard:
        return record.getMessage()
    with suppress(Exception), guard:
        return f"{record.msg}  (its arguments do not fit)"
    return "a line whose text cannot be made"


def process_formatter(form: str) -> logging.Formatter:
    """Return the formatter for the log of a process, as `FLOWKIT_LOG_FORMAT` says. `form` is that of a text line."""
    if read_format() == "json":
        return Layout(bound=_bound.get, taken=_STANDARD_ATTRIBUTES, pretty=False, stack=True)
    return TextLayout(form)


def _read_switch(name: str, text: str | None) -> bool | None:
    if not text:
        return None
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"0", "false", "no", "off"}:
        return False
    raise ConfigError(f"{name} is {text!r}; it must be 1 or 0 (or true, yes, on; false, no, off)")


def _read_level(level: int | str, name: str) -> int:
    if isinstance(level, str):
        if level.strip().upper() not in LEVELS:
            raise ConfigError(f"{name} is {level!r}; it must be one of {', '.join(LEVELS)}")
        return int(getattr(logging, level.strip().upper()))
    if isinstance(level, bool) or not isinstance(level, int):
        raise ConfigError(f"{name} is {level!r}; it must be one of {', '.join(LEVELS)}")
    return level


def _set_library_defaults() -> None:
    root = logging.getLogger(ROOT)
    if not any(isinstance(handler, logging.NullHandler) for handler in root.handlers):
        root.addHandler(logging.NullHandler())
    if root.level == logging.NOTSET:
        root.setLevel(logging.DEBUG)


_set_library_defaults()


class StdoutHandler(logging.StreamHandler[Any]):
    """Writes to the current `sys.stdout`, even if it has been replaced."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(sys.stdout)
        self.setFormatter(layout)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; never raises."""
        self.stream = sys.stdout
        super().emit(record)


class Layout(logging.Formatter):
    """Formats a record with its own fields and those bound to the context. Those that name an attempt stay."""

    def __init__(
        self, *, bound: Callable[[], Mapping[str, Any]], taken: Collection[str], pretty: bool, stack: bool
    ) -> None:
        super().__init__()
        self._bound = bound
        self._taken = taken
        self._pretty = pretty
        self._stack = stack

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        bound = self._bound()
        named = ATTEMPT_FIELDS if "attempt_epoch" in bound else ()
        own = {
            f"field_{name}" if name in named and bound.get(name, value) is not value else name: value
            for name, value in self._own(record).items()
        }
        fields = {name: _hide_secrets(name, value) for name, value in {**bound, **own}.items()}
        return visible(
            _masked(_format_text(record, fields)) if self._pretty else _format_json(record, fields)
        )

    def _own(self, record: logging.LogRecord) -> dict[str, Any]:
        fields = {name: value for name, value in vars(record).items() if name not in self._taken}
        if record.exc_info and record.exc_info[1] is not None:
            fields.setdefault("error_type", type(record.exc_info[1]).__name__)
            fields.setdefault("error", _text_of(record.exc_info[1]))
            if self._stack:
                fields["stack"] = self.formatException(record.exc_info)
        return fields


DRIVERS = ("pymongo", "motor", "temporalio", "asyncio", "aiokafka", "kafka")
"""Loggers of libraries that FlowKit itself uses. What they log of their own work may contain params and results."""


def is_of_driver(record: logging.LogRecord) -> bool:
    """Return whether a library that FlowKit itself uses has made a record."""
    return record.name.partition(".")[0] in DRIVERS


def is_for_people(record: logging.LogRecord) -> bool:
    """Return whether the log of a process has a record: not what drivers say below INFO, such as whole commands."""
    return record.levelno >= logging.INFO or not is_of_driver(record)


class TextLayout(logging.Formatter):
    """Formats a record as text. That of an attempt ends with its own fields and those that name the attempt.

    Control and bidirectional characters are escaped, which errors of handlers and workers may contain.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the lines of a traceback."""
        return visible(_masked(super().format(record)))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line."""
        text, bound = super().formatMessage(record), _bound.get() or vars(record)
        if "attempt_epoch" not in bound:
            return text
        named = {name: bound[name] for name in _SHOWN_IN_TEXT if bound.get(name)}
        return f"{text}  {format_fields({**own_fields(record), **named})}"


def _text_of(error: BaseException) -> str:
    with suppress(Exception):
        return str(error)
    return kind_of(error)


def _format_json(record: logging.LogRecord, fields: Mapping[str, Any]) -> str:
    """Return the record as one line of ASCII that is valid JSON for any values."""
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    head = {"ts": at, "level": record.levelname, "logger": record.name, "message": message_of(record)}
    whole = {**head, **{f"field_{name}" if name in head else name: value for name, value in fields.items()}}
    text = ""
    with suppress(Exception):  # what the method __str__ of a value raises
        text = json.dumps(whole, default=str, allow_nan=False)
    text = text or json.dumps({str(name): _to_json_value(value) for name, value in whole.items()})
    mask = _mask.get()
    return text if mask is None else json.dumps(mask.mask.value(json.loads(text)))


def _to_json_value(value: Any) -> Any:
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    with suppress(Exception):
        return repr(value)
    return kind_of(value)


def _format_text(record: logging.LogRecord, fields: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
    shown = " ".join(f"{name}={_format_value(value)}" for name, value in fields.items() if name != "stack")
    text = f"{at} {record.levelname:<8} {record.name}: {message_of(record)}  {shown}".rstrip()
    if "stack" in fields:
        text = f"{text}\n{fields['stack']}"
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _format_value(value: Any) -> str:
    """Return a value as JSON, without line breaks and control characters."""
    try:
        return json.dumps(value, default=str, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(repr(value), ensure_ascii=False)
