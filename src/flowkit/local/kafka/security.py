"""How clients connect to a local broker: in the clear, with TLS, with a password, or with both."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from flowkit.errors import ConfigError

KEY_STORE, TRUST_STORE = "broker.pem", "clients.pem"
_SCRAM_TEXT = re.compile(r"[\w.~@+-]+")
"""What `kafka-storage format --add-scram` reads as one value."""
_PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


class SaslMechanism(StrEnum):
    """How a client proves that it knows its password."""

    PLAIN = "PLAIN"
    SCRAM_SHA_256 = "SCRAM-SHA-256"
    SCRAM_SHA_512 = "SCRAM-SHA-512"


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerTls:
    """The certificates of a broker, as PEM text."""

    certificate: str
    """The certificate of the broker, followed by its chain. It must be valid for 127.0.0.1."""
    private_key: str = field(repr=False)
    """The key of the certificate, unencrypted and as PKCS#8 (`BEGIN PRIVATE KEY`)."""
    client_ca: str | None = None
    """The authority that signs client certificates. Clients need a certificate only if this is set."""

    def properties(self, folder: Path) -> dict[str, str]:
        """Return the settings of the client listener for a broker that sees its files in `folder`."""
        stores = {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(folder / KEY_STORE)}
        if self.client_ca is not None:
            stores |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(folder / TRUST_STORE)}
        return {**stores, "ssl.client.auth": "none" if self.client_ca is None else "required"}

    def write_files(self, folder: Path) -> None:
        """Write the files that the settings name. Only this user can read the key."""
        store = folder / KEY_STORE
        store.touch(mode=0o600)
        store.write_text(f"{self.private_key.strip()}\n{self.certificate.strip()}\n", encoding="ascii")
        if self.client_ca is not None:
            (folder / TRUST_STORE).write_text(self.client_ca, encoding="ascii")


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerSecurity:
    """What a broker requires of its clients. By default nothing, which is Kafka's protocol PLAINTEXT."""

    mechanism: SaslMechanism | None = None
    """How clients authenticate; None if they do not."""
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Passwords by user name. A broker with SCRAM stores them when it starts for the first time."""
    tls: BrokerTls | None = None
    """The certificates of the broker; None for unencrypted connections."""

    def __post_init__(self) -> None:
        scram = self.mechanism not in (None, SaslMechanism.PLAIN)
        for name, password in self.users.items() if scram else ():
            if not (_SCRAM_TEXT.fullmatch(name) and _SCRAM_TEXT.fullmatch(password)):
                raise ConfigError(
                    f"Kafka cannot store name or password of the user {name!r} for {self.mechanism}; "
                    "use letters, digits and . _ ~ @ + -"
                )

    @property
    def protocol(self) -> str:
        """Kafka's name for this combination, which clients use as `security_protocol`."""
        encrypted = self.tls is not None
        if self.mechanism is None:
            return "SSL" if encrypted else "PLAINTEXT"
        return "SASL_SSL" if encrypted else "SASL_PLAINTEXT"

    def properties(self, folder: Path) -> dict[str, str]:
        """Return the settings of the client listener for a broker that sees its files in `folder`."""
        found = self.tls.properties(folder) if self.tls is not None else {}
        if self.mechanism is not None:
            found["sasl.enabled.mechanisms"] = self.mechanism
            found[f"{self.mechanism.lower()}.sasl.jaas.config"] = self._login_module(self.mechanism)
        return found

    def format_arguments(self) -> list[str]:
        """Return the options of `kafka-storage format` that store the users of SCRAM."""
        if self.mechanism in (None, SaslMechanism.PLAIN):
            return []
        users = [
            f"{self.mechanism}=[name={name},password={password}]" for name, password in self.users.items()
        ]
        return [part for user in users for part in ("--add-scram", user)]

    def write_files(self, folder: Path) -> None:
        """Write the certificates, if there are any."""
        if self.tls is not None:
            self.tls.write_files(folder)

    def _login_module(self, mechanism: SaslMechanism) -> str:
        if mechanism is not SaslMechanism.PLAIN:
            return f"{_SCRAM_MODULE} required;"
        return f"{_PLAIN_MODULE} required{''.join(self._plain_users())};"

    def _plain_users(self) -> Iterator[str]:
        for name, password in self.users.items():
            yield f" user_{name}={_quoted(password)}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
