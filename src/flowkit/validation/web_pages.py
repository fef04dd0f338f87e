"""Which requests a web page in a browser may have caused, by their headers. Pure.

A server that needs no token would otherwise obey every page that the user of this machine opens: one that sends a form
or an image to it, and one whose host name resolves to this machine (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

SITE = "sec-fetch-site"
"""The header in which a browser says where the page comes from that causes a request. Other programs do not send it."""
FETCH_HEADERS = (SITE, "sec-fetch-mode", "sec-fetch-dest")

_MAX_PORT = 65_535
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9A-Za-z._-]+))(?::([0-9]{1,5}))?")
"""The header `Host`: an IPv6 address in brackets, an IPv4 address or a name, and perhaps a port."""
_OWN_SITES = ("", "same-origin", "none")
"""No browser, a page of the server itself, and an address that the user has typed."""


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address. Other names are not, whatever they resolve to."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_loopback(header: str) -> bool:
    """Return whether the header `Host` is exactly a loopback host of `is_loopback`, alone or with a port."""
    return is_loopback(_host_of(header))


def names_server(header: str, names: Collection[str]) -> bool:
    """Return whether the header `Host` is an IP address, a loopback host, or one of `names`, alone or with a port.

    No web page has an address as its host but one that comes from there.
    """
    host = _host_of(header)
    return bool(host) and (_is_address(host) or is_loopback(host) or host.lower() in map(str.lower, names))


def _host_of(header: str) -> str:
    """Return the host that the header names, without brackets; an empty string if the header is malformed."""
    found = _AUTHORITY.fullmatch(header)
    if found is None:
        return ""
    ipv6, host, port = found.groups()
    if int(port or 0) > _MAX_PORT or (ipv6 is not None and ":" not in ipv6):
        return ""
    return str(ipv6 or host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def comes_from_another_page(headers: Mapping[str, str]) -> bool:
    """Return whether a browser sends a request for a page of another server. The names of headers are in lower case.

    Another port of this machine is another server, too.
    """
    return headers.get(SITE, "") not in _OWN_SITES


def opens_a_page(method: str, headers: Mapping[str, str]) -> bool:
    """Return whether a browser opens an address in a tab of its own, for example because of a link in a chat."""
    wanted = dict(zip(FETCH_HEADERS[1:], ("navigate", "document"), strict=True))
    return method in ("GET", "HEAD") and all(headers.get(name) == value for name, value in wanted.items())
