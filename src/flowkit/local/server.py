"""A server whose program may come from several sources, one of them a container engine."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from flowkit.local.container import ContainerImage, container_name, find_engine, output_of
from flowkit.local.process import ServerProcess
from flowkit.local.sources import Program, Source


class LocalServer(ServerProcess):
    """Temporal or MongoDB, as a program or as a container."""

    @abstractmethod
    def find_program(self) -> Program:
        """Where it would come from now. InstallFailed or ConfigError tells why there is nothing."""

    @cached_property
    def program(self) -> Program:
        """Where it comes from; it stays the same for the life of this object."""
        return self.find_program()

    def cleanup_command(self) -> Sequence[str]:
        """Removes the container, if it is one."""
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
        """The command that runs `program` of the image; one that an earlier process left behind is removed first."""
        name = container_name(self.name, self.folder)
        output_of(container.removal_arguments(name))
        return container.run_arguments(name, program=program, ports=ports, data=data, arguments=arguments)


def container_program(image: str) -> Program | None:
    """An image, if a container engine runs here."""
    engine = find_engine()
    if engine is None:
        return None
    container = ContainerImage(engine, image)
    description = f"{image} in {engine.name}"
    return Program(
        source=Source.CONTAINER, description=description, install=container.pull, container=container
    )
