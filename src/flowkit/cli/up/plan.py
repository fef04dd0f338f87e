"""The plan of `flowkit up`: which parts to start, and on which ports. Made before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from flowkit.cli.errors import remedied
from flowkit.cli.options import DEFAULT_DATABASE
from flowkit.config import DEFAULT_QUEUE
from flowkit.errors import ConfigError
from flowkit.validation import settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Part(StrEnum):
    """A part that `flowkit up` can start."""

    TEMPORAL = "temporal"
    MONGO = "mongo"
    ENGINE = "engine"
    WORKER = "worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """Ports of the servers."""

    temporal: int = 7233
    ui: int = 8233
    mongo: int = 27017
    temporal_http: int | None = None
    """None for any free port."""
    kafka: int = 9092

    @classmethod
    def from_base(cls, base: int | None) -> Ports:
        """Return the default ports, or five consecutive ports from `base`."""
        if base is None:
            return cls()
        return cls(temporal=base, ui=base + 1, mongo=base + 2, temporal_http=base + 3, kafka=base + 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class UpOptions:
    """The options of `flowkit up`."""

    handlers: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    data: Path | None = None
    port_base: int | None = None
    functions: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    """Handlers that the engine hosts."""
    external: tuple[str, ...] = ()
    """Roles that external workers serve through Kafka."""
    workers: int | None = None
    concurrency: int | None = None
    queue: str = DEFAULT_QUEUE
    database: str = DEFAULT_DATABASE
    verbose: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to start, and which servers to use."""

    options: UpOptions
    parts: frozenset[Part]
    ports: Ports
    starts_temporal: bool
    """Whether to start a Temporal server; otherwise the one of `TEMPORAL_*` is used."""
    starts_mongo: bool
    uses_temporal: bool
    """Whether a part is Temporal or needs it."""
    uses_mongo: bool
    starts_kafka: bool = False
    """Whether to start a Kafka broker; otherwise the one of `KAFKA_BOOTSTRAP_SERVERS` is used, if any."""

    @property
    def uses_kafka(self) -> bool:
        """Whether external workers serve roles, which needs a broker."""
        return bool(self.options.external)

    @property
    def starts_bridge(self) -> bool:
        """Whether to start a bridge, beside the engine."""
        return self.uses_kafka and Part.ENGINE in self.parts


def parse_parts(only: Sequence[str]) -> frozenset[Part]:
    """Return the parts that `--only` names. Raises ConfigError for an unknown part."""
    names = [name.strip() for text in only for name in text.split(",") if name.strip()]
    known = [part.value for part in Part]
    for name in names:
        if name not in known:
            raise remedied(ConfigError(f"--only {name!r} is unknown"), f"choose from {', '.join(known)}")
    return frozenset(map(Part, names))


def parse_external(external: Sequence[str]) -> tuple[str, ...]:
    """Return the roles that `--external` names. Raises ConfigError for one that is no role, or named twice."""
    roles = [name.strip() for text in external for name in text.split(",") if name.strip()]
    for _, found, wanted in settings.roles()(roles):
        raise remedied(ConfigError(f"--external {found!r} is not allowed"), f"it must be {wanted}")
    return tuple(roles)


def make_plan(options: UpOptions, environment: Mapping[str, str]) -> Plan:
    """Return what to start. Raises ConfigError if options contradict each other."""
    parts = parse_parts(options.only) or frozenset(Part) - ({Part.WORKER} if not options.handlers else set())
    _check_options(options, parts)
    runs_tasks = not parts.isdisjoint({Part.ENGINE, Part.WORKER})
    return Plan(
        options=options,
        parts=parts,
        ports=Ports.from_base(options.port_base),
        starts_temporal=Part.TEMPORAL in parts and not environment.get("TEMPORAL_ADDRESS"),
        starts_mongo=Part.MONGO in parts and not environment.get("MONGO_URL"),
        uses_temporal=runs_tasks or Part.TEMPORAL in parts,
        uses_mongo=runs_tasks or Part.MONGO in parts,
        starts_kafka=bool(options.external) and not environment.get("KAFKA_BOOTSTRAP_SERVERS"),
    )


def _check_options(options: UpOptions, parts: frozenset[Part]) -> None:
    if Part.WORKER in parts and not options.handlers:
        problem = ConfigError("a worker needs handlers, but none are given")
        raise remedied(
            problem, "name them as module:CLASS, for example flowkit up mypackage.handlers:MyHandler"
        )
    for name, value, part in (
        ("handlers are given", options.handlers, Part.WORKER),
        ("--workers is given", options.workers, Part.WORKER),
        ("--concurrency is given", options.concurrency, Part.WORKER),
        ("--function is given", options.functions, Part.ENGINE),
        ("--role is given", options.roles, Part.ENGINE),
    ):
        if value and part not in parts:
            raise remedied(ConfigError(f"{name}, but this command starts no {part}"), _remedy(part, options))


def _remedy(part: Part, options: UpOptions) -> str:
    if part is Part.WORKER and not options.only:
        return "name the handlers of a worker as module:CLASS"
    return f"add {part} to --only, or omit --only"
