"""Servers in containers, for machines with a running container engine.

A container runs in the foreground, as a child of the engine's client, which forwards SIGTERM to it. Its
ports are published on this machine only, and it keeps its data in the server's folder.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowkit.local.install import fingerprint, report_progress, run_command
from flowkit.local.ports import HOST

COMMAND_TIMEOUT_SECONDS = 3.0
DATA_FOLDER = "/flowkit"
"""Path inside a container where the server's folder is mounted."""


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """A running container engine."""

    program: str
    """Path of its client."""
    rootless: bool
    """Whether root inside a container is the current user outside."""

    @property
    def name(self) -> str:
        """Name of the client, `docker` or `podman`."""
        return Path(self.program).name


@dataclass(frozen=True, slots=True)
class ContainerImage:
    """An image and the engine that runs it."""

    engine: ContainerEngine
    image: str

    def pull(self) -> str:
        """Pull the image unless the engine already has it, and return its name."""
        if not output_of([self.engine.program, "image", "inspect", self.image]):
            with report_progress(self.image):
                run_command([self.engine.program, "pull", self.image], folder=Path.cwd())
        return self.image

    def run_arguments(
        self, name: str, *, program: str, ports: Mapping[int, int], data: Path, arguments: Sequence[str]
    ) -> list[str]:
        """Return the command that runs a program of the image in the foreground, as the owner of `data`.

        `ports` maps ports of this machine to ports of the container, which sees `data` as DATA_FOLDER.
        """
        published = [
            part
            for host_port, container_port in ports.items()
            for part in ("--publish", f"{HOST}:{host_port}:{container_port}")
        ]
        user = "0:0" if self.engine.rootless else f"{os.getuid()}:{os.getgid()}"
        return [
            *(self.engine.program, "run", "--rm", "--name", name),
            *(*published, "--volume", f"{data}:{DATA_FOLDER}:z", "--user", user),
            *("--entrypoint", program, self.image, *arguments),
        ]

    def removal_arguments(self, name: str) -> list[str]:
        """Return the command that stops and removes the container; it does nothing if there is none."""
        return [self.engine.program, "rm", "--force", name]


def container_name(server: str, folder: Path) -> str:
    """Return the name of a server's container, which depends only on the server and its data folder."""
    return f"flowkit-{server}-{fingerprint(str(folder))}"


def find_engine() -> ContainerEngine | None:
    """Return Docker or Podman, whichever is installed and running; Docker first."""
    return next((engine for name in ("docker", "podman") if (engine := _probe(name))), None)


def _probe(name: str) -> ContainerEngine | None:
    program = shutil.which(name)
    if program is None:
        return None
    # `docker version` fails unless the engine is running; Podman has no engine process.
    version = output_of([program, "version"])
    if not version:
        return None
    podman = "podman" in version.lower()
    return ContainerEngine(program, rootless=podman or "rootless" in output_of([program, "info"]))


def output_of(command: Sequence[str]) -> str:
    """Return what a command prints, or an empty string if it fails or takes longer than three seconds."""
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout if completed.returncode == 0 else ""
