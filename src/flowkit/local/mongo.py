"""A local MongoDB server, or a stand-in on machines that have neither MongoDB nor a container engine."""

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
"""Sources that provide MongoDB itself; the other sources provide the stand-in."""
PING_TIMEOUT_MS = 500


class MongoServer(LocalServer):
    """MongoDB, or a stand-in that speaks its protocol. Data survives `stop` and `restart`.

    The server is `mongod` from PATH, else a container, else the stand-in; `FLOWKIT_SERVERS` limits and
    orders these sources. A folder with data of MongoDB or of the stand-in is used only with the same
    kind of server. Without `port` the server uses a free port.

    With `keeps_data=False` a stand-in holds its data in memory, which is much faster, and loses it when
    it stops; MongoDB keeps its data regardless. Do not `kill()` a stand-in whose data matters: see
    `stand_in`.
    """

    name = "mongo"

    def __init__(self, folder: Path, *, port: int | None = None, keeps_data: bool = True) -> None:
        self.port = port or free_port()
        self._keeps_data = keeps_data
        super().__init__(folder, self.port)

    @property
    def url(self) -> str:
        """The connection string for clients."""
        return f"mongodb://{HOST}:{self.port}"

    def find_program(self) -> Program:
        """Return the program from the first source that has one. Raises InstallFailed or ConfigError."""
        return mongo_program(compatible_sources(self.folder, sources.allowed_sources()))

    @property
    def stand_in(self) -> bool:
        """Whether this is a stand-in: it has no transactions, and SIGKILL may lose a second of writes."""
        return self.program.source not in MONGODB_SOURCES

    @classmethod
    def install(cls) -> None:
        """Pull the image or install the stand-in, unless MongoDB is installed."""
        mongo_program(sources.allowed_sources()).install()

    def command(self) -> list[str]:
        """Return the command for `mongod`, its container, or the stand-in."""
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
        """Whether the server accepts connections."""
        # The port of a container accepts connections before its server does, so a container must answer
        # a ping.
        return is_listening(self.port) and (self.program.container is None or _responds(self.url))


def mongo_program(allowed: Sequence[Source]) -> Program:
    """Return MongoDB or its stand-in from the first allowed source that has it. Raises InstallFailed."""
    finders: dict[Source, Finder] = {
        Source.PATH: _on_path,
        Source.CONTAINER: partial(container_program, IMAGE),
        Source.CACHE: partial(_stand_in, Source.CACHE),
        Source.DOWNLOAD: partial(_stand_in, Source.DOWNLOAD),
    }
    return sources.select_program("MongoDB", finders, allowed)


def compatible_sources(folder: Path, allowed: Sequence[Source]) -> Sequence[Source]:
    """Return the allowed sources whose server can read the data in `folder`; for a new folder, all of them.

    Raises ConfigError if there is none.
    """
    holds_mongodb, stand_in = (folder / "mongo").exists(), (folder / "mongo.mv").exists()
    if holds_mongodb == stand_in:
        return allowed
    compatible = [source for source in allowed if (source in MONGODB_SOURCES) == holds_mongodb]
    if not compatible:
        kinds = (
            ("MongoDB", "its stand-in") if holds_mongodb else ("the stand-in for MongoDB", "MongoDB itself")
        )
        raise ConfigError(
            f"{folder} contains data of {kinds[0]}, but {sources.VARIABLE} allows only {kinds[1]}; "
            f"change {sources.VARIABLE}, or choose another folder"
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
