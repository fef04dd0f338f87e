"""Collections in memory whose operations take a time that does not grow with their documents.

mongomock compares each filter with all documents of a collection, and copies the whole document for each update. A task
of n nodes has one document with n nodes and at least n artifacts, so it takes n times as long for each node.
"""

from __future__ import annotations

import copy
import itertools
from datetime import datetime
from typing import TYPE_CHECKING, Any

from bson import ObjectId
from mongomock.collection import Collection
from mongomock.database import Database
from mongomock.filtering import filter_applies
from mongomock.helpers import hashdict
from mongomock.helpers import patch_datetime_awareness_in_document as as_stored
from mongomock.store import CollectionStore, DatabaseStore
from pymongo.errors import DuplicateKeyError, WriteError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowkit.core.utils import Fields


_SEARCHED = (str, int, ObjectId)
"""The types of values that an index finds. A comparison with any other value looks at all documents."""

_SCALARS = (str, int, float, ObjectId, datetime, type(None))
"""The types of values of which each equals only values with the same hash."""


class IndexedDatabase(Database):
    """A database whose collections find documents by the values of their fields."""

    def __init__(self, client: Any, name: str) -> None:
        super().__init__(client, name, _store=_Stores())

    def get_collection(self, name: Any, *given: Any, **options: Any) -> Any:
        """Return the collection with this name."""
        if name not in self._collection_accesses:
            self._ensure_valid_collection_name(name)
            self._collection_accesses[name] = _IndexedCollection(self, name, _db_store=self._store)
        return super().get_collection(name, *given, **options)


class _Stores(DatabaseStore):
    """The stores of the collections of one database, by name."""

    def __getitem__(self, name: str) -> _IndexedStore:
        if name not in self._collections:
            self._collections[name] = _IndexedStore(name)
        found: _IndexedStore = self._collections[name]
        return found


class _IndexedStore(CollectionStore):
    """The documents of a collection. Each field that a filter compares with a value gets an index."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._reset()

    def _reset(self) -> None:
        self._fields: dict[str, _Index] = {}
        self._places: dict[Any, int] = {}
        self._count = itertools.count()

    def drop(self) -> None:
        super().drop()
        self._reset()

    def __setitem__(self, key: Any, document: Fields) -> None:
        before = self._documents.get(key)
        super().__setitem__(key, document)
        self._places.setdefault(key, next(self._count))
        for index in self._fields.values():
            index.replace(key, before, document)

    def __delitem__(self, key: Any) -> None:
        before = self._documents[key]
        super().__delitem__(key)
        del self._places[key]
        for index in self._fields.values():
            index.replace(key, before, None)

    def candidates(self, condition: Fields) -> list[Fields]:
        """Return the documents that `condition` can match, oldest first: by the field with the fewest of them."""
        self._remove_expired_documents()
        found = [self._index(field).find(value) for field, value in _equalities(condition)]
        if not found:
            return list(self._documents.values())
        fewest = min(found, key=lambda keys: len(keys))
        return [self._documents[key] for key in sorted(fewest, key=self._places.__getitem__)]

    def _index(self, field: str) -> _Index:
        if field not in self._fields:
            index = self._fields[field] = _Index(field)
            for key, document in self._documents.items():
                index.replace(key, None, document)
        return self._fields[field]


class _Index:
    """The keys of documents by the value of one field."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._keys: dict[Any, set[Any]] = {}
        self._others: set[Any] = set()
        """The keys of documents whose value can equal several values, such as a list and each of its items."""

    def find(self, value: Any) -> set[Any]:
        """Return the keys of the documents whose field can equal `value`."""
        found = self._keys.get(value, set())
        return found | self._others if self._others else found

    def replace(self, key: Any, before: Fields | None, after: Fields | None) -> None:
        """Note that a document has changed; None for one that is not there."""
        if before is not None:
            self._of(before).discard(key)
        if after is not None:
            self._of(after).add(key)

    def _of(self, document: Fields) -> set[Any]:
        value = document.get(self._field)
        return self._keys.setdefault(value, set()) if isinstance(value, _SCALARS) else self._others


class _IndexedCollection(Collection):
    """A collection that asks its store's indexes, and whose updates share with the old document what they
    do not change.
    """

    def with_options(self, *given: Any, **options: Any) -> Any:
        """Return a handle on the same collection with other options."""
        changed = super().with_options(*given, **options)
        changed.__class__ = type(self)
        return changed

    def _iter_documents(self, condition: Fields) -> Iterator[Fields]:
        found = self._store.candidates(condition)
        if not found:
            filter_applies(condition, {})  # raises for an invalid filter
        return (document for document in found if filter_applies(condition, document))

    def _update(self, spec: Any, document: Any, upsert: Any = False, *given: Any, **options: Any) -> Fields:
        found = list(self._iter_documents(as_stored(spec)))
        multi, is_special = options.get("multi"), any(options[key] for key in options if key != "multi")
        if not found or given or is_special:
            result: Fields = super()._update(spec, document, upsert, *given, **options)
            return result
        changed = [self._change(each, spec, as_stored(document)) for each in (found if multi else found[:1])]
        return {"n": len(changed), "nModified": sum(changed), "upserted": None, "updatedExisting": True}

    def _change(self, before: Fields, spec: Fields, update: Any) -> bool:
        """Apply an update to one document. Return False if it changes nothing."""
        if isinstance(update, list):
            after = copy.deepcopy(before)
            self._apply_update_pipeline(after, update, None)
        else:
            after = _copy_for(update, before)
            self._apply_update_document(after, as_stored(spec), update, False)
        if after.get("_id") != before["_id"]:
            raise WriteError(f"the update changes the immutable field _id of {before['_id']!r}")
        self._replace(before, after)
        return after != before

    def _replace(self, before: Fields, after: Fields) -> None:
        """Store `after` in place of `before`.

        Raise DuplicateKeyError, and keep `before`, if a unique index forbids it.
        """
        key = hashdict(before["_id"]) if isinstance(before["_id"], dict) else before["_id"]
        self._store[key] = after
        try:
            self._ensure_uniques(after)
        except DuplicateKeyError:
            self._store[key] = before
            raise


def _equalities(condition: Fields) -> Iterator[tuple[str, Any]]:
    """Yield the fields that must equal a value, with the value, as far as an index can find it."""
    for field, value in condition.items():
        if field == "$and":
            for each in value:
                yield from _equalities(each)
        elif isinstance(value, _SEARCHED) and "." not in field:
            yield field, value


def _copy_for(update: Fields, document: Fields) -> Fields:
    """Return a copy that `update` can change: it shares with `document` what lies beside the paths of the update."""
    paths = [path for operator, fields in update.items() if operator.startswith("$") for path in fields]
    if any("$" in path for path in paths):
        return copy.deepcopy(document)
    after = copy.copy(document)
    copied = {id(after)}
    for path in paths:
        _copy_along(path.split("."), after, copied)
    return after


def _copy_along(path: list[str], document: Fields, copied: set[int]) -> None:
    """Replace the values on a path below `document` with shallow copies, unless their ids are in `copied`."""
    at: Any = document
    for part in path:
        step = int(part) if isinstance(at, list) and part.isdecimal() else part
        try:
            below = at[step]
        except (LookupError, TypeError):
            return
        if not isinstance(below, dict | list):
            return
        if id(below) not in copied:
            below = at[step] = copy.copy(below)
            copied.add(id(below))
        at = below
