"""Chooses the partition for a command: one whose worker is likely to start it at once. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def choose(
    partitions: Collection[int],
    *,
    owners: Mapping[int, str],
    outstanding: Mapping[int, int],
    busy: Mapping[str, int],
    last: int,
) -> int:
    """Return the best partition for the next command; raise ValueError if there are no partitions.

    A worker reads none of its partitions while it runs a command, so a command behind another one waits.
    Preferred in this order: partitions whose owner is idle and has no outstanding command; partitions without
    a known owner and without outstanding commands; partitions whose owner has the fewest commands. Among
    equals, the partitions take turns, beginning after `last`.

    `owners` maps a partition to the member that reads it, as far as known. `outstanding` counts the commands
    of a partition that no worker has accepted yet, and `busy` the commands that a member runs.
    """
    if not partitions:
        raise ValueError("a command topic has at least one partition")
    waiting = _waiting_by_owner(owners, outstanding)

    def load(partition: int) -> tuple[int, int, int]:
        return _load(partition, owners.get(partition), outstanding, busy, waiting)

    least = min(load(partition) for partition in partitions)
    return _next_after(last, [partition for partition in partitions if load(partition) == least])


def _waiting_by_owner(owners: Mapping[int, str], outstanding: Mapping[int, int]) -> dict[str, int]:
    waiting: dict[str, int] = {}
    for partition, owner in owners.items():
        waiting[owner] = waiting.get(owner, 0) + outstanding.get(partition, 0)
    return waiting


def _load(
    partition: int,
    owner: str | None,
    outstanding: Mapping[int, int],
    busy: Mapping[str, int],
    waiting: Mapping[str, int],
) -> tuple[int, int, int]:
    """Return the rank of a partition, and how many commands a new one would follow: at its owner, in the partition."""
    queued = outstanding.get(partition, 0)
    if owner is None:
        return (1 if queued == 0 else 2, queued, queued)
    ahead = busy.get(owner, 0) + waiting[owner]
    return (0 if ahead == 0 else 2, ahead, queued)


def _next_after(last: int, candidates: Collection[int]) -> int:
    """Return the smallest candidate above `last`, or the smallest of all."""
    return min(candidates, key=lambda partition: (partition <= last, partition))
