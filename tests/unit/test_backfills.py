"""The rules of backfills: which nominal times they have, and what becomes of each."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest

from flowkit import limits
from flowkit.adapters.backfills import BackfillStore, _row
from flowkit.adapters.tasks.replace import replacing
from flowkit.backfills.ranges import PAGE, check_range, empty_range, list_times, read_bound
from flowkit.backfills.rules import BackfillStep, SeenTask, estimate_left_sec, next_step, same_problem
from flowkit.backfills.views import BackfillView
from flowkit.errors import ConfigError
from flowkit.graph.scheduled import Nominal, nominal_fields, read_nominal
from flowkit.models import OpenTask, TaskStatus
from flowkit.models.admission import Admission
from flowkit.models.backfills import (
    BackfillOutcome,
    BackfillRun,
    BackfillRunStatus,
    BackfillState,
    Existing,
    Order,
    StoredBackfill,
)
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Sequence

START = datetime(2026, 11, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("given", "zone", "wanted"),
    [
        ("2026-11-01", "UTC", "2026-11-01T00:00:00+00:00"),
        ("2026-11-01", "Europe/Berlin", "2026-10-31T23:00:00+00:00"),
        ("2026-03-29", "Europe/Berlin", "2026-03-28T23:00:00+00:00"),
        ("2026-11-01", "America/New_York", "2026-11-01T04:00:00+00:00"),
        (" 2026-11-01T02:00:00+01:00 ", "UTC", "2026-11-01T01:00:00+00:00"),
        ("2026-11-01T02:00Z", "Europe/Berlin", "2026-11-01T02:00:00+00:00"),
        (datetime(2026, 11, 1, tzinfo=UTC), "Europe/Berlin", "2026-11-01T00:00:00+00:00"),
        (datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN), "UTC", "2026-10-25T00:30:00+00:00"),
        (datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1), "UTC", "2026-10-25T01:30:00+00:00"),
        (datetime(2026, 11, 1, 5, 59, 59, 1, tzinfo=UTC), "UTC", "2026-11-01T06:00:00+00:00"),
        ("2026-11-01T02:00:00.123456Z", "UTC", "2026-11-01T02:00:01+00:00"),
    ],
)
def test_a_date_begins_in_the_zone_of_the_schedule_and_a_time_has_its_own_offset(
    given: str | datetime, zone: str, wanted: str
) -> None:
    assert read_bound(given, "from", zone).isoformat() == wanted


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("2026-11-01T02:00:00", "from is '2026-11-01T02:00:00', without an offset; write a date such as"),
        ("yesterday", "from is 'yesterday'; write a date such as 2026-11-01"),
        ("2026-13-01", "from is '2026-13-01'; write"),
        ("0001-01-01", "from is '0001-01-01'; write"),
        (5, "from is 5; write"),
        (datetime(2026, 11, 1), "without a time zone; pass a datetime with tzinfo"),
    ],
)
def test_another_form_is_refused_with_the_right_one(given: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_bound(given, "from", "Europe/Berlin")
    assert text in str(caught.value)


def hours(start: datetime, count: int) -> list[datetime]:
    """Return so many hours from `start` on."""
    return [start + each * HOUR for each in range(count)]


async def listed(times: Sequence[datetime], start: datetime, end: datetime) -> list[datetime]:
    """Return the times of a range from a server that lists pages, after the start and until the end."""

    async def page(after: datetime, until: datetime) -> list[datetime]:
        return [at for at in times if after < at <= until][:PAGE]

    return await list_times(page, start, end)


async def test_the_start_belongs_to_a_range_and_its_end_does_not_on_any_number_of_pages() -> None:
    times = hours(START - HOUR, 3_000)
    assert await listed(times, START, START + 2 * HOUR) == hours(START, 2)
    for count in (PAGE - 1, PAGE, PAGE + 1, 2 * PAGE):
        assert await listed(times, START, START + count * HOUR) == hours(START, count)
    assert await listed(times, START + HOUR / 2, START + HOUR) == []


async def test_a_range_has_at_most_the_times_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BACKFILL_TIMES", 24)
    times = hours(START, 50)
    assert len(await listed(times, START, START + 24 * HOUR)) == 24
    with pytest.raises(ConfigError, match="more than 24 nominal times; .* with to 2026-11-02T00:00:00Z"):
        await listed(times, START, START + 25 * HOUR)


def test_an_empty_range_names_the_times_around_it() -> None:
    with pytest.raises(ConfigError, match="from is 2026-11-01T00:00:00Z, which is not before to"):
        check_range(START, START)
    error = empty_range(START, START + HOUR, START - HOUR, None)
    assert str(error).endswith(
        "from 2026-11-01T00:00:00Z to before 2026-11-01T01:00:00Z; the one before is 2026-10-31T23:00:00Z"
    )


AGAIN = BackfillStep.START_AGAIN
OPEN, OWN = SeenTask(is_open=True), SeenTask(is_own=True, status=TaskStatus.FINISHED)


def seen(status: TaskStatus | None) -> SeenTask:
    """Return a task that something else has started, and that Temporal does not run."""
    return SeenTask(status=status)


@pytest.mark.parametrize(
    ("task", "none", "failed", "all_"),
    [
        (seen(None), BackfillStep.START, BackfillStep.START, BackfillStep.START),
        (OWN, BackfillStep.AWAIT, BackfillStep.AWAIT, BackfillStep.AWAIT),
        (OPEN, "runs already", "runs already", "runs already"),
        (seen(TaskStatus.QUEUED), "is queued already", "is queued already", "is queued already"),
        (seen(TaskStatus.FINISHED), "has finished already", "has finished already", AGAIN),
        (
            seen(TaskStatus.FAILED),
            "which failed; `--existing failed`",
            BackfillStep.START_AGAIN,
            BackfillStep.START_AGAIN,
        ),
        (
            seen(TaskStatus.CANCELLED),
            "which was cancelled",
            BackfillStep.START_AGAIN,
            BackfillStep.START_AGAIN,
        ),
    ],
)
def test_what_becomes_of_a_nominal_time_whose_task_exists(
    task: SeenTask, none: BackfillStep | str, failed: BackfillStep | str, all_: BackfillStep | str
) -> None:
    for existing, wanted in ((Existing.NONE, none), (Existing.FAILED, failed), (Existing.ALL, all_)):
        step = next_step(task, existing, 0)
        if isinstance(wanted, BackfillStep):
            assert step is wanted
        else:
            assert isinstance(step, BackfillOutcome)
            assert step.status is BackfillRunStatus.SKIPPED
            assert wanted in (step.reason or "")


def test_retry_failed_starts_a_failed_task_again_whatever_existing_says() -> None:
    assert next_step(seen(TaskStatus.FAILED), Existing.NONE, 1) is BackfillStep.START_AGAIN
    assert isinstance(next_step(seen(TaskStatus.FINISHED), Existing.NONE, 1), BackfillOutcome)


def test_the_time_left_is_known_only_from_tasks_that_have_ended() -> None:
    assert estimate_left_sec([10.0, 10.0], 8, 4) is None
    assert estimate_left_sec([10.0, 10.0, 10.0], 8, 4) == 20.0
    assert estimate_left_sec([10.0, 10.0, 10.0], 1, 4) == 10.0


def test_the_nodes_of_another_graph_begin_after_all_attempts_of_the_earlier_one() -> None:
    earlier = {
        "graph": {"nodes": [{"attempt_epoch": 7, "generation": 1}, {"attempt_epoch": 3, "generation": 4}]}
    }
    graph = {"nodes": [{"node_id": "a", "type": "x"}, {"node_id": "new", "type": "x", "depends_on": ["a"]}]}
    opening = OpenTask(
        task_id="t", first_run_id="f", run_id="r", at=1.0, graph=graph, params={"n": 1}, scheduled_at="now"
    )
    sets, unsets = replacing(earlier, opening)
    begun = [
        (each["node_id"], each["attempt_epoch"], each["first_epoch"], each["generation"])
        for each in sets["graph"]["nodes"]
    ]
    assert begun == [("a", 7, 7, 4), ("new", 7, 7, 4)]
    assert (sets["params"], sets["scheduled_at"]) == ({"n": 1}, "now")
    assert "coordinator.vars" in unsets


def test_a_nominal_time_is_read_back_from_a_request_and_from_nothing_else() -> None:
    nominal = Nominal(schedule="nightly", at=START)
    assert nominal.task_id == "nightly-2026-11-01T00:00:00Z"
    assert read_nominal(nominal_fields(nominal)) == nominal
    for fields in ({}, {"schedule": "s"}, {"schedule": "s", "scheduled_at": "x"}, {"scheduled_at": 5}):
        assert read_nominal(fields) is None


def stored(**fields: Any) -> StoredBackfill:
    """Return a backfill of four hours."""
    given: dict[str, Any] = {
        "backfill_id": "b",
        "schedule": "hourly",
        "start": START,
        "end": START + 4 * HOUR,
        "timezone": "UTC",
        "order": Order.NEWEST,
        "max_active": 2,
        "existing": Existing.NONE,
        "total": 4,
        "queue": "flowkit",
        "namespace_id": "n",
        "state": BackfillState.RUNNING,
        "created_at": START,
    }
    return StoredBackfill(**{**given, **fields})


async def new_store(**fields: Any) -> tuple[BackfillStore, StoredBackfill]:
    """Return a store with one backfill."""
    store, backfill = BackfillStore(memory_database()), stored(**fields)
    assert await store.insert(backfill, b"task", hours(START, 4))
    assert not await store.insert(backfill, b"other", hours(START, 4))
    await store.complete(backfill)
    return store, backfill


async def test_an_interrupted_creation_continues_starts_nothing_and_is_purged() -> None:
    store, backfill = BackfillStore(memory_database()), stored()
    assert await store.insert(backfill, b"task", hours(START, 4))
    interrupted = await store.find("b")
    assert interrupted == stored(state=BackfillState.CREATING)
    created = START.timestamp()
    assert await store.ended_before(created, "n") == []
    assert await store.ended_before(created + 1, "n") == ["b"]
    await store._rows.insert_one(_row(backfill, START))  # A killed call has stored only this one.
    await asyncio.gather(store.complete(backfill), store.complete(backfill))
    assert (await store.find("b"), (await store.counts("b")).pending) == (backfill, 4)
    assert await store.ended_before(created + 1, "n") == []
    await store._backfills.update_one({"_id": "b"}, {"$set": {"state": "creating"}})
    assert await store.remove(["b"]) == 4
    assert await store.find("b") is None


async def test_nothing_starts_of_a_backfill_that_was_cancelled_during_its_creation() -> None:
    store, backfill = BackfillStore(memory_database()), stored()
    assert await store.insert(backfill, b"task", hours(START, 4))
    await store.cancel("b")
    cancelled = await store.find("b")
    assert cancelled is not None
    assert await store.close(cancelled)
    await store.complete(backfill)
    assert (await store.counts("b")).text == "4 cancelled"
    assert await store.claim(backfill) is None


def test_a_second_creation_with_the_same_id_asks_for_the_same() -> None:
    found = stored(admission=Admission(user_id="ada"))
    asked = {"schedule": "hourly", "from": START, "max_active": 2, "admission": Admission(user_id="ada")}
    assert same_problem(found, "n", asked) is None
    for name, value, text in (
        ("schedule", "daily", "whose schedule is 'hourly' and not 'daily'; choose another id"),
        ("to", START, "whose to is 2026-11-01T04:00:00Z and not 2026-11-01T00:00:00Z"),
        ("order", Order.OLDEST, "whose order is 'newest' and not 'oldest'"),
        ("max_active", 3, "whose max_active is 2 and not 3"),
        (
            "admission",
            None,
            "whose admission is for user 'ada' of tenant 'default', with priority normal and not none",
        ),
    ):
        assert text in (same_problem(found, "n", {**asked, name: value}) or "")
    assert "in another namespace" in (same_problem(found, "m", asked) or "")


async def test_a_backfill_is_stored_as_it_is() -> None:
    store, backfill = await new_store(admission=Admission(user_id="ada", priority="low"))
    assert await store.find("b") == backfill
    assert await store.task("b") == b"task"
    assert await store.newest("n", 10, schedule="hourly") == [backfill]
    assert await store.newest("other", 10) == []
    view = BackfillView(backfill=backfill, counts=await store.counts("b"))
    assert (view.percent, view.as_json()["counts"]["pending"]) == (0, 4)


async def test_a_nominal_time_is_claimed_once_in_order_and_a_cancel_takes_the_rest() -> None:
    store, backfill = await new_store()
    first = await store.claim(backfill)
    second = await store.claim(backfill)
    assert first is not None
    assert second is not None
    assert (first.at, second.at) == (START + 3 * HOUR, START + 2 * HOUR)
    assert not await store.close(backfill)
    await store.cancel("b", running=True)
    assert await store.claim(backfill) is None
    present = await store.find("b")
    assert present is not None
    assert (present.state, present.cancels_running) == (BackfillState.CANCELLING, True)
    await store.end_run("b", first, BackfillOutcome(status=BackfillRunStatus.SUCCEEDED))
    await store.end_run("b", second, BackfillOutcome(status=BackfillRunStatus.FAILED, reason="no", code="c"))
    assert (await store.counts("b")).text == "1 succeeded, 1 failed, 2 cancelled"
    assert not await store.close(backfill)  # It was read before the cancel.
    assert await store.close(present)
    closed = await store.find("b")
    assert closed is not None
    assert (closed.state, closed.ended_at is not None) == (BackfillState.CANCELLED, True)
    await store.cancel("b")
    assert await store.find("b") == closed


async def test_retry_failed_takes_only_the_failed_ones_and_an_earlier_read_does_not_close_them() -> None:
    store, backfill = await new_store(order=Order.OLDEST)
    while (run := await store.claim(backfill)) is not None:
        failed = run.at == START
        status = BackfillRunStatus.FAILED if failed else BackfillRunStatus.SUCCEEDED
        await store.end_run("b", run, BackfillOutcome(status=status, reason="no" if failed else None))
    assert await store.close(backfill)
    ended = await store.find("b")
    assert ended is not None
    assert await store.retry_failed("b", b"present") == 1
    assert (await store.task("b"), (await store.counts("b")).pending) == (b"present", 1)
    assert not await store.close(ended)
    present = await store.find("b")
    assert present is not None
    run = await store.claim(present)
    assert run is not None
    assert (run.tries, run.reason, run.ended_at) == (1, None, None)
    late = BackfillRun(at=run.at, task_id=run.task_id, status=run.status, tries=0)
    await store.end_run("b", late, BackfillOutcome(status=BackfillRunStatus.SUCCEEDED))
    assert (await store.counts("b")).running == 1


async def test_purge_removes_ended_backfills_with_their_rows() -> None:
    store, backfill = await new_store()
    later = datetime.now(UTC).timestamp() + 60
    assert await store.ended_before(later, "n") == []
    await store.cancel("b")
    present = await store.find("b")
    assert present is not None
    assert await store.close(present)
    assert await store.ended_before(later, "other") == []
    assert await store.ended_before(later, "n") == ["b"]
    assert await store.count_rows(["b"]) == 4
    assert await store.remove(["b"]) == 4
    assert await store.find(backfill.backfill_id) is None
