"""Bridges that share a role send their commands to different workers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.contract.bridges import UNUSED, context_of
from tests.contract.builders import AT
from tests.contract.test_dispatch_renewals import dispatched

from flowkit.adapters.dispatches import DispatchStore
from flowkit.bridge.commands import Placement
from flowkit.bridge.kafka.topics import worker_group

if TYPE_CHECKING:
    from flowkit.adapters.dispatches import Dispatch

ROLE = "crawler"
WORKERS = 4


class Kafka:
    """A topic with one partition for each worker."""

    def cmd(self, role: str) -> str:
        """Return the topic of a role's commands."""
        return role

    async def read_ends(self, _: str) -> dict[int, int]:
        """Return the ends of the partitions."""
        return dict.fromkeys(range(WORKERS), 0)

    async def list_partitions(self, _: str) -> tuple[int, ...]:
        """Return the partitions."""
        return tuple(range(WORKERS))

    async def read_members(self, group: str) -> dict[str, frozenset[tuple[str, int]]]:
        """Return the partition of each worker."""
        assert group == worker_group(ROLE)
        return {f"w-{number}": frozenset({(ROLE, number)}) for number in range(WORKERS)}


def placement(db: Any, bridge_id: str, own: list[Dispatch] | None = None) -> Placement:
    """Return the placement of a bridge that supervises the attempts `own`."""
    context = context_of(db, UNUSED, AT)
    kafka: Any = Kafka()
    context.bridge_id, context.roles, context.topics, context.offsets = bridge_id, (ROLE,), kafka, kafka
    return Placement(context, lambda: own or [])


async def chosen(made: Placement, count: int) -> set[int]:
    """Return the partitions of so many commands."""
    found = {(await made.choose(ROLE))[0] for _ in range(count)}
    await made.stop()
    return found


async def test_bridges_begin_with_different_partitions(db: Any) -> None:
    first = [await chosen(placement(db, f"flowkit-bridge-{number}"), 1) for number in range(20)]
    assert set().union(*first) == set(range(WORKERS))


async def test_commands_go_to_the_workers_that_no_other_bridge_has_chosen(db: Any) -> None:
    store = DispatchStore(db)
    for number in range(2):
        await dispatched(store, f"n{number}", partition=number, owner="another bridge")
    made = placement(db, "flowkit-bridge-1")
    await made.read_others()
    assert await chosen(made, 2) == {2, 3}


async def test_own_command_counts_once_although_it_was_read_before_its_adoption(db: Any) -> None:
    record = await dispatched(DispatchStore(db), "a", partition=0, owner="another bridge")
    made = placement(db, "flowkit-bridge-1", [replace(record, offset=1)])
    await made.read_others()
    await made.choose(ROLE)
    known = made._roles[ROLE]
    assert (known.planned[0], made._count_commands(ROLE, known)[0][0]) == (0, 1)
    await made.stop()
