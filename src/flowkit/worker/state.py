"""What a worker keeps of its run across its own restart: nothing any more.

Temporal knows which attempts run. When a worker dies, its attempts begin anew elsewhere and pulling nodes resume from
what is stored; so there is no state to write down, to read back and to distrust. External workers behind Kafka still
keep theirs, in the collection `worker_state`; `ActiveRun(**document["active_run"])` reads it.
"""

from __future__ import annotations

from typing import Any

from flowkit.errors import FlowKitError
from flowkit.protocol.payloads import ActiveRun

__all__ = ["ActiveRun", "LocalStateManager"]


class LocalStateManager:
    """Kept the active run of a worker of the earlier system. It cannot be made: it would manage what nobody reads."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise FlowKitError(
            "LocalStateManager is gone: Temporal keeps track of running attempts, and an attempt whose worker dies "
            "begins anew elsewhere. Keep progress of your own in ctx.artifacts; leave this object out"
        )
