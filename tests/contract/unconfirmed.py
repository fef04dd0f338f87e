"""A database in which no majority confirms what is inserted."""

from __future__ import annotations

from typing import Any

from pymongo.errors import BulkWriteError


class Unconfirmed:
    """Collections in which an insert finds the first row there, and no majority confirms the others."""

    def __getattr__(self, name: str) -> Unconfirmed:
        return self

    __getitem__ = __getattr__

    async def insert_many(self, rows: Any, *, ordered: bool) -> None:
        """Insert all but the first row on the primary only."""
        duplicate = {"index": 0, "code": 11000, "errmsg": "E11000 duplicate key error"}
        concern = {"code": 91, "codeName": "ShutdownInProgress", "errmsg": "Replication is being shut down"}
        raise BulkWriteError({"writeErrors": [duplicate], "writeConcernErrors": [concern], "nInserted": 1})
