"""Logging of commands, to stderr."""

from __future__ import annotations

import logging

from flowkit.text import visible


class VisibleFormatter(logging.Formatter):
    """Escapes control and bidirectional characters, which errors of handlers and workers may contain."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the lines of a traceback."""
        return visible(super().format(record))


def log_processes(verbose: bool) -> None:
    """Configure logging for an engine or a worker: lines with time and logger name."""
    _configure(
        logging.INFO if verbose else logging.WARNING, "%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def log_warnings(verbose: bool) -> None:
    """Configure logging for a short command: warnings of FlowKit's client, but only errors from libraries."""
    _configure(logging.INFO if verbose else logging.ERROR, "%(levelname)s %(name)s: %(message)s")
    handler = _handler("warning: %(message)s")
    logger = logging.getLogger("flowkit.client")
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False


def _configure(level: int, form: str) -> None:
    logging.basicConfig(level=level, handlers=[_handler(form)])


def _handler(form: str) -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter(form))
    return handler
