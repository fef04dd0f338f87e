"""A local MongoDB server, or a stand-in on machines that have neither MongoDB nor a container engine."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flowkit.errors import ConfigError
from flowkit.local import sources
from flowkit.local.container import DATA_FOLDER
from flowkit.local.data_folder import make_folder
from flowkit.local.install import (
    Jars,
    find_installed,
    fingerprint,
    install_once,
    require_program,
    run_command,
)
from flowkit.local.ports import HOST, free_port, is_listening
from flowkit.local.process import LocalServer, container_program
from flowkit.local.sources import Finder, Program, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME, VERSION = "mongo-java-server", "1.47.0"
NETTY = "4.2.2.Final"
JARS = Jars(
    NAME,
    VERSION,
    f"de.bwaldvogel:mongo-java-server:{VERSION}",
    f"de.bwaldvogel:mongo-java-server-h2-backend:{VERSION}",
    "org.slf4j:slf4j-simple:2.0.17",
    sha256={
        "h2-2.3.232.jar": "8dae62d22db8982c3dcb3826edb9c727c5d302063a67eef7d63d82de401f07d3",
        f"mongo-java-server-{VERSION}.jar": "37fc487ab0ef924dee0acdc62e2de1ef1daffa7eb2fdf9b56e5d2f3bdc2b909b",
        f"mongo-java-server-core-{VERSION}.jar": "9a34c9ad6ac6261906295481838256033ec1efc8c93a3e3828e5d47a006b0bd4",
        f"mongo-java-server-h2-backend-{VERSION}.jar": (
            "58ca6760a25f8a05adfe8a0f7a8a042ca22bd472869028755931507cdce20e71"
        ),
        f"mongo-java-server-memory-backend-{VERSION}.jar": (
            "82864f8a2ede1514f64c2cd3a70e8022c259eb3d78975cfa208c1668ac1f12bb"
        ),
        f"netty-buffer-{NETTY}.jar": "4820eeb2d3db269b20b30711e3d7d21979664249aaf10fc67f90dee935810747",
        f"netty-codec-{NETTY}.jar": "6a4ea3cedc831a377e20e32da5df4d2a47b954810e941138e3358e313db3a7f9",
        f"netty-codec-base-{NETTY}.jar": "76987614ccb2fda7d3292b69ba5b61351f30e91bf5c7d8fa4b51bc32c9f67456",
        f"netty-codec-compression-{NETTY}.jar": "005734e20aceb5e2c030033f7e042c81ee444497efd110cfca8de445642652ac",
        f"netty-codec-marshalling-{NETTY}.jar": "ae8bb7a077ca02357c922e3abc1acf1bf191d5e2776721d69cbca50a16281096",
        f"netty-codec-protobuf-{NETTY}.jar": "cfe0c7e6e68d83480a639b533eb7edaaf3252cfae8b73d0e362859673a4f9d97",
        f"netty-common-{NETTY}.jar": "5d022f3acad74cb0f195f60213500a4000d1340e5e941edaf1a0e756686b9bae",
        f"netty-handler-{NETTY}.jar": "d4ef582c78125457baa0cfa52992b5fb1bb9172d1a2c03b726e8b26e17d3fe2c",
        f"netty-resolver-{NETTY}.jar": "fa7841ffe2e39d52251814fb8560d6936b10ae7c67453ee50426b83fd5170ba0",
        f"netty-transport-{NETTY}.jar": "116d766a1af4722fe76a4cdaed969644985d44e08ec1337d2dbab697dd109603",
        f"netty-transport-native-unix-common-{NETTY}.jar": (
            "aa8821a7ea2ca47f62740bd1f37d67deb97824cc77e76dde6ae2c439a923fc9d"
        ),
        "slf4j-api-2.0.17.jar": "7b751d952061954d5abfed7181c1f645d336091b679891591d63329c622eb832",
        "slf4j-simple-2.0.17.jar": "ddfea59ac074c6d3e24ac2c38622d2d963895e17f70b38ed4bdae4d780be6964",
    },
)
REMEDY = "install MongoDB, or a JDK 17 or newer and Maven, or set MONGO_URL to a running server"
LAUNCHER = Path(__file__).with_name("MongoStandIn.java")
# Use only the fast compiler: in a server that lives for minutes, the optimizing one costs more than it
# saves. To enable it for a long run, set `_JAVA_OPTIONS=-XX:TieredStopAtLevel=4`.
JVM_FLAGS = (
    *("-Xmx512m", "-Xmn192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)


def stand_in_command(port: int, file: Path | None) -> list[str]:
    """Return the command that serves `file`, or memory, on `port`; install the server first if it is missing.

    The server writes to its file about once a second and on SIGTERM, so SIGKILL may lose the last second
    of writes.
    """
    java = require_program("java", remedy=REMEDY)
    saved = [] if file is None else [str(file)]
    return [java, *JVM_FLAGS, "-cp", stand_in_classpath(), LAUNCHER.stem, HOST, str(port), *saved]


def stand_in_classpath() -> str:
    """Return the Java class path of the server and its launcher; download and compile them once."""
    require_program("java", remedy=REMEDY)
    libraries = JARS.folder()

    def compile_launcher(folder: Path) -> None:
        javac = require_program("javac", remedy=REMEDY)
        options = ["--release", "17", "-encoding", "UTF-8", "-cp", f"{libraries}/*", "-d", str(folder)]
        run_command([javac, *options, str(LAUNCHER)], folder=folder)

    launcher = install_once(f"{NAME}-launcher", _launcher_version(), compile_launcher)
    return f"{launcher}:{libraries}/*"


def stand_in_installed() -> bool:
    """Whether the server and its launcher are in the cache."""
    return JARS.is_cached() and find_installed(f"{NAME}-launcher", _launcher_version()) is not None


def _launcher_version() -> str:
    return f"{VERSION}-{fingerprint(LAUNCHER.read_text(encoding='utf-8'))}"


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
        make_folder(data)
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
