"""A local Kafka broker in KRaft mode: one node, no ZooKeeper."""

import base64
import shlex
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from flowkit.local import sources
from flowkit.local.container import DATA_FOLDER, ContainerImage
from flowkit.local.errors import translate_write_errors
from flowkit.local.install.commands import run_command
from flowkit.local.kafka.program import (
    HEAP,
    IMAGE_PROGRAMS,
    archive_classes,
    format_command,
    kafka_program,
    start_command,
    storage_program,
)
from flowkit.local.kafka.security import BrokerSecurity
from flowkit.local.kafka.settings import BrokerPlace, properties_file
from flowkit.local.ports import HOST, free_port, is_listening
from flowkit.local.server import LocalServer
from flowkit.local.sources import Program

STARTED = "Kafka Server started"
"""The broker logs this text when it serves requests."""
SETTINGS_FILE = "server.properties"


class Kafka(LocalServer):
    """A Kafka broker. Topics, records and offsets survive `stop`, `kill` and `restart`.

    The program comes from PATH, a container, the cache or Maven; `FLOWKIT_SERVERS` limits and orders
    these sources. The broker uses free ports unless they are given. It creates no topics by itself.
    `security` says how clients connect; by default without TLS and without passwords.
    """

    name = "kafka"

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        controller_port: int | None = None,
        security: BrokerSecurity | None = None,
    ) -> None:
        self.port = port or free_port()
        self.security = security or BrokerSecurity()
        self._controller_port = controller_port or free_port()
        self._record_to: Path | None = None
        super().__init__(folder, self.port, self._controller_port)

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients, as `host:port`."""
        return f"{HOST}:{self.port}"

    def find_program(self) -> Program:
        """Return the program from the first source that has one. Raises InstallFailed or ConfigError."""
        return kafka_program(sources.allowed_sources())

    @classmethod
    def install(cls) -> None:
        """Pull the image or download Kafka, unless it is installed. Archive its classes, for faster starts."""
        program = kafka_program(sources.allowed_sources())
        program.install()
        archive_classes(program, cls._record_classes)

    @classmethod
    def _record_classes(cls, file: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            broker = cls(Path(folder))
            broker._record_to = file
            with broker:
                pass

    def environment(self) -> Mapping[str, str]:
        """Return the settings of a distribution on PATH: its heap and the folder of its own logs."""
        return {"KAFKA_HEAP_OPTS": HEAP, "LOG_DIR": str(self._home / "logs")}

    def command(self) -> list[str]:
        """Return the command for the broker; format its storage first if it has none."""
        self.program.install()
        if self.program.container is not None:
            return self._in_container(self.program.container)
        settings = self._write_files(self._home, HOST)
        if not self._formatted:
            run_command(format_command(self.program, self._format_arguments(settings)), folder=self._home)
        return start_command(self.program, settings, self._record_to)

    def is_ready(self) -> bool:
        """Whether the broker serves requests."""
        return is_listening(self.port) and STARTED in self.read_log()

    @property
    def _home(self) -> Path:
        return self.folder / "kafka"

    @property
    def _formatted(self) -> bool:
        return (self._home / "data" / "meta.properties").exists()

    def _write_files(self, folder: Path, listen_on: str) -> Path:
        """Write settings and certificates for a broker that sees them in `folder`; return the settings' path there."""
        place = BrokerPlace(
            port=self.port, controller_port=self._controller_port, folder=folder, listen_on=listen_on
        )
        with translate_write_errors(self.folder, what=f"{self.name} cannot start"):
            self._home.mkdir(exist_ok=True)
            self.security.write_files(self._home)
            file = self._home / SETTINGS_FILE
            file.touch(mode=0o600)
            file.write_text(properties_file(place, self.security), encoding="utf-8")
        return folder / SETTINGS_FILE

    def _format_arguments(self, settings: Path) -> list[str]:
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        named = [f"--cluster-id={cluster_id}", "--config", str(settings), "--ignore-formatted"]
        return [*named, *self.security.format_arguments()]

    def _in_container(self, container: ContainerImage) -> list[str]:
        """Return the command for a container, in which a shell formats the storage and starts the broker."""
        settings = self._write_files(Path(DATA_FOLDER), "0.0.0.0")
        start = IMAGE_PROGRAMS / "kafka-server-start.sh"
        steps = [f"export KAFKA_HEAP_OPTS={HEAP} LOG_DIR=/tmp/kafka-logs"]
        if not self._formatted:
            steps.append(
                shlex.join([str(storage_program(start)), "format", *self._format_arguments(settings)])
            )
        steps.append(shlex.join(["exec", str(start), str(settings)]))
        return self.container_command(
            container, "/bin/sh", {self.port: self.port}, self._home, ["-c", " && ".join(steps)]
        )
