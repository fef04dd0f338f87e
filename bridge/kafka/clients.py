"""Kafka clients: the settings with which they connect, their start, calls and end in bounded time, and their errors."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit.core.instruments import ERRORS
from flowkit.errors import ConfigError, KafkaUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from flowkit.config import CoordinatorConfig

T = TypeVar("T")

_logger = logging.getLogger("flowkit.bridge")

_closing: set[asyncio.Task[None]] = set()
"""Clients that did not close in time and finish in the background."""

REQUEST_TIMEOUT_SEC = 5.0
"""How long a call waits for Kafka, including its retries."""

CLOSE_TIMEOUT_SEC = 5.0
RETRY_PAUSE_SEC = 0.1

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


class UnreadableBatch(Exception):
    """A batch of Kafka that is damaged, or that cannot be decompressed."""

    def __init__(self, why: str, offset: int | None = None, end: int | None = None) -> None:
        super().__init__(why if offset is None else f"the record at offset {offset} cannot be read: {why}")
        self.offset = offset
        """The offset of the first record that cannot be read, if it is known."""
        self.end = end
        """The offset after the last record of the batch, if it is known."""


CLIENT_ID = "flowkit-bridge"
_TLS_FILES = ("ssl_cafile", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True)
class KafkaConnection:
    """The address of Kafka and what its brokers require of clients. The fields are the settings `kafka_…`."""

    bootstrap: str
    security_protocol: str = "PLAINTEXT"
    """`PLAINTEXT`, `SSL`, `SASL_PLAINTEXT` or `SASL_SSL`."""
    sasl_mechanism: str = "PLAIN"
    """`PLAIN`, `SCRAM-SHA-256` or `SCRAM-SHA-512`."""
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False)
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_password: str | None = field(default=None, repr=False)

    @classmethod
    def from_config(cls, cfg: CoordinatorConfig) -> KafkaConnection:
        """Return the connection that the settings describe. Raise ConfigError if they contradict each other."""
        made = cls(
            bootstrap=cfg.kafka_bootstrap,
            security_protocol=cfg.kafka_security_protocol,
            sasl_mechanism=cfg.kafka_sasl_mechanism,
            sasl_username=cfg.kafka_sasl_username,
            sasl_password=cfg.kafka_sasl_password,
            ssl_cafile=cfg.kafka_ssl_cafile,
            ssl_certfile=cfg.kafka_ssl_certfile,
            ssl_keyfile=cfg.kafka_ssl_keyfile,
            ssl_password=cfg.kafka_ssl_password,
        )
        made.options()
        return made

    @property
    def encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return self.security_protocol in ("SSL", "SASL_SSL")

    @property
    def authenticated(self) -> bool:
        """Whether the client sends a user name and a password."""
        return self.security_protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    def options(self) -> dict[str, Any]:
        """Return the arguments that every aiokafka client takes. Raise ConfigError for settings that cannot work."""
        self._check_sasl()
        self._check_tls()
        options: dict[str, Any] = {
            "bootstrap_servers": [each.strip() for each in self.bootstrap.split(",")],
            "client_id": CLIENT_ID,
            "security_protocol": self.security_protocol,
        }
        if self.authenticated:
            options["sasl_mechanism"] = self.sasl_mechanism
            options["sasl_plain_username"] = self.sasl_username
            options["sasl_plain_password"] = self.sasl_password
        if self.encrypted:
            options["ssl_context"] = self._ssl_context()
        return options

    def check(self, timeout: float = REQUEST_TIMEOUT_SEC) -> Coroutine[Any, Any, None]:
        """Connect to Kafka once. Raise KafkaUnavailable, which says what prevents the connection."""
        return _check_brokers(self.options(), timeout)

    def _check_sasl(self) -> None:
        given = {"kafka_sasl_username": self.sasl_username, "kafka_sasl_password": self.sasl_password}
        for name, value in given.items():
            if self.authenticated and value is None:
                raise ConfigError(
                    f"{name} is missing, although kafka_security_protocol is {self.security_protocol!r}; "
                    f"set {name} or the variable {name.upper()}"
                )
            if not self.authenticated and value is not None:
                raise ConfigError(
                    f"{name} is set, but kafka_security_protocol {self.security_protocol!r} sends no credentials; "
                    f"set kafka_security_protocol to 'SASL_SSL' or 'SASL_PLAINTEXT', or remove {name}"
                )

    def _check_tls(self) -> None:
        for name in _TLS_FILES:
            value = getattr(self, name)
            if value is not None and not self.encrypted:
                raise ConfigError(
                    f"kafka_{name} is set, but kafka_security_protocol {self.security_protocol!r} does not "
                    f"encrypt; set kafka_security_protocol to 'SSL' or 'SASL_SSL', or remove kafka_{name}"
                )
            if value is not None and not Path(value).is_file():
                raise ConfigError(f"kafka_{name} is {value!r}, which is not a file; correct the path")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError(
                f"kafka_ssl_keyfile is {self.ssl_keyfile!r}, but kafka_ssl_certfile is missing; "
                "set kafka_ssl_certfile to the certificate of that key"
            )

    def _ssl_context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ssl_cafile)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"kafka_ssl_cafile is {self.ssl_cafile!r}, which holds no usable certificate ({error}); "
                "use a PEM file with the certificate of the authority"
            ) from None
        if self.ssl_certfile is not None:
            self._load_client_certificate(context, self.ssl_certfile)
        return context

    def _load_client_certificate(self, context: ssl.SSLContext, certfile: str) -> None:
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(certfile, self.ssl_keyfile, password=self.ssl_password or "")
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"kafka_ssl_certfile {certfile!r} and kafka_ssl_keyfile {self.ssl_keyfile!r} cannot be used "
                f"({error}); use PEM files of one certificate and its key, and set kafka_ssl_password if the "
                "key is encrypted"
            ) from None


async def _check_brokers(options: dict[str, Any], limit: float) -> None:
    brokers = options.pop("bootstrap_servers")
    async with asyncio.TaskGroup() as group:
        tries = [group.create_task(_find_problem(broker, options, limit)) for broker in brokers]
    problems = [problem for each in tries if (problem := each.result()) is not None]
    if len(problems) == len(tries):
        raise KafkaUnavailable("; ".join(dict.fromkeys(problems)))


async def _find_problem(broker: str, options: dict[str, Any], limit: float) -> str | None:
    """Return why a broker and the brokers that it names cannot be used, or None if they can."""
    try:
        async with asyncio.timeout(limit):
            named = await _brokers_named_by(broker, options)
    except kafka_errors() as error:
        return f"Kafka cannot be used at {broker}: {reason(error)}; {_suggest_remedy(error, options)}"
    problems = []
    for address in named:
        try:
            async with asyncio.timeout(limit):
                await _brokers_named_by(address, options)
            return None
        except kafka_errors() as error:
            problems.append(
                f"the broker at {broker} names {address} as an address for clients, which cannot be used: "
                f"{reason(error)}; correct advertised.listeners in the settings of the broker"
            )
    return "; ".join(problems) or f"Kafka at {broker} has no brokers that can be used; check its log"


async def _brokers_named_by(address: str, options: dict[str, Any]) -> list[str]:
    """Connect to a broker and return the addresses of all brokers that it knows."""
    from aiokafka.conn import collect_hosts, create_conn
    from aiokafka.protocol.metadata import MetadataRequest

    ((host, port, _),) = collect_hosts([address])
    connection = await create_conn(host, port, **options)
    try:
        metadata = await connection.send(MetadataRequest([]))
    finally:
        connection.close()
    return [_join_address(broker[1], broker[2]) for broker in metadata.brokers]


def _join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def start(client: Any) -> Any:
    """Start a client and return it; close it if it does not start.

    A client that is cancelled while it connects would not close its socket, so it finishes in the background.
    """
    _silence_aiokafka()
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


def _silence_aiokafka() -> None:
    """Silence aiokafka, which logs every retry, unless the application has set the level of its logger."""
    logger = logging.getLogger("aiokafka")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)


async def _stop_after(starting: asyncio.Task[None], client: Any) -> None:
    await asyncio.wait([starting], timeout=CLOSE_TIMEOUT_SEC)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await _find_stop(client)()


async def close(client: Any) -> None:
    """Close a client. If that takes too long, as it can while Kafka is away, it continues in the background."""
    await asyncio.wait([_close_soon(_find_stop(client))], timeout=CLOSE_TIMEOUT_SEC)


async def wait_closed(limit: float) -> None:
    """Wait, at most `limit` seconds, for the clients that close in the background. Call it before the loop ends."""
    if _closing:
        await asyncio.wait(_closing, timeout=limit)


def _find_stop(client: Any) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return what closes a client; an admin client names it differently."""
    stop: Callable[[], Coroutine[Any, Any, None]] = getattr(client, "stop", None) or client.close
    return stop


def _close_soon(stop: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    closing = asyncio.create_task(stop())
    _closing.add(closing)
    closing.add_done_callback(_note_closed)
    return closing


def _note_closed(closing: asyncio.Task[None]) -> None:
    _closing.discard(closing)
    if not closing.cancelled() and (error := closing.exception()) is not None:
        _logger.debug("a Kafka client did not close cleanly: %s", reason(error))


async def call_with_retries(
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

    return (KafkaError, UnreadableBatch, OSError)


def connect_errors() -> tuple[type[Exception], ...]:
    """Return the errors after which a client that must run tries to connect again."""
    return (*kafka_errors(), ConfigError)


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed a moment later, with the same rights and settings."""
    from aiokafka.errors import KafkaConnectionError, KafkaError, KafkaTimeoutError

    if isinstance(error, KafkaError):
        return bool(error.retriable) or isinstance(error, (KafkaConnectionError, KafkaTimeoutError))
    return isinstance(error, OSError)


def unavailable(what: str, address: str, error: BaseException) -> KafkaUnavailable:
    """Count a failed call, and return its error: what failed, at which address, why, and what to do."""
    count_error(error)
    return KafkaUnavailable(f"{what} failed at {address}: {reason(error)}; {remedy(error)}")


def count_error(error: BaseException) -> None:
    """Count a request to Kafka that has failed."""
    ERRORS.add("kafka", type(error).__name__)


def reason(error: BaseException) -> str:
    """Return why a call failed, in words."""
    name, text = type(error).__name__, str(error) or "no details"
    if name in _ACL:
        return f"{_ACL[name][0]} ({text})"
    if name in _SASL:
        return f"Kafka rejects the credentials ({text})"
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


def _suggest_remedy(error: BaseException, options: dict[str, Any]) -> str:
    """Return the remedy; a broker that closes the connection at once usually expects another protocol."""
    if isinstance(error, (ConnectionRefusedError, ssl.SSLError)) or not _closed_at_once(error):
        return remedy(error)
    protocol = options["security_protocol"]
    certificate = ", or require a client certificate (kafka_ssl_certfile)" if "ssl_context" in options else ""
    return (
        f"check kafka_security_protocol, which is {protocol!r}: the listener of the broker may use another "
        f"one{certificate}"
    )


def _closed_at_once(error: BaseException) -> bool:
    return (
        isinstance(error, (TimeoutError, ConnectionError)) or type(error).__name__ == "KafkaConnectionError"
    )
