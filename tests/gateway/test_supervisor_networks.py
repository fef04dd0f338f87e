"""Which addresses of supervisors a setting allows."""

from __future__ import annotations

import pytest

from flowkit.errors import ConfigError
from flowkit.gateway.http_client import DEFAULT_NETWORKS, AllowedNetworks

FORBIDDEN = [
    *("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::127.0.0.1"),
    *("169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "fe80::1", "fe80::1%eth0"),
    *("2001:0:a9fe:a9fe::1", "64:ff9b:1::7f00:1", "fd00:ec2::254", "100.100.100.200", "168.63.129.16"),
    *("0.0.0.0", "0.0.0.1", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "2130706433", "localhost"),
]
ORDINARY = ["10.0.0.8", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fd12::1", "203.0.113.9", "2001:db8::1"]
ORDINARY += ["::ffff:10.0.0.8", "64:ff9b::a00:8", "400::1", "54d:f5ad::1"]


@pytest.mark.parametrize("networks", [DEFAULT_NETWORKS, "0.0.0.0/0,::/0"])
@pytest.mark.parametrize("address", FORBIDDEN)
def test_special_addresses_are_refused_unless_they_are_named(address: str, networks: str) -> None:
    assert AllowedNetworks.parse(networks).refusal(address) is not None


@pytest.mark.parametrize("networks", [DEFAULT_NETWORKS, "0.0.0.0/0,::/0"])
@pytest.mark.parametrize("address", ORDINARY)
def test_private_and_public_addresses_are_allowed(address: str, networks: str) -> None:
    assert AllowedNetworks.parse(networks).refusal(address) is None


@pytest.mark.parametrize(
    ("networks", "allowed", "refused"),
    [
        ("loopback", "127.0.0.1", "10.0.0.8"),
        ("loopback", "::ffff:127.0.0.1", "169.254.169.254"),
        ("link-local, private", "fe80::1%eth0", "203.0.113.9"),
        ("10.1.0.0/16", "10.1.2.3", "10.2.0.1"),
        ("10.1.0.0/16,private", "10.2.0.1", "203.0.113.9"),
        ("127.0.0.1/32", "127.0.0.1", "127.0.0.2"),
        ("100.100.100.200/32", "100.100.100.200", "100.64.0.1"),
        ("64:ff9b::/96", "64:ff9b::cb00:7109", "64:ff9b::7f00:1"),
        ("64:ff9b:1::/48", "64:ff9b:1::a00:8", "203.0.113.9"),
    ],
)
def test_a_setting_allows_what_it_names_and_nothing_else(networks: str, allowed: str, refused: str) -> None:
    found = AllowedNetworks.parse(networks)
    assert found.refusal(allowed) is None
    assert found.refusal(refused) is not None


def test_a_refusal_names_the_address_the_setting_and_the_remedy() -> None:
    allowed = AllowedNetworks.parse("private,203.0.113.0/24")
    assert allowed.refusal("127.0.0.1") == (
        "the loopback address 127.0.0.1 is not allowed by FLOWKIT_SUPERVISOR_NETWORKS (private,203.0.113.0/24); "
        "an operator can add loopback, or 127.0.0.1/32, to it"
    )
    assert "64:ff9b::7f00:1, which leads to 127.0.0.1, is" in str(allowed.refusal("64:ff9b::7f00:1"))
    assert "can add 0.0.0.0/32 to it" in str(allowed.refusal("0.0.0.0"))


@pytest.mark.parametrize("text", ["", " , ", "10.0.0.1/8", "metadata", "everything", "10.0.0.0/33"])
def test_other_settings_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="FLOWKIT_SUPERVISOR_NETWORKS"):
        AllowedNetworks.parse(text)
