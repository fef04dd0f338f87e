"""The output of log records on stdout: one JSON object per line, or readable text."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


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
    """Formats a record with its own fields and those bound to the context."""

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
        fields = {**self._bound(), **self._own(record)}
        return _text(record, fields) if self._pretty else _json(record, fields)

    def _own(self, record: logging.LogRecord) -> dict[str, Any]:
        fields = {name: value for name, value in vars(record).items() if name not in self._taken}
        if record.exc_info and record.exc_info[1] is not None:
            fields.setdefault("error_type", type(record.exc_info[1]).__name__)
            fields.setdefault("error", str(record.exc_info[1]))
            if self._stack:
                fields["stack"] = self.formatException(record.exc_info)
        return fields


def _json(record: logging.LogRecord, fields: Mapping[str, Any]) -> str:
    """Return the record as one line of ASCII that is valid JSON for any values."""
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    head = {"ts": at, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
    whole = {**head, **{f"field_{name}" if name in head else name: value for name, value in fields.items()}}
    try:
        return json.dumps(whole, default=str, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps({str(name): _shown(value) for name, value in whole.items()})


def _shown(value: Any) -> Any:
    return value if isinstance(value, (str, bool, int)) or value is None else repr(value)


def _text(record: logging.LogRecord, fields: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
    shown = " ".join(f"{name}={_json_value(value)}" for name, value in fields.items() if name != "stack")
    text = f"{at} {record.levelname:<8} {record.name}: {record.getMessage()}  {shown}".rstrip()
    if "stack" in fields:
        text = f"{text}\n{fields['stack']}"
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _json_value(value: Any) -> str:
    """Return a value as JSON, without line breaks and control characters."""
    try:
        return json.dumps(value, default=str, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(repr(value), ensure_ascii=False)
