"""Which requests a web page in a browser may have caused."""

from __future__ import annotations

import pytest

from flowkit.validation.web_pages import (
    comes_from_another_page,
    is_loopback,
    names_loopback,
    names_server,
    opens_a_page,
)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("LOCALHOST", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "")],
)
def test_only_localhost_and_loopback_addresses_are_local(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


HOSTS = {
    True: ["localhost", "LOCALHOST:9652", "127.0.0.1", "127.9.9.9:1", "[::1]", "[::1]:65535"],
    False: [
        *("", ":80", "::1", "[127.0.0.1]", "[localhost]", "[::1%25lo]", "[::1", "[::1]x", "127.1", "0x7f.1"),
        *("localhost:9652.evil.example", "localhost:", "localhost:65536", "localhost:-1", "localhost:1:2"),
        *(
            "evil.example@localhost",
            "localhost@evil.example",
            "localhost#evil.example",
            "localhost/evil.example",
        ),
        *("localhost.", "localhost.evil.example", "localhost, evil.example", " localhost", "localhost\n"),
        *("localhost:١", "ｌocalhost", "localhost:9652\\evil.example"),
    ],
}


@pytest.mark.parametrize(
    ("header", "loopback"), [(host, loopback) for loopback, hosts in HOSTS.items() for host in hosts]
)
def test_host_of_a_call_is_exactly_a_loopback_host_with_or_without_a_port(
    header: str, loopback: bool
) -> None:
    assert names_loopback(header) == loopback


@pytest.mark.parametrize("header", ["10.0.0.5:9656", "[fd00::1]:9656", "localhost", "Engine:9656", "my_host"])
def test_host_of_a_probe_is_an_address_or_a_name_that_is_known(header: str) -> None:
    assert names_server(header, ("engine", "my_host"))


@pytest.mark.parametrize(
    "header",
    ["", "evil.example", "engine.evil.example", "engine@evil.example", "10.0.0.5.evil.example", "0x7f.1"],
)
def test_other_hosts_are_those_of_web_pages(header: str) -> None:
    assert not names_server(header, ("engine",))


@pytest.mark.parametrize(
    ("site", "foreign"),
    [
        (None, False),
        ("none", False),
        ("same-origin", False),
        ("same-site", True),
        ("cross-site", True),
        ("x", True),
    ],
)
def test_a_browser_says_which_page_has_caused_a_request(site: str | None, foreign: bool) -> None:
    assert comes_from_another_page({} if site is None else {"sec-fetch-site": site}) == foreign


def test_only_a_navigation_of_a_tab_opens_a_page() -> None:
    opened = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert opens_a_page("GET", opened)
    assert not opens_a_page("POST", opened)
    assert not opens_a_page("GET", {**opened, "sec-fetch-dest": "iframe"})
    assert not opens_a_page("GET", {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"})
