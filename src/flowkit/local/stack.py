"""The servers that FlowKit needs: local ones that the stack starts, and external ones that it uses."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from flowkit.local.mongo import MongoServer
from flowkit.local.process import ServerProcess, start_all, stop_all
from flowkit.local.temporal import TemporalServer


class Stack:
    """Temporal and MongoDB, as a context manager.

    If `TEMPORAL_ADDRESS` or `MONGO_URL` is set when the stack is created, the stack uses that server and
    neither starts nor stops it; its attribute is then None. The other servers keep their data and logs
    in `folder`. With `keeps_data=False` a stand-in for MongoDB loses its data when it stops (see
    MongoServer).
    """

    temporal: TemporalServer | None = None
    mongo: MongoServer | None = None

    def __init__(
        self,
        folder: Path,
        *,
        temporal_port: int | None = None,
        ui_port: int | None = None,
        mongo_port: int | None = None,
        dynamic_config: Mapping[str, object] | None = None,
        keeps_data: bool = True,
    ) -> None:
        self.temporal_address = os.environ.get("TEMPORAL_ADDRESS", "")
        if not self.temporal_address:
            self.temporal = TemporalServer(
                folder, port=temporal_port, ui_port=ui_port, dynamic_config=dynamic_config
            )
            self.temporal_address = self.temporal.address
        self.mongo_url = os.environ.get("MONGO_URL", "")
        if not self.mongo_url:
            self.mongo = MongoServer(folder, port=mongo_port, keeps_data=keeps_data)
            self.mongo_url = self.mongo.url

    @property
    def servers(self) -> list[ServerProcess]:
        """The servers that this stack starts and stops, in start order."""
        return [server for server in (self.mongo, self.temporal) if server is not None]

    @property
    def exports(self) -> dict[str, str]:
        """Environment variables with which other programs and stacks use these servers."""
        return {"TEMPORAL_ADDRESS": self.temporal_address, "MONGO_URL": self.mongo_url}

    def start(self) -> None:
        """Start all servers that are not running, and return when all are ready. If one fails, stop all."""
        start_all(self.servers)

    def stop(self) -> None:
        """Stop all servers that this stack started, even if stopping one fails. Keeps data and logs."""
        stop_all(self.servers)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
