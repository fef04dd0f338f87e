"""Finds reads of MongoDB that have no limit or no projection, in the stores of admission and of the gateway.

Paths that repeat (polls, events, metrics, statuses) would otherwise read more with each request that was ever made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

Read = tuple[str, str, frozenset[str]]
"""The collection, the method, and the fields of the condition."""


def _read(collection: str, method: str, *fields: str) -> Read:
    return collection, method, frozenset(fields)


_ITEMS: Final = "admission_items"
ALLOWED: Final[dict[Read, str]] = {
    _read(_ITEMS, "find", "queue", "state", "lane"): "requests that start, as many as slots are free",
    _read(
        _ITEMS, "count_documents", "queue", "state", "rank"
    ): "a position counts what waits, up to max_pending",
    _read(_ITEMS, "count_documents", "queue", "state", "rank", "seq"): "the same",
    _read(_ITEMS, "distinct", "queue", "state", "lane"): "holders at their limit that have requests waiting",
    **{
        _read(entity, "find_one_and_update", "_id"): "a call that returns the entity that it has changed"
        for entity in ("flow_actors", "flow_contexts", "flow_runners", "flow_jobs", "flow_messages", "flows")
    },
    _read("flows", "find_one_and_update", "_id", "version"): "the same, for a version of it",
    **{
        _read(entity, "find_one", "_id"): "a call that returns an entity, or depends on most of its fields"
        for entity in ("flow_contexts", "flow_runners", "flow_jobs", "flow_messages", "flows")
    },
    _read(
        "flows", "find_one", "task_id"
    ): "a process that runs jobs reads the flow of a run once, and keeps it",
    _read("flow_jobs", "find", "_id"): "the jobs of one flow, by id, once for each start or process",
    _read("tasks", "find", "id"): "the status of each flow of one page of a list",
    _read(
        "flow_messages", "find", "job_id", "task_id"
    ): "the attempts of jobs in flight, whose arrows have no events yet",
    **{
        _read(entity, "find", *fields): "one page of a list, whose entries are shown whole"
        for entity, *fields in (
            ("flow_actors",),
            ("flow_actors", "_id"),
            ("flow_contexts",),
            ("flow_contexts", "_id"),
            ("flow_jobs", "context_id"),
            ("flow_jobs", "context_id", "id"),
            ("flow_runners", "context_id"),
            ("flow_runners", "context_id", "addresses"),
            ("flow_events", "flow", "seq"),
        )
    },
}
"""Reads that need no limit or no projection, and why."""


class BoundedReads:
    """Notes the reads of databases that were passed to `checked`."""

    def __init__(self) -> None:
        self.problems: set[str] = set()

    def checked(self, durable: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that returns the handle of `durable`, whose reads are noted."""
        return lambda db: _Database(durable(db), self)

    def note(self, read: Read, *, limit: object, projection: object) -> None:
        """Note a read if something is missing."""
        missing = [name for name, given in (("limit", limit), ("projection", projection)) if not given]
        if missing and read not in ALLOWED:
            collection, method, fields = read
            self.problems.add(
                f"{collection}.{method}({', '.join(sorted(fields))}) has no {' and no '.join(missing)}"
            )


class _Database:
    def __init__(self, db: Any, reads: BoundedReads) -> None:
        self._db, self._reads = db, reads

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __getitem__(self, name: str) -> Any:
        return _Collection(name, self._db[name], self._reads)


class _Collection:
    def __init__(self, name: str, collection: Any, reads: BoundedReads) -> None:
        self._name, self._collection, self._reads = name, collection, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collection, name)

    def _note(self, method: str, condition: Any, *, limit: object, projection: object) -> None:
        read = (self._name, method, frozenset(condition or {}))
        self._reads.note(read, limit=limit, projection=projection)

    def find(self, condition: Any = None, projection: Any = None, **options: Any) -> Any:
        found = self._collection.find(condition, projection, **options)
        return _Cursor(found, lambda limit: self._note("find", condition, limit=limit, projection=projection))

    def find_one(self, condition: Any = None, projection: Any = None, **options: Any) -> Any:
        self._note("find_one", condition, limit=1, projection=projection)
        return self._collection.find_one(condition, projection, **options)

    def find_one_and_update(self, condition: Any, update: Any, **options: Any) -> Any:
        self._note("find_one_and_update", condition, limit=1, projection=options.get("projection"))
        return self._collection.find_one_and_update(condition, update, **options)

    def distinct(self, key: str, condition: Any = None, **options: Any) -> Any:
        self._note("distinct", condition, limit=None, projection=key)
        return self._collection.distinct(key, condition, **options)

    def count_documents(self, condition: Any, **options: Any) -> Any:
        self._note("count_documents", condition, limit=options.get("limit"), projection=True)
        return self._collection.count_documents(condition, **options)

    def aggregate(self, pipeline: Any, **options: Any) -> Any:
        stages = {name for stage in pipeline for name in stage}
        shown = stages & {"$project", "$group"}
        matched: dict[str, Any] = next((stage["$match"] for stage in pipeline if "$match" in stage), {})
        self._note("aggregate", matched, limit="$limit" in stages, projection=shown)
        return self._collection.aggregate(pipeline, **options)


class _Cursor:
    """A cursor that notes its read when it is used."""

    def __init__(self, cursor: Any, note: Callable[[int], None]) -> None:
        self._cursor, self._note, self._limit = cursor, note, 0

    def limit(self, limit: int) -> _Cursor:
        self._cursor, self._limit = self._cursor.limit(limit), limit
        return self

    def sort(self, *given: Any) -> _Cursor:
        self._cursor = self._cursor.sort(*given)
        return self

    def skip(self, count: int) -> _Cursor:
        self._cursor = self._cursor.skip(count)
        return self

    def __aiter__(self) -> Any:
        self._note(self._limit)
        return self._cursor.__aiter__()

    def to_list(self, *given: Any) -> Any:
        self._note(self._limit)
        return self._cursor.to_list(*given)


def check_reads(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> Iterator[None]:
    """Fail if a store of one of these modules makes a read that has no limit or no projection."""
    reads = BoundedReads()
    for module in modules:
        monkeypatch.setattr(module, "durable", reads.checked(module.durable))
    yield
    assert not reads.problems, "give these reads a limit and a projection: " + "; ".join(
        sorted(reads.problems)
    )
