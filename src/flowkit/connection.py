"""The connection of engines, workers and clients to Temporal, and the thread that runs Temporal workers."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.envconfig import ClientConfig
from temporalio.service import GrpcCompression, RPCError, RPCStatusCode

from flowkit import reason_codes
from flowkit.core.loops import new_event_loop, run_to_end
from flowkit.errors import ConfigError, FlowKitError
from flowkit.models.temporal_names import SEARCH_ATTRIBUTES
from flowkit.payload_converter import configured_converter
from flowkit.text import shell_word, shown_address, truncate
from flowkit.validation.web_pages import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from temporalio.envconfig import ClientConnectConfig

_logger = logging.getLogger("flowkit.client")

DEFAULT_ADDRESS = "localhost:7233"
_DETAIL_CHARS = 200
# A development server of Temporal CLI 1.6 or older can lose its connection to SQLite. All requests then fail.
_BROKEN_SQLITE = "interrupted (9)"


class TemporalUnavailable(FlowKitError):
    """Temporal is unavailable; check TEMPORAL_ADDRESS and TEMPORAL_NAMESPACE, and that the server is running."""

    retryable = True
    code = reason_codes.TEMPORAL_UNAVAILABLE

    def __init__(self, problem: str | None = None, remedy: str = "", detail: str = "") -> None:
        self.problem = problem
        """The problem, without the remedy."""
        self.remedy = remedy
        more = f" ({detail})" if detail else ""
        super().__init__(f"{problem}: {remedy}{more}" if problem and remedy else problem)


async def connect() -> Client:
    """Return a client connected as `TEMPORAL_*` or Temporal's profile specify.

    Raise ConfigError if a setting is invalid, otherwise TemporalUnavailable. It names the address if the
    server does not respond. It also names the namespace if the namespace does not exist or the server
    denies access to it.
    """
    settings = _read_settings()
    address, namespace = settings["target_host"], settings["namespace"]
    converter = configured_converter()
    compression = GrpcCompression.NONE if is_local(address) else GrpcCompression.GZIP
    try:
        client = await Client.connect(**settings, data_converter=converter, grpc_compression=compression)
        await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=client.namespace))
        return client
    except (RPCError, RuntimeError) as error:
        raise unavailable(error, address, namespace) from None


def temporal_address() -> tuple[str, str]:
    """Return address and namespace from `TEMPORAL_*` or the Temporal profile. Raises ConfigError."""
    settings = _read_settings()
    return settings["target_host"], settings["namespace"]


def _read_settings() -> ClientConnectConfig:
    """Return the settings of the connection. Raises ConfigError without the lines of a profile, which hold secrets."""
    try:
        settings = ClientConfig.load_client_connect_config()
    except (RuntimeError, OSError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        remedy = "check TEMPORAL_ADDRESS and the other TEMPORAL_* variables"
        raise ConfigError(f"invalid settings for Temporal's client: {reason}; {remedy}") from None
    settings.setdefault("target_host", DEFAULT_ADDRESS)
    settings.setdefault("namespace", "default")
    return settings


class Namespace:
    """The namespace of a client. Its id distinguishes namespaces with the same name on different servers."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._id = ""
        self._warned = False

    async def id(self) -> str:
        """Return the namespace id, or an empty string while Temporal does not return it. Each call tries again."""
        if not self._id:
            request = DescribeNamespaceRequest(namespace=self._client.namespace)
            try:
                response = await self._client.workflow_service.describe_namespace(request)
                self._id = response.namespace_info.id
            except RPCError as error:
                self._warn(error)
        return self._id

    def _warn(self, error: RPCError) -> None:
        if not self._warned:
            name = self._client.namespace
            _logger.warning("Temporal did not return the id of namespace %r: %s", name, error.message)
        self._warned = True


async def register_search_attributes(client: Client) -> None:
    """Register FlowKit's search attributes in the namespace. Raise RPCError if the server refuses it."""
    wanted = dict.fromkeys(SEARCH_ATTRIBUTES, IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD)
    await client.operator_service.add_search_attributes(
        AddSearchAttributesRequest(namespace=client.namespace, search_attributes=wanted)
    )


async def registered_search_attributes(client: Client) -> tuple[str, ...]:
    """Return FlowKit's search attributes that are registered in the namespace.

    Raise RPCError if the server refuses it.
    """
    request = ListSearchAttributesRequest(namespace=client.namespace)
    known = await client.operator_service.list_search_attributes(request)
    return tuple(name for name in SEARCH_ATTRIBUTES if name in known.custom_attributes)


def is_local(address: str) -> bool:
    """Return whether `host:port` is this machine, where compression takes time without saving bandwidth."""
    return is_loopback(urlsplit(f"//{address}").hostname or "")


_ACCESS_DENIED = (RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNAUTHENTICATED)


def unavailable(error: RPCError | RuntimeError, address: str, namespace: str) -> TemporalUnavailable:
    """Return the error that explains why a client could not connect, with its remedy."""
    address = shown_address(address)
    status = error.status if isinstance(error, RPCError) else None
    if status is RPCStatusCode.NOT_FOUND:
        create = f"temporal operator namespace create --namespace {shell_word(namespace)}"
        problem = f"Temporal at {address} has no namespace {namespace!r}"
        return TemporalUnavailable(problem, f"set TEMPORAL_NAMESPACE, or create it: {create}")
    detail = truncate(str(error), _DETAIL_CHARS)
    if status in _ACCESS_DENIED:
        problem = f"Temporal at {address} denies this client access to namespace {namespace!r}"
        return TemporalUnavailable(problem, "check TEMPORAL_API_KEY, or the client's certificate", detail)
    if status is RPCStatusCode.UNAVAILABLE and _BROKEN_SQLITE in detail:
        problem = f"the Temporal development server at {address} has lost its database connection"
        return TemporalUnavailable(problem, "restart it, with Temporal CLI 1.9 or newer if possible", detail)
    problem = f"no Temporal server responds at {address}"
    return TemporalUnavailable(problem, "start one, or set TEMPORAL_ADDRESS", detail)


class Service(Protocol):
    """Something that runs beside Temporal workers until it is shut down, such as a Temporal worker or a bridge."""

    async def run(self) -> None:
        """Run until `shutdown`. Raise the error that ends it, if any."""

    async def shutdown(self) -> None:
        """Stop gracefully."""


class WorkerThread:
    """Runs Temporal workers on a separate thread with its own event loop.

    Code that blocks the caller's loop then delays neither heartbeats nor workflow tasks.
    """

    def __init__(self, name: str, build: Callable[[], Sequence[Service]]) -> None:
        self._build = build
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._started = asyncio.get_running_loop().create_future()
        self._caller = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._error: BaseException | None = None
        self.failed: asyncio.Future[BaseException | None] = self._caller.create_future()
        """Resolves when the workers have ended; raises the error that ended them, if any."""

    async def start(self) -> None:
        """Start the workers. Raise the error that prevents creating them; `failed` reports later errors."""
        self._thread.start()
        await self._started

    @property
    def alive(self) -> bool:
        """Whether the workers have been started and have not ended."""
        return self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """The error that ended the workers, or None."""
        return self._error

    async def stop(self) -> None:
        """Stop the workers and wait until their thread has ended."""
        with suppress(RuntimeError):  # the loop is closed because the workers have already ended
            self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                run_to_end(runner, self._run())
        except BaseException as caught:  # noqa: BLE001 - passed to the code that awaits the thread
            self._error = caught
            _logger.error("%s stopped: %s", self._thread.name, caught or type(caught).__name__)
        self._settle_in_caller(self._started, self._error)
        self._settle_in_caller(self.failed, self._error)

    async def _run(self) -> None:
        workers = self._build()
        self._settle_in_caller(self._started, None)
        await _run_until(self._stop, workers)

    def _settle_in_caller(self, future: asyncio.Future[Any], error: BaseException | None) -> None:
        self._caller.call_soon_threadsafe(_settle, future, error)


class InlineWorkers:
    """Runs Temporal workers on the caller's event loop. Faster than a thread if nothing blocks that loop."""

    def __init__(self, build: Callable[[], Sequence[Service]]) -> None:
        self._build = build
        self._stop = asyncio.Event()
        self.failed: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        """Resolves when the workers have ended; raises the error that ended them, if any."""

    async def start(self) -> None:
        """Start the workers. Raise the error that prevents creating them; `failed` reports later errors."""
        self._ends = asyncio.create_task(_run_until(self._stop, self._build()))
        self._ends.add_done_callback(lambda ends: _settle(self.failed, self.error))

    @property
    def alive(self) -> bool:
        """Whether the workers have been started and have not ended."""
        return not self._ends.done()

    @property
    def error(self) -> BaseException | None:
        """The error that ended the workers, or None."""
        return self._ends.exception() if self._ends.done() and not self._ends.cancelled() else None

    async def stop(self) -> None:
        """Stop the workers and wait until they have ended."""
        self._stop.set()
        await asyncio.wait([self._ends])


async def _run_until(stop: asyncio.Event, workers: Sequence[Service]) -> None:
    """Run the workers until one of them ends or `stop` is set, then stop the others."""
    ends = [asyncio.create_task(worker.run()) for worker in workers]
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([*ends, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    running = [worker for worker, end in zip(workers, ends, strict=True) if not end.done()]
    await asyncio.gather(*(worker.shutdown() for worker in running))
    await asyncio.gather(*ends)


def _settle(future: asyncio.Future[Any], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
