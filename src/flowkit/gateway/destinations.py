"""Where supervisors are: the addresses of runners, and their one spelling."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from yarl import URL

from flowkit.text import shown_address

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_TOPIC: Final = "supervisor.rpc"
_PUBLIC_KEY: Final = re.compile(r"[0-9a-fA-F]{64}")
_NUMERIC_HOST: Final = re.compile(r"[0-9.]+|0[xX].*")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a supervisor is."""

    kind: str
    """`http` or `mycelium`."""
    address: str
    """A URL, or the public key or IPv6 address of a Mycelium node, in lower case."""
    topic: str = DEFAULT_TOPIC

    @property
    def key(self) -> str:
        """The address in one spelling, whichever it was given in.

        Paths that differ in a slash at the end are the same.
        """
        if self.kind != "http":
            return f"{self.kind}:{self.address}"
        url = URL(self.address).with_fragment(None)
        host = _canonical_host((url.host or "").rstrip("."))
        return str(url.with_host(host).with_port(url.port).with_path(url.path.rstrip("/"), keep_query=True))

    @property
    def credentials(self) -> tuple[str, ...]:
        """The password of the URL, or a user without one, which is a token."""
        if self.kind != "http":
            return ()
        url = URL(self.address)
        return tuple(filter(None, (url.password or url.user, url.raw_password or url.raw_user)))

    @property
    def is_public_key(self) -> bool:
        """Whether the address is the public key of a Mycelium node."""
        return _PUBLIC_KEY.fullmatch(self.address) is not None

    def __str__(self) -> str:
        return shown_address(self.address) if self.kind == "http" else f"mycelium:{self.address}"


def parse_destination(text: str, *, topic: str = DEFAULT_TOPIC) -> Destination:
    """Return the destination that `http(s)://…` or `mycelium:…` names. Raise ValueError for any other text."""
    scheme, _, rest = text.partition(":")
    scheme = scheme.lower()
    if scheme in {"http", "https"}:
        if not _has_host(text):
            raise ValueError("must be a URL with a host, such as http://10.0.0.8:3030")
        return Destination("http", text, topic)
    if scheme == "mycelium" and (_PUBLIC_KEY.fullmatch(rest) or _is_address(rest, ipaddress.IPv6Address)):
        return Destination("mycelium", _canonical_host(rest), topic)
    raise ValueError("must be http://…, https://…, or mycelium: with a public key or an IPv6 address")


def _has_host(text: str) -> bool:
    """Return whether a URL has a host and a port, and not an IPv4 address in an unusual form, such as 127.1."""
    try:
        url = URL(text)
        host, port = url.host, url.port
        url.with_host(host or "")
    except (ValueError, IndexError):  # yarl finds no host where a bracket is left open
        return False
    if not host or not port or any(char.isspace() for char in text):
        return False
    return not _NUMERIC_HOST.fullmatch(host) or _is_address(host, ipaddress.IPv4Address)


def _canonical_host(text: str) -> str:
    """Return a name, a key or an IP address in lower case, and IPv6 in its shortest form."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text.lower()


def _is_address(text: str, kind: Callable[[str], object]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True
