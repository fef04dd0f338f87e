"""How `flowkit gateway` names the Mycelium node: by a URL, or by the options of earlier coordinators."""

from __future__ import annotations

import pytest

from flowkit.cli.app import run
from flowkit.gateway import cli

OPTIONS = {
    (): "http://127.0.0.1:8990",
    ("--mycelium-url", "https://node:1"): "https://node:1",
    ("--mycelium-ip", "10.0.0.7"): "http://10.0.0.7:8990",
    ("--mycelium-port", "9000"): "http://127.0.0.1:9000",
    ("--mycelium-ip", "10.0.0.7", "--mycelium-port", "9000"): "http://10.0.0.7:9000",
    ("--mycelium-ip", "fd00::7"): "http://[fd00::7]:8990",
    ("--mycelium-url", "https://node:1", "--mycelium-port", "9000"): "http://127.0.0.1:9000",
}


@pytest.mark.parametrize("command", [["gateway"], ["gateway", "jobs"]], ids=" ".join)
@pytest.mark.parametrize(("options", "url"), OPTIONS.items(), ids=lambda each: " ".join(each) or "none")
def test_the_mycelium_node_is_named_by_a_url_or_by_ip_address_and_port(
    monkeypatch: pytest.MonkeyPatch, command: list[str], options: tuple[str, ...], url: str
) -> None:
    monkeypatch.delenv("MYCELIUM_URL", raising=False)
    given: list[str] = []
    monkeypatch.setattr(cli, "_run", lambda _where, values, *_, **__: given.append(values["mycelium_url"]))
    assert run([*command, *options]) == 0
    assert given == [url]


def test_ip_address_and_port_take_precedence_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYCELIUM_URL", "http://elsewhere:1")
    given: list[str] = []
    monkeypatch.setattr(cli, "_run", lambda _where, values, *_, **__: given.append(values["mycelium_url"]))
    assert run(["gateway", "jobs"]) == 0
    assert run(["gateway", "jobs", "--mycelium-port", "2"]) == 0
    assert given == ["http://elsewhere:1", "http://127.0.0.1:2"]


def test_a_host_name_is_no_ip_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gateway", "jobs", "--mycelium-ip", "node"]) == 2
    assert "'node' is no IP address; --mycelium-url takes host names" in " ".join(
        capsys.readouterr().err.split()
    )
