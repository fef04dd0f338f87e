"""Addresses on which the HTTP server listens, and which of them only this machine can reach."""

from __future__ import annotations

from dataclasses import dataclass

from flowkit.errors import ConfigError
from flowkit.validation.web_pages import is_loopback

_MAX_PORT = 65_535


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A host and a port on which the server listens. The system chooses a free port for 0.

    Raise ConfigError if the port is not one.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(
                f"the port of {self} is {self.port}; it must be a whole number from 0 to {_MAX_PORT}"
            )

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)
