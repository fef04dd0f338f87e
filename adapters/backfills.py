"""The collections `backfills`, one document for each backfill, and `backfill_runs`, one row for each nominal time.

A row starts once: only a compare-and-set takes it from `pending` to `running`. A cancel takes all pending rows, so that
nothing starts after it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bson import Binary
from pymongo import ASCENDING, DESCENDING, ReturnDocument
from pymongo.errors import BulkWriteError, DuplicateKeyError

from flowkit.adapters.mongo import (
    Database,
    duplicate_indexes,
    durable,
    ensure_index,
    moment,
    translate_errors,
)
from flowkit.graph.scheduled import Nominal, format_nominal
from flowkit.models.admission import Admission
from flowkit.models.backfills import (
    BackfillCounts,
    BackfillRun,
    BackfillRunStatus,
    BackfillState,
    Existing,
    Order,
    StoredBackfill,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.core.utils import Fields
    from flowkit.models.backfills import BackfillOutcome

_ROWS_AT_ONCE = 1_000
_WITHOUT_TASK = {"task": 0, "times": 0}
"""Calls get a copy: the database in memory of `flowkit.testing` changes what it gets."""
_ENDED = [state.value for state in BackfillState if state.ended]
_STOPPED = [BackfillState.CANCELLING.value, BackfillState.CANCELLED.value]
_OPEN_ROWS = [status.value for status in BackfillRunStatus if not status.ended]
_SORTS = {Order.OLDEST: ASCENDING, Order.NEWEST: DESCENDING}
_NO_OUTCOME = {"reason": None, "code": None, "ended_at": None}


class BackfillStore:
    """The backfills of one database. Methods raise StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._backfills = durable(db).backfills
        self._rows = durable(db).backfill_runs

    @translate_errors
    async def prepare(self) -> None:
        """Create the indexes."""
        by_status = [("backfill_id", ASCENDING), ("status", ASCENDING), ("at", ASCENDING)]
        await ensure_index(self._rows, by_status, "ix_backfill_runs_status")
        await ensure_index(self._backfills, [("created_at", DESCENDING)], "ix_backfills_created")

    @translate_errors
    async def insert(self, backfill: StoredBackfill, task: bytes, times: Sequence[datetime]) -> bool:
        """Store a new backfill, with the packed graph and params of its tasks. Return False if its id is taken.

        It is in the state `creating` until `complete` has stored a row for each of its nominal `times`.
        """
        document = {
            **_document(backfill),
            "state": BackfillState.CREATING.value,
            "task": Binary(task),
            "times": [*times],
        }
        try:
            await self._backfills.insert_one(document)
        except DuplicateKeyError:
            return False
        return True

    @translate_errors
    async def complete(self, backfill: StoredBackfill) -> None:
        """Store the rows of a backfill that `insert` has stored, also those that a killed call has left out.

        Nothing of a backfill starts that was cancelled meanwhile.
        """
        wanted = {"_id": backfill.backfill_id, "created_at": backfill.created_at}
        found = await self._backfills.find_one(wanted, {"times": 1}) or {}
        times = [_utc(each) for each in found.get("times") or ()]
        for start in range(0, len(times), _ROWS_AT_ONCE):
            some = [_row(backfill, each) for each in times[start : start + _ROWS_AT_ONCE]]
            try:
                await self._rows.insert_many(some, ordered=False)
            except BulkWriteError as error:  # an earlier try has written them
                duplicate_indexes(error)
        creating = {**wanted, "state": BackfillState.CREATING.value}
        running = {"$set": {"state": BackfillState.RUNNING.value}, "$unset": {"times": ""}}
        await self._backfills.update_one(creating, running)
        stopped = {**wanted, "state": {"$in": _STOPPED}}
        if await self._backfills.find_one(stopped, {"_id": 1}) is not None:
            await self.cancel_pending(backfill.backfill_id)

    @translate_errors
    async def find(self, backfill_id: str) -> StoredBackfill | None:
        """Return a backfill; None if there is none."""
        found = await self._backfills.find_one({"_id": backfill_id}, {**_WITHOUT_TASK})
        return None if found is None else _backfill(found)

    @translate_errors
    async def task(self, backfill_id: str) -> bytes | None:
        """Return the packed graph and params of the tasks of a backfill; None if there is no such backfill."""
        found = await self._backfills.find_one({"_id": backfill_id}, {"task": 1})
        return None if found is None else bytes(found["task"])

    @translate_errors
    async def newest(
        self, namespace_id: str, limit: int, *, schedule: str | None = None
    ) -> list[StoredBackfill]:
        """Return the newest backfills of a namespace, or of one of its schedules."""
        wanted = {"namespace_id": namespace_id, **({} if schedule is None else {"schedule": schedule})}
        found = self._backfills.find(wanted, {**_WITHOUT_TASK}).sort("created_at", DESCENDING).limit(limit)
        return [_backfill(document) async for document in found]

    @translate_errors
    async def counts(self, backfill_id: str) -> BackfillCounts:
        """Return the nominal times of a backfill, counted by status."""
        counts = {
            status.value: await self._rows.count_documents(
                {"backfill_id": backfill_id, "status": status.value}
            )
            for status in BackfillRunStatus
        }
        return BackfillCounts(**counts)

    @translate_errors
    async def runs(self, backfill_id: str, status: BackfillRunStatus, limit: int = 0) -> list[BackfillRun]:
        """Return the nominal times with a status, the oldest first; with `limit`, at most so many."""
        wanted = {"backfill_id": backfill_id, "status": status.value}
        found = self._rows.find(wanted).sort("at", ASCENDING).limit(limit)
        return [_run(row) async for row in found]

    @translate_errors
    async def latest(self, backfill_id: str, limit: int) -> list[BackfillRun]:
        """Return the nominal times whose tasks have ended by themselves, the latest end first."""
        statuses = [BackfillRunStatus.SUCCEEDED.value, BackfillRunStatus.FAILED.value]
        wanted = {"backfill_id": backfill_id, "status": {"$in": statuses}}
        found = self._rows.find(wanted).sort("ended_at", DESCENDING).limit(limit)
        return [_run(row) async for row in found]

    @translate_errors
    async def claim(self, backfill: StoredBackfill) -> BackfillRun | None:
        """Take the next pending nominal time; None if there is none."""
        row = await self._rows.find_one_and_update(
            {"backfill_id": backfill.backfill_id, "status": BackfillRunStatus.PENDING.value},
            {"$set": {"status": BackfillRunStatus.RUNNING.value, "started_at": datetime.now(UTC)}},
            sort=[("at", _SORTS[backfill.order])],
            return_document=ReturnDocument.AFTER,
        )
        return None if row is None else _run(row)

    @translate_errors
    async def note_submission(self, backfill_id: str, run: BackfillRun) -> None:
        """Note that a backfill submits a task to the admission queue next."""
        await self._rows.update_one({"_id": _row_id(backfill_id, run.at)}, {"$set": {"submitted": True}})

    @translate_errors
    async def is_submitted(self, backfill_id: str, run: BackfillRun) -> bool:
        """Return whether a submission was noted, now or by an engine that was killed."""
        wanted = {"_id": _row_id(backfill_id, run.at), "submitted": True}
        return await self._rows.find_one(wanted, {"_id": 1}) is not None

    @translate_errors
    async def end_run(self, backfill_id: str, run: BackfillRun, outcome: BackfillOutcome) -> None:
        """Write how a running nominal time has ended."""
        running = {
            "_id": _row_id(backfill_id, run.at),
            "status": BackfillRunStatus.RUNNING.value,
            "tries": run.tries,
        }
        ended = {
            "status": outcome.status.value,
            "reason": outcome.reason,
            "code": outcome.code,
            "ended_at": datetime.now(UTC),
        }
        await self._rows.update_one(running, {"$set": ended})

    @translate_errors
    async def cancel(self, backfill_id: str, *, running: bool = False) -> None:
        """Cancel a backfill that has not ended: none of its pending nominal times starts after this.

        With `running`, note that the tasks that run are to be cancelled, too.
        """
        state = {
            "state": BackfillState.CANCELLING.value,
            **({"cancels_running": True} if running else {}),
        }
        opened = {"_id": backfill_id, "state": {"$nin": _ENDED}}
        await self._backfills.update_one(opened, {"$set": state})
        await self.cancel_pending(backfill_id)

    @translate_errors
    async def cancel_pending(self, backfill_id: str) -> None:
        """Cancel the nominal times that have not started."""
        ended = {
            "status": BackfillRunStatus.CANCELLED.value,
            "reason": "the backfill was cancelled before",
            "ended_at": datetime.now(UTC),
        }
        pending = {"backfill_id": backfill_id, "status": BackfillRunStatus.PENDING.value}
        await self._rows.update_many(pending, {"$set": ended})

    @translate_errors
    async def retry_failed(self, backfill_id: str, task: bytes) -> int:
        """Let the failed nominal times start again, with this packed graph and params. Return their number."""
        again = {
            "$set": {
                "state": BackfillState.RUNNING.value,
                "cancels_running": False,
                "ended_at": None,
                "task": Binary(task),
            },
            "$inc": {"revision": 1},
        }
        await self._backfills.update_one({"_id": backfill_id}, again)
        failed = {"backfill_id": backfill_id, "status": BackfillRunStatus.FAILED.value}
        pending = {"$set": {"status": BackfillRunStatus.PENDING.value, **_NO_OUTCOME}, "$inc": {"tries": 1}}
        changed: int = (await self._rows.update_many(failed, pending)).modified_count
        return changed

    @translate_errors
    async def close(self, backfill: StoredBackfill) -> bool:
        """Write the end of a backfill. Return False if one of its nominal times is open, or will start again."""
        still_open = {"backfill_id": backfill.backfill_id, "status": {"$in": _OPEN_ROWS}}
        if await self._rows.find_one(still_open, {"_id": 1}) is not None:
            return False
        is_cancelled = backfill.state in {BackfillState.CANCELLING, BackfillState.CANCELLED}
        state = BackfillState.CANCELLED if is_cancelled else BackfillState.FINISHED
        unchanged = {
            "_id": backfill.backfill_id,
            "state": backfill.state.value,
            "revision": backfill.revision,
        }
        ended = {"state": state.value, "ended_at": backfill.ended_at or datetime.now(UTC)}
        done = await self._backfills.update_one(unchanged, {"$set": ended})
        return bool(done.matched_count)

    @translate_errors
    async def ended_before(self, at: float, namespace_id: str) -> list[str]:
        """Return the ids of the backfills of a namespace that have ended before a Unix time.

        Those that were not created completely count from the beginning of their creation.
        """
        ended = {"state": {"$in": _ENDED}, "ended_at": {"$lt": moment(at)}}
        incomplete = {"state": BackfillState.CREATING.value, "created_at": {"$lt": moment(at)}}
        wanted = {"namespace_id": namespace_id, "$or": [ended, incomplete]}
        return [each["_id"] async for each in self._backfills.find(wanted, {"_id": 1})]

    @translate_errors
    async def count_rows(self, backfill_ids: Sequence[str]) -> int:
        """Return the number of nominal times of these backfills."""
        found: int = await self._rows.count_documents({"backfill_id": {"$in": list(backfill_ids)}})
        return found

    @translate_errors
    async def remove(self, backfill_ids: Sequence[str]) -> int:
        """Delete backfills of `ended_before` with their rows, and return the number of rows."""
        gone = await self._rows.delete_many({"backfill_id": {"$in": list(backfill_ids)}})
        removable = [*_ENDED, BackfillState.CREATING.value]
        await self._backfills.delete_many({"_id": {"$in": list(backfill_ids)}, "state": {"$in": removable}})
        removed: int = gone.deleted_count
        return removed


def _row_id(backfill_id: str, at: datetime) -> str:
    return f"{format_nominal(at)}.{backfill_id}"


def _row(backfill: StoredBackfill, at: datetime) -> Fields:
    return {
        "_id": _row_id(backfill.backfill_id, at),
        "backfill_id": backfill.backfill_id,
        "at": at,
        "task_id": Nominal(schedule=backfill.schedule, at=at).task_id,
        "status": BackfillRunStatus.PENDING.value,
        "tries": 0,
        "submitted": False,
        "started_at": None,
        **_NO_OUTCOME,
    }


def _run(row: Fields) -> BackfillRun:
    return BackfillRun(
        at=_utc(row["at"]),
        task_id=row["task_id"],
        status=BackfillRunStatus(row["status"]),
        reason=row["reason"],
        code=row["code"],
        tries=row["tries"],
        submitted=row["submitted"],
        started_at=_optional_utc(row["started_at"]),
        ended_at=_optional_utc(row["ended_at"]),
    )


def _document(backfill: StoredBackfill) -> Fields:
    admission = backfill.admission
    return {
        "_id": backfill.backfill_id,
        "schedule": backfill.schedule,
        "start": backfill.start,
        "end": backfill.end,
        "timezone": backfill.timezone,
        "order": backfill.order.value,
        "max_active": backfill.max_active,
        "existing": backfill.existing.value,
        "total": backfill.total,
        "queue": backfill.queue,
        "namespace_id": backfill.namespace_id,
        "state": backfill.state.value,
        "created_at": backfill.created_at,
        "admission": None
        if admission is None
        else {
            "user_id": admission.user_id,
            "tenant": admission.tenant,
            "priority": str(admission.priority),
        },
        "ended_at": backfill.ended_at,
        "revision": backfill.revision,
        "cancels_running": backfill.cancels_running,
    }


def _backfill(found: Fields) -> StoredBackfill:
    admission: Any = found["admission"]
    return StoredBackfill(
        backfill_id=found["_id"],
        schedule=found["schedule"],
        start=_utc(found["start"]),
        end=_utc(found["end"]),
        timezone=found["timezone"],
        order=Order(found["order"]),
        max_active=found["max_active"],
        existing=Existing(found["existing"]),
        total=found["total"],
        queue=found["queue"],
        namespace_id=found["namespace_id"],
        state=BackfillState(found["state"]),
        created_at=_utc(found["created_at"]),
        admission=None if admission is None else Admission(**admission),
        ended_at=_optional_utc(found["ended_at"]),
        revision=found["revision"],
        cancels_running=found["cancels_running"],
    )


def _utc(at: datetime) -> datetime:
    """Return a stored date, which a client may return without its time zone."""
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _optional_utc(at: datetime | None) -> datetime | None:
    return None if at is None else _utc(at)
