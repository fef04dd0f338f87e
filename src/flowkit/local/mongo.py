"""A MongoDB server, real if this machine has one."""

import shutil
from pathlib import Path

from flowkit.local.mongo_stand_in import stand_in_classpath, stand_in_command
from flowkit.local.ports import HOST, free_port, is_listening
from flowkit.local.process import ServerProcess


class MongoServer(ServerProcess):
    """`mongod` if it is on PATH, else a stand-in that speaks its protocol; its data survive stop and restart.

    The port is a free one unless given. Do not `kill()` a stand-in whose data matter: see `stand_in`.
    """

    name = "mongo"

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        self.port = port or free_port()
        super().__init__(folder, self.port)

    @property
    def url(self) -> str:
        """What a client connects to."""
        return f"mongodb://{HOST}:{self.port}"

    @property
    def stand_in(self) -> bool:
        """Whether this is not MongoDB: no transactions, and SIGKILL may lose the last second of writes."""
        return shutil.which("mongod") is None

    @classmethod
    def install(cls) -> None:
        """Fetch the stand-in, where MongoDB is missing."""
        if shutil.which("mongod") is None:
            stand_in_classpath()

    def command(self) -> list[str]:
        """`mongod`, or the stand-in."""
        mongod = shutil.which("mongod")
        if mongod is None:
            return stand_in_command(self.port, self.folder / "mongo.mv")
        data = self.folder / "mongo"
        data.mkdir(exist_ok=True)
        return [mongod, "--bind_ip", HOST, "--port", str(self.port), "--dbpath", str(data)]

    def is_ready(self) -> bool:
        """Whether somebody listens."""
        return is_listening(self.port)
