"""Connection errors of a client: each cause has its own text and remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from flowkit.connection import Namespace, TemporalUnavailable, is_local, unavailable

ADDRESS = "temporal.example:7233"


def rpc(status: RPCStatusCode, message: str = "as the server says") -> RPCError:
    """Return an error response of the server."""
    return RPCError(message, status, b"")


def test_missing_namespace_is_reported_with_the_command_that_creates_it() -> None:
    error = unavailable(rpc(RPCStatusCode.NOT_FOUND), ADDRESS, "my orders")
    assert error.problem == f"Temporal at {ADDRESS} has no namespace 'my orders'"
    assert error.remedy == (
        "set TEMPORAL_NAMESPACE, or create it: temporal operator namespace create --namespace 'my orders'"
    )
    assert str(error) == f"{error.problem}: {error.remedy}"


@pytest.mark.parametrize("status", [RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNAUTHENTICATED])
def test_authentication_error_is_not_reported_as_an_unreachable_server(status: RPCStatusCode) -> None:
    error = unavailable(rpc(status), ADDRESS, "default")
    assert error.problem == f"Temporal at {ADDRESS} denies this client access to namespace 'default'"
    assert "TEMPORAL_API_KEY" in error.remedy
    assert str(error).endswith("(as the server says)")


@pytest.mark.parametrize(
    "cause", [RuntimeError("Failed client connect: " + "x" * 900), rpc(RPCStatusCode.UNAVAILABLE)]
)
def test_error_for_an_unreachable_server_contains_its_address(cause: RuntimeError | RPCError) -> None:
    error = unavailable(cause, ADDRESS, "default")
    assert error.problem == f"no Temporal server responds at {ADDRESS}"
    assert error.remedy == "start one, or set TEMPORAL_ADDRESS"
    assert len(str(error)) < 350


def test_broken_development_server_is_reported_with_the_advice_to_restart_it() -> None:
    cause = rpc(RPCStatusCode.UNAVAILABLE, "GetNamespace operation failed. Error interrupted (9)")
    error = unavailable(cause, ADDRESS, "default")
    assert error.problem == f"the Temporal development server at {ADDRESS} has lost its database connection"
    assert error.remedy == "restart it, with Temporal CLI 1.9 or newer if possible"
    assert str(error).endswith("(GetNamespace operation failed. Error interrupted (9))")


def test_error_without_details_has_a_default_text() -> None:
    assert "TEMPORAL_ADDRESS" in str(TemporalUnavailable())
    assert str(TemporalUnavailable("only this")) == "only this"


@pytest.mark.parametrize(
    "address", ["127.0.0.1:7233", "127.8.9.1:1", "localhost:7233", "LOCALHOST:7233", "[::1]:7233"]
)
def test_loopback_addresses_are_recognized(address: str) -> None:
    assert is_local(address)


@pytest.mark.parametrize(
    "address", ["temporal:7233", "10.0.0.1:7233", "localhost.example:7233", "[fe80::1]:7233", "", ":7233"]
)
def test_other_addresses_are_not_loopback(address: str) -> None:
    assert not is_local(address)


class Describes:
    """A client whose first calls are denied."""

    namespace = "default"

    def __init__(self, refusals: int) -> None:
        self.workflow_service = self
        self.refusals = refusals
        self.asked = 0

    async def describe_namespace(self, request: Any) -> Any:
        """Return the id once no denials are left."""
        self.asked += 1
        if self.asked <= self.refusals:
            raise RPCError("not allowed", RPCStatusCode.PERMISSION_DENIED, b"")
        return SimpleNamespace(namespace_info=SimpleNamespace(id=f"id of {request.namespace}"))


async def test_namespace_id_is_requested_until_it_is_known(caplog: pytest.LogCaptureFixture) -> None:
    client: Any = Describes(refusals=2)
    namespace = Namespace(client)
    assert [await namespace.id() for _ in range(5)] == ["", "", *["id of default"] * 3]
    assert client.asked == 3
    assert [record.getMessage() for record in caplog.records if record.name == "flowkit.client"] == [
        "Temporal did not return the id of namespace 'default': not allowed"
    ]
