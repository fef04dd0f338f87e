"""The servers of a test run: started when a test first needs them, and shared by its test processes."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import xmlrpc.client
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xmlrpc.server import SimpleXMLRPCServer

import pytest
from pymongo.errors import AutoReconnect

from flowkit.local import Kafka, MongoServer, Stack, TemporalServer
from flowkit.local.process import start_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.local.process import ServerProcess

    Start = Callable[..., dict[str, str]]

KAFKA = "KAFKA_BOOTSTRAP_SERVERS"
SHORT_RUNS = "SHORT_RUNS_ADDRESS"
"""Address of a Temporal server that soon suggests continue-as-new."""
SHORT_RUNS_NAMESPACE = "FLOWKIT_SHORT_RUNS_NAMESPACE"
"""The environment variable with the namespace of TEMPORAL_ADDRESS that does the same. Tests then use it instead."""
SUGGESTED_EVENTS = 100
"""Length of a history at which that server suggests a new run."""
LOGS = Path(__file__).parents[1] / ".logs"


_DROPS = 3
_GIVEN_MONGO = bool(os.environ.get("MONGO_URL"))
"""Whether the run uses a MongoDB that it does not start. Later, the variable names the run's own."""


def stoppable_mongo(folder: Path) -> MongoServer:
    """Return a MongoDB server that only one test uses, which may stop or freeze it.

    Skip the test if the run is for a MongoDB that it does not start.
    """
    if _GIVEN_MONGO:
        pytest.skip("stops or freezes MongoDB: this says nothing about the server that MONGO_URL names")
    return MongoServer(folder)


def with_options(url: str, options: str) -> str:
    """Return a connection string of MongoDB with further options. Its own, such as `replicaSet`, stay."""
    address, _, own = url.partition("?")
    host = address if address.count("/") > 2 else f"{address}/"
    return f"{host}?{'&'.join(filter(None, [own, options]))}"


async def drop_database(client: Any, name: str) -> None:
    """Delete a database. Drivers do not repeat this when a replica set elects another primary meanwhile."""
    for _ in range(_DROPS):
        with suppress(AutoReconnect):
            await client.drop_database(name)
            return
    await client.drop_database(name)


class SharedServers:
    """Temporal, another Temporal for short runs, MongoDB and Kafka for one run of pytest.

    Addresses in the environment have priority.

    The process that pytest-xdist starts its workers from owns them. Its workers call `start` over a socket.
    """

    def __init__(self) -> None:
        self._stack: Stack | None = None
        self._kafka: Kafka | None = None
        self._short_runs: TemporalServer | None = None
        self._folder: Path | None = None
        self._listener: SimpleXMLRPCServer | None = None

    def start(self, *names: str) -> dict[str, str]:
        """Start the servers with these names, unless they run, and return the variables with all addresses."""
        if self._stack is None:
            self._folder = Path(tempfile.mkdtemp(prefix="flowkit-tests-")) / "servers"
            self._stack = Stack(self._folder, keeps_data=False)
            self._kafka = None if KAFKA in os.environ else Kafka(self._folder)
            suggestion = {"limit.historyCount.suggestContinueAsNew": SUGGESTED_EVENTS}
            self._short_runs = TemporalServer(self._folder / "short-runs", dynamic_config=suggestion)
        servers: list[ServerProcess] = [*self._stack.servers, *([self._kafka] if self._kafka else [])]
        wanted = [server for server in servers if server.name in names]
        if self._short_runs is not None and "short-runs" in names:
            wanted.append(self._short_runs)
        start_all([server for server in wanted if not server.running])
        brokers = self._kafka.bootstrap_servers if self._kafka else os.environ[KAFKA]
        short_runs = self._short_runs.address if self._short_runs else ""
        return {**self._stack.exports, KAFKA: brokers, SHORT_RUNS: short_runs}

    def listen(self) -> str:
        """Accept calls of `start` from test processes, one at a time, and return the URL for them."""
        if self._listener is None:
            self._listener = SimpleXMLRPCServer(("127.0.0.1", 0), logRequests=False)
            self._listener.register_function(self.start)
            threading.Thread(target=self._listener.serve_forever, daemon=True).start()
        host, port = self._listener.server_address[:2]
        return f"http://{host!s}:{port}"

    def stop(self, *, keep_logs: bool) -> None:
        """Stop the servers that were started, and remove their data."""
        if self._listener is not None:
            self._listener.shutdown()
            self._listener.server_close()
        if self._stack is None or self._folder is None:
            return
        self._stack.stop()
        for server in (self._kafka, self._short_runs):
            if server is not None:
                server.stop()
        if keep_logs:
            copy_logs(self._folder)
        shutil.rmtree(self._folder.parent, ignore_errors=True)


def started_by(url: str) -> Start:
    """Return a function that makes the process that listens at `url` start servers."""

    def start(*names: str) -> dict[str, str]:
        with xmlrpc.client.ServerProxy(url) as owner:
            exports: Any = owner.start(*names)
            return dict(exports)

    return start


def copy_logs(folder: Path) -> None:
    """Copy the servers' logs to where CI prints them."""
    LOGS.mkdir(exist_ok=True)
    for log in folder.glob("*.log"):
        shutil.copy(log, LOGS / f"{folder.name}-{log.name}")
