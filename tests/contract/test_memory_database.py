"""The database in memory that users' tests get."""

from __future__ import annotations

import copy
import random
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import mongomock
import pytest
from pymongo import ReadPreference
from pymongo.errors import DuplicateKeyError, PyMongoError

from flowkit.testing import memory_database
from flowkit.testing.memory_collections import IndexedDatabase

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

VALUES = (
    "a",
    "b",
    1,
    2.5,
    True,
    None,
    ["a", 1],
    [{"n": 1}, {"n": 2}],
    {"n": 1},
    datetime(2026, 1, 1, tzinfo=UTC),
)
FIELDS = ("kind", "owner", "rows", "rows.n", "deep.er", "deep.n.0")


async def test_two_memory_databases_are_independent() -> None:
    first, second = memory_database(), memory_database()
    await first.tasks.insert_one({"id": "t"})
    assert await second.tasks.count_documents({}) == 0
    assert await first["tasks"].count_documents({}) == 1


@pytest.mark.parametrize("missing", ["mongomock", "mongomock_motor"])
def test_missing_library_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"flowkit-temporal\[testing\]"):
        memory_database()


@pytest.mark.parametrize(
    ("projection", "expected"),
    [
        (None, {"_id": 1, "n": 1, "m": 5}),
        ({"_id": 0, "absent": 1}, {}),
        ({"_id": 0, "n": 1}, {"n": 1}),
        ({"n": 1}, {"_id": 1, "n": 1}),
    ],
)
async def test_update_is_applied_for_any_projection(
    projection: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    db = memory_database()
    await db.things.insert_one({"_id": 1, "n": 1, "m": 5})
    found = await db.things.find_one_and_update({"n": 1}, {"$set": {"n": 2}}, projection=projection)
    assert found == expected
    assert (await db.things.find_one({}))["n"] == 2


async def test_update_without_a_match_returns_nothing() -> None:
    assert await memory_database().things.find_one_and_update({"n": 1}, {"$set": {"n": 2}}) is None


async def test_ttl_index_removes_expired_documents_without_a_deprecated_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    db = memory_database()
    monkeypatch.setattr("mongomock.helpers.utcnow", None)
    await db.things.create_index("created_at", expireAfterSeconds=60)
    now = datetime.now(UTC)
    await db.things.insert_many([{"_id": age, "created_at": now - timedelta(minutes=age)} for age in (0, 2)])
    assert [thing["_id"] async for thing in db.things.find({})] == [0]


def _condition(choose: random.Random) -> dict[str, Any]:
    """Return a filter: some fields that equal a value, a field that equals one of several, or both."""
    equal = {choose.choice(FIELDS): choose.choice(VALUES) for _ in range(choose.randrange(3))}
    some = {
        choose.choice(FIELDS): choose.choice([{"$in": ["a", 1]}, {"$ne": "a"}, {"$exists": True}, {"$gt": 0}])
    }
    return choose.choice([equal, equal | some, {"$and": [equal, some]}, {"$or": [equal, some]}])


def _update(choose: random.Random) -> dict[str, Any]:
    field, value = choose.choice(FIELDS), choose.choice(VALUES)
    operators = (
        "$set",
        "$set",
        "$set",
        "$unset",
        "$push",
        "$addToSet",
        "$pull",
        "$inc",
        "$max",
        "$setOnInsert",
    )
    return {choose.choice(operators): {field: value}, "$currentDate": {}}


def _operation(choose: random.Random) -> Callable[[Any], Any]:
    """Return one operation of a collection, with arguments that stay the same."""
    condition, update, place = _condition(choose), _update(choose), choose.randrange(40)
    document = {"_id": place, **{field: choose.choice(VALUES) for field in ("kind", "owner", "rows")}}
    return choose.choice([
        lambda rows: rows.insert_one({**document}).inserted_id,
        lambda rows: rows.replace_one({"_id": place}, {**document}).modified_count,
        lambda rows: rows.update_one(condition, update).modified_count,
        lambda rows: rows.update_many(condition, {"$set": {"deep.er": place}}).matched_count,
        lambda rows: rows.update_one({"_id": place}, update, upsert=True).upserted_id,
        lambda rows: rows.update_one({"rows.n": 2}, {"$set": {"rows.$.n": place}}).modified_count,
        lambda rows: rows.update_one(condition, [{"$set": {"owner": "b"}}]).modified_count,
        lambda rows: rows.delete_one(condition).deleted_count,
        lambda rows: rows.find_one_and_update({"_id": place}, update),
        lambda rows: list(rows.find(condition)),
    ])  # fmt: skip


def _result(operation: Callable[[Any], Any], rows: Any) -> Any:
    try:
        return operation(rows)
    except (PyMongoError, TypeError, AttributeError, ValueError, KeyError, IndexError) as error:
        return type(error)


@pytest.mark.parametrize("seed", range(5))
def test_indexes_change_no_result(seed: int) -> None:
    choose = random.Random(seed)
    client: Any = mongomock.MongoClient()
    plain, indexed = client["plain"].rows, IndexedDatabase(client, "indexed").rows
    for rows in (plain, indexed):
        rows.create_index([("kind", 1), ("_id", 1)], unique=True)
    for _ in range(200):
        operation = _operation(choose)
        before = copy.deepcopy(plain._store._documents)
        result = _result(operation, plain)
        if isinstance(result, type):
            plain._store._documents = before  # mongomock leaves half an update
        assert _result(operation, indexed) == result
        assert list(indexed.find()) == list(plain.find())


async def test_update_that_fails_changes_nothing() -> None:
    db = memory_database()
    await db.things.create_index("name", unique=True)
    await db.things.insert_many([{"_id": n, "name": str(n), "rows": [{"n": n}]} for n in range(2)])
    before = [thing async for thing in db.things.find()]
    with pytest.raises(DuplicateKeyError):
        await db.things.update_one({"_id": 1}, {"$set": {"rows.0.n": 5, "name": "0"}})
    assert [thing async for thing in db.things.find()] == before
    assert await db.things.find_one({"name": "1"}) == before[1]


async def test_dropped_collection_has_no_documents() -> None:
    db = memory_database()
    await db.things.insert_one({"name": "a"})
    assert await db.things.count_documents({"name": "a"}) == 1
    await db.things.drop()
    assert await db.things.count_documents({"name": "a"}) == 0


async def test_options_of_a_collection_see_its_changes() -> None:
    db = memory_database()
    await db.things.insert_one({"_id": 1, "name": "a"})
    assert await db.things.count_documents({"name": "a"}) == 1
    other = db.get_collection("things", read_preference=ReadPreference.SECONDARY)
    await other.update_one({"_id": 1}, {"$set": {"name": "b"}})
    assert await db.things.count_documents({"name": "b"}) == 1
