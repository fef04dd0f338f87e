"""All variables of a task together stay within their limit, to the byte, whichever operations create them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.builders import TASK, new_task, stored
from tests.contract.recording_database import RecordingDatabase
from tests.contract.test_vars_model import NAMES, OPERATIONS, SEQUENCES, Model, Operation, Refused, touch
from tests.contract.variables import SECRET, held, hold, refused, unchanged, write
from tests.unit.property_examples import examples

from flowkit.adapters.vars import rules
from flowkit.adapters.vars.changes import size
from flowkit.coordinator.adapters import AdapterError, CoordinatorAdapters
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LIMIT = 1_000_000


async def nothing() -> None:
    """Do nothing before a write."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Set a small limit."""
    monkeypatch.setattr(rules, "VARS_BYTES", 2_000)
    return 2_000


async def measured_bytes(db: Any, task_id: str = TASK) -> tuple[int, int]:
    """Return the size of the variables, and its upper bound in the document."""
    coordinator = (await stored(db, task_id))["coordinator"]
    return size(coordinator.get("vars", {})), coordinator.get("vars_bytes", 0) + size({})


async def until_refused(call: Callable[[int], Awaitable[Any]]) -> int:
    """Call with 0, 1, 2… until a call is rejected, and return the number of earlier calls."""
    for n in range(10_000):
        try:
            await call(n)
        except AdapterError as error:
            assert "more than 2,000: unset what is not needed" in str(error)
            return n
    raise AssertionError("never refused")


async def test_task_can_hold_a_million_bytes_of_variables(db: Any, adapters: CoordinatorAdapters) -> None:
    kept = {f"k{n:02}": "x" * 65_000 for n in range(15)}
    await adapters.vars_set(TASK, kv=kept)
    left = LIMIT - 5 - sum(len(key) + 7 + len(value) for key, value in kept.items())
    async with unchanged(db):
        text = await refused(adapters.vars_merge(TASK, last="x" * (left - 4 - 7 + 1)))
        assert "would have 1,000,001 bytes, more than 1,000,000" in text
    await adapters.vars_merge(TASK, last="x" * (left - 4 - 7))
    assert len(await held(db)) == 16
    assert await measured_bytes(db) == (LIMIT, LIMIT)


GROWING: dict[str, Callable[[CoordinatorAdapters, int], Awaitable[Any]]] = {
    "set": lambda a, n: a.vars_set(TASK, kv={f"k{n}": "x" * (n % 50)}),
    "set, nested": lambda a, n: a.vars_set(TASK, a={f"k{n}": {"b": [n]}}),
    "set, long path": lambda a, n: a.vars_set(TASK, kv={f"{'p' * 100}.{n}.{'.'.join('abcdef')}": None}),
    "merge": lambda a, n: a.vars_merge(TASK, a={str(n): {"b": n}}, b={str(n): True}),
    "incr": lambda a, n: a.vars_incr(TASK, key=f"counts.of.k{n}"),
    "incr, long path": lambda a, n: a.vars_incr(TASK, key=f"{'p' * 100}.{n}.{'.'.join('abcdef')}", by=0.5),
}


@pytest.mark.parametrize("call", GROWING.values(), ids=list(GROWING))
async def test_many_small_writes_fill_but_never_exceed_the_limit(
    db: Any,
    adapters: CoordinatorAdapters,
    small: int,
    call: Callable[[CoordinatorAdapters, int], Awaitable[Any]],
) -> None:
    done = await until_refused(lambda n: call(adapters, n))
    total, bound = await measured_bytes(db)
    assert total <= bound <= small
    assert total > small - 300
    async with unchanged(db):
        await refused(call(adapters, done))


async def test_full_task_accepts_writes_that_do_not_make_it_larger(
    db: Any, adapters: CoordinatorAdapters, small: int
) -> None:
    await hold(db, {"n": 1, "text": "x" * (small - 5 - 7 - 11)})
    assert await measured_bytes(db) == (small, small)
    async with unchanged(db):
        await refused(adapters.vars_set(TASK, a=None))
        await refused(adapters.vars_incr(TASK, key="m"))
        await refused(adapters.vars_incr(TASK, key="n", by=2**31))
    for _ in range(3):
        await adapters.vars_incr(TASK, key="n")
        await adapters.vars_set(TASK, text="y" * (small - 5 - 7 - 11))
    assert await measured_bytes(db) == (small, small)
    await adapters.vars_unset(TASK, "text")
    await adapters.vars_set(TASK, a=None)
    assert await held(db) == {"n": 4, "a": None}


async def test_variables_beyond_the_limit_can_shrink_but_not_grow(
    db: Any, adapters: CoordinatorAdapters, small: int
) -> None:
    await hold(db, {f"k{n}": "x" * 500 for n in range(5)})
    await adapters.vars_set(TASK, k0="y" * 100)
    await adapters.vars_set(TASK, k1="y" * 500)
    async with unchanged(db):
        await refused(adapters.vars_set(TASK, k0="y" * 101))
        await refused(adapters.vars_incr(TASK, key="count"))
    await adapters.vars_unset(TASK, "k1", "k2")
    await adapters.vars_incr(TASK, key="count")


async def test_variables_of_an_earlier_release_are_measured_at_the_first_write(
    db: Any, adapters: CoordinatorAdapters, small: int
) -> None:
    await hold(db, {"text": "x" * (small - 5 - 11)}, bound=False)
    async with unchanged(db):
        await refused(adapters.vars_set(TASK, a=None))
    await adapters.vars_set(TASK, text="x" * 100)
    total, bound = await measured_bytes(db)
    assert total == bound == 5 + 11 + 100
    await asyncio.gather(*(adapters.vars_set(TASK, kv={f"k{n}": n}) for n in range(20)))
    assert len(await held(db)) == 21


async def test_repeated_writes_of_a_value_rarely_measure_the_variables(
    db: Any, adapters: CoordinatorAdapters, small: int
) -> None:
    recording = RecordingDatabase(db)
    own = CoordinatorAdapters(db=recording)
    for n in range(200):
        await own.vars_set(TASK, status="x" * (n % 40))
        await own.vars_incr(TASK, key="n")
    assert (await held(db))["n"] == 200
    corrected = (await stored(db))["coordinator"]["vars_measured"]
    assert 0 < corrected < 10
    assert len(recording.updates) == 400 + corrected


async def test_operation_too_large_for_any_task_is_rejected_before_it_is_sent(
    db: Any, adapters: CoordinatorAdapters
) -> None:
    recording = RecordingDatabase(db)
    own = CoordinatorAdapters(db=recording)
    async with unchanged(db):
        text = await refused(own.vars_set(TASK, kv={f"k{n}": SECRET * 2_900 for n in range(200)}))
    assert "more than 1,000,000" in text
    assert recording.updates == []


# --- concurrent operations --------------------------------------------------------------------------------------


async def test_as_many_concurrent_writers_succeed_as_fit(
    db: Any, adapters: CoordinatorAdapters, small: int
) -> None:
    others = [CoordinatorAdapters(db=db) for _ in range(4)]
    each = 1 + 4 + 4 + 52  # a type, a name, a length, a text with their NULs
    await adapters.vars_set(TASK, text="x" * 1_500)
    calls = (others[n % 4].vars_set(TASK, kv={f"k{n:02}": "x" * 51}) for n in range(60))
    found = await asyncio.gather(*calls, return_exceptions=True)
    fit = (small - 5 - 11 - 1_500) // each
    assert [type(response) for response in found].count(AdapterError) == 60 - fit
    assert (await measured_bytes(db))[0] <= small
    assert len(await held(db)) == 1 + fit


async def test_second_of_two_concurrent_corrections_measures_again(server_db: Any, small: int) -> None:
    await server_db.tasks.insert_one(new_task("a"))
    await hold(server_db, {"keep": "x" * 900})
    await server_db.tasks.update_one({"id": TASK}, {"$set": {"coordinator.vars_bytes": small}})
    other = CoordinatorAdapters(db=server_db)
    db = RecordingDatabase(server_db)

    async def write_concurrently() -> None:
        await other.vars_set(TASK, theirs="x" * 800)

    db.before["tasks"] += [nothing, write_concurrently]
    assert "would have" in await refused(CoordinatorAdapters(db=db).vars_set(TASK, mine="x" * 800))
    assert set(await held(server_db)) == {"keep", "theirs"}
    assert (await measured_bytes(server_db))[0] <= small


async def test_node_whose_change_does_not_fit_fails_without_an_effect(
    db: Any, adapters: CoordinatorAdapters, small: int
) -> None:
    await hold(db, {"text": "x" * (small - 5 - 11)})
    await refused(adapters.for_node(write()).vars_incr(TASK, key="n"))
    assert set(await held(db)) == {"text"}
    await adapters.vars_unset(TASK, "text")
    await adapters.for_node(write(2)).vars_incr(TASK, key="n")
    await adapters.for_node(write(3)).vars_incr(TASK, key="n")
    assert await held(db) == {"n": 1}


TIGHT = 80


@settings(max_examples=examples(60))
@given(sequence=SEQUENCES)
async def test_write_is_rejected_exactly_if_all_variables_would_be_too_large(
    sequence: list[Operation],
) -> None:
    db, model, task_id = memory_database(), Model(), next(NAMES)
    await db.tasks.insert_one(new_task("a", task_id=task_id))
    with mock.patch.object(rules, "VARS_BYTES", TIGHT):
        for operation in sequence:
            before = model.tree
            expected = applied(model, operation)
            if size(model.tree) > max(TIGHT, size(before)):
                expected, model.tree = None, before
            if expected is None:
                continue
            found = await touch(CoordinatorAdapters(db=db), operation, task_id)
            assert found == expected, operation
            total, bound = await measured_bytes(db, task_id)
            assert size(model.tree) == total <= bound <= TIGHT


def applied(model: Model, operation: Operation) -> int | None:
    """Return what the operation touches in the model; None if the model rejects it."""
    try:
        return model.apply(operation)
    except Refused:
        return None


@pytest.mark.slow
@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(sequence=st.lists(st.tuples(OPERATIONS, st.lists(OPERATIONS, max_size=3)), min_size=1, max_size=6))
async def test_concurrent_writes_never_exceed_the_limit(
    sequence: list[tuple[Operation, list[Operation]]],
) -> None:
    plain, task_id = memory_database(), next(NAMES)
    await plain.tasks.insert_one(new_task("a", task_id=task_id))
    with mock.patch.object(rules, "VARS_BYTES", TIGHT):
        for operation, concurrent_writers in sequence:
            db = RecordingDatabase(plain)
            db.before["tasks"] += [
                with_concurrent_writes(plain, concurrent_writer, task_id)
                for concurrent_writer in concurrent_writers
            ]
            await touch(CoordinatorAdapters(db=db), operation, task_id)
            total, bound = await measured_bytes(plain, task_id)
            assert total <= bound <= TIGHT


async def test_correction_keeps_the_limit_although_another_write_came_after_its_read() -> None:
    db, task_id = memory_database(), next(NAMES)
    await db.tasks.insert_one(new_task("a", task_id=task_id))
    others, own = CoordinatorAdapters(db=db), RecordingDatabase(db)

    async def write_concurrently() -> None:
        await others.vars_set(task_id, n=None)

    with mock.patch.object(rules, "VARS_BYTES", TIGHT):
        await others.vars_set(task_id, k="x" * (TIGHT - 5 - 8 - 20))
        # It grows by less than its largest growth, so it fits only after the bound has been corrected.
        own.before["tasks"] += [nothing, write_concurrently]
        await touch(CoordinatorAdapters(db=own), Operation("set", {"k": "x" * (TIGHT - 5 - 8)}), task_id)
        total, bound = await measured_bytes(db, task_id)
        assert total <= bound <= TIGHT


def with_concurrent_writes(db: Any, operation: Operation, task_id: str) -> Callable[[], Awaitable[None]]:
    """Return the operation as another process makes it."""

    async def call() -> None:
        await touch(CoordinatorAdapters(db=db), operation, task_id)

    return call
