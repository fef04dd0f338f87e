"""How the bridge connects to Kafka: brokers, encryption and credentials."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowkit.bridge.kafka import clients
from flowkit.errors import ConfigError, KafkaUnavailable

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from flowkit.config import CoordinatorConfig

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
        """Return the connection that the settings describe. Raises ConfigError if they contradict each other."""
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
        """Return the arguments that every aiokafka client takes. Raises ConfigError for settings that cannot work."""
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

    def check(self, timeout: float = clients.REQUEST_TIMEOUT_SEC) -> Coroutine[Any, Any, None]:
        """Connect to Kafka once. Raises KafkaUnavailable, which says what prevents the connection."""
        return _check(self.options(), timeout)

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


async def _check(options: dict[str, Any], limit: float) -> None:
    brokers = options.pop("bootstrap_servers")
    async with asyncio.TaskGroup() as group:
        tries = [group.create_task(_problem(broker, options, limit)) for broker in brokers]
    problems = [problem for each in tries if (problem := each.result()) is not None]
    if len(problems) == len(tries):
        raise KafkaUnavailable("; ".join(dict.fromkeys(problems)))


async def _problem(broker: str, options: dict[str, Any], limit: float) -> str | None:
    """Return why a broker and the brokers that it names cannot be used, or None if they can."""
    try:
        async with asyncio.timeout(limit):
            named = await _brokers_named_by(broker, options)
    except clients.kafka_errors() as error:
        return f"Kafka cannot be used at {broker}: {clients.reason(error)}; {_remedy(error, options)}"
    problems = []
    for address in named:
        try:
            async with asyncio.timeout(limit):
                await _brokers_named_by(address, options)
            return None
        except clients.kafka_errors() as error:
            problems.append(
                f"the broker at {broker} names {address} as an address for clients, which cannot be used: "
                f"{clients.reason(error)}; correct advertised.listeners in the settings of the broker"
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
    return [_joined(broker[1], broker[2]) for broker in metadata.brokers]


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _remedy(error: BaseException, options: dict[str, Any]) -> str:
    """Return the remedy; a broker that closes the connection at once usually expects another protocol."""
    if isinstance(error, (ConnectionRefusedError, ssl.SSLError)) or not _closed_at_once(error):
        return clients.remedy(error)
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
