"""What Kafka knows about a consumer group: its committed offsets and its members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_NO_OFFSET = -1


async def committed_offsets(
    admin: Any, group: str, topic: str, partitions: Iterable[int]
) -> dict[int, int | None]:
    """Return the committed offset of each partition; None where the group has none.

    Raises an aiokafka error, which may be transient.
    """
    from aiokafka import TopicPartition
    from aiokafka.errors import GroupLoadInProgressError

    wanted = [TopicPartition(topic, number) for number in partitions]
    if not wanted:
        return {}
    found = await admin.list_consumer_group_offsets(group, partitions=wanted)
    # aiokafka ignores errors that concern the whole group; Kafka then returns no partitions. Absent partitions must
    # not look like partitions without an offset.
    if any(each not in found for each in wanted):
        raise GroupLoadInProgressError(f"the offsets of the group {group} are not available")
    return {
        each.partition: None if found[each].offset == _NO_OFFSET else found[each].offset for each in wanted
    }


async def group_members(admin: Any, group: str) -> dict[str, frozenset[tuple[str, int]]]:
    """Return the (topic, partition) pairs of each member. Raises an aiokafka error, which may be transient.

    While a group rebalances, its members have no partitions.
    """
    from aiokafka import errors

    (response,) = await admin.describe_consumer_groups([group])
    ((code, _, _, _, _, members, *_),) = response.groups
    if (error := errors.for_code(code)) not in (errors.NoError, errors.GroupIdNotFound):
        raise error(group)
    return {member[0]: _assignment(member[4]) for member in members}


def _assignment(encoded: bytes) -> frozenset[tuple[str, int]]:
    """Decode the assignment of a member; a member that the group has not assigned anything yet has no bytes."""
    from aiokafka.coordinator.protocol import ConsumerProtocol

    if not encoded:
        return frozenset()
    decoded = ConsumerProtocol.ASSIGNMENT.decode(encoded)
    return frozenset((each.topic, each.partition) for each in decoded.partitions())
