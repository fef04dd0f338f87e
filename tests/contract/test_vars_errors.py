"""Rejected operations on task variables: the message names the conflict, and nothing is written."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from bson import Decimal128
from pymongo import errors
from tests.contract.builders import TASK, new_task
from tests.contract.drivers import DRIVERS, connected
from tests.contract.recording_database import RecordingDatabase
from tests.contract.variables import SECRET, held, hold, refused, unchanged

from flowkit.coordinator.adapters import AdapterError, CoordinatorAdapters
from flowkit.errors import StoreUnavailable
from flowkit.local.ports import HOST, free_port
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Call = Callable[[CoordinatorAdapters], Awaitable[dict[str, Any]]]


# --- conflicts with existing variables --------------------------------------------------------------------------

LARGE = SECRET * 100

BELOW: dict[str, Call] = {
    "set": lambda a: a.vars_set(TASK, kv={"new": 1, "x.a.b": SECRET}),
    "set, large": lambda a: a.vars_set(TASK, kv={"new": 1, "x.a.b": LARGE}),
    "set, nested": lambda a: a.vars_set(TASK, new=1, x={"a": {"b": {"c": SECRET}}}),
    "merge": lambda a: a.vars_merge(TASK, new=1, x={"a": {"b": SECRET}}),
    "merge, large": lambda a: a.vars_merge(TASK, new=1, x={"a": {"b": {"c": LARGE}}}),
    "incr": lambda a: a.vars_incr(TASK, key="x.a.b", by=3),
}


@pytest.mark.parametrize("call", BELOW.values(), ids=list(BELOW))
async def test_write_below_a_value_or_into_a_list_is_rejected(
    db: Any, adapters: CoordinatorAdapters, call: Call
) -> None:
    for value in [None, True, 1.5, SECRET, [], [{"b": 1}]]:
        await hold(db, {"x": {"a": value}, "y": 1})
        async with unchanged(db):
            await refused(call(adapters), "x.a", "x.a.b")


@pytest.mark.parametrize("path", ["x.0", "x.0.k", "x.k", "x.k.z"])
async def test_elements_of_a_list_cannot_be_addressed(
    db: Any, adapters: CoordinatorAdapters, path: str
) -> None:
    await hold(db, {"x": [{"k": {"z": 1}}, 2], "y": 1})
    calls: list[Awaitable[object]] = [
        adapters.vars_set(TASK, kv={"y": 2, path: SECRET}),
        adapters.vars_incr(TASK, key=path),
        adapters.vars_unset(TASK, "y", path),
    ]
    for call in calls:
        async with unchanged(db):
            await refused(call, "x", path)


async def test_incr_of_a_value_that_is_not_a_number_is_rejected(
    db: Any, adapters: CoordinatorAdapters
) -> None:
    for value in [None, True, SECRET, "5", [], [1], {}, {"k": 1}]:
        await hold(db, {"x": {"n": value}})
        async with unchanged(db):
            assert "not a number" in await refused(adapters.vars_incr(TASK, key="x.n", by=1), "x.n")


@pytest.mark.parametrize(
    "call",
    [
        lambda a: a.vars_set(TASK, kv={"a.b": 1}),
        lambda a: a.vars_merge(TASK, a=1),
        lambda a: a.vars_incr(TASK, key="a"),
        lambda a: a.vars_unset(TASK, "a.b"),
    ],
    ids=["set", "merge", "incr", "unset"],
)
async def test_variables_overwritten_by_another_client_are_not_changed(
    db: Any, adapters: CoordinatorAdapters, call: Call
) -> None:
    for variables in [None, 5, [{"a": 1}]]:
        await hold(db, variables)
        async with unchanged(db):
            await refused(call(adapters))


async def test_decimal_of_mongodb_is_a_number(server_db: Any) -> None:
    """Not in memory: mongomock cannot add to this type."""
    await server_db.tasks.insert_one({"id": TASK, "coordinator": {"vars": {"n": Decimal128("1.5")}}})
    await CoordinatorAdapters(db=server_db).vars_incr(TASK, key="n", by=1)
    assert await held(server_db) == {"n": Decimal128("2.5")}


@pytest.mark.parametrize(("held_", "by"), [(2**63 - 1, 1), (-(2**63), -1), (2**62, 2**62)])
async def test_sum_beyond_64_bits_is_rejected(
    db: Any, adapters: CoordinatorAdapters, held_: int, by: int
) -> None:
    await hold(db, {"x": {"n": held_}})
    async with unchanged(db):
        assert "64 bits" in await refused(adapters.vars_incr(TASK, key="x.n", by=by), "x.n")


# --- invalid requests -------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Call, str]] = {
    "set, too deep": (lambda a: a.vars_set(TASK, kv={"ok": 1, ".".join("s" * 15): SECRET}), "s.s.s"),
    "set, too long": (lambda a: a.vars_set(TASK, ok=1, a={"b": "x" * 65_537}), "a.b"),
    "set, overlap": (lambda a: a.vars_set(TASK, kv={"a.b": SECRET, "a.b.c": SECRET}), "a.b.c"),
    "set, twice": (lambda a: a.vars_set(TASK, kv={"a.b": SECRET, "a": {"b": SECRET}}), "a.b"),
    "set, no value for MongoDB": (lambda a: a.vars_set(TASK, ok=1, a={SECRET}), "a"),
    "set, too many": (lambda a: a.vars_set(TASK, kv={f"k{n}": SECRET for n in range(257)}), ""),
    "merge, too deep": (lambda a: a.vars_merge(TASK, a={"b": {"c": _nested(13)}}), "a.b.c.s.s.s"),
    "merge, too many": (lambda a: a.vars_merge(TASK, data={f"k{n}": SECRET for n in range(257)}), ""),
    "incr, too deep": (lambda a: a.vars_incr(TASK, key=".".join("s" * 15)), "s.s.s"),
    "unset, too deep": (lambda a: a.vars_unset(TASK, "ok", ".".join("s" * 15)), "s.s.s"),
    "unset, overlap": (lambda a: a.vars_unset(TASK, "a", keys=["a.b"]), "a.b"),
    "unset, too many": (lambda a: a.vars_unset(TASK, keys=(f"k{n}" for n in range(257))), ""),
}


def _nested(depth: int) -> Any:
    return {"s": _nested(depth - 1)} if depth else SECRET


async def test_invalid_operation_is_rejected_before_any_write(db: Any, adapters: CoordinatorAdapters) -> None:
    for call, named in BAD.values():
        await hold(db, {"ok": 0, "a": {"x": 1}})
        async with unchanged(db):
            text = await refused(call(adapters), *filter(None, [named]))
        assert text.startswith(("vars.set: ", "vars.merge: ", "vars.incr: ", "vars.unset: "))


# --- sensitive values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("wrapper", ["kv", "data", None])
@pytest.mark.parametrize("method", ["vars_set", "vars_merge"])
async def test_sensitive_value_is_blocked_on_request_in_every_form(
    db: Any, adapters: CoordinatorAdapters, method: str, wrapper: str | None, *, inside: bool
) -> None:
    if method == "vars_set" and wrapper == "data":
        wrapper = None
    variables = {"a": {"b": SECRET, "c": "A" * 24, "d": "gold"}}
    switch = {"block_sensitive": True}
    given: dict[str, Any] = {**variables, **switch}
    if wrapper:
        given = {wrapper: {**variables, **switch}} if inside else {wrapper: variables, **switch}
    async with unchanged(db):
        text = await refused(getattr(adapters, method)(TASK, **given))
    assert text == f"{method.replace('_', '.')} blocked: 2 sensitive-looking values"


async def test_blocking_accepts_values_that_are_not_sensitive_and_is_not_stored(
    db: Any, adapters: CoordinatorAdapters
) -> None:
    await adapters.vars_set(TASK, a="gold", block_sensitive=True)
    await adapters.vars_merge(TASK, b=1, block_sensitive=True)
    await adapters.vars_merge(TASK, data={"c": None, "block_sensitive": False})
    assert await held(db) == {"a": "gold", "b": 1, "c": None}


class _LeakyDetector:
    def is_sensitive(self, key_path: str, value: Any) -> bool:
        """Fail with the value in the message."""
        raise RuntimeError(value)


async def test_failing_detector_blocks_every_value(db: Any, adapters: CoordinatorAdapters) -> None:
    leaking = CoordinatorAdapters(db=db, detector=_LeakyDetector())
    async with unchanged(db):
        for call in (leaking.vars_set(TASK, a=SECRET), leaking.vars_merge(TASK, a=SECRET)):
            assert "detector of sensitive values raised RuntimeError" in await refused(call)
    await asyncio.gather(leaking.vars_incr(TASK, key="n"), leaking.vars_unset(TASK, "x"))
    assert await held(db) == {"n": 1}


# --- database errors --------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Call] = {
    "set": lambda a: a.vars_set(TASK, kv={"x.y": SECRET}),
    "set, large": lambda a: a.vars_set(TASK, kv={"x.y": LARGE}),
    "merge": lambda a: a.vars_merge(TASK, x={"y": SECRET}, z=SECRET),
    "incr": lambda a: a.vars_incr(TASK, key="x.y"),
    "unset": lambda a: a.vars_unset(TASK, "x.y"),
}


@pytest.mark.parametrize("call", OPERATIONS.values(), ids=list(OPERATIONS))
@pytest.mark.parametrize(
    ("raised", "ours", "reported"),
    [
        (errors.WriteError(f"cannot store {SECRET}", 17419), AdapterError, "(code 17419)"),
        (errors.AutoReconnect(f"lost {SECRET}"), StoreUnavailable, "MongoDB is unavailable (AutoReconnect)"),
        (errors.OperationFailure(f"not primary {SECRET}", 189), StoreUnavailable, "is unavailable"),
    ],
)
async def test_driver_error_contains_no_value(
    call: Call, raised: errors.PyMongoError, ours: type[Exception], reported: str
) -> None:
    db = RecordingDatabase(memory_database())
    await db.tasks.insert_one(new_task("a"))

    async def fail() -> None:
        raise raised

    db.before["tasks"] += [fail] * 3  # A write whose document is too large is repeated after room was made.
    with pytest.raises(ours) as caught:
        await call(CoordinatorAdapters(db=db))
    assert reported in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("driver", DRIVERS)
async def test_operation_without_a_server_can_be_retried(driver: str) -> None:
    async with connected(driver, f"mongodb://{HOST}:{free_port()}", serverSelectionTimeoutMS=20) as client:
        adapters = CoordinatorAdapters(db=client.flowkit)
        calls = (call(adapters) for call in OPERATIONS.values())
        found = await asyncio.gather(
            *calls,
            adapters.merge_generic(TASK, ["a"], {}),
            adapters.metrics_aggregate(TASK, "a"),
            return_exceptions=True,
        )
    assert {type(error) for error in found} == {StoreUnavailable}
    assert [error for error in found if SECRET in str(error)] == []
