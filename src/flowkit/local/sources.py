"""Where the programs of local servers come from, and which of these ways is taken."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from flowkit.errors import ConfigError
from flowkit.local.container import ContainerImage
from flowkit.local.errors import InstallFailed

VARIABLE = "FLOWKIT_SERVERS"


class Source(StrEnum):
    """Ways to a server's program, in the order in which they are tried."""

    PATH = "path"
    """A program of the user's."""
    CONTAINER = "container"
    """An image that a container engine runs."""
    CACHE = "cache"
    """What was installed before."""
    DOWNLOAD = "download"
    """Fetched, or built, now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One server's program, and the way to it."""

    source: Source
    description: str
    """The program, the image, or what would be fetched: for people."""
    install: Callable[[], str]
    """Makes it present, and answers its path, or the name of its image."""
    requires: tuple[str, ...] = ()
    """Other programs without which it cannot be had."""
    container: ContainerImage | None = None


Finder = Callable[[], Program | None]
"""Looks whether a server's program is there on one way."""


def allowed_sources() -> tuple[Source, ...]:
    """The sources in their order; `FLOWKIT_SERVERS` limits and orders them. ConfigError for an unknown one."""
    names = [name.strip() for name in os.environ.get("FLOWKIT_SERVERS", "").split(",") if name.strip()]
    known = [source.value for source in Source]
    for name in names:
        if name not in known:
            raise ConfigError(f"{VARIABLE} names {name!r}; its names are {', '.join(known)}")
    return tuple(dict.fromkeys(map(Source, names))) or tuple(Source)


def select_program(server: str, finders: Mapping[Source, Finder], sources: Sequence[Source]) -> Program:
    """The program on the first of these ways that leads to one; InstallFailed if none does."""
    for source in sources:
        finder = finders.get(source)
        found = finder() if finder is not None else None
        if found is not None:
            return found
    tried = ", ".join(sources)
    raise InstallFailed(
        f"no {server} is to be had by {tried} alone; unset {VARIABLE}, or name more sources there"
    )
