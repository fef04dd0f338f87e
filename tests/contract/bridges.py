"""A bridge without Kafka, whose time the test sets, and replacements of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit import CoordinatorConfig
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.role_leases import RoleKind
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.role_lease import leases_of
from flowkit.bridge.context import BridgeContext, Stores
from flowkit.core.loop_portal import LoopPortal

if TYPE_CHECKING:
    from flowkit.adapters.dispatches import Dispatch

UNUSED: Any = None


class Parts:
    """Replaces the other parts of the bridge, and records which attempts they end."""

    def __init__(self) -> None:
        self.delivered: list[str] = []
        self.stopped: list[str] = []

    def start(self, record: Dispatch) -> None:
        """Deliver an outcome."""
        self.delivered.append(record.key)

    def stop_owner(self, record: Dispatch) -> None:
        """Signal the worker to stop."""
        self.stopped.append(record.key)

    def cancel(self, *_: Any, **__: Any) -> None:
        """Signal a cancel."""

    def discover(self, *_: Any) -> None:
        """Send a query."""

    async def refresh(self, _: list[Dispatch]) -> None:
        """Read where the workers are in the topics."""


class Context(BridgeContext):
    """The context of a bridge whose time the test sets."""

    at: float
    ahead: float = 0.0
    """By how much its clock is ahead of those of other bridges."""

    def now(self) -> float:
        """Return the time of the test."""
        return self.at + self.ahead

    def monotonic(self) -> float:
        """Return the time of the test, whatever the clock of the bridge shows."""
        return self.at


def context_of(db: Any, temporal: Any, at: float) -> Context:
    """Return the context of a bridge without Kafka."""
    unused = dict.fromkeys(("topics", "producer", "offsets"), UNUSED)
    stores = Stores(tasks=TaskStore(db), artifacts=ArtifactStore(db))
    own = Context(
        bridge_id="bridge-1",
        roles=(),
        config=CoordinatorConfig(),
        client=temporal,
        stores=stores,
        portal=LoopPortal(),
        deployment="",
        leases=leases_of(
            *(db, LoopPortal(), RoleKind.EXTERNAL),
            namespace="default",
            queue="flowkit",
            roles=["crawler"],
            name="bridge-1",
        ),
        **unused,
    )
    own.at = at
    return own
