"""The programs of Kafka: a distribution on PATH, a container image, or jars from Maven."""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from flowkit.local import sources
from flowkit.local.install.commands import require_program
from flowkit.local.kafka.class_archive import archive_options, create_archive, recording_option
from flowkit.local.kafka.jars import JARS, NAME, VERSION
from flowkit.local.server import container_program
from flowkit.local.sources import Finder, Program, Source

IMAGE = f"docker.io/apache/kafka:{VERSION}"
IMAGE_PROGRAMS = Path("/opt/kafka/bin")
START_PROGRAMS = ("kafka-server-start", "kafka-server-start.sh")
REMEDY = "install a JDK 17 or newer and Maven, or set KAFKA_BOOTSTRAP_SERVERS to a running broker"
HEAP = "-Xmx256m"
# The fast compiler suits a broker that lives for minutes. Only the line that reports readiness is logged
# below the level of warnings.
JVM_FLAGS = (
    *(HEAP, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    *("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true"),
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss,SSS",
    "-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info",
)


def kafka_program(allowed: Sequence[Source]) -> Program:
    """Return Kafka from the first allowed source that has it. Raises InstallFailed."""
    finders: dict[Source, Finder] = {
        Source.PATH: _on_path,
        Source.CONTAINER: partial(container_program, IMAGE),
        Source.CACHE: partial(_from_maven, Source.CACHE),
        Source.DOWNLOAD: partial(_from_maven, Source.DOWNLOAD),
    }
    return sources.select_program("Kafka", finders, allowed)


def format_command(program: Program, arguments: Sequence[str]) -> list[str]:
    """Return the command that formats the storage of a broker, outside a container."""
    if program.source is Source.PATH:
        return [str(storage_program(Path(program.install()))), "format", *arguments]
    return [*_java(program), "kafka.tools.StorageTool", "format", *arguments]


def start_command(program: Program, settings: Path, record_to: Path | None = None) -> list[str]:
    """Return the command that runs a broker with a settings file, outside a container.

    With `record_to`, a broker that runs from jars writes the classes that it has loaded to this file when it stops.
    """
    if program.source is Source.PATH:
        return [program.install(), str(settings)]
    java, *options = _java(program)
    recording = [recording_option(record_to)] if record_to else []
    return [java, *recording, *options, "kafka.Kafka", str(settings)]


def archive_classes(program: Program, record: Callable[[Path], None]) -> None:
    """Let `record(file)` run a broker once, so that brokers that run from jars start faster from then on."""
    if program.source in (Source.CACHE, Source.DOWNLOAD):
        create_archive(require_program("java", remedy=REMEDY), program.install(), record)


def storage_program(start: Path) -> Path:
    """Return the program that formats storage; it is beside the one that starts a broker."""
    return start.with_name(start.name.replace("server-start", "storage"))


def _java(program: Program) -> list[str]:
    java, classpath = require_program("java", remedy=REMEDY), program.install()
    return [java, *JVM_FLAGS, *archive_options(java, classpath), "-cp", classpath]


def _on_path() -> Program | None:
    """Return Kafka on PATH if it can format its storage, which versions with ZooKeeper cannot."""
    for name in START_PROGRAMS:
        start = shutil.which(name)
        if start is not None and storage_program(Path(start)).exists():
            return Program(source=Source.PATH, description=start, install=partial(str, start))
    return None


def _from_maven(source: Source) -> Program | None:
    if source is Source.CACHE and not JARS.is_cached():
        return None
    requires = ("java",) if source is Source.CACHE else ("java", "mvn")
    return Program(
        source=source, description=f"Apache {NAME.title()} {VERSION}", install=_classpath, requires=requires
    )


def _classpath() -> str:
    require_program("java", remedy=REMEDY)
    return f"{JARS.folder()}/*"
