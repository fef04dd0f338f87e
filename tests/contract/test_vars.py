"""Task variables in the document: each operation is one write, which takes effect completely or not at all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import TASK, new_task, stored
from tests.contract.recording_database import RecordingDatabase
from tests.contract.variables import SECRET, held, hold, refused, unchanged

from flowkit.coordinator.adapters import CoordinatorAdapters, default_adapters

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Call = Callable[[CoordinatorAdapters], Awaitable[dict[str, Any]]]


# --- set and merge ----------------------------------------------------------------------------------------------


async def test_set_writes_dotted_and_nested_keys_at_once(db: Any, adapters: CoordinatorAdapters) -> None:
    response = await adapters.vars_set(TASK, kv={"sla": "gold", "a": {"b": 1, "c": {"d": None}}, "x.y": [1]})
    assert response == {"ok": True, "touched": 4}
    assert await held(db) == {"sla": "gold", "a": {"b": 1, "c": {"d": None}}, "x": {"y": [1]}}


async def test_set_keeps_siblings_of_its_leaves(db: Any, adapters: CoordinatorAdapters) -> None:
    await hold(db, {"a": {"b": {"x": 1}, "c": 2}, "d": {"e": 3}})
    response = await adapters.vars_set(TASK, kv={"a": {"b": {"y": 5}}, "d": 4, "f.g": 6})
    assert response == {"ok": True, "touched": 3}
    assert await held(db) == {"a": {"b": {"x": 1, "y": 5}, "c": 2}, "d": 4, "f": {"g": 6}}


@pytest.mark.parametrize("name", ["self", "keys", "operation", "change"])
async def test_variable_can_have_the_name_of_a_flowkit_field(
    db: Any, adapters: CoordinatorAdapters, name: str
) -> None:
    await adapters.vars_set(TASK, **{name: {"a": 1}})
    await adapters.vars_merge(TASK, **{name: {"b": 2}})
    await adapters.noop(TASK, **{name: 3})
    assert await held(db) == {name: {"a": 1, "b": 2}}


async def test_dict_under_a_dotted_key_replaces_the_earlier_value(
    db: Any, adapters: CoordinatorAdapters
) -> None:
    await hold(db, {"a": {"b": {"old": 1}, "c": 2}})
    assert (await adapters.vars_set(TASK, kv={"a.b": {"new": {"x": 1}}}))["touched"] == 1
    assert await held(db) == {"a": {"b": {"new": {"x": 1}}, "c": 2}}


async def test_merge_overwrites_leaves_and_keeps_their_siblings(
    db: Any, adapters: CoordinatorAdapters
) -> None:
    await hold(db, {"a": {"b": {"x": 1, "y": 2}, "c": 3}, "d": [1, 2]})
    response = await adapters.vars_merge(TASK, data={"a": {"b": {"y": 5, "z": 6}}, "d": [3]})
    assert response == {"ok": True, "touched": 3}
    assert await held(db) == {"a": {"b": {"x": 1, "y": 5, "z": 6}, "c": 3}, "d": [3]}


@pytest.mark.parametrize("value", [5, None, "text", [1], False])
async def test_merge_replaces_an_object_with_a_value(
    db: Any, adapters: CoordinatorAdapters, value: object
) -> None:
    await hold(db, {"a": {"b": {"x": 1}}})
    assert (await adapters.vars_merge(TASK, a={"b": value}))["touched"] == 1
    assert await held(db) == {"a": {"b": value}}


NOTHING: dict[str, Call] = {
    "set, no keywords": lambda a: a.vars_set(TASK),
    "set, empty kv": lambda a: a.vars_set(TASK, kv={}),
    "set, no leaf": lambda a: a.vars_set(TASK, kv={"a": {}, "b": {"c": {}}}),
    "set, only a switch": lambda a: a.vars_set(TASK, block_sensitive=True),
    "merge, no keywords": lambda a: a.vars_merge(TASK),
    "merge, empty data": lambda a: a.vars_merge(TASK, data={}),
    "merge, no leaf": lambda a: a.vars_merge(TASK, a={"b": {}}),
    "merge, only a switch": lambda a: a.vars_merge(TASK, data={"block_sensitive": True}),
    "unset, no paths": lambda a: a.vars_unset(TASK),
    "unset, no keys": lambda a: a.vars_unset(TASK, keys=[]),
}


@pytest.mark.parametrize("call", NOTHING.values(), ids=list(NOTHING))
async def test_operation_without_changes_writes_nothing(
    db: Any, adapters: CoordinatorAdapters, call: Call
) -> None:
    async with unchanged(db):
        assert await call(adapters) == {"ok": True, "touched": 0}
    assert "vars" not in (await stored(db))["coordinator"]


async def test_largest_operation_is_written(db: Any, adapters: CoordinatorAdapters) -> None:
    deep = ".".join("abcdefghijklm")
    given = {f"{deep}.k{n}": n for n in range(256)}
    assert (await adapters.vars_set(TASK, kv=given))["touched"] == 256
    variables = await held(db)
    for segment in deep.split("."):
        variables = variables[segment]
    assert variables == {f"k{n}": n for n in range(256)}
    assert (await adapters.vars_unset(TASK, *given))["touched"] == 256
    assert await held(db) == {}


# --- incr -------------------------------------------------------------------------------------------------------


async def test_incr_creates_its_leaf_and_adds_to_it(db: Any, adapters: CoordinatorAdapters) -> None:
    assert await adapters.vars_incr(TASK, key="n.m") == {"ok": True, "key": "n.m", "by": 1}
    for by in (5, -2, 0.5, True):
        assert await adapters.vars_incr(TASK, key="n.m", by=by) == {"ok": True, "key": "n.m", "by": by}
    assert await held(db) == {"n": {"m": 5.5}}


async def test_boolean_counts_as_a_number(db: Any, adapters: CoordinatorAdapters) -> None:
    for by in (True, False, True):
        await adapters.vars_incr(TASK, key="n", by=by)
    found = (await held(db))["n"]
    assert (found, type(found)) == (2, int)


async def test_number_can_grow_beyond_32_bits(db: Any, adapters: CoordinatorAdapters) -> None:
    await hold(db, {"n": 2**31 - 1})
    await adapters.vars_incr(TASK, key="n", by=1)
    assert (await held(db))["n"] == 2**31
    await adapters.vars_incr(TASK, key="n", by=2**63 - 1 - 2**31)
    assert (await held(db))["n"] == 2**63 - 1


async def test_concurrent_increments_sum_exactly(db: Any, adapters: CoordinatorAdapters) -> None:
    others = [CoordinatorAdapters(db=db) for _ in range(4)]
    calls = (others[n % 4].vars_incr(TASK, key=f"n.{n % 2}", by=n) for n in range(100))
    await asyncio.gather(*calls, *(adapters.vars_set(TASK, kv={f"k{n}": n}) for n in range(20)))
    variables = await held(db)
    assert variables["n"] == {"0": sum(range(0, 100, 2)), "1": sum(range(1, 100, 2))}
    assert len(variables) == 21


# --- unset ------------------------------------------------------------------------------------------------------


async def test_unset_counts_requested_paths_even_if_absent(db: Any, adapters: CoordinatorAdapters) -> None:
    await hold(db, {"a": {"b": 1, "c": 2}, "d": 3})
    assert await adapters.vars_unset(TASK, "a.b", "x.y", keys=["d", "nope"]) == {"ok": True, "touched": 4}
    assert await held(db) == {"a": {"c": 2}}
    assert await adapters.vars_unset(TASK, keys={"a.c"}) == {"ok": True, "touched": 1}
    assert await held(db) == {}


async def test_unset_counts_repeated_paths(db: Any, adapters: CoordinatorAdapters) -> None:
    await hold(db, {"a": 1, "b": 2})
    assert await adapters.vars_unset(TASK, "a", "a", "no", keys=["a", "b", "no"]) == {
        "ok": True,
        "touched": 6,
    }
    assert await held(db) == {}


async def test_unset_of_a_task_without_variables_creates_none(db: Any, adapters: CoordinatorAdapters) -> None:
    assert (await adapters.vars_unset(TASK, "a.b"))["touched"] == 1
    assert await held(db) is None


async def test_unset_ignores_a_path_below_a_value(db: Any, adapters: CoordinatorAdapters) -> None:
    await hold(db, {"a": 5, "b": None})
    assert (await adapters.vars_unset(TASK, "a.b", "b.c"))["touched"] == 2
    assert await held(db) == {"a": 5, "b": None}


async def test_unset_ignores_a_path_far_below_a_value(server_db: Any) -> None:
    """Not in memory: mongomock's `$not` matches nothing there, so the write has no effect."""
    await server_db.tasks.insert_one(new_task("a"))
    await hold(server_db, {"a": 5, "b": None})
    assert (await CoordinatorAdapters(db=server_db).vars_unset(TASK, "a.b.c", "b.c.d.e"))["touched"] == 2
    assert await held(server_db) == {"a": 5, "b": None}


async def test_unset_removes_every_object_that_becomes_empty(db: Any, adapters: CoordinatorAdapters) -> None:
    await hold(db, {"a": {"b": {"c": 1}}, "x": {"y": {}, "z": 1}, "l": [{}], "deep": {"er": {"still": {}}}})
    await adapters.vars_unset(TASK, "a.b.c")
    assert await held(db) == {"x": {"z": 1}, "l": [{}]}


@pytest.mark.parametrize("whole", [{"$x": {}, "k": 1}, {"x.y": {}, "k": 1}, {"": {}, "k": 1}], ids=repr)
async def test_unset_prunes_objects_next_to_keys_that_no_path_can_name(
    db: Any, adapters: CoordinatorAdapters, whole: dict[str, Any]
) -> None:
    await hold(db, {"a": {"b": 1}, "empty": {}})
    await adapters.vars_set(TASK, kv={"kept.whole": whole})
    assert (await adapters.vars_unset(TASK, "a.b"))["touched"] == 1
    assert (await held(db))["kept"]["whole"]["k"] == 1
    assert set(await held(db)) == {"kept"}


async def test_object_that_is_filled_concurrently_is_not_pruned(server_db: Any) -> None:
    await server_db.tasks.insert_one(new_task("a"))
    await hold(server_db, {"a": {"b": 1}, "x": {"y": {}}, "z": {}})
    db, other = RecordingDatabase(server_db), CoordinatorAdapters(db=server_db)

    async def nothing() -> None: ...

    async def fill() -> None:
        await other.vars_set(TASK, kv={"x.y.late": 1})

    db.before["tasks"] += [nothing, fill]
    await CoordinatorAdapters(db=db).vars_unset(TASK, "a.b")
    assert db.before["tasks"] == []
    assert await held(server_db) == {"x": {"y": {"late": 1}}}


async def test_concurrent_sets_and_prunes_lose_no_values(server_db: Any) -> None:
    await server_db.tasks.insert_one(new_task("a"))
    one, other = CoordinatorAdapters(db=server_db), CoordinatorAdapters(db=server_db)
    for n in range(10):
        await hold(server_db, {"x": {str(k): {} for k in range(20)}, "gone": 1})
        fills = [other.vars_set(TASK, kv={f"x.{k}.late": n}) for k in range(0, 20, 2)]
        await asyncio.gather(one.vars_unset(TASK, "gone"), *fills, one.vars_unset(TASK, "gone"))
        await one.vars_unset(TASK, "gone")
        assert await held(server_db) == {"x": {str(k): {"late": n} for k in range(0, 20, 2)}}


# --- every operation --------------------------------------------------------------------------------------------

WRITES: dict[str, Call] = {
    "set": lambda a: a.vars_set(TASK, kv={"a.b": SECRET}),
    "merge": lambda a: a.vars_merge(TASK, a={"b": SECRET}),
    "incr": lambda a: a.vars_incr(TASK, key="a.b", by=2),
    "unset": lambda a: a.vars_unset(TASK, "a.b"),
}


@pytest.mark.parametrize("call", [*WRITES.values(), *NOTHING.values()], ids=[*WRITES, *NOTHING])
async def test_unknown_task_is_named_in_the_error(db: Any, call: Call) -> None:
    assert f"no task {TASK!r}" in await refused(call(CoordinatorAdapters(db=db)))
    assert await db.tasks.count_documents({}) == 0


@pytest.mark.parametrize("call", WRITES.values(), ids=list(WRITES))
async def test_operation_changes_only_the_variables_and_the_date(
    db: Any, adapters: CoordinatorAdapters, call: Call
) -> None:
    await hold(db, {"a": {"b": 1, "c": 2}})
    before = await stored(db)
    await call(adapters)
    after = await stored(db)
    assert {key for key in after if after[key] != before.get(key)} == {"coordinator", "updated_at"}
    assert after["coordinator"]["liveness"] == before["coordinator"]["liveness"]
    assert after["coordinator"]["vars"]["a"]["c"] == 2


async def test_built_in_functions_have_their_documented_names(db: Any, adapters: CoordinatorAdapters) -> None:
    functions = default_adapters(db=db)
    await functions["vars.set"](TASK, a={"b": 1})
    await functions["vars.merge"](TASK, a={"c": 2})
    await functions["vars.incr"](TASK, key="a.b", by=3)
    await functions["vars.unset"](TASK, "a.c")
    assert await functions["noop"](TASK, any_thing=1) == {"ok": True}
    assert await held(db) == {"a": {"b": 4}}
    assert set(functions) == {
        *("vars.set", "vars.merge", "vars.incr", "vars.unset", "merge.generic", "metrics.aggregate", "noop")
    }
