"""The settings file of a local broker: one node that is both broker and controller."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flowkit.local.kafka.security import BrokerSecurity
from flowkit.local.ports import HOST

NODE_ID = 1
CLIENT, CONTROLLER, INTERNAL = "CLIENT", "CONTROLLER", "INTERNAL"
"""Names of the listeners."""
# Kafka's defaults suit a cluster: three replicas, 50 partitions for offsets, 128 MB for log cleaning.
SETTINGS: Mapping[str, object] = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": 0,
    "offsets.topic.num.partitions": 1,
    "offsets.topic.replication.factor": 1,
    "transaction.state.log.num.partitions": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "log.cleaner.dedupe.buffer.size": 4 << 20,
    # A killed broker can register again only after its session has expired.
    "broker.heartbeat.interval.ms": 500,
    "broker.session.timeout.ms": 3000,
    "num.network.threads": 2,
    "num.io.threads": 4,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerPlace:
    """Where a broker listens and keeps its files, as the broker itself sees it."""

    port: int
    controller_port: int
    folder: Path
    listen_on: str = HOST
    """The address that the client listener binds; clients always connect to 127.0.0.1."""


def properties_file(place: BrokerPlace, security: BrokerSecurity) -> str:
    """Return the content of `server.properties`."""
    settings = {**SETTINGS, **_node(place), **_listeners(place, security)}
    client = f"listener.name.{CLIENT.lower()}"
    settings |= {f"{client}.{key}": value for key, value in security.properties(place.folder).items()}
    return "".join(f"{key}={_escaped(str(value))}\n" for key, value in settings.items())


def _node(place: BrokerPlace) -> dict[str, object]:
    return {
        "process.roles": "broker,controller",
        "node.id": NODE_ID,
        "controller.quorum.voters": f"{NODE_ID}@{HOST}:{place.controller_port}",
        "log.dirs": place.folder / "data",
    }


def _listeners(place: BrokerPlace, security: BrokerSecurity) -> dict[str, object]:
    """Return the listeners. The broker connects to itself without security, on a port that it chooses."""
    addresses = {
        CLIENT: f"{place.listen_on}:{place.port}",
        INTERNAL: f"{HOST}:0",
        CONTROLLER: f"{HOST}:{place.controller_port}",
    }
    advertised = {CLIENT: f"{HOST}:{place.port}", INTERNAL: f"{HOST}:0"}
    protocols = {CLIENT: security.protocol, INTERNAL: "PLAINTEXT", CONTROLLER: "PLAINTEXT"}
    return {
        "listeners": _joined(addresses, "://"),
        "advertised.listeners": _joined(advertised, "://"),
        "listener.security.protocol.map": _joined(protocols, ":"),
        "controller.listener.names": CONTROLLER,
        "inter.broker.listener.name": INTERNAL,
    }


def _joined(values: Mapping[str, str], separator: str) -> str:
    return ",".join(f"{key}{separator}{value}" for key, value in values.items())


def _escaped(value: str) -> str:
    """Escape backslashes, which a Java properties file would otherwise remove."""
    return value.replace("\\", "\\\\")
