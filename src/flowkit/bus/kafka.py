"""Import path of KafkaBus, which was removed."""

from __future__ import annotations

from typing import Any

from flowkit.errors import FlowKitError


class KafkaBus:
    """Removed. In earlier releases, it carried the coordinator's messages. Creating one raises FlowKitError."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise FlowKitError(
            "KafkaBus was removed: engines and workers communicate through Temporal. "
            "Omit it; the messages for external workers are in flowkit.protocol.messages"
        )
