"""The stand-in for MongoDB: a Java server that speaks its protocol, for machines without MongoDB."""

from pathlib import Path

from flowkit.local.install.cache import find_installed, fingerprint, install_once
from flowkit.local.install.commands import require_program, run_command
from flowkit.local.install.maven import Jars
from flowkit.local.ports import HOST

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
