"""What a worker keeps across its restarts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowkit.testing.external.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.testing.external.handlers import Handler
    from flowkit.testing.external.misbehavior import Misbehavior
    from flowkit.testing.external.runs import Run
    from flowkit.testing.external.settings import Clock, ExternalSettings


@dataclass(kw_only=True)
class Parts:
    """Identity, configuration and records of a worker."""

    worker_id: str
    roles: list[str]
    handlers: Mapping[str, Handler]
    db: Any
    bootstrap: str
    settings: ExternalSettings
    misbehavior: Misbehavior
    clock: Clock
    producer_options: Mapping[str, Any] = field(default_factory=dict)
    consumer_options: Mapping[str, Any] = field(default_factory=dict)
    journal: Journal = field(default_factory=Journal)
    runs: list[Run] = field(default_factory=list)
