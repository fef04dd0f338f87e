"""The plan of `flowkit up`: which parts to start, and on which ports. Made before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from flowkit import products
from flowkit.cli.errors import add_remedy
from flowkit.cli.options import DEFAULT_DATABASE, DEFAULT_MONGO_URL
from flowkit.config import DEFAULT_QUEUE
from flowkit.errors import ConfigError
from flowkit.text import shell_word
from flowkit.validation.values import ROLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from flowkit.products import UpProcess


DEFAULT_TEMPORAL_ADDRESS = "localhost:7233"
SERVERS = ("TEMPORAL_ADDRESS", "MONGO_URL", "KAFKA_BOOTSTRAP_SERVERS")
_DEFAULTS = {
    "TEMPORAL_ADDRESS": {DEFAULT_TEMPORAL_ADDRESS, "127.0.0.1:7233"},
    "MONGO_URL": {DEFAULT_MONGO_URL, "mongodb://127.0.0.1:27017"},
    "MONGO_DATABASE": {DEFAULT_DATABASE},
    "FLOWKIT_QUEUE": {DEFAULT_QUEUE},
}


class UpPart(StrEnum):
    """A part of the core that `flowkit up` can start. The processes of products are further parts, by name."""

    TEMPORAL = "temporal"
    MONGO = "mongo"
    ENGINE = "engine"
    BRIDGE = "bridge"
    WORKER = "worker"


_HEALTH_PORTS = ("engine", "bridge", "gateway", "admission", "page", "worker-1")
"""The processes in the order of the ports of their health and metrics. Further workers follow."""
_FIRST_HEALTH_PORT, _HEALTH_OFFSET = 9656, 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """Ports of the servers."""

    temporal: int = 7233
    ui: int = 8233
    mongo: int = 27017
    temporal_http: int | None = None
    """None for any free port."""
    kafka: int = 9092
    products: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the processes of products, by name."""
    health: int = _FIRST_HEALTH_PORT
    """The first one for health and metrics."""

    def health_port(self, process: str) -> int | None:
        """Return the port of the health and the metrics of a process; None for any free port.

        `process` is its name, such as `engine` or `worker-2`.
        """
        name, _, number = process.partition("-")
        if name == UpPart.WORKER:
            return self.health + len(_HEALTH_PORTS) - 2 + int(number)
        return self.health + _HEALTH_PORTS.index(name) if name in _HEALTH_PORTS else None

    @classmethod
    def from_base(cls, base: int | None) -> Ports:
        """Return the default ports, or consecutive ports from `base`."""
        of_products = {name: each.ports(base) for name, each in products.processes().items()}
        if base is None:
            return cls(products=of_products)
        return cls(
            temporal=base,
            ui=base + 1,
            mongo=base + 2,
            temporal_http=base + 3,
            kafka=base + 4,
            products=of_products,
            health=base + _HEALTH_OFFSET,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UpOptions:
    """The options of `flowkit up`."""

    handlers: tuple[str, ...] = ()
    """Handlers and flows that the workers run."""
    flows: tuple[str, ...] = ()
    """Flows whose functions and inline handlers the engine runs."""
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
    config: str | None = None
    """JSON or YAML file with settings of engines and workers."""
    reload: bool = False
    products: tuple[str, ...] = ()
    """The products of which to start a process."""
    verbose: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class UpPlan:
    """What to start, and which servers to use."""

    options: UpOptions
    parts: frozenset[str]
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
    def products(self) -> dict[str, UpProcess]:
        """The processes of products to start."""
        return {name: each for name, each in products.processes().items() if name in self.parts}

    @property
    def uses_kafka(self) -> bool:
        """Whether external workers serve roles, which needs a broker."""
        return bool(self.options.external)

    @property
    def starts_bridge(self) -> bool:
        """Whether to start a bridge: beside the engine, or because `--only` names it."""
        return self.uses_kafka and not self.parts.isdisjoint({UpPart.ENGINE, UpPart.BRIDGE})

    @property
    def notes(self) -> list[str]:
        """What the command does not start although the options may suggest it."""
        if self.uses_kafka and not self.starts_bridge:
            return ["no bridge starts, because --only names neither engine nor bridge"]
        return []


def parse_parts(only: Sequence[str]) -> frozenset[str]:
    """Return the parts that `--only` names. Raises ConfigError for an unknown part."""
    names = [name.strip() for text in only for name in text.split(",") if name.strip()]
    known = [*(part.value for part in UpPart), *products.processes()]
    for name in names:
        if name not in known:
            _check_installed(name)
            raise add_remedy(ConfigError(f"--only {name!r} is unknown"), f"choose from {', '.join(known)}")
    return frozenset(names)


def _check_installed(name: str) -> None:
    """Raise ConfigError if this is a product of FlowKit that is not installed."""
    if name in products.EXTRAS and name not in products.processes():
        raise products.missing(f"the process {name!r}", name)


def parse_external(external: Sequence[str]) -> tuple[str, ...]:
    """Return the roles that `--external` names. Raises ConfigError for one that is no role, or named twice."""
    roles = [name.strip() for text in external for name in text.split(",") if name.strip()]
    for _, found, wanted in ROLES.find(roles):
        raise add_remedy(ConfigError(f"--external {found!r} is not allowed"), f"it must be {wanted}")
    return tuple(roles)


def make_plan(options: UpOptions, environment: Mapping[str, str]) -> UpPlan:
    """Return what to start. Raises ConfigError if options contradict each other."""
    wanted = {UpPart.WORKER: bool(options.handlers), UpPart.BRIDGE: bool(options.external)}
    usual = frozenset(part.value for part in UpPart if wanted.get(part, True))
    for name in options.products:
        _check_installed(name)
    parts = parse_parts(options.only) or usual | set(options.products)
    for name, process in products.processes().items():
        if name in parts:
            process.check()
    _check_options(options, parts)
    runs_tasks = bool(parts - {UpPart.TEMPORAL, UpPart.MONGO})
    return UpPlan(
        options=options,
        parts=parts,
        ports=Ports.from_base(options.port_base),
        starts_temporal=UpPart.TEMPORAL in parts and not environment.get("TEMPORAL_ADDRESS"),
        starts_mongo=UpPart.MONGO in parts and not environment.get("MONGO_URL"),
        uses_temporal=runs_tasks or UpPart.TEMPORAL in parts,
        uses_mongo=runs_tasks or UpPart.MONGO in parts,
        starts_kafka=bool(options.external) and not environment.get("KAFKA_BOOTSTRAP_SERVERS"),
    )


def _check_options(options: UpOptions, parts: frozenset[str]) -> None:
    if UpPart.WORKER in parts and not options.handlers:
        problem = ConfigError("a worker needs handlers, but none are given")
        raise add_remedy(
            problem, "name them as module:CLASS, for example flowkit up mypackage.handlers:MyHandler"
        )
    if UpPart.BRIDGE in parts and not options.external:
        problem = ConfigError("a bridge needs roles, but none are given")
        raise add_remedy(problem, "name them with --external, for example --external indexer")
    for name, value, part in (
        ("handlers are given", options.handlers, UpPart.WORKER),
        ("--workers is given", options.workers, UpPart.WORKER),
        ("--concurrency is given", options.concurrency, UpPart.WORKER),
        ("--function is given", options.functions, UpPart.ENGINE),
        ("--role is given", options.roles, UpPart.ENGINE),
        *((f"--{name} is given", True, name) for name in options.products),
    ):
        if value and part not in parts:
            raise add_remedy(
                ConfigError(f"{name}, but this command starts no {part}"), _suggest_remedy(part, options)
            )


def _suggest_remedy(part: str, options: UpOptions) -> str:
    if part == UpPart.WORKER and not options.only:
        return "name the handlers of a worker as module:CLASS"
    return f"add {part} to --only, or omit --only"


def make_exports(
    plan: UpPlan, temporal_address: str | None, mongo_url: str | None, kafka_bootstrap: str | None = None
) -> dict[str, str]:
    """Return the variables that name servers, task queue and database."""
    exports: dict[str, str | None] = {
        "TEMPORAL_ADDRESS": temporal_address if plan.uses_temporal else None,
        "MONGO_URL": mongo_url if plan.uses_mongo else None,
        "KAFKA_BOOTSTRAP_SERVERS": kafka_bootstrap if plan.uses_kafka else None,
    }
    for name, process in plan.products.items():
        exports |= process.exports(plan.ports.products[name])
    if plan.starts_temporal:
        exports["TEMPORAL_NAMESPACE"] = "default"
    exports |= {"MONGO_DATABASE": plan.options.database, "FLOWKIT_QUEUE": plan.options.queue}
    return {name: value for name, value in exports.items() if value}


def script_exports(plan: UpPlan, environment: Mapping[str, str], exports: Mapping[str, str]) -> list[str]:
    """Return the lines for scripts:

    `export` lines for the servers that `up` starts and for values that are not default.

    The address of another server may contain a password, so a comment takes its place. Comments come last: a shell
    that evaluates the lines as one line ignores everything after the first.
    """
    own = own_servers(plan)
    lines = [
        _format_export(name, value)
        for name, value in exports.items()
        if name in own or (name not in SERVERS and value != environment.get(name, _find_default(name)))
    ]
    return lines + [f"# {name}: keep your value" for name in exports if name in SERVERS and name not in own]


def terminal_exports(plan: UpPlan, environment: Mapping[str, str], exports: Mapping[str, str]) -> list[str]:
    """Return the `export` lines that another terminal needs: only variables that are not default there."""
    own = own_servers(plan)
    changed = {
        name: value
        for name, value in exports.items()
        if value != environment.get(name)
        and (name in environment or value not in _list_defaults(name))
        and (name in own or name not in SERVERS)
    }
    return [_format_export(name, value) for name, value in changed.items()]


def own_servers(plan: UpPlan) -> set[str]:
    """Return the variables of the servers that `up` starts."""
    starts = (plan.starts_temporal, plan.starts_mongo, plan.starts_kafka)
    return {name for name, started in zip(SERVERS, starts, strict=True) if started}


def _format_export(name: str, value: str) -> str:
    return f"export {name}={shell_word(value)}"


def _list_defaults(name: str) -> set[str]:
    of_products = (each.exports(each.default_ports) for each in products.processes().values())
    return _DEFAULTS.get(name, {each[name] for each in of_products if name in each} or {"default"})


def _find_default(name: str) -> str:
    return next(iter(_list_defaults(name)))
