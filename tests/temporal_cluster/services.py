"""The services of a Temporal cluster, each a process of its own, and the namespaces that tests need."""

from __future__ import annotations

import asyncio
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from temporalio.api.workflowservice.v1 import (
    DescribeNamespaceRequest,
    ListNamespacesRequest,
    RegisterNamespaceRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError

from flowkit.attempt.pollers import recent_pollers
from flowkit.attempt.workflows import WorkflowState, look_up
from flowkit.connection import register_search_attributes, registered_search_attributes
from flowkit.local.errors import InstallFailed
from flowkit.local.ports import HOST, free_port, is_listening
from flowkit.local.process import ServerProcess, start_all, stop_all
from flowkit.local.temporal import DYNAMIC_CONFIG, NAMESPACE
from flowkit.models.temporal_names import SEARCH_ATTRIBUTES
from tests.integration.harness import eventually
from tests.temporal_cluster.postgres import USER, PostgresServer
from tests.temporal_cluster.programs import schema_tool, temporal_server

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DATA, VISIBILITY = "temporal", "temporal_visibility"
SCHEMAS = {DATA: "postgresql/v12/temporal", VISIBILITY: "postgresql/v12/visibility"}
"""The databases, and the names of their schemas in the schema tool."""
SHARDS = 16
"""Number of history shards, which two processes share."""
HISTORY, MATCHING = ("history-1", "history-2"), ("matching",)
SERVICES = ("frontend", *HISTORY, *MATCHING, "worker")
RETENTION = timedelta(days=3)


@dataclass(frozen=True, slots=True)
class ServicePorts:
    """The ports of one process."""

    grpc: int
    membership: int
    http: int


class TemporalService(ServerProcess):
    """One process of the cluster: `name` is its service, with a number after a hyphen if there are several."""

    def __init__(self, folder: Path, name: str, ports: ServicePorts, config: dict[str, Any]) -> None:
        self.name = f"temporal-{name}"
        self._service = _kind(name)
        self.port = ports.grpc
        self._config = config
        super().__init__(folder, ports.grpc, ports.membership)

    @classmethod
    def install(cls) -> None:
        """Build the server, if it is not in the cache."""
        temporal_server()

    def command(self) -> list[str]:
        """Return the command that runs the service; write its configuration. JSON is YAML, too."""
        file = self.folder / f"{self.name}.yaml"
        file.write_text(json.dumps(self._config, indent=1), encoding="utf-8")
        return [
            temporal_server(),
            "--config-file",
            str(file),
            "--allow-no-auth",
            "start",
            "--service",
            self._service,
        ]

    def is_ready(self) -> bool:
        """Whether the service accepts connections."""
        return is_listening(self.port)


class TemporalCluster:
    """Frontend, two history processes, matching and worker on PostgreSQL, as a context manager.

    It has what `TemporalServer` has for its users: an address, the port of the frontend, and `start`, `stop` and `kill`
    of all services. `kill` leaves PostgreSQL running. Logs lie in `folder`.
    """

    name = "temporal"

    def __init__(
        self,
        folder: Path,
        *,
        dynamic_config: Mapping[str, object] | None = None,
        namespaces: Mapping[str, Mapping[str, object]] | None = None,
        postgres: Mapping[str, str] | None = None,
        shards: int = SHARDS,
    ) -> None:
        """Settings in `dynamic_config` are those of all namespaces. `namespaces` has others, with their settings."""
        self.folder = folder
        self.postgres = PostgresServer(folder, options=postgres)
        self._namespaces = {NAMESPACE: {}, **(namespaces or {})}
        self._settings = {**DYNAMIC_CONFIG, **(dynamic_config or {})}
        self._shards = shards
        ports = {name: ServicePorts(free_port(), free_port(), free_port()) for name in SERVICES}
        ports |= {_kind(name): ports[name] for name in reversed(SERVICES)}
        self.port = ports["frontend"].grpc
        self.services = {
            name: TemporalService(folder, name, own, self._config({**ports, _kind(name): own}))
            for name, own in ports.items()
            if name in SERVICES
        }
        self._is_made = False

    @property
    def address(self) -> str:
        """The address for clients, as `host:port`."""
        return f"{HOST}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether all services run."""
        return all(service.running for service in self.services.values())

    def start(self) -> None:
        """Start what does not run. Return when clients can use all namespaces."""
        self.postgres.start()
        if not self._is_made:
            self._make_databases()
            self._write_dynamic_config()
            # The first process of an empty database writes metadata, which others that start with it fail to write.
            self.services[HISTORY[0]].start()
        start_all([*self.services.values()])
        with ThreadPoolExecutor(1) as pool:  # this thread may have an event loop that runs
            pool.submit(asyncio.run, self._wait_until_usable()).result()
        self._is_made = True

    def stop(self) -> None:
        """Stop all services, then PostgreSQL, which waits for its clients."""
        stop_all([*self.services.values()])
        self.postgres.stop()

    def kill(self) -> None:
        """Kill all services."""
        for service in self.services.values():
            service.kill()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _make_databases(self) -> None:
        for database, schema in SCHEMAS.items():
            self._run_tool(database, "create-database")
            self._run_tool(database, "setup-schema", "--version", "0.0")
            self._run_tool(database, "update-schema", "--schema-name", schema)

    def _run_tool(self, database: str, *arguments: str) -> None:
        server = ("--plugin", "postgres12", "--ep", HOST, "--port", str(self.postgres.port), "--user", USER)
        command = (schema_tool(), *server, "--database", database, *arguments)
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=120
        )
        with (self.folder / "temporal-schema.log").open("a", encoding="utf-8") as log:
            log.write(done.stdout)
        if done.returncode:
            raise InstallFailed(f"`{arguments[0]}` for the database {database} failed: {done.stdout[-2000:]}")

    def _write_dynamic_config(self) -> None:
        values: dict[str, list[dict[str, object]]] = {
            name: [{"value": value}] for name, value in self._settings.items()
        }
        for namespace, settings in self._namespaces.items():
            for name, value in settings.items():
                constrained = {"value": value, "constraints": {"namespace": namespace}}
                values.setdefault(name, []).append(constrained)
        (self.folder / "dynamicconfig.yaml").write_text(json.dumps(values, indent=1), encoding="utf-8")

    def _config(self, ports: Mapping[str, ServicePorts]) -> dict[str, Any]:
        """Return the configuration of one process: its own ports, and those of the other services."""
        local = {
            "enabled": True,
            "initialFailoverVersion": 1,
            "rpcName": "frontend",
            "rpcAddress": self.address,
        }
        return {
            "log": {"stdout": True, "level": "warn"},
            "persistence": {
                "defaultStore": DATA,
                "visibilityStore": VISIBILITY,
                "numHistoryShards": self._shards,
                "datastores": {
                    DATA: {"sql": self._store(DATA, 20)},
                    VISIBILITY: {"sql": self._store(VISIBILITY, 10)},
                },
            },
            "global": {"membership": {"maxJoinDuration": "30s", "broadcastAddress": HOST}},
            "services": {kind: {"rpc": _rpc(kind, ports[kind])} for kind in map(_kind, SERVICES)},
            "clusterMetadata": {
                "enableGlobalNamespace": False,
                "failoverVersionIncrement": 10,
                "masterClusterName": "active",
                "currentClusterName": "active",
                "clusterInformation": {"active": local},
            },
            "dcRedirectionPolicy": {"policy": "noop"},
            "publicClient": {"hostPort": self.address},
            "dynamicConfigClient": {
                "filepath": str(self.folder / "dynamicconfig.yaml"),
                "pollInterval": "10s",
            },
        }

    def _store(self, database: str, connections: int) -> dict[str, object]:
        return {
            "pluginName": "postgres12",
            "databaseName": database,
            "connectAddr": f"{HOST}:{self.postgres.port}",
            "connectProtocol": "tcp",
            "user": USER,
            "password": "",
            "maxConns": connections,
            "maxIdleConns": connections,
            "maxConnLifetime": "1h",
        }

    async def _wait_until_usable(self) -> None:
        for namespace in self._namespaces:
            client = await Client.connect(self.address, namespace=namespace, lazy=True)
            await eventually(partial(_make_namespace, client))


def _kind(name: str) -> str:
    """Return the service of a process."""
    return name.partition("-")[0]


def _rpc(kind: str, ports: ServicePorts) -> dict[str, object]:
    rpc = {"grpcPort": ports.grpc, "membershipPort": ports.membership, "bindOnIP": HOST}
    return rpc | ({"httpPort": ports.http} if kind == "frontend" else {})


async def _make_namespace(client: Client) -> bool:
    """Make the namespace with FlowKit's search attributes; return whether the frontend knows both."""
    name = client.namespace
    request = RegisterNamespaceRequest(namespace=name)
    request.workflow_execution_retention_period.FromTimedelta(RETENTION)
    with suppress(RPCError, RuntimeError):
        if name not in await _namespaces(client):
            await client.workflow_service.register_namespace(request)
        await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=name))
        await register_search_attributes(client)
        registered = await registered_search_attributes(client)
        return len(registered) == len(SEARCH_ATTRIBUTES) and await _is_served(client)
    return False


async def _is_served(client: Client) -> bool:
    """Return whether the frontend reaches a matching and a history process, which have to find each other first."""
    await recent_pollers(client, "no-such-queue")
    return (await look_up(client, "no-such-task")).state is WorkflowState.ABSENT


async def _namespaces(client: Client) -> set[str]:
    listed = await client.workflow_service.list_namespaces(ListNamespacesRequest(page_size=100))
    return {each.namespace_info.name for each in listed.namespaces}
