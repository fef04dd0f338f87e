"""The HTTP endpoint with the health of a process."""

from __future__ import annotations

import http.client
import json
import socket

import pytest
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.product_code import needs_product

from flowkit.attempt.background import BridgeHealth, Health, LoopHealth, RoleHealth
from flowkit.cli.health import health_endpoint
from flowkit.cli.options import DEFAULT_HEALTH_HOST, HealthOptions
from flowkit.errors import ConfigError
from flowkit.local.ports import free_port

BRIDGE = BridgeHealth(
    bridge_id="b", roles=(RoleHealth(role="indexer", waits_for="Kafka"), RoleHealth(role="grouper"))
)
GOOD = Health(running=True, loops=(LoopHealth(name="a loop", running=True),), bridge=BRIDGE)


def respond(
    port: int, method: str = "GET", path: str = "/", host: str = DEFAULT_HEALTH_HOST
) -> tuple[int, bytes]:
    """Return status and body of one request."""
    connection = http.client.HTTPConnection(host, port, timeout=EVENT_TIMEOUT_SEC)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/", "/healthz?full=1"])
def test_healthy_process_returns_200_and_its_health_at_every_path(path: str) -> None:
    port = free_port()
    with health_endpoint(HealthOptions(port=port), lambda: GOOD):
        status, body = respond(port, path=path)
    found = json.loads(body)
    assert (status, found["ok"], found["running"]) == (200, True, True)
    assert [role["waits_for"] for role in found["bridge"]["roles"]] == ["Kafka", None]


def test_health_port_may_listen_on_an_address_of_ipv6() -> None:
    port = free_port()
    with health_endpoint(HealthOptions(host="::1", port=port), lambda: GOOD):
        assert respond(port, host="::1")[0] == 200


def status_for(port: int, headers: dict[str, str]) -> int:
    """Return the status of a request for metrics with these headers."""
    connection = http.client.HTTPConnection(DEFAULT_HEALTH_HOST, port, timeout=EVENT_TIMEOUT_SEC)
    try:
        connection.request("GET", "/metrics", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


@needs_product("observe")
def test_web_pages_read_neither_health_nor_metrics() -> None:
    port = free_port()
    reports = HealthOptions(port=port, names="engine.example, engine")
    with health_endpoint(reports, lambda: GOOD, lambda: b"metrics"):
        for host in (f"127.0.0.1:{port}", "localhost", "10.0.0.5:9656", "engine.example:80", "engine"):
            assert status_for(port, {"Host": host}) == 200
        for host in ("evil.example", "engine.example.evil.example", "127.0.0.1.evil.example", ""):
            assert status_for(port, {"Host": host}) == 403
        for site in ("cross-site", "same-site"):
            assert status_for(port, {"Sec-Fetch-Site": site}) == 403
        assert status_for(port, {"Sec-Fetch-Site": "none"}) == 200


def test_unhealthy_process_returns_503_with_the_reason() -> None:
    port = free_port()
    with health_endpoint(HealthOptions(port=port), lambda: Health(running=False, error="no database")):
        status, body = respond(port)
        assert respond(port, "HEAD") == (503, b"")
    assert (status, json.loads(body)["error"]) == (503, "no database")


def test_other_methods_are_rejected() -> None:
    port = free_port()
    with health_endpoint(HealthOptions(port=port), lambda: GOOD):
        assert respond(port, "POST")[0] == 501


def test_clients_that_do_not_finish_their_request_keep_no_probe_out() -> None:
    port = free_port()
    with health_endpoint(HealthOptions(port=port), lambda: GOOD):
        clients = [
            socket.create_connection((DEFAULT_HEALTH_HOST, port), timeout=EVENT_TIMEOUT_SEC)
            for _ in range(60)
        ]
        for client in clients:
            client.sendall(b"GET / HT")
        assert respond(port)[0] == 200
        assert clients[0].recv(1) == b""
        for client in clients:
            client.close()


def test_client_that_sends_its_request_too_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkit.cli.health._HealthServer.timeout_sec", 0.3)
    port = free_port()
    with (
        health_endpoint(HealthOptions(port=port), lambda: GOOD),
        socket.create_connection((DEFAULT_HEALTH_HOST, port), timeout=EVENT_TIMEOUT_SEC) as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        assert client.recv(1) == b""


def test_port_in_use_is_reported_with_the_option() -> None:
    with socket.create_server((DEFAULT_HEALTH_HOST, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--health-port {port} is not usable on 127.0.0.1: "):
            health_endpoint(HealthOptions(port=port), lambda: GOOD).__enter__()


def test_bridge_is_served_once_all_of_its_roles_are() -> None:
    assert not BRIDGE.served
    assert BridgeHealth(bridge_id="b", roles=BRIDGE.roles[1:]).served
