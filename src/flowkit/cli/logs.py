"""Logs of commands, on stderr."""

from __future__ import annotations

import logging


def log_processes(verbose: bool) -> None:
    """Logs of a process that runs for long: with time and name."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def log_warnings(verbose: bool) -> None:
    """Logs of a command that ends soon: what a person should know, and nothing of the libraries below."""
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
