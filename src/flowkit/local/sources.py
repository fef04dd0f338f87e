"""The sources of the servers' programs, and the choice among them."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from flowkit.errors import ConfigError
from flowkit.local.container import ContainerImage
from flowkit.local.errors import InstallFailed

VARIABLE = "FLOWKIT_SERVERS"


class Source(StrEnum):
    """Sources of a server's program, in the default order."""

    PATH = "path"
    """A program that the user installed."""
    CONTAINER = "container"
    """An image that a container engine runs."""
    CACHE = "cache"
    """A program that FlowKit installed earlier."""
    DOWNLOAD = "download"
    """A program that FlowKit downloads or builds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A server's program and its source."""

    source: Source
    description: str
    """The path, the image, or what FlowKit would download, for display."""
    install: Callable[[], str]
    """Installs the program if necessary, and returns its path or the name of its image."""
    requires: tuple[str, ...] = ()
    """Other programs that it needs on PATH."""
    container: ContainerImage | None = None


Finder = Callable[[], Program | None]
"""Looks for a server's program in one source; returns None if it is not there."""


def allowed_sources() -> tuple[Source, ...]:
    """Return the sources to try: those of `FLOWKIT_SERVERS`, or all. ConfigError for an unknown one."""
    names = [name.strip() for name in os.environ.get("FLOWKIT_SERVERS", "").split(",") if name.strip()]
    known = [source.value for source in Source]
    for name in names:
        if name not in known:
            raise ConfigError(f"{VARIABLE} has the unknown source {name!r}; choose from {', '.join(known)}")
    return tuple(dict.fromkeys(map(Source, names))) or tuple(Source)


def select_program(server: str, finders: Mapping[Source, Finder], sources: Sequence[Source]) -> Program:
    """Return the program from the first source that has it. Raises InstallFailed if none has."""
    for source in sources:
        finder = finders.get(source)
        found = finder() if finder is not None else None
        if found is not None:
            return found
    tried = ",".join(sources)
    raise InstallFailed(
        f"no {server} found in {VARIABLE}={tried}; unset {VARIABLE}, or add more sources to it"
    )
