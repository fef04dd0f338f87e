"""A Java server that speaks MongoDB's protocol, for machines without MongoDB."""

from pathlib import Path

from flowkit.local.cache import fingerprint, install_once
from flowkit.local.commands import program, run
from flowkit.local.maven import jars
from flowkit.local.ports import HOST

NAME, VERSION = "mongo-java-server", "1.47.0"
ARTIFACTS = (
    f"de.bwaldvogel:mongo-java-server:{VERSION}",
    f"de.bwaldvogel:mongo-java-server-h2-backend:{VERSION}",
    "org.slf4j:slf4j-simple:2.0.17",
)
REMEDY = "install MongoDB, or a JDK 17 or newer and Maven, or point MONGO_URL at a running server"
LAUNCHER = Path(__file__).with_name("MongoStandIn.java")
# Both compilers and the serial collector: the lowest latency of a small update once warm, started in half a second
# with 210 MB. One compiler alone (TieredStopAtLevel=1) warms up faster and stays a third slower.
JVM_FLAGS = ("-Xmx512m", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")


def stand_in_command(port: int, file: Path) -> list[str]:
    """The command that serves `file` on `port`; installs the server first if it is missing.

    On SIGTERM it saves everything. It saves about once a second otherwise: SIGKILL may lose the last second.
    """
    java = program("java", remedy=REMEDY)
    return [java, *JVM_FLAGS, "-cp", stand_in_classpath(), LAUNCHER.stem, HOST, str(port), str(file)]


def stand_in_classpath() -> str:
    """Where Java finds the server and its launcher, both fetched and compiled once."""
    libraries = jars(NAME, VERSION, *ARTIFACTS)

    def compile_launcher(folder: Path) -> None:
        javac = program("javac", remedy=REMEDY)
        options = ["--release", "17", "-encoding", "UTF-8", "-cp", f"{libraries}/*", "-d", str(folder)]
        run([javac, *options, str(LAUNCHER)], folder=folder)

    source = fingerprint(LAUNCHER.read_text(encoding="utf-8"))
    launcher = install_once(f"{NAME}-launcher", f"{VERSION}-{source}", compile_launcher)
    return f"{launcher}:{libraries}/*"
