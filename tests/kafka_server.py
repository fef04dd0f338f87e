"""The Kafka broker of the tests, and clients of it. `tests/conftest.py` imports the fixture."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from flowkit.local.kafka import BrokerSecurity, BrokerTls, SaslMechanism
from tests.servers import KAFKA

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import Start


@dataclass(frozen=True, kw_only=True, slots=True)
class Broker:
    """A running broker, and what its clients need to connect to it."""

    bootstrap_servers: str
    client_settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of aiokafka's clients besides the address."""

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments with which aiokafka's clients connect."""
        return {"bootstrap_servers": self.bootstrap_servers, **self.client_settings}

    async def create_topics(self, *names: str, partitions: int = 1) -> None:
        """Create topics with one replica."""
        from aiokafka.admin import AIOKafkaAdminClient, NewTopic

        admin = AIOKafkaAdminClient(**self.arguments)
        await admin.start()
        try:
            created = await admin.create_topics([NewTopic(name, partitions, 1) for name in names])
        finally:
            await admin.close()
        assert [error for _, error, *_ in created.topic_errors if error] == []

    async def produce(self, topic: str, *values: bytes) -> None:
        """Append records to a topic; return when the broker has stored them."""
        from aiokafka import AIOKafkaProducer

        async with AIOKafkaProducer(**self.arguments, acks="all") as producer:
            for value in values:
                await producer.send_and_wait(topic, value)

    async def consume(self, topic: str, count: int) -> list[bytes | None]:
        """Return the first records of a topic; wait until it has as many."""
        from aiokafka import AIOKafkaConsumer

        async with AIOKafkaConsumer(topic, **self.arguments, auto_offset_reset="earliest") as consumer:
            return [(await consumer.getone()).value for _ in range(count)]


@pytest.fixture(scope="session")
def kafka(start_servers: Start) -> Broker:
    """The run's broker without security: that of KAFKA_BOOTSTRAP_SERVERS, or one that all test processes share."""
    return Broker(bootstrap_servers=start_servers("kafka")[KAFKA])


@dataclass(frozen=True, slots=True)
class BrokerAuthority:
    """A certificate authority for a broker and its clients, with the files of one client."""

    folder: Path
    ca: trustme.CA = field(default_factory=trustme.CA)

    def tls(self, *, require_client_certificate: bool) -> BrokerTls:
        """Return the certificates of a broker at 127.0.0.1."""
        issued = self.ca.issue_cert("127.0.0.1")
        return BrokerTls(
            certificate="".join(part.bytes().decode() for part in issued.cert_chain_pems),
            private_key=pkcs8(issued.private_key_pem.bytes()),
            client_ca=self.ca.cert_pem.bytes().decode() if require_client_certificate else None,
        )

    def client_context(self, *, certificate: bool) -> ssl.SSLContext:
        """Return a TLS context that trusts the broker, with or without a client certificate."""
        authority = self.folder / "ca.pem"
        self.ca.cert_pem.write_to_path(str(authority))
        context = ssl.create_default_context(cafile=str(authority))
        if certificate:
            self.ca.issue_cert("client@example.com").configure_cert(context)
        return context


def pkcs8(key: bytes) -> str:
    """Return a PEM key in the form that Kafka reads."""
    parsed = load_pem_private_key(key, password=None)
    return parsed.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


USER, PASSWORD = "flowkit", "a-secret_1"


def secured(mechanism: SaslMechanism | None, tls: BrokerTls | None) -> BrokerSecurity:
    """Return the security of a broker with one user, if it has users at all."""
    return BrokerSecurity(mechanism=mechanism, users={USER: PASSWORD} if mechanism else {}, tls=tls)


def client_settings(
    security: BrokerSecurity, context: ssl.SSLContext | None, password: str = PASSWORD
) -> dict[str, Any]:
    """Return the arguments with which aiokafka connects to such a broker."""
    settings: dict[str, Any] = {"security_protocol": security.protocol, "ssl_context": context}
    if security.mechanism is not None:
        settings |= {"sasl_mechanism": security.mechanism.value}
        settings |= {"sasl_plain_username": USER, "sasl_plain_password": password}
    return settings
