"""A MongoDB server, real if this machine has one or can run one in a container."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from flowkit.errors import ConfigError
from flowkit.local import sources
from flowkit.local.container import DATA_FOLDER
from flowkit.local.mongo_stand_in import VERSION, stand_in_classpath, stand_in_command, stand_in_installed
from flowkit.local.ports import HOST, free_port, is_listening
from flowkit.local.server import LocalServer, container_program
from flowkit.local.sources import Finder, Program, Source

IMAGE = "docker.io/library/mongo:7.0.28"
CONTAINER_PORT = 27017
MONGODB_SOURCES = (Source.PATH, Source.CONTAINER)
"""The sources of MongoDB itself; the others are those of the stand-in."""
PING_TIMEOUT_MS = 500


class MongoServer(LocalServer):
    """MongoDB, or else a stand-in that speaks its protocol; its data survive stop and restart.

    `mongod` on PATH, else a container, else the stand-in; `FLOWKIT_SERVERS` orders and limits that. A folder that holds
    data of one of the two kinds keeps to that kind. The port is a free one unless given. Do not `kill()` a stand-in
    whose data matter: see `stand_in`. With `keeps_data=False` a stand-in holds its data in memory, which is much
    quicker, and loses them when it stops; MongoDB itself keeps them even so.
    """

    name = "mongo"

    def __init__(self, folder: Path, *, port: int | None = None, keeps_data: bool = True) -> None:
        self.port = port or free_port()
        self._keeps_data = keeps_data
        super().__init__(folder, self.port)

    @property
    def url(self) -> str:
        """What a client connects to."""
        return f"mongodb://{HOST}:{self.port}"

    def find_program(self) -> Program:
        """Where it would come from now. InstallFailed or ConfigError tells why there is nothing."""
        return mongo_program(compatible_sources(self.folder, sources.allowed_sources()))

    @property
    def stand_in(self) -> bool:
        """Whether this is not MongoDB: no transactions, and SIGKILL may lose the last second of writes."""
        return self.program.source not in MONGODB_SOURCES

    @classmethod
    def install(cls) -> None:
        """Fetch the image or the stand-in, where MongoDB is missing."""
        mongo_program(sources.allowed_sources()).install()

    def command(self) -> list[str]:
        """`mongod`, a container of it, or the stand-in."""
        if self.stand_in:
            self.program.install()
            return stand_in_command(self.port, self.folder / "mongo.mv" if self._keeps_data else None)
        data = self.folder / "mongo"
        data.mkdir(exist_ok=True)
        mongod, container = self.program.install(), self.program.container
        if container is None:
            return [mongod, "--bind_ip", HOST, "--port", str(self.port), "--dbpath", str(data)]
        arguments = ["--bind_ip_all", "--port", str(CONTAINER_PORT), "--dbpath", DATA_FOLDER]
        return self.container_command(container, "mongod", {self.port: CONTAINER_PORT}, data, arguments)

    def is_ready(self) -> bool:
        """Whether somebody listens, and answers: the port of a container listens before its server does."""
        return is_listening(self.port) and (self.program.container is None or _responds(self.url))


def mongo_program(allowed: Sequence[Source]) -> Program:
    """Where MongoDB, or its stand-in, comes from. InstallFailed when these sources have none."""
    finders: dict[Source, Finder] = {
        Source.PATH: _on_path,
        Source.CONTAINER: partial(container_program, IMAGE),
        Source.CACHE: partial(_stand_in, Source.CACHE),
        Source.DOWNLOAD: partial(_stand_in, Source.DOWNLOAD),
    }
    return sources.select_program("MongoDB", finders, allowed)


def compatible_sources(folder: Path, allowed: Sequence[Source]) -> Sequence[Source]:
    """Those of the allowed sources that can read the data in a folder; all of them for a new folder.

    ConfigError when there is none.
    """
    holds_mongodb, stand_in = (folder / "mongo").exists(), (folder / "mongo.mv").exists()
    if holds_mongodb == stand_in:
        return allowed
    compatible = [source for source in allowed if (source in MONGODB_SOURCES) == holds_mongodb]
    if not compatible:
        kind = "MongoDB, not of its stand-in" if holds_mongodb else "the stand-in of MongoDB, not of MongoDB"
        raise ConfigError(
            f"{folder} holds data of {kind}; change {sources.VARIABLE}, or choose another folder"
        )
    return compatible


def _on_path() -> Program | None:
    mongod = shutil.which("mongod")
    return Program(source=Source.PATH, description=mongod, install=lambda: mongod) if mongod else None


def _stand_in(source: Source) -> Program | None:
    requires = ("java",) if source is Source.CACHE else ("java", "javac", "mvn")
    if source is Source.CACHE and not stand_in_installed():
        return None
    description = f"mongo-java-server {VERSION}, a stand-in for MongoDB"
    return Program(source=source, description=description, install=stand_in_classpath, requires=requires)


def _responds(url: str) -> bool:
    from pymongo import MongoClient
    from pymongo.errors import PyMongoError

    client: MongoClient[dict[str, object]] = MongoClient(url, serverSelectionTimeoutMS=PING_TIMEOUT_MS)
    with client:
        try:
            client.admin.command("ping")
        except PyMongoError:
            return False
        return True
