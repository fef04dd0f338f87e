"""Settings of engine and workers, with the documented names, defaults and layers (spec: configuration).

How to reach Temporal is not among them: that is what `TEMPORAL_ADDRESS`, `TEMPORAL_NAMESPACE` and Temporal's own
profiles are for (`temporalio.envconfig`).
"""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from flowkit.errors import ConfigError

DEFAULT_QUEUE = "flowkit"


class _Ms:
    """A setting in seconds, read as whole milliseconds."""

    def __init__(self, seconds: str) -> None:
        self._seconds = seconds

    def __get__(self, config: object, owner: type | None = None) -> int:
        return int(getattr(config, self._seconds) * 1000) if config is not None else 0


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
        """Command topic of a role."""
        return self.topic_cmd_fmt.format(type=type)

    def topic_status(self, type: str) -> str:
        """Status topic of a role."""
        return self.topic_status_fmt.format(type=type)


@dataclass
class CoordinatorConfig(_Topics):
    """Settings of the engine. Times ending in `_sec` are seconds and may be fractions."""

    worker_types: list[str] = field(default_factory=list)
    """Roles served by external Kafka workers."""
    heartbeat_soft_sec: float = 300
    heartbeat_hard_sec: float = 3600
    lease_ttl_sec: float = 45
    """Silence after which an attempt counts as lost."""
    discovery_window_sec: float = 8
    cancel_grace_sec: float = 30
    """How long a cancelled attempt may take to end."""
    scheduler_tick_sec: float = 1.0
    finalizer_tick_sec: float = 5.0
    hb_monitor_tick_sec: float = 10.0
    outbox_dispatch_tick_sec: float = 0.25
    outbox_max_retry: int = 12
    outbox_backoff_min_ms: int = 250
    outbox_backoff_max_ms: int = 60_000
    queue: str = DEFAULT_QUEUE
    """Task queue of the engine; roles poll `<queue>.<role>`."""
    window: int = 100
    """Attempts of one role and task in flight at once."""
    max_nodes: int = 5_000
    function_timeout_sec: float = 300
    sweep_sec: float = 60
    """How often open documents are compared with their workflows."""
    hold_starts_events: int = 40_000
    """Events of one run's history from which on nothing new is started until it continues as a new run."""
    hold_starts_bytes: int = 40_000_000

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
        _check(self, positive=_COORDINATOR_POSITIVE)

    @classmethod
    def load(cls, path: str | Path | None = None, *, overrides: dict[str, Any] | None = None) -> Self:
        """Defaults < JSON file < environment (`KAFKA_BOOTSTRAP_SERVERS`, `WORKER_TYPES`) < `overrides`.

        A missing file is no error; an unknown key is (TypeError, as documented).
        """
        return cls(**_known(cls, {**_read(path), **_environment(), **(overrides or {})}))


@dataclass
class WorkerConfig(_Topics):
    """Settings of a native worker."""

    roles: list[str] = field(default_factory=lambda: ["echo"])
    worker_id: str | None = None
    """Empty: `w-` and eight hex digits, new for each process."""
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
    """Task queue of the engine; this worker polls `<queue>.<role>`."""
    max_concurrent: int = 1
    """Attempts of one role that this process runs at once."""

    lease_ttl_ms = _Ms("lease_ttl_sec")
    hb_interval_ms = _Ms("hb_interval_sec")
    announce_interval_ms = _Ms("announce_interval_sec")

    def __post_init__(self) -> None:
        _check(self, positive=_WORKER_POSITIVE)

    @classmethod
    def load(
        cls, path: str | Path = "configs/worker.default.json", overrides: dict[str, Any] | None = None
    ) -> Self:
        """Defaults < JSON file (relative to the working directory; may be missing) < `overrides`."""
        return cls(**_known(cls, {**_read(path), **(overrides or {})}))


_COORDINATOR_POSITIVE = ("lease_ttl_sec", "window", "max_nodes", "sweep_sec", "function_timeout_sec")
_WORKER_POSITIVE = ("lease_ttl_sec", "hb_interval_sec", "max_concurrent", "pull_poll_ms_default")


def _check(config: Any, positive: tuple[str, ...]) -> None:
    for name in positive:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(f"{type(config).__name__}.{name} is {value!r}; it must be a number above 0")
    if not config.queue or not isinstance(config.queue, str):
        raise ConfigError(
            f"{type(config).__name__}.queue is {config.queue!r}; it must be a task queue's name"
        )


def _known(cls: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    known = {f.name for f in fields(cls)}
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{cls.__name__} has no setting {key!r}{hint}")
    return given


def _read(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(settings).__name__}")
    return settings


def _environment() -> dict[str, Any]:
    found: dict[str, Any] = {}
    if servers := os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        found["kafka_bootstrap"] = servers
    if roles := os.environ.get("WORKER_TYPES"):
        found["worker_types"] = [role.strip() for role in roles.split(",") if role.strip()]
    return found
