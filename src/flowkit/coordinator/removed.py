"""Attributes of Coordinator that were removed, with errors that say what replaces them."""

from __future__ import annotations

from typing import Any

from flowkit.errors import Removed


class RemovedAttributes:
    """Raises `Removed` for attributes that earlier releases had."""

    @property
    def bus(self) -> Any:
        """Removed. Raise `Removed`, an AttributeError, so that `hasattr` returns False."""
        raise Removed(
            "Coordinator.bus was removed: engines and workers communicate through Temporal. Omit it; to exchange Kafka "
            "messages with external workers, use the models in flowkit.protocol.messages and a Kafka client"
        )

    @property
    def outbox(self) -> Any:
        """Removed. Raise `Removed`, an AttributeError, so that `hasattr` returns False."""
        raise Removed(
            "Coordinator.outbox was removed: Temporal workflows now dispatch attempts durably. Omit it; you do not need "
            "a replacement"
        )
