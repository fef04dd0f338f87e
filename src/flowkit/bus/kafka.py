"""Import path of KafkaBus, which was removed."""

from __future__ import annotations

from typing import Any

from flowkit.errors import FlowKitError


class KafkaBus:
    """Removed. In earlier releases, it carried the coordinator's messages. Creating one raises FlowKitError."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise FlowKitError(
            "the Kafka bus is gone: engine and workers of this system talk through Temporal. "
            "Leave KafkaBus out; messages for external workers are in flowkit.protocol.messages"
        )
