"""What a bridge reports about itself: its roles, their queues, and the Kafka records that it skipped."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleHealth:
    """One external role of a bridge. Counts are None while Kafka or MongoDB does not return them."""

    role: str
    waits_for: str | None = None
    """Why the bridge does not serve the role yet; None while it serves the role."""
    workers: int | None = None
    """Number of external workers of the role that are connected to Kafka."""
    attempts: int | None = None
    """Number of the role's attempts without an outcome, of all bridges on the database."""
    queued: int | None = None
    """Number of commands that no worker has read yet, by the offsets of the workers' group."""
    status_lag: int | None = None
    """Number of status events that no bridge has processed yet."""

    @property
    def served(self) -> bool:
        """Return whether the bridge serves the role."""
        return self.waits_for is None


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeHealth:
    """The state of one bridge."""

    bridge_id: str
    roles: tuple[RoleHealth, ...] = ()
    attempts: int = 0
    """Number of attempts that this bridge supervises."""
    malformed: dict[str, int] = field(default_factory=dict)
    """Number of Kafka records by topic that this bridge skipped, because they are not messages of the protocol."""
    measured_at: float | None = None
    """When the counts of the roles were last read, in seconds since the Unix epoch."""

    @property
    def served(self) -> bool:
        """Return whether the bridge serves all of its roles."""
        return all(role.served for role in self.roles)
