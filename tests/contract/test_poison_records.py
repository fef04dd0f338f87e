"""Records that a bridge cannot handle end their own attempt or are skipped, and delay no other record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.bridge_side import BridgeSide
from tests.contract.poison import POISON, mixed, unhandled

if TYPE_CHECKING:
    from tests.contract.poison import Poison

OF_STATUS: list[Poison] = [each for each in POISON if each.topic == "status"]


@pytest.fixture
async def side(db: Any) -> BridgeSide:
    """A bridge on the test's database."""
    return await BridgeSide.create(db)


def test_there_are_poison_records_of_every_kind_and_defect() -> None:
    assert len({each.name for each in POISON}) == len(POISON) >= 200


async def test_good_records_behind_poison_are_handled_and_poison_ends_only_its_own_attempt(
    side: BridgeSide,
) -> None:
    """All of them arrive in one poll of each topic."""
    await side.handle(*await mixed(side))
    assert await unhandled(side) == []
    expected = {each.name: each.code for each in OF_STATUS}
    assert await side.codes([*expected]) == expected
    stopped = {signal.node_id: signal.target_worker_id for signal in side.signals}
    ended = {each.name: each.kind for each in OF_STATUS if each.code != "open"}
    assert stopped.keys() - ended.keys() == set()
    assert {ended[name] for name in ended.keys() - stopped.keys()} == {"TASK_DONE"}, "its worker has ended"
    assert {stopped[name] for name, kind in ended.items() if kind == "BATCH_OK"} == {"w1"}
    skipped = [each for each in OF_STATUS if each.code == "open"]
    assert side.bridge.context.malformed.counts[side.topics.status("indexer")] == len(skipped)
