"""An archive of the classes that a broker loads, with which it starts in half of the time.

A JVM ignores an archive that does not suit its version or the jars.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flowkit.local.errors import DevServerError
from flowkit.local.install.cache import find_installed, fingerprint, install_once

NAME = "kafka-classes"
FILE = "kafka.jsa"
# Otherwise, a JVM that ignores the archive says so in the broker's log at every start.
QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


def archive_options(java: str, classpath: str) -> list[str]:
    """Return the options with which the JVM uses the archive, or none if it has not been created."""
    folder = find_installed(NAME, _version(java, classpath))
    return [f"-XX:SharedArchiveFile={folder / FILE}", *QUIET] if folder and (folder / FILE).exists() else []


def recording_option(archive: Path) -> str:
    """Return the option with which a JVM creates the archive when it exits."""
    return f"-XX:ArchiveClassesAtExit={archive}"


def create_archive(java: str, classpath: str, record: Callable[[Path], None]) -> None:
    """Create the archive once. `record(file)` runs a broker that creates it; a JVM that cannot leaves none."""
    with suppress(DevServerError):
        install_once(NAME, _version(java, classpath), lambda folder: record(folder / FILE))


def _version(java: str, classpath: str) -> str:
    program = Path(java).resolve()
    return fingerprint(f"{program} of {program.stat().st_mtime_ns}, {classpath}")
