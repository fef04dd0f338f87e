"""A server whose program comes from one of several sources, such as PATH or a container image."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from flowkit.local.container import ContainerImage, container_name, find_engine, output_of
from flowkit.local.process import ServerProcess
from flowkit.local.sources import Program, Source


class LocalServer(ServerProcess):
    """Temporal or MongoDB, as a program or in a container."""

    @abstractmethod
    def find_program(self) -> Program:
        """Return the program from the first source that has one. Raises InstallFailed or ConfigError."""

    @cached_property
    def program(self) -> Program:
        """The program, found once for the lifetime of this object."""
        return self.find_program()

    def cleanup_command(self) -> Sequence[str]:
        """Return the command that removes the server's container, if it has one."""
        container = self.program.container
        return container.removal_arguments(container_name(self.name, self.folder)) if container else ()

    def container_command(
        self,
        container: ContainerImage,
        program: str,
        ports: Mapping[int, int],
        data: Path,
        arguments: Sequence[str],
    ) -> list[str]:
        """Return the command that runs `program` of the image; first remove an earlier container."""
        name = container_name(self.name, self.folder)
        output_of(container.removal_arguments(name))
        return container.run_arguments(name, program=program, ports=ports, data=data, arguments=arguments)


def container_program(image: str) -> Program | None:
    """Return the image as a program, if a container engine is running."""
    engine = find_engine()
    if engine is None:
        return None
    container = ContainerImage(engine, image)
    description = f"{image} in {engine.name}"
    return Program(
        source=Source.CONTAINER, description=description, install=container.pull, container=container
    )
