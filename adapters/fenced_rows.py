"""Rows with a unique key: a write of the same or a higher epoch replaces the row, and one of a lower epoch is rejected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError, DuplicateKeyError

from flowkit.adapters.group_commit import GroupCommit
from flowkit.errors import Fenced

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_LARGE_BYTES = 256 * 1024
"""Rows with more than this many bytes are written by themselves, so that small rows do not wait for them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Row:
    key: dict[str, Any]
    epoch: int
    fields: dict[str, Any]
    first: dict[str, Any]
    """Fields that are written only when the row is created."""
    forgotten: tuple[str, ...]
    """Fields of an earlier write that this write removes unless it sets them."""

    @property
    def values(self) -> dict[str, Any]:
        return {name: value for name, value in self.key.items() if not isinstance(value, dict)}

    @property
    def document(self) -> dict[str, Any]:
        return {**self.values, **self.first, **self.fields, "attempt_epoch": self.epoch}

    @property
    def replaceable(self) -> dict[str, Any]:
        """The filter for a stored row that this one may replace."""
        return {**self.key, "attempt_epoch": {"$not": {"$gt": self.epoch}}}

    @property
    def update(self) -> dict[str, Any]:
        fields = {**self.fields, "attempt_epoch": self.epoch}
        gone = {name: "" for name in self.forgotten if name not in fields}
        written = {"$set": fields}
        return {**written, "$unset": gone} if gone else written


class FencedRows:
    """Writes fenced rows to one collection, grouping rows that arrive at the same time into one call."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection
        self._rows = GroupCommit[_Row](alone=self._replace, together=self._insert)
        self._existing = GroupCommit[_Row](alone=self._update, together=self._update_all)

    async def put(
        self,
        key: dict[str, Any],
        epoch: int,
        fields: dict[str, Any],
        first: dict[str, Any],
        *,
        size: int,
        forgotten: tuple[str, ...] = (),
        exists: bool = False,
    ) -> None:
        """Write the row with this `key`, which probably `exists`. Raise Fenced if a higher epoch has written it.

        An existing row keeps its `first` fields and loses the `forgotten` fields that are not in `fields`. `size` is
        the size of the user's part of the row in bytes.
        """
        row = _Row(key=key, epoch=epoch, fields=fields, first=first, forgotten=forgotten)
        if size > _LARGE_BYTES:
            await (self._update(row) if exists else self._replace(row))
        else:
            await (self._existing if exists else self._rows).write(row)

    async def _insert(self, rows: Sequence[_Row]) -> Collection[int]:
        """Insert the new rows. Return the indexes of those that could not be inserted."""
        try:
            await self._collection.insert_many([row.document for row in rows], ordered=False)
        except BulkWriteError as error:
            if error.details.get("writeConcernErrors"):
                raise
            return {problem["index"] for problem in error.details.get("writeErrors", [])}
        return ()

    async def _update(self, row: _Row) -> None:
        """Replace the row if it exists, otherwise insert it. Raise Fenced if the stored row is not replaceable."""
        replaced = await self._collection.update_one(row.replaceable, row.update)
        if not replaced.matched_count:
            await self._replace(row)

    async def _update_all(self, rows: Sequence[_Row]) -> Collection[int]:
        """Replace the rows. Return all indexes if one of them could not be replaced, because it is not known which."""
        updates = [UpdateOne(row.replaceable, row.update) for row in rows]
        done = await self._collection.bulk_write(updates, ordered=False)
        return () if done.matched_count == len(rows) else range(len(rows))

    async def _replace(self, row: _Row) -> None:
        """Insert the row, or replace it if its key exists. Raise Fenced if the stored row is not replaceable.

        The insert comes first because it is the fastest write and most rows are new.
        """
        try:
            await self._collection.insert_one(row.document)
        except DuplicateKeyError:
            replaced = await self._collection.update_one(row.replaceable, row.update)
            if not replaced.matched_count:
                text = f"a newer attempt of node {row.key['node_id']!r} has already written {row.values}"
                raise Fenced(text) from None
