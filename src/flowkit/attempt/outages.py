"""Logs an outage of a service once when it begins and once when it ends."""

from __future__ import annotations

import logging

_logger = logging.getLogger("flowkit.worker")


class OutageLogger:
    """Logs an outage once when it begins and once when it ends."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_down = False

    def failed(self, error: Exception) -> None:
        """Log the first failure of an outage."""
        if not self._is_down:
            _logger.warning("cannot %s: %s; retrying", self._what, str(error) or "no response in time")
        self._is_down = True

    def recovered(self) -> None:
        """Log the end of an outage, if one was in progress."""
        if self._is_down:
            _logger.info("can %s again", self._what)
        self._is_down = False
