"""Group commit: writes that arrive during a write go into the next call, and each writer gets its own outcome."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError
from tests.unit.event_loop import let_other_tasks_run

from flowkit.adapters.group_commit import GroupCommit

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Collector:
    """Records each write, and blocks it until the test releases it."""

    def __init__(self, interval_sec: float) -> None:
        self.alone: list[str] = []
        self.groups: list[list[str]] = []
        self.gate = asyncio.Event()
        self.refused: dict[str, Exception] = {}
        """Writes that fail when written alone."""
        self.left: set[str] = set()
        """Writes that a group does not complete."""
        self.group_error: Exception | None = None
        """The error of the next group."""
        self.commit = GroupCommit[str](
            "writes", alone=self._alone, together=self._together, interval_sec=interval_sec
        )

    async def _alone(self, item: str) -> None:
        await self.gate.wait()
        self.alone.append(item)
        if item in self.refused:
            raise self.refused[item]

    async def _together(self, items: Sequence[str]) -> Collection[int]:
        await self.gate.wait()
        self.groups.append([*items])
        group_error, self.group_error = self.group_error, None
        if group_error is not None:
            raise group_error
        return [place for place, item in enumerate(items) if item in self.left]

    async def begin(self, *items: str) -> dict[str, asyncio.Task[None]]:
        """Start writers in this order, and return when all of them wait."""
        writers = {item: asyncio.create_task(self.commit.write(item)) for item in items}
        await let_other_tasks_run()
        return writers

    async def ends(self, writers: dict[str, asyncio.Task[None]]) -> dict[str, BaseException | None]:
        """Release all writes, and return how each writer ended."""
        self.gate.set()
        ends = await asyncio.gather(*writers.values(), return_exceptions=True)
        return dict(zip(writers, ends, strict=True))


@pytest.fixture(params=[0.0, 0.001], ids=["at once", "with an interval"])
async def collector(request: pytest.FixtureRequest) -> Collector:
    """A group commit for small documents, and one for large ones."""
    return Collector(request.param)


async def test_single_writer_writes_alone(collector: Collector) -> None:
    collector.gate.set()
    for item in "abc":
        await collector.commit.write(item)
    assert (collector.alone, collector.groups) == (["a", "b", "c"], [])


async def test_writes_that_arrive_during_a_write_are_grouped_in_order(collector: Collector) -> None:
    writers = await collector.begin("a", "b", "c", "d")
    assert await collector.ends(writers) == dict.fromkeys("abcd")
    assert (collector.alone, collector.groups) == (["a"], [["b", "c", "d"]])


async def test_single_writer_writes_alone_after_a_group() -> None:
    collector = Collector(0.0)
    await collector.ends(await collector.begin("a", "b", "c"))
    await let_other_tasks_run()
    await collector.commit.write("d")
    assert collector.alone == ["a", "d"]


async def test_single_writer_waits_after_a_group_if_there_is_an_interval_but_the_next_one_does_not() -> None:
    collector = Collector(0.001)
    await collector.ends(await collector.begin("a", "b", "c"))
    for item in "def":
        await collector.commit.write(item)
    assert collector.alone == ["a", "e", "f"]
    assert collector.groups == [["b", "c"], ["d"]]


async def test_writer_returns_only_after_its_own_write(collector: Collector) -> None:
    writers = await collector.begin("a", "b", "c")
    assert not any(writer.done() for writer in writers.values())
    await collector.ends(writers)


async def test_more_than_a_hundred_writes_use_several_groups(collector: Collector) -> None:
    names = [f"w{number}" for number in range(251)]
    await collector.ends(await collector.begin(*names))
    assert [len(group) for group in collector.groups] == [100, 100, 50]
    assert [*collector.alone, *(item for group in collector.groups for item in group)] == names


async def test_write_omitted_by_a_group_is_repeated_alone_and_fails_alone(collector: Collector) -> None:
    refusal = OperationFailure("too large")
    collector.left, collector.refused = {"b", "d"}, {"d": refusal}
    ends = await collector.ends(await collector.begin("a", "b", "c", "d"))
    assert ends == {"a": None, "b": None, "c": None, "d": refusal}
    assert collector.alone == ["a", "b", "d"]


async def test_failure_of_the_first_writer_does_not_affect_the_others(collector: Collector) -> None:
    refusal = OperationFailure("no")
    collector.refused = {"a": refusal}
    ends = await collector.ends(await collector.begin("a", "b", "c"))
    assert ends == {"a": refusal, "b": None, "c": None}


async def test_unavailable_database_fails_the_whole_group_and_the_next_group_is_tried(
    collector: Collector,
) -> None:
    away = collector.group_error = AutoReconnect("gone")
    ends = await collector.ends(await collector.begin("a", "b", "c"))
    assert ends == {"a": None, "b": away, "c": away}
    assert collector.alone == ["a"]
    assert await collector.ends(await collector.begin("d", "e", "f")) == dict.fromkeys("def")


@pytest.mark.parametrize(
    "group_error", [OperationFailure("refused"), OverflowError("int too large"), KeyError("x")]
)
async def test_other_group_errors_are_followed_by_single_writes(
    collector: Collector, group_error: Exception
) -> None:
    failing = PyMongoError("mine")
    collector.group_error, collector.refused = group_error, {"c": failing}
    ends = await collector.ends(await collector.begin("a", "b", "c", "d"))
    assert ends == {"a": None, "b": None, "c": failing, "d": None}
    assert collector.alone == ["a", "b", "c", "d"]


async def test_writer_cancelled_while_it_waits_is_not_written(collector: Collector) -> None:
    writers = await collector.begin("a", "b", "c")
    writers["b"].cancel()
    ends = await collector.ends(writers)
    assert isinstance(ends["b"], asyncio.CancelledError)
    assert collector.groups == [["c"]]


async def test_writer_cancelled_during_its_write_does_not_delay_others(collector: Collector) -> None:
    writers = await collector.begin("a", "b", "c")
    writers["a"].cancel()
    ends = await collector.ends(writers)
    assert isinstance(ends["a"], asyncio.CancelledError)
    assert (ends["b"], ends["c"]) == (None, None)
    assert collector.groups == [["b", "c"]]


async def test_next_write_starts_if_all_writers_of_a_group_are_cancelled(collector: Collector) -> None:
    writers = await collector.begin("a", "b", "c")
    for item in "bc":
        writers[item].cancel()
    await collector.ends(writers)
    assert await collector.ends(await collector.begin("d")) == {"d": None}
    assert sorted([*collector.alone, *(item for group in collector.groups for item in group)]) == ["a", "d"]
