"""Import path of OutboxDispatcher, which was removed."""

from __future__ import annotations

from typing import Any

from flowkit.errors import FlowKitError


class OutboxDispatcher:
    """Removed. In earlier releases it sent the coordinator's stored messages. Creating one raises FlowKitError."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise FlowKitError(
            "OutboxDispatcher was removed: Temporal workflows now dispatch attempts durably. "
            "Omit it; you do not need a replacement"
        )
