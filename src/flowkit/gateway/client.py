"""A client of the gateway: calls over HTTP, and the events of a flow over a WebSocket."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any, Final, Self

from flowkit import reason_codes
from flowkit.errors import ConfigError, FlowKitError
from flowkit.text import shown_address

try:
    import aiohttp

    from flowkit.gateway.http_client import open_session, read_body
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"GatewayClient needs {error.name}: run pip install 'flowkit-temporal[gateway]'", name=error.name
    ) from error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from types import TracebackType

DEFAULT_URL: Final = "http://127.0.0.1:9652"
_TIMEOUT_SEC: Final = 60.0
_MAX_REPLY: Final = 100_000_000
"""Largest reply of a gateway, in bytes."""


class GatewayUnavailable(FlowKitError):
    """The gateway does not respond."""

    code = reason_codes.GATEWAY_UNAVAILABLE


class CallFailed(FlowKitError):
    """The gateway has returned an error."""

    code = reason_codes.CALL_FAILED

    def __init__(self, method: str, error: Mapping[str, Any]) -> None:
        super().__init__(f"{method}: {error['message']} (error {error['code']})")
        self.rpc_code: int = error["code"]
        """See docs/flows.md for the codes."""
        self.data: Any = error.get("data")
        """The place of the problem."""


class GatewayClient:
    """Calls the methods of a gateway. Use it as an asynchronous context manager.

    `url` is its HTTP address; a WebSocket connects to the same address. `token` is a bearer token, which a gateway on
    another machine needs.
    """

    def __init__(self, url: str = DEFAULT_URL, *, token: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the address of the gateway is {shown_address(url)!r}; it must begin with http:// or https://"
            )
        self.url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._ids = itertools.count(1)

    async def __aenter__(self) -> Self:
        self._session = open_session(headers=self._headers, timeout_sec=_TIMEOUT_SEC)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP session. Raise RuntimeError outside of the block."""
        if self._session is None:
            raise RuntimeError("use the client in `async with GatewayClient(...) as client:`")
        return self._session

    async def call(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """Return the result of a method. Raise CallFailed for its errors, and GatewayUnavailable."""
        request = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": {**(params or {})}}
        reply = await self.post(request)
        if "result" not in reply:
            raise CallFailed(method, reply["error"])
        return reply["result"]

    async def post(self, request: Mapping[str, Any] | Sequence[Any]) -> Any:
        """Send a request, or a batch of requests, and return the reply as it is."""
        try:
            async with self.session.post(self.url, json=request) as response:
                reply: Any = json.loads(await read_body(response, _MAX_REPLY))
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            raise self._unavailable(error) from None
        if response.status == 401:
            raise CallFailed("the call", {"code": 401, "message": "the gateway needs a valid token"})
        return reply

    async def events(self, context_id: int, flow_id: int, after: int = 0) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a flow, those that are stored and then new ones, until the connection ends.

        To continue after a lost connection without a gap, pass the `seq` of the last event as `after`. Raise CallFailed
        if the gateway rejects the subscription, and GatewayUnavailable.
        """
        params = {"context_id": context_id, "id": flow_id, "after": after}
        request = {"jsonrpc": "2.0", "id": next(self._ids), "method": "flow.subscribe", "params": params}
        try:
            async with self.session.ws_connect(self.url) as socket:
                await socket.send_json(request)
                async for message in socket:
                    reply = message.json()
                    if reply.get("method") == "flow.event":
                        yield reply["params"]
                    elif "result" not in reply:
                        raise CallFailed("flow.subscribe", reply["error"])
        except aiohttp.ClientError as error:
            raise self._unavailable(error) from None

    def _unavailable(self, error: Exception) -> GatewayUnavailable:
        return GatewayUnavailable(f"no gateway responds at {shown_address(self.url)} ({_words(error)})")


def _words(error: Exception) -> str:
    """Return why a connection has failed, in a few words and without the URL, which may contain credentials."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"status {error.status}"
    if isinstance(error, aiohttp.InvalidURL):
        return "it is no valid URL"
    reason = getattr(error, "os_error", None) or error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
