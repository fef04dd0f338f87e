"""The documented home of OutboxDispatcher, which has nothing left to do."""

from __future__ import annotations

from typing import Any

from flowkit.errors import FlowKitError


class OutboxDispatcher:
    """Sent messages that the earlier coordinator had stored. It cannot be made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise FlowKitError(
            "the outbox is gone: an attempt's dispatch is a durable step of its Temporal workflow and is repeated until "
            "it is done. Leave OutboxDispatcher out; nothing replaces it"
        )
