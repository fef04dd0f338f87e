"""The database in memory that users' tests get."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from flowkit.testing import memory_database

if TYPE_CHECKING:
    from typing import Any


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
