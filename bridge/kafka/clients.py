"""Start, call and stop Kafka clients in bounded time, and describe their errors."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit.errors import ConfigError, KafkaUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")

_logger = logging.getLogger("flowkit.bridge")

REQUEST_TIMEOUT_SEC = 5.0
"""How long a call waits for Kafka, including its retries."""
CLOSE_TIMEOUT_SEC = 5.0
RETRY_PAUSE_SEC = 0.1

_closing: set[asyncio.Task[None]] = set()
"""Clients that did not close in time and finish in the background."""

_ACL = {
    "TopicAuthorizationFailedError": (
        "the ACLs do not allow this user to use the topic",
        "grant DESCRIBE on the topic, and READ or WRITE",
    ),
    "GroupAuthorizationFailedError": (
        "the ACLs do not allow this user to use the consumer group",
        "grant DESCRIBE and READ on the group",
    ),
    "ClusterAuthorizationFailedError": (
        "the ACLs do not allow this user to write",
        "grant WRITE on the command topics, or IDEMPOTENT_WRITE on the cluster",
    ),
    # aiokafka raises this one for a partition whose offsets the user may not read.
    "NoError": (
        "the ACLs do not allow this user to read the offsets of the topic",
        "grant DESCRIBE on the topic",
    ),
}
"""Why Kafka denies a call, and the ACL that allows it, by the name of the error."""

_SASL = frozenset(
    (
        "SaslAuthenticationFailed",
        "AuthenticationFailedError",
        "UnsupportedSaslMechanismError",
        "IllegalSaslStateError",
    )
)


async def started(client: Any) -> Any:
    """Start a client and return it; close it if it does not start.

    A client that is cancelled while it connects would not close its socket, so it finishes in the background.
    """
    _quiet()
    starting = asyncio.create_task(client.start())
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        _close_soon(functools.partial(_stop_after, starting, client))
        raise
    except BaseException:
        await close(client)
        raise
    return client


def _quiet() -> None:
    """Silence aiokafka, which logs every retry, unless the application has set the level of its logger."""
    logger = logging.getLogger("aiokafka")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)


async def _stop_after(starting: asyncio.Task[None], client: Any) -> None:
    await asyncio.wait([starting], timeout=CLOSE_TIMEOUT_SEC)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await _stop_of(client)()


async def close(client: Any) -> None:
    """Close a client. If that takes too long, as it can while Kafka is away, it continues in the background."""
    await asyncio.wait([_close_soon(_stop_of(client))], timeout=CLOSE_TIMEOUT_SEC)


async def all_closed(limit: float) -> None:
    """Wait, at most `limit` seconds, for the clients that close in the background. Call it before the loop ends."""
    if _closing:
        await asyncio.wait(_closing, timeout=limit)


def _stop_of(client: Any) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return what closes a client; an admin client names it differently."""
    stop: Callable[[], Coroutine[Any, Any, None]] = getattr(client, "stop", None) or client.close
    return stop


def _close_soon(stop: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    closing = asyncio.create_task(stop())
    _closing.add(closing)
    closing.add_done_callback(_closed)
    return closing


def _closed(closing: asyncio.Task[None]) -> None:
    _closing.discard(closing)
    if not closing.cancelled() and (error := closing.exception()) is not None:
        _logger.debug("a Kafka client did not close cleanly: %s", reason(error))


async def bounded(
    call: Callable[[], Awaitable[T]], *, what: str, address: str, limit: float = REQUEST_TIMEOUT_SEC
) -> T:
    """Return the result of `call`. Retry after transient errors; raise KafkaUnavailable after `limit` seconds."""
    last: Exception = TimeoutError()
    try:
        async with asyncio.timeout(limit):
            while True:
                try:
                    return await call()
                except kafka_errors() as error:
                    if not is_transient(error):
                        raise unavailable(what, address, error) from error
                    last = error
                await asyncio.sleep(RETRY_PAUSE_SEC)
    except TimeoutError:
        raise unavailable(what, address, last) from last


def kafka_errors() -> tuple[type[Exception], ...]:
    """Return the errors that come from Kafka or the network, not from a mistake in the calling code."""
    from aiokafka.errors import KafkaError

    return (KafkaError, OSError)


def connect_errors() -> tuple[type[Exception], ...]:
    """Return the errors after which a client that must run tries to connect again."""
    return (*kafka_errors(), ConfigError)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later, with the same rights and settings."""
    from aiokafka.errors import KafkaConnectionError, KafkaError, KafkaTimeoutError

    if isinstance(error, KafkaError):
        return bool(error.retriable) or isinstance(error, (KafkaConnectionError, KafkaTimeoutError))
    return isinstance(error, OSError)


def unavailable(what: str, address: str, error: BaseException) -> KafkaUnavailable:
    """Return the error for a failed call: what failed, at which address, why, and what to do."""
    return KafkaUnavailable(f"{what} failed at {address}: {reason(error)}; {remedy(error)}")


def reason(error: BaseException) -> str:
    """Return why a call failed, in words."""
    name, text = type(error).__name__, str(error) or "no details"
    if name in _ACL:
        return f"{_ACL[name][0]} ({text})"
    if name in _SASL:
        return f"Kafka rejects the credentials ({text})"
    if name == "KafkaConnectionError" and text.endswith(" closed"):
        return "the connection was closed"
    return _network_reason(error) or f"{name}: {text}"


def _network_reason(error: BaseException) -> str | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the broker cannot be verified ({getattr(error, 'verify_message', error)})"
    if isinstance(error, ssl.SSLError):
        return f"the TLS handshake failed ({getattr(error, 'reason', None) or error})"
    if isinstance(error, socket.gaierror):
        return "the host name cannot be resolved"
    if isinstance(error, ConnectionRefusedError):
        return "the connection is refused"
    if isinstance(error, TimeoutError):
        return "no response in time"
    return None


def remedy(error: BaseException) -> str:
    """Return how to fix the cause of a failed call."""
    name = type(error).__name__
    if name in _ACL:
        return _ACL[name][1]
    if name in _SASL:
        return "check kafka_sasl_mechanism, kafka_sasl_username and kafka_sasl_password"
    if isinstance(error, ssl.SSLError):
        return "check kafka_security_protocol, kafka_ssl_cafile and kafka_ssl_certfile"
    if isinstance(error, socket.gaierror):
        return "check kafka_bootstrap (KAFKA_BOOTSTRAP_SERVERS)"
    return "check that Kafka runs, and check kafka_bootstrap (KAFKA_BOOTSTRAP_SERVERS)"
