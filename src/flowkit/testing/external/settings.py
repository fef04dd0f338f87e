"""Settings and the clock of an external worker."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime


class Clock:
    """The time of a worker. Tests can replace it."""

    def now_ms(self) -> int:
        """Return the time in milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def now(self) -> datetime:
        """Return the time in UTC, as worker documents store it."""
        return datetime.fromtimestamp(self.now_ms() / 1000, UTC)

    async def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds."""
        await asyncio.sleep(seconds)


@dataclass(frozen=True, kw_only=True)
class ExternalSettings:
    """Settings of an external worker, with the defaults of the protocol."""

    topic_cmd_fmt: str = "cmd.{type}.v1"
    topic_status_fmt: str = "status.{type}.v1"
    topic_worker_announce: str = "workers.announce.v1"
    topic_query: str = "query.tasks.v1"
    topic_reply: str = "reply.tasks.v1"
    topic_signals: str = "signals.v1"
    hb_interval_sec: float = 20
    lease_ttl_sec: float = 60
    announce_interval_sec: float = 60
    db_cancel_poll_ms: int = 500
    pull_poll_ms_default: int = 300
    pull_empty_backoff_ms_max: int = 4_000
    dedup_cache_size: int = 10_000
    dedup_ttl_ms: int = 3_600_000
    strict_input_adapters: bool = False
    worker_version: str = "2.0.0"

    def topic_cmd(self, role: str) -> str:
        """Return the command topic of a role."""
        return self.topic_cmd_fmt.format(type=role)

    def topic_status(self, role: str) -> str:
        """Return the status topic of a role."""
        return self.topic_status_fmt.format(type=role)

    @property
    def hb_interval_ms(self) -> int:
        """The heartbeat interval in whole milliseconds."""
        return int(self.hb_interval_sec * 1000)

    @property
    def lease_ttl_ms(self) -> int:
        """The lease duration in whole milliseconds."""
        return int(self.lease_ttl_sec * 1000)
