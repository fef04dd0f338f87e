"""HTTP requests that FlowKit sends: without redirects, cookies, proxies and compression, and to allowed addresses only.

What the other side sends is not trusted. A redirect would send a secret to another host, a cookie of one tenant would
reach another one, and a compressed response has no size that is known before it is read.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp

from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiohttp import AddrInfoType, ClientHandlerType, ClientRequest, ClientResponse

    Address = ipaddress.IPv4Address | ipaddress.IPv6Address
    Network = ipaddress.IPv4Network | ipaddress.IPv6Network

NETWORKS_VARIABLE: Final = "FLOWKIT_SUPERVISOR_NETWORKS"
DEFAULT_NETWORKS: Final = "private,public"


# --- sessions ---------------------------------------------------------------------------------------------------


class UnusableResponse(aiohttp.ClientError):
    """The other side sends a response that is not used.

    The text begins with a verb, such as `redirects the request`.
    """


def open_session(
    *,
    connector: aiohttp.BaseConnector | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_sec: float | None = None,
) -> aiohttp.ClientSession:
    """Return a session, which the caller closes. Its requests raise UnusableResponse for a redirect.

    Read bodies with `read_body`: the session does not decompress them. `timeout_sec` bounds each request,
    from its begin to the end of the body. A function that a request has as `trace_request_ctx` is called
    when its body is sent over a connection.
    """
    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(_note_sent)
    return aiohttp.ClientSession(
        connector=connector,
        headers={"Accept-Encoding": "identity", **(headers or {})},
        timeout=aiohttp.ClientTimeout(total=timeout_sec),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
        middlewares=(_refuse_redirects,),
        trace_configs=[trace],
    )


async def _note_sent(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx()


async def _refuse_redirects(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
    response = await handler(request)
    if 300 <= response.status < 400:
        response.close()
        raise UnusableResponse(f"redirects the request (status {response.status}); use its final address")
    return response


async def read_body(response: ClientResponse, max_bytes: int) -> bytes:
    """Return the body of a response. Raise UnusableResponse if it is compressed or larger."""
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnusableResponse("returns a compressed response to a request that accepts none")
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > max_bytes:
            response.close()
            raise UnusableResponse(f"returns more than {max_bytes:,} bytes")
    return bytes(body)


# --- addresses --------------------------------------------------------------------------------------------------


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


_METADATA: Final = "metadata"
_RESERVED: Final = "reserved"
_PUBLIC: Final = "public"
_KINDS: Final = {
    "loopback": _networks("127.0.0.0/8", "::1/128"),
    "link-local": _networks("169.254.0.0/16", "fe80::/10"),
    # Metadata services of clouds whose addresses are not link-local; they return credentials of the machine.
    _METADATA: _networks(
        "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32", "fd00:ec2::254/128", "fd20:ce::254/128"
    ),
    # Unspecified addresses, which reach this machine; multicast; prefixes that embed IPv4 addresses in unknown places.
    _RESERVED: _networks(
        *("0.0.0.0/8", "224.0.0.0/4", "240.0.0.0/4", "::/96", "64:ff9b:1::/48", "fec0::/10", "ff00::/8")
    ),
    "private": _networks("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"),
}
"""The kinds of addresses and their networks. An address belongs to the first that contains it, or else is public."""

_WORDS: Final = tuple(kind for kind in (*_KINDS, _PUBLIC) if kind not in {_METADATA, _RESERVED})
"""The kinds that a setting can name."""

_ORDINARY: Final = frozenset({"private", _PUBLIC})
"""The kinds that every network that contains an address allows."""

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class AllowedNetworks:
    """The addresses to which requests to supervisors may connect."""

    kinds: frozenset[str]
    networks: tuple[Network, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the networks of a list such as `private,203.0.113.0/24`. Raise ConfigError for other texts."""
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise ConfigError(f"{NETWORKS_VARIABLE} is empty; the default is {DEFAULT_NETWORKS}")
        kinds = frozenset(part for part in parts if part in _WORDS)
        return cls(kinds, tuple(_parse_network(part) for part in parts if part not in kinds))

    def refusal(self, text: str) -> str | None:
        """Return why no request may connect to an address, or None if it may.

        An address that embeds an IPv4 address reaches that one through a gateway, so both must be allowed.
        """
        try:
            address = _without_mapping(ipaddress.ip_address(text))
        except ValueError:
            return f"{text} is no IP address in its usual form"
        for each in _embedded(address):
            kind = _kind_of(each)
            if kind not in _ORDINARY and not self._allows(each, kind):
                return self._describe(f"{address}, which leads to {each},", each, kind)
        kind = _kind_of(address)
        return None if self._allows(address, kind) else self._describe(str(address), address, kind)

    def _allows(self, address: Address, kind: str) -> bool:
        """Return whether a word or a network allows an address.

        A network such as 0.0.0.0/0 does not allow loopback: one for such an address has no others.
        """
        if kind in self.kinds:
            return True
        return any(
            address in network and (kind in _ORDINARY or _is_within(network, _KINDS[kind]))
            for network in self.networks
        )

    def _describe(self, shown: str, address: Address, kind: str) -> str:
        allowed = ",".join([*(word for word in _WORDS if word in self.kinds), *map(str, self.networks)])
        own = str(ipaddress.ip_network(address))
        cure = f"{kind}, or {own}," if kind in _WORDS else own
        return (
            f"the {kind} address {shown} is not allowed by {NETWORKS_VARIABLE} ({allowed}); an operator can add "
            f"{cure} to it"
        )


def _parse_network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(
            f"{NETWORKS_VARIABLE} has {text!r}, which is no network such as 10.0.0.0/8 ({error}) and none of "
            f"{', '.join(_WORDS)}"
        ) from None


def _kind_of(address: Address) -> str:
    for kind, networks in _KINDS.items():
        if any(address in network for network in networks):
            return kind
    return _PUBLIC


def _is_within(network: Network, others: Sequence[Network]) -> bool:
    first, last = network[0], network[-1]
    return any(first in other and last in other for other in others)


def _without_mapping(address: Address) -> Address:
    """Return the IPv4 address for an IPv4-mapped one, such as `::ffff:10.0.0.1`, and others without their zone."""
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or ipaddress.IPv6Address(int(address))
    return address


def _embedded(address: Address) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses that a NAT64, 6to4 or Teredo address contains."""
    if not isinstance(address, ipaddress.IPv6Address):
        return []
    nat64 = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF) if address in _NAT64 else None
    return [each for each in (nat64, address.sixtofour, *(address.teredo or ())) if each is not None]


DEFAULT_ALLOWED: Final = AllowedNetworks.parse(DEFAULT_NETWORKS)


class AddressNotAllowed(OSError):
    """The name or the address of a supervisor leads to an address that is not allowed.

    The text is the same for all addresses, so that a connection to several ones fails with this error;
    `reason` names one.
    """

    def __init__(self, reason: str) -> None:
        super().__init__("the address is not allowed")
        self.reason = reason


def guarded_connector(allowed: AllowedNetworks) -> aiohttp.TCPConnector:
    """Return a connector that connects to allowed addresses only, any number at once.

    It checks the address itself when it opens the socket, so it does not matter what a name resolved to before.
    """

    def open_socket(info: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, where = info
        if (reason := allowed.refusal(str(where[0]))) is not None:
            raise AddressNotAllowed(reason)
        return socket.socket(family=family, type=kind, proto=protocol)

    return aiohttp.TCPConnector(limit=0, keepalive_timeout=60, socket_factory=open_socket)
