"""Names kept for compatibility: a native worker stores no local state.

Temporal tracks running attempts. If a worker crashes, another worker restarts its attempts, and pulling nodes resume
from their stored batches. External Kafka workers still store their state in the collection `worker_state`; read it
with `ActiveRun(**document["active_run"])`.
"""

from __future__ import annotations

from typing import Any

from flowkit.errors import FlowKitError
from flowkit.protocol.messages import ActiveRun

__all__ = ["ActiveRun", "LocalStateManager"]


class LocalStateManager:
    """Removed. In earlier releases, it stored a worker's active run. Creating one raises FlowKitError."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise FlowKitError(
            "LocalStateManager was removed: Temporal tracks running attempts, and another worker restarts those of a "
            "crashed worker. Store your own progress in ctx.artifacts; omit this object"
        )
