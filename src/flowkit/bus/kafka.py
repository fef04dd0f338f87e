"""The documented home of KafkaBus, which engines do not use any more."""

from __future__ import annotations

from typing import Any

from flowkit.errors import FlowKitError


class KafkaBus:
    """Carried the messages of the earlier coordinator. It cannot be made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise FlowKitError(
            "the Kafka bus is gone: engine and workers of this system talk through Temporal. "
            "Leave KafkaBus out; messages for external workers are in flowkit.protocol.messages"
        )
