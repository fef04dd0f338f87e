"""Log records of operations on task variables, with paths and counts, and the growth of `updated_at`."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import AT, TASK, opened, stored
from tests.contract.variables import LOGGER, SECRET, hold, records, write

from flowkit.coordinator.adapters import CoordinatorAdapters
from flowkit.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.adapters.tasks.store import TaskStore

    Call = Callable[[CoordinatorAdapters], Awaitable[dict[str, Any]]]


class StoppedClock:
    """A clock with a fixed time."""

    def now_dt(self) -> datetime:
        """Return the time of all records."""
        return datetime.fromtimestamp(AT, UTC)


@pytest.fixture
async def adapters(db: Any, tasks: TaskStore, caplog: pytest.LogCaptureFixture) -> CoordinatorAdapters:
    """The functions, on a database with one open task."""
    caplog.set_level(logging.INFO, logger=LOGGER)
    await opened(tasks, "a", "b")
    return CoordinatorAdapters(db=db, clock=StoppedClock())


def full(*paths: str) -> list[str]:
    """Return the full paths of variables."""
    return [f"coordinator.vars.{path}" for path in paths]


# --- records ----------------------------------------------------------------------------------------------------


async def test_set_logs_its_sorted_full_paths(
    adapters: CoordinatorAdapters, caplog: pytest.LogCaptureFixture
) -> None:
    await adapters.vars_set(TASK, kv={"z": 1, "b": {"y": 2, "c": SECRET}, "b.d": "A" * 24})
    expected = {"event": "coord.vars.set", "task_id": TASK, "keys": full("b.c", "b.d", "b.y", "z"), "n": 4}
    assert records(caplog) == [{**expected, "sensitive_hits": 2}]


async def test_merge_logs_the_same_if_variables_exist(
    db: Any, adapters: CoordinatorAdapters, caplog: pytest.LogCaptureFixture
) -> None:
    await hold(db, {"x": 1})
    await adapters.vars_merge(TASK, z="gold", b={"c": SECRET})
    expected = {"event": "coord.vars.merge", "task_id": TASK, "keys": full("b.c", "z"), "n": 2}
    assert records(caplog) == [{**expected, "sensitive_hits": 1}]


@pytest.mark.parametrize(
    ("before", "given", "event"),
    [
        (None, {"a": 1, "b": 2}, "set"),
        ({}, {"a": 1, "b": 2}, "set"),
        (None, {"a": {"b": 1, "c": 2}}, "set"),
        (None, {"a": 1}, "merge"),
        ({}, {"a": {"b": 1}}, "merge"),
        ({"x": None}, {"a": 1, "b": 2}, "merge"),
        ({"x": {}}, {"a": 1, "b": 2}, "merge"),
    ],
)
async def test_first_merge_of_several_paths_is_logged_as_a_set(
    db: Any,
    adapters: CoordinatorAdapters,
    caplog: pytest.LogCaptureFixture,
    before: Any,
    given: dict[str, Any],
    event: str,
) -> None:
    if before is not None:
        await hold(db, before)
    await adapters.vars_merge(TASK, data=given)
    await adapters.vars_merge(TASK, data=given)
    assert [record["event"] for record in records(caplog)] == [f"coord.vars.{event}", "coord.vars.merge"]


@pytest.mark.parametrize("by", [1, -2, 0.5, True])
async def test_incr_logs_its_path_and_amount(
    adapters: CoordinatorAdapters, caplog: pytest.LogCaptureFixture, by: float
) -> None:
    await adapters.vars_incr(TASK, key="n.m", by=by)
    [key] = full("n.m")
    expected = {"event": "coord.vars.incr", "task_id": TASK, "keys": [key], "n": 1, "key": key, "by": by}
    assert records(caplog) == [expected]


async def test_unset_logs_the_requested_paths_and_then_the_pruned_ones(
    db: Any, adapters: CoordinatorAdapters, caplog: pytest.LogCaptureFixture
) -> None:
    await hold(db, {"b": {"c": SECRET}, "a": {"deep": {"er": {}}}, "k": 1})
    await adapters.vars_unset(TASK, "z", keys=["b.c"])
    assert records(caplog) == [
        {"event": "coord.vars.unset", "task_id": TASK, "keys": full("b.c", "z"), "n": 2},
        {"event": "coord.vars.unset.prune", "task_id": TASK, "keys": full("a", "b"), "n": 2},
    ]


async def test_unset_without_pruning_logs_no_pruning(
    db: Any, adapters: CoordinatorAdapters, caplog: pytest.LogCaptureFixture
) -> None:
    await hold(db, {"a": {"b": 1, "c": 2}})
    await adapters.vars_unset(TASK, "a.b")
    assert [record["event"] for record in records(caplog)] == ["coord.vars.unset"]


async def test_log_records_contain_no_values(
    db: Any, adapters: CoordinatorAdapters, caplog: pytest.LogCaptureFixture
) -> None:
    await hold(db, {"x": SECRET})
    await adapters.vars_set(TASK, a=SECRET, b=[SECRET], c={"d": SECRET})
    await adapters.vars_set(TASK, kv={"e.f": {"g": SECRET}})
    await adapters.vars_merge(TASK, data={"a": f"{SECRET}, another"})
    await adapters.vars_unset(TASK, "x", "a")
    assert len(records(caplog)) == 4


async def test_operations_without_a_write_log_nothing(
    adapters: CoordinatorAdapters, caplog: pytest.LogCaptureFixture
) -> None:
    await adapters.vars_set(TASK, kv={})
    await adapters.vars_merge(TASK, a={})
    await adapters.vars_unset(TASK)
    await adapters.noop(TASK, secret=SECRET)
    calls: list[Awaitable[object]] = [
        adapters.vars_set(TASK, kv={"$a": SECRET}),
        adapters.vars_set(TASK, a=SECRET, block_sensitive=True),
        adapters.vars_merge("stranger", a=1),
        adapters.vars_incr(TASK, key=""),
        adapters.vars_unset(TASK, ""),
    ]
    for call in calls:
        with pytest.raises(AdapterError):
            await call
    assert records(caplog) == []


# --- the document's date ----------------------------------------------------------------------------------------

CHAIN: dict[str, Call] = {
    "set": lambda a: a.vars_set(TASK, kv={"a.b": 1}),
    "merge": lambda a: a.vars_merge(TASK, a={"c": 2}),
    "merge several": lambda a: a.vars_merge(TASK, x=1, y=2),
    "incr": lambda a: a.vars_incr(TASK, key="a.b"),
    "unset": lambda a: a.vars_unset(TASK, "x"),
    "unset and prune": lambda a: a.vars_unset(TASK, "a.b", "a.c"),
    "incr for a node": lambda a: a.for_node(write()).vars_incr(TASK, key="n"),
    "unset for a node": lambda a: a.for_node(write(node="b", index=1)).vars_unset(TASK, "n"),
}


async def moments(db: Any, adapters: CoordinatorAdapters, *calls: Call) -> list[datetime]:
    """Return `updated_at` after each call."""
    found = []
    for call in calls:
        await call(adapters)
        found.append((await stored(db))["updated_at"])
    return found


def all_grow(found: list[datetime]) -> bool:
    """Return whether each date is later than the one before."""
    return sorted(set(found)) == found


async def test_updated_at_increases_with_every_write_even_if_the_clock_stops(
    db: Any, adapters: CoordinatorAdapters
) -> None:
    before = (await stored(db))["updated_at"]
    found = await moments(db, adapters, *CHAIN.values(), *list(CHAIN.values())[:6])
    assert all_grow(found)
    assert found[0] >= before


async def test_updated_at_comes_from_the_clock(db: Any, adapters: CoordinatorAdapters) -> None:
    [found] = await moments(db, adapters, CHAIN["set"])
    assert found.replace(tzinfo=UTC).timestamp() == AT


async def test_updated_at_also_increases_with_an_aggregation(db: Any, adapters: CoordinatorAdapters) -> None:
    def aggregate(a: CoordinatorAdapters) -> Awaitable[dict[str, Any]]:
        return a.metrics_aggregate(TASK, "a")

    assert all_grow(await moments(db, adapters, CHAIN["set"], CHAIN["incr"], aggregate, aggregate))
