"""All servers that FlowKit needs, together: those that run somewhere already and those that must be started."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from flowkit.local.lifecycle import start_all, stop_all
from flowkit.local.mongo import MongoServer
from flowkit.local.process import ServerProcess
from flowkit.local.temporal import TemporalServer


class Stack:
    """Temporal and Mongo, as a context manager.

    A server whose address stands in the environment (`TEMPORAL_ADDRESS`, `MONGO_URL`) when the stack is made is
    used as it is: its object here is None, and it is neither started nor stopped. The others keep their data and
    logs in `folder`; `keeps_data=False` lets a stand-in for MongoDB forget its data when it stops (see MongoServer).
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
        """The servers that this stack starts and stops, in the order of their start."""
        return [server for server in (self.mongo, self.temporal) if server is not None]

    @property
    def exports(self) -> dict[str, str]:
        """The environment under which other programs, and other stacks, use these servers."""
        return {"TEMPORAL_ADDRESS": self.temporal_address, "MONGO_URL": self.mongo_url}

    def start(self) -> None:
        """Start what is not running, all at once, and return when all is ready; if one fails, all are stopped."""
        start_all(self.servers)

    def stop(self) -> None:
        """Stop what this stack started, even if one of them resists; data and logs stay."""
        stop_all(self.servers)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
