"""The connection to brokers with and without security, and the reasons of connections that fail."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from flowkit.bridge.kafka.clients import KafkaConnection
from flowkit.bridge.kafka.offsets import Offsets
from flowkit.bridge.kafka.topics import Provisioner
from flowkit.errors import KafkaUnavailable
from flowkit.local import Kafka
from flowkit.local.kafka import BrokerSecurity, BrokerTls, SaslMechanism
from flowkit.local.ports import free_port
from tests.integration.bridge.clients import Reading, command_topic, consuming, producing
from tests.integration.bridge.conftest import Names
from tests.integration.kafka_side import KafkaSide
from tests.integration.test_external_worker import two
from tests.kafka_server import Broker, client_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from flowkit import CoordinatorConfig

pytestmark = pytest.mark.server

USERS = {"flowkit": "password"}


class Secured(Names):
    """Names at a broker that requires security, with the settings to connect."""

    settings: dict[str, Any]

    def config(self, **settings: Any) -> CoordinatorConfig:
        """Return settings that include the security."""
        return super().config(**{**self.settings, **settings})


@asynccontextmanager
async def secured(folder: Path, security: BrokerSecurity, **settings: Any) -> AsyncIterator[Secured]:
    """Run a broker with security; `settings` are the engine's settings without their prefix."""
    broker = Kafka(folder, security=security)
    await asyncio.to_thread(broker.start)
    names = Secured(broker.bootstrap_servers)
    names.settings = {"kafka_security_protocol": security.protocol}
    names.settings |= {f"kafka_{name}": value for name, value in settings.items()}
    try:
        yield names
    finally:
        await asyncio.to_thread(broker.stop)


def tls(authority: trustme.CA, *, clients: bool = False) -> BrokerTls:
    """Return the certificates of a broker."""
    own = authority.issue_cert("127.0.0.1")
    return BrokerTls(
        certificate=b"".join(each.bytes() for each in own.cert_chain_pems).decode(),
        private_key=pkcs8(own.private_key_pem.bytes()),
        client_ca=authority.cert_pem.bytes().decode() if clients else None,
    )


def pkcs8(key: bytes) -> str:
    """Return a PEM key in the form that Java reads."""
    from cryptography.hazmat.primitives import serialization

    loaded = serialization.load_pem_private_key(key, None)
    return loaded.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


async def exchange_records(names: Names) -> None:
    """Use every client of the bridge once."""
    await names.connection.check(10)
    topic, reading = await command_topic(names), Reading()
    await Provisioner(names.connection, names.config()).seed(names.role())
    offsets = Offsets(names.connection)
    async with producing(names) as producer, consuming(names, topic, f"{names.prefix}.g", reading):
        await producer.send(topic, "k", b"{}", 0)
        await reading.until({b"{}"})
    assert (await offsets.read_ends(topic))[0] == 1
    assert await offsets.read_members(f"{names.prefix}.g") == {}
    await offsets.close()


async def failure(names: Names, **settings: Any) -> str:
    """Return why a check with other settings fails."""
    connection = KafkaConnection.from_config(names.config(**{f"kafka_{k}": v for k, v in settings.items()}))
    async with asyncio.timeout(30):
        with pytest.raises(KafkaUnavailable) as caught:
            await connection.check(3)
    assert "hunter2" not in str(caught.value)
    return str(caught.value)


async def test_a_broker_without_security_needs_only_its_address(names: Names) -> None:
    await exchange_records(names)


async def test_one_of_several_addresses_is_enough(names: Names) -> None:
    await Names(f"127.0.0.1:{free_port()},{names.bootstrap}").connection.check(10)


async def test_addresses_where_no_broker_listens_are_named(names: Names) -> None:
    ports = free_port(), free_port()
    text = await failure(names, bootstrap=f"127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}")
    for port in ports:
        assert f"127.0.0.1:{port}: the connection is refused; check that Kafka runs" in text


async def test_a_host_without_an_address_is_named(names: Names) -> None:
    text = await failure(names, bootstrap="no-such-host.invalid:9092")
    assert "no-such-host.invalid:9092: the host name cannot be resolved; check kafka_bootstrap" in text


async def test_tls_to_a_broker_without_tls_is_reported(names: Names) -> None:
    text = await failure(names, security_protocol="SSL")
    assert "kafka_security_protocol" in text


async def test_credentials_for_a_broker_without_authentication_are_reported(names: Names) -> None:
    sasl = {"security_protocol": "SASL_PLAINTEXT", "sasl_username": "u", "sasl_password": "hunter2"}
    assert "kafka_sasl" in await failure(names, **sasl)


async def test_a_listener_that_never_responds_is_reported(names: Names) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(accept, "127.0.0.1", 0)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    text = await failure(names, bootstrap=address)
    assert f"{address}: no response in time" in text
    silent.close()


@pytest.mark.slow
async def test_a_password_in_the_clear(tmp_path: Path) -> None:
    security = BrokerSecurity(mechanism=SaslMechanism.PLAIN, users=USERS)
    async with secured(tmp_path, security, sasl_username="flowkit", sasl_password=USERS["flowkit"]) as names:
        await exchange_records(names)
        wrong = await failure(names, sasl_password="hunter2")
        assert "Kafka rejects the credentials" in wrong
        assert "check kafka_sasl_mechanism, kafka_sasl_username and kafka_sasl_password" in wrong
        other = await failure(names, sasl_mechanism="SCRAM-SHA-256")
        assert "Kafka rejects the credentials" in other
        plain = {"security_protocol": "PLAINTEXT", "sasl_username": None, "sasl_password": None}
        assert "check kafka_security_protocol, which is 'PLAINTEXT'" in await failure(names, **plain)


@pytest.mark.slow
async def test_a_scrambled_password_over_tls_for_the_bridge_and_an_external_worker(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    security = BrokerSecurity(mechanism=SaslMechanism.SCRAM_SHA_512, users=USERS, tls=tls(authority))
    async with secured(
        tmp_path,
        security,
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="flowkit",
        sasl_password=USERS["flowkit"],
        ssl_cafile=str(tmp_path / "ca.pem"),
    ) as names:
        await exchange_records(names)
        assert "certificate of the broker cannot be verified" in await failure(names, ssl_cafile=None)
        assert "Kafka rejects the credentials" in await failure(names, sasl_password="hunter2")
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        settings = client_settings(security, context, USERS["flowkit"])
        broker = Broker(bootstrap_servers=names.bootstrap, client_settings=settings)
        async with KafkaSide(broker) as side, side.worker(two) as worker:
            await side.start("a")
            await worker.wait_for("TASK_DONE", node="a")


@pytest.mark.slow
async def test_a_client_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    authority.issue_cert("client@example.com").private_key_and_cert_chain_pem.write_to_path(
        str(tmp_path / "client.pem")
    )
    files = {"ssl_cafile": str(tmp_path / "ca.pem"), "ssl_certfile": str(tmp_path / "client.pem")}
    async with secured(tmp_path, BrokerSecurity(tls=tls(authority, clients=True)), **files) as names:
        await exchange_records(names)
        assert "kafka_ssl_certfile" in await failure(names, ssl_certfile=None)
        plain = {"security_protocol": "PLAINTEXT", "ssl_cafile": None, "ssl_certfile": None}
        assert "kafka_security_protocol" in await failure(names, **plain)
