"""The health file of an engine, a bridge or a worker, which the health check of its container reads."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_logger = logging.getLogger("flowkit.loops")

_EVERY_SEC = 5.0


class Reported(Protocol):
    """Health of one process or of several: a dataclass whose fields are written as JSON."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def ok(self) -> bool:
        """Whether everything runs."""


@contextmanager
def health_file(path: str | None, health: Callable[[], Reported]) -> Iterator[None]:
    """Write the file every five seconds, and remove it at the end. Do nothing if `path` is None.

    A separate thread writes the file, so a handler that blocks the event loop does not make the process look unhealthy.
    """
    if path is None:
        yield
        return
    end = threading.Event()
    writer = threading.Thread(target=_write_until, args=(end, Path(path), health), daemon=True)
    writer.start()
    try:
        yield
    finally:
        end.set()
        writer.join()
        Path(path).unlink(missing_ok=True)


def _write_until(end: threading.Event, path: Path, health: Callable[[], Reported]) -> None:
    while True:
        try:
            _write(path, health())
        except OSError as error:
            _logger.warning("the health file %s cannot be written: %s", path, error)
        if end.wait(_EVERY_SEC):
            return


def _write(path: Path, health: Reported) -> None:
    """Replace the file atomically, so that readers never see a part of it."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(health_json(health), encoding="utf-8")
    os.replace(beside, path)


def health_json(health: Reported) -> str:
    """Return the health and the current time as JSON."""
    return json.dumps({"at": time.time(), "ok": health.ok, **asdict(health)})
