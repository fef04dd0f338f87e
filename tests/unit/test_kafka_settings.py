"""Settings of the connection to Kafka: which combinations work, what clients get, and what errors say."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from aiokafka import errors

from flowkit import CoordinatorConfig
from flowkit.bridge.kafka import clients
from flowkit.bridge.kafka.clients import KafkaConnection
from flowkit.bridge.kafka.offsets import has_dedup_id
from flowkit.bridge.kafka.topics import Topics
from flowkit.errors import ConfigError, KafkaUnavailable

if TYPE_CHECKING:
    from pathlib import Path

SASL: dict[str, Any] = {"kafka_sasl_username": "u", "kafka_sasl_password": "hunter2"}


def options(**settings: Any) -> dict[str, Any]:
    """Return what clients get for these settings."""
    return KafkaConnection.from_config(CoordinatorConfig(**settings)).options()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority and a client certificate, whose key is also there in an encrypted form."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    client = authority.issue_cert("client@example.com")
    client.private_key_pem.write_to_path(str(folder / "client.key"))
    client.cert_chain_pems[0].write_to_path(str(folder / "client.pem"))
    client.private_key_and_cert_chain_pem.write_to_path(str(folder / "both.pem"))
    command = ["openssl", "pkcs8", "-topk8", "-in", "client.key", "-out", "secret.key", "-passout", "pass:pw"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


# --- options ------------------------------------------------------------------------------------------------------


def test_by_default_clients_connect_without_tls_and_credentials() -> None:
    assert options(kafka_bootstrap="a:1, b:2") == {
        "bootstrap_servers": ["a:1", "b:2"],
        "client_id": "flowkit-bridge",
        "security_protocol": "PLAINTEXT",
    }


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_credentials_are_passed_on(mechanism: str) -> None:
    given = options(kafka_security_protocol="SASL_PLAINTEXT", kafka_sasl_mechanism=mechanism, **SASL)
    assert given["sasl_mechanism"] == mechanism
    assert (given["sasl_plain_username"], given["sasl_plain_password"]) == ("u", "hunter2")
    assert "ssl_context" not in given


def test_tls_verifies_the_broker(certificates: Path) -> None:
    for settings in ({}, {"kafka_ssl_cafile": str(certificates / "ca.pem")}):
        context = options(kafka_security_protocol="SSL", **settings)["ssl_context"]
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize(
    "files",
    [
        {"certfile": "client.pem", "keyfile": "client.key"},
        {"certfile": "both.pem"},
        {"certfile": "client.pem", "keyfile": "secret.key", "password": "pw"},
    ],
)
def test_client_certificates_are_loaded(certificates: Path, files: dict[str, str]) -> None:
    settings: dict[str, Any] = {
        f"kafka_ssl_{name}": value if name == "password" else str(certificates / value)
        for name, value in files.items()
    }
    assert options(kafka_security_protocol="SASL_SSL", **SASL, **settings)["ssl_context"]


def test_passwords_are_not_shown() -> None:
    config = CoordinatorConfig(kafka_security_protocol="SASL_SSL", **SASL)
    assert "hunter2" not in f"{config} {KafkaConnection.from_config(config)}"
    with pytest.raises(ConfigError, match="kafka_sasl_password is .hidden.; it must be none, or a text"):
        options(kafka_sasl_password=b"hunter2")


def test_environment_variables_configure_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "broker:1")
    monkeypatch.setenv("KAFKA_SECURITY_PROTOCOL", "SASL_SSL")
    monkeypatch.setenv("KAFKA_SASL_MECHANISM", "SCRAM-SHA-256")
    monkeypatch.setenv("KAFKA_SASL_USERNAME", "u")
    monkeypatch.setenv("KAFKA_SASL_PASSWORD", "hunter2")
    for name in ("CAFILE", "CERTFILE", "KEYFILE", "PASSWORD"):
        monkeypatch.setenv(f"KAFKA_SSL_{name}", name)
    config = CoordinatorConfig.load()
    assert (config.kafka_bootstrap, config.kafka_security_protocol) == ("broker:1", "SASL_SSL")
    assert (config.kafka_sasl_mechanism, config.kafka_sasl_username) == ("SCRAM-SHA-256", "u")
    assert (config.kafka_sasl_password, config.kafka_ssl_cafile) == ("hunter2", "CAFILE")
    assert (config.kafka_ssl_certfile, config.kafka_ssl_keyfile) == ("CERTFILE", "KEYFILE")
    assert config.kafka_ssl_password == "PASSWORD"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kafka_security_protocol": "SASL_SSL"}, "kafka_sasl_username is missing.*KAFKA_SASL_USERNAME"),
        (
            {"kafka_security_protocol": "SASL_PLAINTEXT", "kafka_sasl_username": "u"},
            "kafka_sasl_password is missing.*KAFKA_SASL_PASSWORD",
        ),
        (SASL, "kafka_sasl_username is set, but kafka_security_protocol 'PLAINTEXT' sends no credentials"),
        ({"kafka_ssl_cafile": "ca.pem"}, "kafka_ssl_cafile is set.*'PLAINTEXT' does not encrypt"),
        (
            {"kafka_security_protocol": "SASL_PLAINTEXT", **SASL, "kafka_ssl_certfile": "x"},
            "kafka_ssl_certfile is set.*'SASL_PLAINTEXT' does not encrypt",
        ),
        (
            {"kafka_security_protocol": "SSL", "kafka_ssl_cafile": "nowhere.pem"},
            "kafka_ssl_cafile is 'nowhere.pem', which is not a file",
        ),
        (
            {"kafka_security_protocol": "SSL", "kafka_ssl_keyfile": __file__},
            "kafka_ssl_certfile is missing",
        ),
        (
            {"kafka_security_protocol": "SSL", "kafka_ssl_cafile": __file__},
            "kafka_ssl_cafile .* holds no usable certificate",
        ),
        (
            {"kafka_security_protocol": "SSL", "kafka_ssl_certfile": __file__},
            "kafka_ssl_certfile .* cannot be used",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**settings)


def test_a_missing_password_of_a_key_is_an_error_and_no_question(certificates: Path) -> None:
    files = {"certfile": "client.pem", "keyfile": "secret.key"}
    settings = {f"kafka_ssl_{name}": str(certificates / value) for name, value in files.items()}
    with pytest.raises(ConfigError, match="set kafka_ssl_password if the key is encrypted"):
        options(kafka_security_protocol="SSL", **settings)


@pytest.mark.parametrize("value", [0, -2, 1.0, True, "1", None, 40_000])
def test_replicas_are_counted_or_left_to_the_broker(value: object) -> None:
    with pytest.raises(ConfigError, match="-1 for the default of the broker"):
        options(kafka_replication_factor=value)


# --- checks -------------------------------------------------------------------------------------------------------


async def test_an_address_that_the_broker_names_but_no_client_reaches_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def brokers(address: str, _: object) -> list[str]:
        if address == "kafka:9092":
            return ["internal:9092"]
        raise socket.gaierror(-2, "unknown")

    monkeypatch.setattr(clients, "_brokers_named_by", brokers)
    with pytest.raises(KafkaUnavailable, match=r"kafka:9092 names internal:9092 .* advertised\.listeners"):
        await KafkaConnection("kafka:9092").check(1)


# --- topics -------------------------------------------------------------------------------------------------------


def topics(**settings: Any) -> Topics:
    """Return the topics of these settings."""
    return Topics.of(CoordinatorConfig(**settings))


def test_topics_have_the_documented_names() -> None:
    made = topics()
    assert (made.cmd("indexer"), made.status("indexer")) == ("cmd.indexer.v1", "status.indexer.v1")
    assert made.all(["a", "b", "a"]) == (
        *("workers.announce.v1", "query.tasks.v1", "reply.tasks.v1", "signals.v1"),
        *("cmd.a.v1", "status.a.v1", "cmd.b.v1", "status.b.v1"),
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"topic_status_fmt": "cmd.{type}.v1", "worker_types": ["a"]},
        {"topic_query": "signals.v1"},
        {"topic_status_fmt": "cmd.{type}.v1"},
        {"topic_reply": "cmd.a.v1", "worker_types": ["a"]},
        {"worker_types": ["a.b", "a_b"]},
    ],
)
def test_topics_with_the_same_name_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give the same topic '.*'; change one of them"):
        topics(**settings)


def test_a_format_without_a_role_is_refused() -> None:
    config = CoordinatorConfig()
    config.topic_cmd_fmt = "cmd.v1"
    with pytest.raises(ConfigError, match="topic_cmd_fmt is 'cmd.v1', so all roles would share one topic"):
        Topics.of(config)


@pytest.mark.parametrize("role", ["a b", "ü", "x" * 250, "a/b"])
def test_a_role_that_no_topic_can_contain_is_refused(role: str) -> None:
    with pytest.raises(ConfigError, match="topic_cmd_fmt for role .* must be a Kafka topic"):
        topics().cmd(role)


# --- records and errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (b'{"dedup_id": "d1"}', True),
        (b'{"dedup_id": "d12"}', False),
        (b'{"other": "d1"}', False),
        (b'["d1"]', False),
        (b"d1", False),
        (b"\xff d1", False),
        (b"", False),
        (None, False),
    ],
)
def test_a_dedup_id_is_read_from_a_json_object(value: bytes | None, found: bool) -> None:
    assert has_dedup_id(value, "d1") is found


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionRefusedError(), "the connection is refused; check that Kafka runs"),
        (socket.gaierror(-2, "?"), "the host name cannot be resolved; check kafka_bootstrap"),
        (TimeoutError(), "no response in time; check that Kafka runs"),
        (
            errors.TopicAuthorizationFailedError("t"),
            r"the ACLs do not allow .* topic .*; grant DESCRIBE on the topic, and READ or WRITE",
        ),
        (
            errors.GroupAuthorizationFailedError("g"),
            r"the ACLs do not allow .* consumer group .*; grant DESCRIBE and READ on the group",
        ),
        (
            errors.SaslAuthenticationFailed("no"),
            "Kafka rejects the credentials .*; check kafka_sasl_mechanism",
        ),
        (ssl.SSLError(1, "bad"), "the TLS handshake failed .*; check kafka_security_protocol"),
    ],
)
def test_errors_say_what_failed_where_and_what_to_do(error: Exception, message: str) -> None:
    made = clients.unavailable("reading x", "kafka:9092", error)
    assert made.retryable
    with pytest.raises(KafkaUnavailable, match=f"reading x failed at kafka:9092: {message}"):
        raise made


@pytest.mark.slow(2)
def test_importing_the_bridge_and_the_testing_package_loads_no_client() -> None:
    program = "import sys, flowkit.bridge.service, flowkit.testing.external; print('aiokafka' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ
    )
    assert ended.stdout.strip() == "False"
