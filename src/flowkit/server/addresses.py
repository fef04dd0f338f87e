"""Addresses on which the HTTP server listens, and which of them only this machine can reach."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from flowkit.errors import ConfigError

_MAX_PORT = 65_535
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9A-Za-z.-]+))(?::([0-9]{1,5}))?")
"""The header `Host`: an IPv6 address in brackets, an IPv4 address or a name, and perhaps a port."""


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


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address. Other names are not, whatever they resolve to."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_loopback(header: str) -> bool:
    """Return whether the header `Host` is exactly a loopback host of `is_loopback`, alone or with a port."""
    found = _AUTHORITY.fullmatch(header)
    if found is None:
        return False
    ipv6, host, port = found.groups()
    return is_loopback(ipv6 or host) and (ipv6 is None or ":" in ipv6) and int(port or 0) <= _MAX_PORT
