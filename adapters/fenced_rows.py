"""Rows under a unique key: a higher epoch replaces, a lower one is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pymongo.errors import BulkWriteError, DuplicateKeyError

from flowkit.adapters.group_commit import GroupCommit
from flowkit.errors import Fenced

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_LARGE_BYTES = 256 * 1024
"""A larger row goes alone: small ones are not to wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Row:
    key: dict[str, Any]
    epoch: int
    fields: dict[str, Any]
    first: dict[str, Any]
    """Fields that are written once."""
    forgotten: tuple[str, ...]
    """Fields that an earlier write may have left and this one removes."""

    @property
    def values(self) -> dict[str, Any]:
        return {name: value for name, value in self.key.items() if not isinstance(value, dict)}

    @property
    def document(self) -> dict[str, Any]:
        return {**self.values, **self.first, **self.fields, "attempt_epoch": self.epoch}

    @property
    def update(self) -> dict[str, Any]:
        gone = {name: "" for name in self.forgotten if name not in self.fields}
        written = {"$set": {**self.fields, "attempt_epoch": self.epoch}}
        return {**written, "$unset": gone} if gone else written


class FencedRows:
    """Rows on their way into one collection; those that come at the same time go together."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection
        self._rows = GroupCommit[_Row](alone=self._replace, together=self._insert)

    async def put(
        self,
        key: dict[str, Any],
        epoch: int,
        fields: dict[str, Any],
        first: dict[str, Any],
        *,
        size: int,
        forgotten: tuple[str, ...] = (),
    ) -> None:
        """Write under `key`; a row that exists keeps its `first`. Fenced when a higher epoch has written it.

        `size` is that of the user's part of the row, in bytes. Fields in `forgotten` are removed from a row that
        exists, unless `fields` has them.
        """
        row = _Row(key=key, epoch=epoch, fields=fields, first=first, forgotten=forgotten)
        if size > _LARGE_BYTES:
            await self._replace(row)
        else:
            await self._rows.write(row)

    async def _insert(self, rows: Sequence[_Row]) -> Collection[int]:
        """Insert what is new; answers the places of what is not."""
        try:
            await self._collection.insert_many([row.document for row in rows], ordered=False)
        except BulkWriteError as error:
            if error.details.get("writeConcernErrors"):
                raise
            return {problem["index"] for problem in error.details.get("writeErrors", [])}
        return ()

    async def _replace(self, row: _Row) -> None:
        """A first write is an insert, the quickest there is; the unique index refuses it when the key is taken."""
        try:
            await self._collection.insert_one(row.document)
        except DuplicateKeyError:
            replaced = await self._collection.update_one(
                {**row.key, "attempt_epoch": {"$not": {"$gt": row.epoch}}}, row.update
            )
            if not replaced.matched_count:
                node = row.key["node_id"]
                raise Fenced(f"a newer attempt of node {node!r} has already written {row.values}") from None
