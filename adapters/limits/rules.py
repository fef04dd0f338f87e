"""Decide which roles may get another slot. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.config import CoordinatorConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How many attempts may be in flight over all tasks of a queue."""

    total: int | None = None
    """Limit for all roles together; None means no limit."""
    by_role: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: CoordinatorConfig) -> Self:
        """Return the limits that the configuration contains at this moment."""
        return cls(total=config.max_global_running, by_role=dict(config.max_type_concurrency))

    @property
    def configured(self) -> bool:
        """Whether there is any limit."""
        return self.total is not None or bool(self.by_role)

    def concern(self, role: str) -> bool:
        """Return whether a limit applies to attempts of `role`."""
        return self.total is not None or role in self.by_role


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """How many slots are in use."""

    total: int = 0
    by_role: Mapping[str, int] = field(default_factory=dict)
    turn: int = 0
    """The turn of the latest request that got its slot after a wait."""

    def with_one(self, role: str) -> Usage:
        """Return the usage with one more slot of `role`."""
        return Usage(
            total=self.total + 1,
            by_role={**self.by_role, role: self.by_role.get(role, 0) + 1},
            turn=self.turn,
        )


def is_full(limits: Limits, usage: Usage) -> bool:
    """Return whether no role can get a slot."""
    return limits.total is not None and usage.total >= limits.total


def full_roles(limits: Limits, usage: Usage) -> frozenset[str]:
    """Return the roles that use all of their slots."""
    return frozenset(role for role, limit in limits.by_role.items() if usage.by_role.get(role, 0) >= limit)


def has_room(limits: Limits, usage: Usage, role: str) -> bool:
    """Return whether `role` can get a slot."""
    return not is_full(limits, usage) and role not in full_roles(limits, usage)


def wait_reason(limits: Limits, usage: Usage, role: str, *, served: bool) -> str:
    """Return why a request of `role` waits, such as `12 of 12`."""
    if role in full_roles(limits, usage):
        return f"{usage.by_role[role]} of {limits.by_role[role]}"
    if is_full(limits, usage):
        return f"{usage.total} of {limits.total} over all roles"
    return "other tasks are first" if served else "no worker serves the role"
