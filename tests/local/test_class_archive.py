"""The archive of Java classes with which a broker starts faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.local.processes import create_program

from flowkit.local import kafka as broker
from flowkit.local.errors import InstallFailed
from flowkit.local.sources import Program, Source

if TYPE_CHECKING:
    from pathlib import Path

CLASSPATH = "/jars/*"


@pytest.fixture
def java(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only program on PATH, with an empty cache."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return str(create_program(tmp_path / "bin" / "java"))


def kafka(source: Source) -> Program:
    """Return Kafka from a source."""
    return Program(source=source, description="Kafka", install=lambda: CLASSPATH)


def test_brokers_use_the_archive_once_it_exists(java: str, tmp_path: Path) -> None:
    settings = tmp_path / "server.properties"
    before = broker.start_command(kafka(Source.CACHE), settings)
    assert not [option for option in before if "Archive" in option]
    recorded: list[Path] = []

    def record(file: Path) -> None:
        recorded.append(file)
        file.touch()

    for _ in range(2):
        broker.archive_classes(kafka(Source.CACHE), record)
    [archive] = [
        option for option in broker.start_command(kafka(Source.CACHE), settings) if "Archive" in option
    ]
    assert archive.startswith("-XX:SharedArchiveFile=")
    assert (archive.endswith(broker.ARCHIVE_FILE), len(recorded)) == (True, 1)


def test_recording_broker_gets_the_file_as_an_option(java: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    command = broker.start_command(kafka(Source.CACHE), tmp_path / "server.properties", file)
    assert command[:2] == [java, f"-XX:ArchiveClassesAtExit={file}"]


def test_installation_succeeds_without_an_archive(java: str) -> None:
    def fails(file: Path) -> None:
        raise InstallFailed("`java` failed with code 1:")

    broker.create_archive(java, CLASSPATH, fails)
    assert broker.archive_options(java, CLASSPATH) == []
    broker.create_archive(java, CLASSPATH, lambda file: None)
    assert broker.archive_options(java, CLASSPATH) == [], "a JVM that cannot create one"


@pytest.mark.parametrize("source", [Source.PATH, Source.CONTAINER])
def test_kafka_of_the_user_gets_no_archive(java: str, source: Source) -> None:
    def record(file: Path) -> None:
        raise AssertionError("a broker was started")

    broker.archive_classes(kafka(source), record)
