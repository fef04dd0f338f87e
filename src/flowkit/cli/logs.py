"""Logging of commands, to stderr."""

from __future__ import annotations

import logging


def log_processes(verbose: bool) -> None:
    """Configure logging for an engine or a worker: lines with time and logger name."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def log_warnings(verbose: bool) -> None:
    """Configure logging for a short command: warnings of FlowKit's client, but only errors from libraries."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.ERROR,
        format="%(levelname)s %(name)s: %(message)s",
    )
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logger = logging.getLogger("flowkit.client")
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
