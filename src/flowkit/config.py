"""Settings of the engine and of workers: their names, defaults and layers (spec: configuration).

The connection to Temporal is configured elsewhere: with `TEMPORAL_ADDRESS`, `TEMPORAL_NAMESPACE` and Temporal's own
profiles (`temporalio.envconfig`).
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypeVar

from flowkit.core.handler_lines import KeptLogs
from flowkit.errors import ConfigError
from flowkit.text import kind_of, suggestion
from flowkit.validation import settings
from flowkit.validation.documents import Document

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
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


@dataclass
class _Topics:
    """Kafka settings that engine and external workers must agree on."""

    kafka_bootstrap: str = "kafka:9092"
    topic_cmd_fmt: str = "cmd.{type}.v1"
    topic_status_fmt: str = "status.{type}.v1"
    topic_worker_announce: str = "workers.announce.v1"
    topic_query: str = "query.tasks.v1"
    topic_reply: str = "reply.tasks.v1"
    topic_signals: str = "signals.v1"

    def topic_cmd(self, type: str) -> str:
        """Return the command topic of a role."""
        return self.topic_cmd_fmt.format(type=type)

    def topic_status(self, type: str) -> str:
        """Return the status topic of a role."""
        return self.topic_status_fmt.format(type=type)


@dataclass
class _Kafka(_Topics):
    """How the engine connects to Kafka and which topics it creates."""

    kafka_security_protocol: str = "PLAINTEXT"
    kafka_sasl_mechanism: str = "PLAIN"
    kafka_sasl_username: str | None = None
    kafka_sasl_password: str | None = field(default=None, repr=False)
    kafka_ssl_cafile: str | None = None
    """PEM file of the certificate authority; None for those that the operating system trusts."""
    kafka_ssl_certfile: str | None = None
    """PEM file of the client's own certificate."""
    kafka_ssl_keyfile: str | None = None
    kafka_ssl_password: str | None = field(default=None, repr=False)
    """Password of the key file."""
    kafka_create_topics: bool = True
    kafka_cmd_partitions: int = 16
    """Number of partitions of new command and status topics, at least the number of workers of a role."""
    kafka_replication_factor: int = -1
    """Number of replicas of new topics; -1 for the default of the broker."""


@_ignore_derived
@dataclass
class CoordinatorConfig(KeptLogs, _Kafka):
    """Settings of the engine. Settings that end in `_sec` are in seconds and may be fractions."""

    worker_types: list[str] = field(default_factory=list)
    """Roles that external Kafka workers serve."""
    heartbeat_soft_sec: float = 300
    """Time without a heartbeat of a running attempt after which its task shows as silent. 0 means never."""
    heartbeat_hard_sec: float = 3600
    """Time without a heartbeat after which the attempt's node fails. 0 means never."""
    lease_ttl_sec: float = 45
    """Time without a heartbeat after which an attempt counts as lost."""
    discovery_window_sec: float = 8
    cancel_grace_sec: float = 30
    """How long a cancelled attempt has to end."""
    scheduler_tick_sec: float = 1.0
    finalizer_tick_sec: float = 5.0
    hb_monitor_tick_sec: float = 10.0
    outbox_dispatch_tick_sec: float = 0.25
    outbox_max_retry: int = 12
    outbox_backoff_min_ms: int = 250
    outbox_backoff_max_ms: int = 60_000
    queue: str = DEFAULT_QUEUE
    """Task queue of the engine. Workers of a role poll `<queue>.<role>`."""
    window: int = 100
    """Maximum number of attempts of one role that a task has in flight."""
    max_in_flight: int = 1_000
    """Maximum number of attempts that a task has in flight, across all roles."""
    max_global_running: int | None = None
    """Maximum number of attempts that all tasks of the queue have in flight together; None for no limit."""
    max_type_concurrency: dict[str, int] = field(default_factory=dict)
    """The same limit for single roles, by role."""
    max_nodes: int = 20_000
    function_timeout_sec: float = 300
    function_slots: int = 100
    """Maximum number of calls of user-defined functions that one engine process runs concurrently."""
    page_url: str | None = None
    """Address of the page that shows tasks, to which the details of a task in Temporal's Web UI link."""
    sweep_sec: float = 60
    """How often the sweep compares open task documents with their workflows."""
    worker_events_ttl_sec: float = 30 * 86_400
    """How long MongoDB keeps a row of `worker_events`. 0 means for ever."""
    attempt_logs_ttl_sec: float = 30 * 86_400
    """How long MongoDB keeps the lines of handlers in `attempt_logs`. 0 means for ever."""
    hold_starts_events: int = 40_000
    """Number of history events at which a run stops starting new attempts until it continues as a new run."""
    hold_starts_bytes: int = 40_000_000
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
        settings.check(type(self).__name__, vars(self), RULES)
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

    roles: list[str] = field(default_factory=lambda: ["echo"])
    worker_id: str | None = None
    """None means `w-` and eight random hex digits, new for each worker."""
    worker_version: str = "2.0.0"
    lease_ttl_sec: float = 60
    hb_interval_sec: float = 20
    announce_interval_sec: float = 60
    dedup_cache_size: int = 10_000
    dedup_ttl_ms: int = 3_600_000
    pull_poll_ms_default: int = 300
    pull_empty_backoff_ms_max: int = 4_000
    db_cancel_poll_ms: int = 500
    strict_input_adapters: bool = False
    queue: str = DEFAULT_QUEUE
    """Task queue of the engine. This worker polls `<queue>.<role>`."""
    max_concurrent: int | dict[str, int] = 1
    """Maximum number of concurrent attempts: one number for each role, or a dict by role (default 1). See `slots`."""
    executor: str = "loop"
    """Where handlers run: `loop`, the event loop that started the worker, or `process`, separate processes."""
    process_workers: int | None = None
    """Number of processes of the executor `process`. None lets the executor choose."""
    max_buffered_mb: float = 64
    """Maximum memory, in MiB, that one worker process uses for upstream batches."""

    lease_ttl_ms = _Ms("lease_ttl_sec")
    hb_interval_ms = _Ms("hb_interval_sec")
    announce_interval_ms = _Ms("announce_interval_sec")

    def __post_init__(self) -> None:
        settings.check(type(self).__name__, vars(self), RULES)
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


_NEVER_USED = settings.seconds(0)
_TOPIC = settings.topic()
_FORMAT = settings.topic_format()

RULES = {
    "kafka_bootstrap": settings.brokers(),
    "kafka_security_protocol": settings.one_of("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"),
    "kafka_sasl_mechanism": settings.one_of("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"),
    "kafka_sasl_username": settings.optional(settings.text()),
    "kafka_sasl_password": settings.optional(settings.secret()),
    "kafka_ssl_cafile": settings.optional(settings.file()),
    "kafka_ssl_certfile": settings.optional(settings.file()),
    "kafka_ssl_keyfile": settings.optional(settings.file()),
    "kafka_ssl_password": settings.optional(settings.secret()),
    "kafka_create_topics": settings.switch(),
    "kafka_cmd_partitions": settings.whole(1, 10_000),
    "kafka_replication_factor": settings.replication(),
    "topic_cmd_fmt": _FORMAT,
    "topic_status_fmt": _FORMAT,
    "topic_worker_announce": _TOPIC,
    "topic_query": _TOPIC,
    "topic_reply": _TOPIC,
    "topic_signals": _TOPIC,
    "queue": settings.text(),
    "lease_ttl_sec": settings.seconds(),
    "worker_types": settings.roles(),
    "heartbeat_soft_sec": settings.seconds(0),
    "heartbeat_hard_sec": settings.seconds(0),
    "discovery_window_sec": settings.seconds(0),
    "cancel_grace_sec": settings.seconds(0),
    "scheduler_tick_sec": _NEVER_USED,
    "finalizer_tick_sec": _NEVER_USED,
    "hb_monitor_tick_sec": _NEVER_USED,
    "outbox_dispatch_tick_sec": _NEVER_USED,
    "outbox_max_retry": settings.whole(0),
    "outbox_backoff_min_ms": settings.milliseconds(0),
    "outbox_backoff_max_ms": settings.milliseconds(0),
    "window": settings.whole(1, 2_000),
    "max_in_flight": settings.whole(1, 1_500),
    "max_global_running": settings.optional(settings.whole(1, settings.MOST_SLOTS)),
    "max_type_concurrency": settings.by_role(),
    "max_nodes": settings.whole(1, 20_000),
    "function_timeout_sec": settings.seconds(),
    "function_slots": settings.whole(1, settings.MOST_SLOTS),
    "page_url": settings.optional(settings.web_address()),
    "sweep_sec": settings.seconds(),
    "worker_events_ttl_sec": settings.seconds(0),
    "attempt_logs_ttl_sec": settings.seconds(0),
    "kept_log_level": settings.log_levels(),
    "keep_prints": settings.switch(),
    "hold_starts_events": settings.whole(1, 50_000),
    "hold_starts_bytes": settings.whole(1, 50_000_000),
    "roles": settings.roles(least=1),
    "worker_id": settings.optional(settings.text()),
    "worker_version": settings.text(),
    "hb_interval_sec": settings.seconds(),
    "announce_interval_sec": settings.seconds(),
    "dedup_cache_size": settings.whole(0),
    "dedup_ttl_ms": settings.milliseconds(0),
    "pull_poll_ms_default": settings.milliseconds(1),
    "pull_empty_backoff_ms_max": settings.milliseconds(1),
    "db_cancel_poll_ms": settings.milliseconds(1),
    "strict_input_adapters": settings.switch(),
    "max_concurrent": settings.per_role(),
    "executor": settings.one_of("loop", "process"),
    "process_workers": settings.optional(settings.whole(1, 1_000)),
    "max_buffered_mb": settings.above_zero("MiB"),
}
"""The rule for the value of each setting. Above the upper bounds of `window`, `max_in_flight`, `max_nodes` and
`hold_starts_…`, the Temporal server fails workflow tasks or terminates the workflow."""


def split_settings(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a file that engines have, and those that workers have. Both have some of them.

    Raise ConfigError, which names the file, if it cannot be read, or if a setting is unknown or invalid.
    """
    values: dict[str, Any] = dict(next(_read_file(path), (str(path), {}))[1])
    parts = []
    for cls in (CoordinatorConfig, WorkerConfig):
        known = {each.name for each in fields(cls)} | _list_derived(cls)
        parts.append((cls, {name: value for name, value in values.items() if name in known}))
    engine, worker = (part for _, part in parts)
    for name in values.keys() - engine.keys() - worker.keys():
        every = [each.name for cls, _ in parts for each in fields(cls)]
        raise ConfigError(
            f"{path}: neither engines nor workers have a setting {name!r}{suggestion(name, every)}"
        )
    for cls, part in parts:
        _merge_layers(cls, [(str(path), part)])
    return engine, worker


def _merge_layers(cls: type[Any], layers: Iterable[Layer]) -> dict[str, Any]:
    """Return the last value of each setting, validated. Errors name the layer that contains the value."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    known = {each.name for each in fields(cls)}
    for place, given in layers:
        for name in given.keys() - known - _list_derived(cls):
            guess = suggestion(name, known)
            raise TypeError(f"{place}: {cls.__name__} has no setting {name!r}{guess}")
        values |= {name: value for name, value in given.items() if name in known}
        origin |= dict.fromkeys(given, place)
    for name, value in values.items():
        settings.check(cls.__name__, {name: value}, RULES, place=f"{origin[name]}: ")
    return values


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
