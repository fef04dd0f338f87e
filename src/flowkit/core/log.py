"""Structured logging over the standard library: fields become attributes of the record (docs/logging.md).

Silent until the application, or `enable_stdout_logging`, asks for output: importing this module gives the logger
`flowkit` a handler that writes nothing, and the level DEBUG unless it already has one.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flowkit.core.log_output import Layout, StdoutHandler
from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

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

_TAKEN = frozenset([*vars(logging.makeLogRecord({})), "message", "asctime"])
"""Attributes that a record has anyway."""

_CALLER = 3
"""Frames between the standard logger's call and whoever logs."""

_REMEMBERED = 1_000
"""Keys of `warn_once`; of more, the oldest are forgotten."""

_bound: ContextVar[Mapping[str, Any]] = ContextVar("flowkit_log_context", default=MappingProxyType({}))
_warned: dict[str, None] = {}


class FieldLogger:
    """A logger whose methods take any keywords; those and the bound context become attributes of the record.

    `exc_info` and `stack_info` mean what they mean in the standard library; an attribute that every record has anyway
    (`name`, `args`, `message`, …) is stored with `field_` before its name.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger

    @property
    def name(self) -> str:
        """Full name of the standard logger behind it."""
        return self.logger.name

    def isEnabledFor(self, level: int, /) -> bool:
        """Whether a record of this level would be made."""
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
        """Log the exception that is being handled, at level ERROR."""
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
        depth = fields.pop("stacklevel", 1) - 1 + _CALLER
        extra = {**(fields.pop("extra", None) or {}), **fields}
        self.logger.log(
            level,
            text,
            *args,
            exc_info=exc_info,
            stack_info=stack_info,
            stacklevel=depth,
            extra=_attributes({**_bound.get(), **extra}),
        )


def _attributes(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"field_{name}" if name in _TAKEN else name: value for name, value in fields.items()}


def get_logger(name: str = "") -> FieldLogger:
    """The logger `flowkit.<name>`; a name that begins with `flowkit` is taken as it is."""
    own = not name or name == ROOT or name.startswith(f"{ROOT}.")
    return FieldLogger(logging.getLogger((name or ROOT) if own else f"{ROOT}.{name}"))


def bind_context(**fields: Any) -> None:
    """Give these fields to every later record of this context: of this asyncio task and those it creates."""
    _bound.set(MappingProxyType({**_bound.get(), **fields}))


@contextmanager
def log_context(**fields: Any) -> Iterator[None]:
    """Give these fields to every record made within the block."""
    before = _bound.get()
    bind_context(**fields)
    try:
        yield
    finally:
        _bound.set(before)


def swallow(
    *,
    logger: FieldLogger | None = None,
    code: str = "swallowed",
    msg: str = "an error was ignored",
    level: int = logging.WARNING,
    expected: bool = False,
    **fields: Any,
) -> AbstractContextManager[None, bool]:
    """Log an exception of the `with` block under the event `code`, and go on behind the block.

    An `expected` one is logged without its traceback. What is not an Exception (a cancel, an interrupt) passes.
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
    """Log `text` (else `key`) unless this process already has logged this `key`; answers whether it did."""
    if key in _warned:
        return False
    _warned[key] = None
    while len(_warned) > _REMEMBERED:
        del _warned[next(iter(_warned))]
    (logger or get_logger()).log(level, text or key, stacklevel=2, **{"event": key, **fields})
    return True


def set_level(level: int | str) -> None:
    """Least level of all records of FlowKit, whoever writes them."""
    logging.getLogger(ROOT).setLevel(_level(level, "the level"))


def enable_stdout_logging(
    level: int | str | None = None, *, pretty: bool = False, stack: bool = False
) -> None:
    """Write records to stdout: a JSON object a line, or with `pretty` text for people; `stack` adds tracebacks.

    `level` holds for stdout alone. A second call replaces what the first has set.
    """
    handler = StdoutHandler(Layout(bound=_bound.get, taken=_TAKEN, pretty=pretty, stack=stack))
    handler.setLevel(logging.NOTSET if level is None else _level(level, "the level"))
    disable_stdout_logging()
    logging.getLogger(ROOT).addHandler(handler)


def disable_stdout_logging() -> None:
    """Undo `enable_stdout_logging`."""
    root = logging.getLogger(ROOT)
    for handler in root.handlers[:]:
        if isinstance(handler, StdoutHandler):
            root.removeHandler(handler)


def configure_from_env() -> None:
    """Obey `FLOWKIT_LOG_STDOUT`, `FLOWKIT_LOG_LEVEL`, `FLOWKIT_LOG_PRETTY`, `FLOWKIT_LOG_STACK`.

    What is not set changes nothing. ConfigError names a variable whose value means nothing.
    """
    level = os.environ.get("FLOWKIT_LOG_LEVEL") or None
    stdout = _switch("FLOWKIT_LOG_STDOUT", os.environ.get("FLOWKIT_LOG_STDOUT"))
    pretty = _switch("FLOWKIT_LOG_PRETTY", os.environ.get("FLOWKIT_LOG_PRETTY"))
    stack = _switch("FLOWKIT_LOG_STACK", os.environ.get("FLOWKIT_LOG_STACK"))
    number = None if level is None else _level(level, "FLOWKIT_LOG_LEVEL")
    if number is not None:
        set_level(number)
    if stdout:
        enable_stdout_logging(
            logging.INFO if number is None else number, pretty=bool(pretty), stack=bool(stack)
        )
    elif stdout is False:
        disable_stdout_logging()


def _switch(name: str, text: str | None) -> bool | None:
    if not text:
        return None
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"0", "false", "no", "off"}:
        return False
    raise ConfigError(f"{name} is {text!r}; it must be 1 or 0 (or true, yes, on; false, no, off)")


def _level(level: int | str, name: str) -> int:
    if isinstance(level, str):
        if level.strip().upper() not in LEVELS:
            raise ConfigError(f"{name} is {level!r}; it must be one of {', '.join(LEVELS)}")
        return int(getattr(logging, level.strip().upper()))
    if isinstance(level, bool) or not isinstance(level, int):
        raise ConfigError(f"{name} is {level!r}; it must be one of {', '.join(LEVELS)}")
    return level


def _be_silent() -> None:
    root = logging.getLogger(ROOT)
    if not any(isinstance(handler, logging.NullHandler) for handler in root.handlers):
        root.addHandler(logging.NullHandler())
    if root.level == logging.NOTSET:
        root.setLevel(logging.DEBUG)


_be_silent()
