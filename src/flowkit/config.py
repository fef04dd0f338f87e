"""Settings of the engine and of workers: their names, values, defaults and layers (spec: configuration).

The connection to Temporal is configured elsewhere: with `TEMPORAL_ADDRESS`, `TEMPORAL_NAMESPACE` and Temporal's own
profiles (`temporalio.envconfig`).
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from flowkit.core.handler_lines import OFF
from flowkit.errors import ConfigError
from flowkit.text import kind_of, suggestion
from flowkit.validation import values
from flowkit.validation.documents import Document
from flowkit.validation.invalid import field_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    Layer = tuple[str, dict[str, Any]]

DEFAULT_QUEUE = "flowkit"

T = TypeVar("T")


class _Ms:
    """A read-only view of a setting in seconds, as whole milliseconds."""

    def __init__(self, seconds: str) -> None:
        self._seconds = seconds

    def __get__(self, config: object, owner: type | None = None) -> int:
        return int(getattr(config, self._seconds) * 1000) if config is not None else 0


def _list_derived(cls: type[Any]) -> set[str]:
    """Return the names of the settings that are computed from other settings."""
    return {name for base in cls.__mro__ for name, value in vars(base).items() if isinstance(value, _Ms)}


def _ignore_derived(cls: type[T]) -> type[T]:
    """Make the constructor accept and ignore the computed settings, as documented."""
    create, derived = cls.__init__, _list_derived(cls)

    @functools.wraps(create)
    def __init__(self: T, *args: Any, **settings: Any) -> None:
        create(self, *args, **{name: value for name, value in settings.items() if name not in derived})

    changed: Any = cls
    changed.__init__ = __init__
    return cls


@dataclass(kw_only=True)
class KeptLogs:
    """Which lines of handlers and functions are kept with their attempt (docs/monitoring.md)."""

    kept_log_level: Annotated[str | dict[str, str], values.LOG_LEVEL] = "INFO"
    """Least level of the lines that are kept: one for all roles, or a dict by role (default INFO). `OFF` keeps none."""
    keep_prints: Annotated[bool, values.SWITCH] = False
    """Whether what handlers and functions print to stdout is kept, too."""

    def kept_level(self, role: str) -> int | None:
        """Return the least level of the kept lines of a role; None if none are kept."""
        given = self.kept_log_level
        name = given.get(role, "INFO") if isinstance(given, dict) else given
        return None if name.upper() == OFF else int(logging.getLevelNamesMapping()[name.upper()])

    def least_kept_level(self) -> int | None:
        """Return the least level of the kept lines of all roles; None if none are kept at all."""
        given = self.kept_log_level
        roles = ["", *given] if isinstance(given, dict) else [""]
        return min((level for role in roles if (level := self.kept_level(role)) is not None), default=None)


@dataclass
class _Topics:
    """Kafka settings that engine and external workers must agree on."""

    kafka_bootstrap: Annotated[str, values.BROKERS] = "kafka:9092"
    topic_cmd_fmt: Annotated[str, values.TOPIC_FORMAT] = "cmd.{type}.v1"
    topic_status_fmt: Annotated[str, values.TOPIC_FORMAT] = "status.{type}.v1"
    topic_worker_announce: Annotated[str, values.TOPIC] = "workers.announce.v1"
    topic_query: Annotated[str, values.TOPIC] = "query.tasks.v1"
    topic_reply: Annotated[str, values.TOPIC] = "reply.tasks.v1"
    topic_signals: Annotated[str, values.TOPIC] = "signals.v1"

    def topic_cmd(self, type: str) -> str:
        """Return the command topic of a role."""
        return self.topic_cmd_fmt.format(type=type)

    def topic_status(self, type: str) -> str:
        """Return the status topic of a role."""
        return self.topic_status_fmt.format(type=type)


@dataclass
class _Kafka(_Topics):
    """How the engine connects to Kafka and which topics it creates."""

    kafka_security_protocol: Annotated[
        str, values.one_of("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
    ] = "PLAINTEXT"
    kafka_sasl_mechanism: Annotated[str, values.one_of("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")] = "PLAIN"
    kafka_sasl_username: Annotated[str | None, values.NAME] = None
    kafka_sasl_password: Annotated[str | None, values.PASSWORD] = field(default=None, repr=False)
    kafka_ssl_cafile: Annotated[str | None, values.PATH] = None
    """PEM file of the certificate authority; None for those that the operating system trusts."""
    kafka_ssl_certfile: Annotated[str | None, values.PATH] = None
    """PEM file of the client's own certificate."""
    kafka_ssl_keyfile: Annotated[str | None, values.PATH] = None
    kafka_ssl_password: Annotated[str | None, values.PASSWORD] = field(default=None, repr=False)
    """Password of the key file."""
    kafka_create_topics: Annotated[bool, values.SWITCH] = True
    kafka_cmd_partitions: Annotated[int, values.whole(1, 10_000)] = 16
    """Number of partitions of new command and status topics, at least the number of workers of a role."""
    kafka_replication_factor: Annotated[int, values.REPLICAS] = -1
    """Number of replicas of new topics; -1 for the default of the broker."""


@_ignore_derived
@dataclass
class CoordinatorConfig(KeptLogs, _Kafka):
    """Settings of the engine. Settings that end in `_sec` are in seconds and may be fractions."""

    worker_types: Annotated[list[str], values.ROLES] = field(default_factory=list)
    """Roles that external Kafka workers serve."""
    heartbeat_soft_sec: Annotated[float, values.seconds(0)] = 300
    """Time without a heartbeat of a running attempt after which its task shows as silent. 0 means never."""
    heartbeat_hard_sec: Annotated[float, values.seconds(0)] = 3600
    """Time without a heartbeat after which the attempt's node fails. 0 means never."""
    lease_ttl_sec: Annotated[float, values.seconds()] = 45
    """Time without a heartbeat after which an attempt counts as lost."""
    discovery_window_sec: Annotated[float, values.seconds(0)] = 8
    cancel_grace_sec: Annotated[float, values.seconds(0)] = 30
    """How long a cancelled attempt has to end."""
    scheduler_tick_sec: Annotated[float, values.seconds(0)] = 1.0
    finalizer_tick_sec: Annotated[float, values.seconds(0)] = 5.0
    hb_monitor_tick_sec: Annotated[float, values.seconds(0)] = 10.0
    outbox_dispatch_tick_sec: Annotated[float, values.seconds(0)] = 0.25
    outbox_max_retry: Annotated[int, values.whole(0)] = 12
    outbox_backoff_min_ms: Annotated[int, values.milliseconds(0)] = 250
    outbox_backoff_max_ms: Annotated[int, values.milliseconds(0)] = 60_000
    queue: Annotated[str, values.NAME] = DEFAULT_QUEUE
    """Task queue of the engine. Workers of a role poll `<queue>.<role>`."""
    window: Annotated[int, values.whole(1, 2_000)] = 100
    """Maximum number of attempts of one role that a task has in flight. Above the upper bounds of this setting, of
    `max_in_flight`, `max_nodes` and `hold_starts_…`, the Temporal server fails workflow tasks or ends the workflow."""
    max_in_flight: Annotated[int, values.whole(1, 1_500)] = 1_000
    """Maximum number of attempts that a task has in flight, across all roles."""
    max_global_running: Annotated[int | None, values.SLOTS] = None
    """Maximum number of attempts that all tasks of the queue have in flight together; None for no limit."""
    max_type_concurrency: Annotated[dict[str, int], values.SLOTS_BY_ROLE] = field(default_factory=dict)
    """The same limit for single roles, by role."""
    max_nodes: Annotated[int, values.whole(1, 20_000)] = 20_000
    function_timeout_sec: Annotated[float, values.seconds()] = 300
    function_slots: Annotated[int, values.SLOTS] = 100
    """Maximum number of calls of user-defined functions that one engine process runs concurrently."""
    page_url: Annotated[str | None, values.PAGE_ADDRESS] = None
    """Address of the page that shows tasks, to which the details of a task in Temporal's Web UI link."""
    sweep_sec: Annotated[float, values.seconds()] = 60
    """How often the sweep compares open task documents with their workflows."""
    worker_events_ttl_sec: Annotated[float, values.seconds(0)] = 30 * 86_400
    """How long MongoDB keeps a row of `worker_events`. 0 means for ever."""
    attempt_logs_ttl_sec: Annotated[float, values.seconds(0)] = 30 * 86_400
    """How long MongoDB keeps the lines of handlers in `attempt_logs`. 0 means for ever."""
    hold_starts_events: Annotated[int, values.whole(1, 50_000)] = 40_000
    """Number of history events at which a run stops starting new attempts until it continues as a new run."""
    hold_starts_bytes: Annotated[int, values.whole(1, 50_000_000)] = 40_000_000
    """History size in bytes with the same effect as `hold_starts_events`."""

    hb_soft_ms = _Ms("heartbeat_soft_sec")
    hb_hard_ms = _Ms("heartbeat_hard_sec")
    lease_ttl_ms = _Ms("lease_ttl_sec")
    discovery_window_ms = _Ms("discovery_window_sec")
    cancel_grace_ms = _Ms("cancel_grace_sec")
    scheduler_tick_ms = _Ms("scheduler_tick_sec")
    finalizer_tick_ms = _Ms("finalizer_tick_sec")
    hb_monitor_tick_ms = _Ms("hb_monitor_tick_sec")
    outbox_dispatch_tick_ms = _Ms("outbox_dispatch_tick_sec")

    def __post_init__(self) -> None:
        _check(type(self), vars(self))
        self.worker_types = list(self.worker_types)
        self.max_type_concurrency = dict(self.max_type_concurrency)

    @classmethod
    def load(cls, path: str | Path | None = None, *, overrides: dict[str, Any] | None = None) -> Self:
        """Load the settings. Each layer overrides the previous one.

        The layers are: defaults, JSON or YAML file, environment (`KAFKA_…`, `WORKER_TYPES`, `FLOWKIT_PAGE_URL`),
        `overrides`.
        The file may be missing. Raise TypeError for an unknown key, and ConfigError for an invalid value.
        """
        return cls(
            **_merge_layers(cls, [*_read_file(path), *_read_environment(), ("overrides", overrides or {})])
        )


@_ignore_derived
@dataclass
class WorkerConfig(KeptLogs, _Topics):
    """Settings of a native worker."""

    roles: Annotated[list[str], values.SOME_ROLES] = field(default_factory=lambda: ["echo"])
    worker_id: Annotated[str | None, values.NAME] = None
    """None means `w-` and eight random hex digits, new for each worker."""
    worker_version: Annotated[str, values.NAME] = "2.0.0"
    lease_ttl_sec: Annotated[float, values.seconds()] = 60
    hb_interval_sec: Annotated[float, values.seconds()] = 20
    announce_interval_sec: Annotated[float, values.seconds()] = 60
    dedup_cache_size: Annotated[int, values.whole(0)] = 10_000
    dedup_ttl_ms: Annotated[int, values.milliseconds(0)] = 3_600_000
    pull_poll_ms_default: Annotated[int, values.milliseconds(1)] = 300
    pull_empty_backoff_ms_max: Annotated[int, values.milliseconds(1)] = 4_000
    db_cancel_poll_ms: Annotated[int, values.milliseconds(1)] = 500
    strict_input_adapters: Annotated[bool, values.SWITCH] = False
    queue: Annotated[str, values.NAME] = DEFAULT_QUEUE
    """Task queue of the engine. This worker polls `<queue>.<role>`."""
    max_concurrent: Annotated[int | dict[str, int], values.SLOTS_PER_ROLE] = 1
    """Maximum number of concurrent attempts: one number for each role, or a dict by role (default 1). See `slots`."""
    executor: Annotated[str, values.one_of("loop", "process")] = "loop"
    """Where handlers run: `loop`, the event loop that started the worker, or `process`, separate processes."""
    process_workers: Annotated[int | None, values.whole(1, 1_000)] = None
    """Number of processes of the executor `process`. None lets the executor choose."""
    max_buffered_mb: Annotated[float, values.MEBIBYTES] = 64
    """Maximum memory, in MiB, that one worker process uses for upstream batches."""

    lease_ttl_ms = _Ms("lease_ttl_sec")
    hb_interval_ms = _Ms("hb_interval_sec")
    announce_interval_ms = _Ms("announce_interval_sec")

    def __post_init__(self) -> None:
        _check(type(self), vars(self))
        self.roles = list(self.roles)

    @classmethod
    def load(
        cls, path: str | Path | None = "configs/worker.default.json", overrides: dict[str, Any] | None = None
    ) -> Self:
        """Load the settings. Each layer overrides the previous one: defaults, JSON or YAML file, `overrides`.

        The path is relative to the working directory, and the file may be missing. Raise TypeError for an unknown
        key, and ConfigError for an invalid value.
        """
        return cls(**_merge_layers(cls, [*_read_file(path), ("overrides", overrides or {})]))

    def slots(self, role: str) -> int:
        """Return the maximum number of attempts of a role that this process runs concurrently."""
        given = self.max_concurrent
        return given.get(role, 1) if isinstance(given, dict) else given


def split_settings(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a file that engines have, and those that workers have. Both have some of them.

    Raise ConfigError, which names the file, if it cannot be read, or if a setting is unknown or invalid.
    """
    given: dict[str, Any] = dict(next(_read_file(path), (str(path), {}))[1])
    parts = []
    for cls in (CoordinatorConfig, WorkerConfig):
        known = {each.name for each in fields(cls)} | _list_derived(cls)
        parts.append((cls, {name: value for name, value in given.items() if name in known}))
    engine, worker = (part for _, part in parts)
    for name in given.keys() - engine.keys() - worker.keys():
        every = [each.name for cls, _ in parts for each in fields(cls)]
        raise ConfigError(
            f"{path}: neither engines nor workers have a setting {name!r}{suggestion(name, every)}"
        )
    for cls, part in parts:
        _merge_layers(cls, [(str(path), part)])
    return engine, worker


def _merge_layers(cls: type[Any], layers: Iterable[Layer]) -> dict[str, Any]:
    """Return the last value of each setting, validated. Errors name the layer that contains the value."""
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    known = {each.name for each in fields(cls)}
    for place, given in layers:
        for name in given.keys() - known - _list_derived(cls):
            guess = suggestion(name, known)
            raise TypeError(f"{place}: {cls.__name__} has no setting {name!r}{guess}")
        merged |= {name: value for name, value in given.items() if name in known}
        origin |= dict.fromkeys(given, place)
    for name, value in merged.items():
        _check(cls, {name: value}, f"{origin[name]}: ")
    return merged


def _check(cls: type[Any], given: Mapping[str, Any], place: str = "") -> None:
    """Raise ConfigError for the first value that is not valid. `place` names the source of the values."""
    for name, value in given.items():
        if problem := field_problem(cls, name, value, f"{place}{cls.__name__}.{name}"):
            raise ConfigError(problem)


def _read_file(path: str | Path | None) -> Iterator[Layer]:
    if path is None:
        return
    try:
        settings = Document.read(path).load()
    except FileNotFoundError:
        return
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{path} must contain an object, not {'null' if settings is None else kind_of(settings)}"
        )
    yield str(path), settings


_VARIABLES = {
    "KAFKA_BOOTSTRAP_SERVERS": "kafka_bootstrap",
    "KAFKA_SECURITY_PROTOCOL": "kafka_security_protocol",
    "KAFKA_SASL_MECHANISM": "kafka_sasl_mechanism",
    "KAFKA_SASL_USERNAME": "kafka_sasl_username",
    "KAFKA_SASL_PASSWORD": "kafka_sasl_password",
    "KAFKA_SSL_CAFILE": "kafka_ssl_cafile",
    "KAFKA_SSL_CERTFILE": "kafka_ssl_certfile",
    "KAFKA_SSL_KEYFILE": "kafka_ssl_keyfile",
    "KAFKA_SSL_PASSWORD": "kafka_ssl_password",
    "FLOWKIT_PAGE_URL": "page_url",
}


def _read_environment() -> Iterator[Layer]:
    """Yield a layer for each environment variable that is set and not empty."""
    for variable, name in _VARIABLES.items():
        if value := os.environ.get(variable):
            yield variable, {name: value}
    if roles := os.environ.get("WORKER_TYPES"):
        yield "WORKER_TYPES", {"worker_types": [role.strip() for role in roles.split(",") if role.strip()]}
