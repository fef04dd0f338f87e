"""What handlers log is kept with their attempt: which lines, in which order, and of which attempt."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import logging
import logging.config
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import bson
import pytest

from flowkit.adapters.tasks.queries import TaskQueries
from flowkit.cli.tasks import lines as lines_of_tasks
from flowkit.cli.tasks.lines import LineOptions, _has_ended, _print_found
from flowkit.client import TaskCatalog
from flowkit.config import WorkerConfig
from flowkit.core import handler_lines
from flowkit.core.handler_lines import CaptureHandler, HandlerLine, begin_attempt, end_attempt
from flowkit.core.instruments import LOG_LINES, LOG_LINES_DROPPED
from flowkit.errors import StoreUnavailable
from flowkit.observe import log_buffer
from flowkit.observe.log_keeper import HandlerLogKeeper
from flowkit.observe.log_reading import HandlerLogReader
from flowkit.observe.log_store import LogStore
from flowkit.testing import memory_database, run_graph
from flowkit.worker import Batch, BatchResult, RoleHandler
from tests.contract.builders import attempt
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.unit.event_loop import let_other_tasks_run
from tests.unit.handler_runs import node
from tests.unit.measured import measuring

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from flowkit.products import KeptLine

SHOP = logging.getLogger("shop")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    root.setLevel(logging.INFO)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


async def read(db: Any, task_id: str, node_id: str | None = None, **options: Any) -> list[KeptLine]:
    """Return all lines that are kept now."""
    found: list[KeptLine] = []
    async for lines in HandlerLogReader(db).lines(task_id, node_id, **options):
        if not lines:
            return found
        found += lines
    return found


class Talking(RoleHandler):
    """Logs in its hooks."""

    role = "talking"

    def init(self, info: dict[str, Any]) -> None:
        """Log on a thread."""
        SHOP.info("begins on a thread")

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield two batches."""
        for number in range(2):
            yield Batch(batch_uid=f"b{number}", payload={})

    async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        """Log by all ways."""
        SHOP.debug("not kept")
        SHOP.warning("slow page %d", 3)
        ctx.log.info("page read", page=3, password="hunter2")
        thread = threading.Thread(target=lambda: ctx.log.info("from a thread of the handler"))
        thread.start()
        await asyncio.to_thread(thread.join)
        return BatchResult(success=True, metrics={"n": 1})


async def test_lines_of_all_hooks_are_kept_with_their_batch() -> None:
    db = memory_database()
    run = await run_graph({"nodes": [node("a", "talking")]}, Talking(), db=db)
    lines = await read(db, run.task_id)
    assert [(each.level, each.logger, each.text, each.batch_uid) for each in lines[:4]] == [
        ("INFO", "shop", "begins on a thread", ""),
        ("WARNING", "shop", "slow page 3", "b0"),
        ("INFO", "flowkit.handler", 'page read  page=3 password="(hidden)"', "b0"),
        ("INFO", "flowkit.handler", "from a thread of the handler", "b0"),
    ]
    assert len(lines) == 7
    assert {(each.node_id, each.attempt, each.left_out) for each in lines} == {("a", 1, 0)}
    assert [each.text for each in await read(db, run.task_id, level="WARNING")] == ["slow page 3"] * 2
    assert await read(db, run.task_id, "other") == []


class Flaky(RoleHandler):
    """Fails in its first attempt, with a secret of its input in the text."""

    role = "flaky"

    async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        """Fail once."""
        SHOP.info("attempt %d of %s signs in with %s", ctx.attempt_epoch, ctx.node_id, ctx.params["token"])
        if ctx.attempt_epoch == 1:
            raise ConnectionError(f"cannot sign in with {ctx.params['token']}")
        return BatchResult(success=True)


async def test_attempts_do_not_mix_and_the_traceback_of_a_failure_is_kept_without_secrets() -> None:
    db = memory_database()
    nodes = [node(name, "flaky", retry_policy={"max": 1, "backoff_sec": 0.1}) for name in "abc"]
    run = await run_graph({"nodes": nodes}, Flaky(), db=db, params={"token": "correct-horse"})
    lines = await read(db, run.task_id)
    for name in "abc":
        first = [each for each in lines if (each.node_id, each.attempt) == (name, 1)]
        assert [each.level for each in first] == ["INFO", "WARNING"]
        assert first[0].text == f"attempt 1 of {name} signs in with (hidden)"
        assert "ConnectionError: cannot sign in with (hidden)" in first[1].text
        assert "Traceback" in first[1].text
        (second,) = await read(db, run.task_id, name, attempt=2)
        assert second.text.startswith(f"attempt 2 of {name}")
    assert "correct-horse" not in str(lines)


class Kept:
    """Lines of attempts that run in this test, without a task."""

    def __init__(self, db: Any, keeper: HandlerLogKeeper) -> None:
        self.db = db
        self.keeper = keeper

    async def run(self, body: Any, node_id: str = "a", **given: Any) -> None:
        """Call a function as the handler of an attempt."""

        async def run() -> None:
            own = replace(attempt(node_id), **given)
            begin_attempt(own, "w-1", "run-1", self.keeper)
            try:
                body()
            finally:
                end_attempt()

        await asyncio.create_task(run())

    async def texts(self, **options: Any) -> list[str]:
        """Return the texts of the lines that are kept."""
        await self.keeper.flush()
        return [each.text for each in await read(self.db, attempt().task_id, **options)]


@pytest.fixture
async def kept(request: pytest.FixtureRequest) -> AsyncIterator[Kept]:
    """A keeper that writes when the test asks for the lines. The parameter has its settings."""
    db = memory_database()
    keeper = HandlerLogKeeper(db, WorkerConfig(**getattr(request, "param", {})), pause_sec=3_600)
    keeper.start()
    yield Kept(db, keeper)
    await keeper.stop()


with_prints = pytest.mark.parametrize("kept", [{"keep_prints": True}], indirect=True)


@with_prints
async def test_printed_lines_are_kept_if_a_setting_says_so(kept: Kept) -> None:
    def body() -> None:
        sys.stdout.write("one 1\ntwo")
        handler = logging.StreamHandler(sys.stdout)
        handler.emit(logging.makeLogRecord({"msg": "a record, no printed line"}))
        sys.stdout.write("\nthree")

    handler_lines.start_capture(logging.INFO, prints=True)  # pytest has replaced the stream since the fixture
    await kept.run(body)
    handler_lines.stop_capture(prints=True)
    assert (await kept.texts())[:2] == ["one 1", "two"]
    assert (await kept.texts())[-1] == "three"


@with_prints
@pytest.mark.parametrize("often", [True, False])
async def test_a_progress_bar_shows_its_latest_state_while_it_runs(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, often: bool
) -> None:
    """It prints one line again and again, with a carriage return before or after it, and not all states are kept."""

    def body() -> None:
        for number in range(4):
            sys.stdout.write(f"\r{number} of 4")
        during.extend(each.line.text for buffer in kept.keeper._changed for each in buffer._head)
        sys.stdout.write("\r4 of 4\ndone\r\n")
        for number in range(4):
            sys.stdout.write(f"{number} %\r")

    during: list[str] = []
    monkeypatch.setattr(handler_lines, "_PROGRESS_SEC", 0.0 if often else 3_600.0)
    handler_lines.start_capture(logging.INFO, prints=True)
    await kept.run(body)
    handler_lines.stop_capture(prints=True)
    assert during == (["0 of 4", "1 of 4", "2 of 4"] if often else ["0 of 4"])
    last = ["4 of 4", "done", "0 %", "1 %", "2 %", "3 %"] if often else ["4 of 4", "done", "3 %"]
    assert await kept.texts() == [*during, *last]


async def test_printed_lines_are_not_kept_by_default(kept: Kept) -> None:
    await kept.run(lambda: sys.stdout.write("one\n"))
    assert await kept.texts() == []


@pytest.mark.parametrize("kept", [{"kept_log_level": {"crawler": "OFF"}}], indirect=True)
async def test_role_can_be_switched_off(kept: Kept) -> None:
    await kept.run(lambda: SHOP.error("not kept"))
    await kept.run(lambda: SHOP.info("kept"), role="other")
    assert await kept.texts() == ["kept"]


@pytest.mark.parametrize("kept", [{"kept_log_level": "DEBUG"}], indirect=True)
async def test_drivers_and_flowkit_itself_do_not_fill_the_log(kept: Kept) -> None:
    def body() -> None:
        SHOP.setLevel(logging.DEBUG)
        SHOP.debug("kept")
        pymongo = logging.getLogger("pymongo.command")
        pymongo.setLevel(logging.DEBUG)
        pymongo.debug("insert")
        pymongo.setLevel(logging.NOTSET)
        SHOP.setLevel(logging.NOTSET)
        pymongo.warning("slow")

    await kept.run(body)
    assert await kept.texts() == ["kept", "slow"]


async def test_configuration_of_the_user_does_not_end_the_capture(kept: Kept) -> None:
    def configure() -> None:
        logging.config.dictConfig(
            {"version": 1, "disable_existing_loggers": False, "root": {"level": "INFO"}}
        )

    await kept.run(configure)
    await kept.run(lambda: SHOP.info("after it"))
    assert await kept.texts() == ["after it"]


async def test_logger_of_the_context_survives_every_configuration(kept: Kept) -> None:
    """A configuration disables all loggers that it does not name, if it does not say otherwise."""
    ours = logging.getLogger("flowkit")
    before = {each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)}
    handlers, was_disabled = ours.handlers[:], {each for each in before if each.disabled}

    def configure() -> None:
        logger = handler_lines.HandlerLogger()
        separate = {"propagate": False, "handlers": []}
        logging.config.dictConfig(
            {"version": 1, "root": {"level": "ERROR"}, "loggers": {"flowkit": separate}}
        )
        logger.info("after it")

    try:
        await kept.run(configure)
    finally:
        ours.propagate, ours.handlers[:] = True, handlers
        for each in before - was_disabled:
            each.disabled = False
    assert await kept.texts() == ["after it"]


async def test_warnings_of_a_program_without_handlers_are_printed_as_before(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    own = [each for each in root.handlers if isinstance(each, CaptureHandler)]
    monkeypatch.setattr(root, "handlers", own)
    SHOP.warning("printed")
    SHOP.info("not printed")
    with_handler = logging.getLogger("shop.quiet")
    with_handler.addHandler(logging.NullHandler())
    with_handler.warning("taken by its handler")
    assert capsys.readouterr().err == "printed\n"


async def test_broken_records_are_lines_too(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __str__(self) -> str:
            raise SystemExit("its text cannot be made")

    def body() -> None:
        SHOP.info("%d items", "many")
        SHOP.info(Broken())
        SHOP.info("fields", extra={"page": Broken()})
        try:
            raise RuntimeError("inner")
        except RuntimeError:
            SHOP.exception("outer")

    root = logging.getLogger()
    monkeypatch.setattr(
        root, "handlers", [each for each in root.handlers if isinstance(each, CaptureHandler)]
    )
    await kept.run(body)
    texts = await kept.texts()
    assert texts[0] == "%d items  (its arguments do not fit)"
    assert texts[1] == "a line whose text cannot be made"
    assert texts[-1].startswith("outer\nTraceback")


async def test_text_that_logs_itself_ends(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    class Talkative:
        def __str__(self) -> str:
            SHOP.info(self)
            return "its text"

    root = logging.getLogger()
    own = [each for each in root.handlers if isinstance(each, CaptureHandler)]
    monkeypatch.setattr(root, "handlers", own)
    await kept.run(lambda: SHOP.info(Talkative()))
    texts = await kept.texts()
    assert texts == ["a line that the text of another line has logged", *["its text"] * 3]


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ({"levelno": 10**30}, "CRITICAL"),
        ({"created": float("nan")}, "INFO"),
        ({"created": 1e30}, "INFO"),
        ({"created": -1e30}, "INFO"),
        ({"name": "x" * 1_000}, "INFO"),
        ({"msg": "\x00cut\x00and more"}, "INFO"),
    ],
    ids=["level", "no time", "late", "early", "name", "mark"],
)
async def test_strange_records_do_not_cost_the_lines_of_others(
    kept: Kept, given: dict[str, Any], level: str
) -> None:
    record = logging.makeLogRecord({"name": "shop", "levelno": logging.INFO, "msg": "strange", **given})

    def body() -> None:
        SHOP.info("before")
        logging.getLogger().handle(record)

    await kept.run(body)
    assert await kept.texts() == ["before", given.get("msg", "strange")]
    lines = await read(kept.db, attempt().task_id)
    assert (lines[-1].level, len(lines[-1].logger) <= 200) == (level, True)
    bson.encode(await kept.db.attempt_logs.find_one({}))


async def test_records_without_a_text_name_fail_no_attempt(kept: Kept) -> None:
    await kept.run(lambda: logging.getLogger().handle(logging.makeLogRecord({"name": None, "levelno": 20})))
    await kept.run(lambda: SHOP.info("after it"))
    assert await kept.texts() == ["after it"]


async def test_fields_of_the_user_stay_and_their_nested_secrets_are_hidden(kept: Kept) -> None:
    """Some have the names of fields that name the attempt."""
    settings = {"db": {"password": "hunter2", "port": 1}, "hosts": [{"api_key": "k-1"}]}
    given = {"role": "admin", "task_id": "other", "settings": settings, "prompt_tokens": 512}
    await kept.run(lambda: SHOP.info("signed in", extra=given))
    (text,) = await kept.texts()
    assert 'role="admin"' in text
    assert 'task_id="other"' in text
    assert "prompt_tokens=512" in text
    assert "hunter2" not in text
    assert "k-1" not in text
    assert "run_id" not in text


async def test_finalizer_may_log_while_a_line_is_added(kept: Kept) -> None:
    """Python collects garbage at any time, also while the keeper holds its lock."""

    class Connection:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            SHOP.info("unclosed")

    def body() -> None:
        threshold = gc.get_threshold()
        gc.set_threshold(1)
        try:
            for _ in range(300):
                Connection()
                SHOP.info("line")
        finally:
            gc.set_threshold(*threshold)
            gc.collect()

    def run_on_a_thread() -> None:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(body,), daemon=True)
        thread.start()
        thread.join(EVENT_TIMEOUT_SEC)
        assert not thread.is_alive()

    await kept.run(run_on_a_thread)
    texts = await kept.texts()
    assert (texts.count("line"), texts.count("unclosed")) == (300, 300)


async def test_process_that_a_handler_forks_logs_without_its_locks(kept: Kept) -> None:
    """Another thread may hold one at the moment of the fork."""

    def body() -> None:
        SHOP.info("before")
        logger = handler_lines.HandlerLogger()
        with ThreadPoolExecutor(1) as thread:
            thread.submit(kept.keeper._lock.acquire).result()
            child = os.fork()
            if not child:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(20)
                SHOP.info("of the child")
                logger.info("of the child, too")
                os._exit(0)
            thread.submit(kept.keeper._lock.release).result()
        assert os.waitpid(child, 0)[1] == 0

    await kept.run(body)
    assert await kept.texts() == ["before"]


async def test_captured_warnings_are_lines(kept: Kept) -> None:
    def body() -> None:
        logging.captureWarnings(True)
        try:
            warnings.simplefilter("always")
            warnings.warn("old", DeprecationWarning, stacklevel=1)
        finally:
            logging.captureWarnings(False)

    with warnings.catch_warnings():
        await kept.run(body)
    assert "DeprecationWarning: old" in (await kept.texts())[0]


async def test_line_of_a_thread_after_the_end_of_its_attempt_is_kept(kept: Kept) -> None:
    logger: list[Any] = []
    await kept.run(lambda: logger.append(handler_lines.HandlerLogger()))
    assert await kept.texts() == []
    thread = threading.Thread(target=lambda: logger[0].info("late"))
    thread.start()
    thread.join()
    assert await kept.texts() == ["late"]


async def test_outside_of_attempts_nothing_is_kept(kept: Kept) -> None:
    SHOP.error("not in an attempt")
    assert await kept.texts() == []


async def test_lines_that_were_left_out_are_counted_where_they_are_missing(kept: Kept) -> None:
    def body() -> None:
        for number in range(20_000):
            SHOP.info("line %d", number)
        SHOP.warning("last")

    await kept.run(body)
    await kept.texts()
    lines = await read(kept.db, attempt().task_id)
    (gap,) = [each for each in lines if each.left_out]
    assert gap.left_out == 20_001 - len(lines)
    (warning,) = await read(kept.db, attempt().task_id, level="WARNING")
    assert (warning.text, warning.left_out) == ("last", gap.left_out)


async def test_long_lines_of_the_same_moment_keep_their_order(kept: Kept) -> None:
    """They need many documents, whose ids decide about their order."""

    def body() -> None:
        for number in range(60):
            record = {
                "name": "shop",
                "levelno": logging.INFO,
                "msg": f"{number} " + "x" * 15_000,
                "created": 1e9,
            }
            logging.getLogger().handle(logging.makeLogRecord(record))

    await kept.run(body)
    texts = await kept.texts()
    assert [int(each.split()[0]) for each in texts] == [*range(60)]
    lines = await read(kept.db, attempt().task_id)
    assert not [each for each in lines if each.left_out]
    places = [each.place for each in lines]
    assert places == sorted(places)


async def test_pages_of_an_attempt_meet_each_other(kept: Kept) -> None:
    def body() -> None:
        for number in range(25):
            SHOP.info("line %d", number)

    await kept.run(body)
    await kept.keeper.flush()
    reader, own = HandlerLogReader(kept.db), attempt()
    place = own.task_id, own.node_id, own.epoch
    last = await reader.page(*place, limit=10)
    before = await reader.page(*place, before=last.lines[0].place, limit=10)
    first = await reader.page(*place, before=before.lines[0].place, limit=10)
    assert [len(each.lines) for each in (first, before, last)] == [5, 10, 10]
    assert [each.earlier for each in (first, before, last)] == [False, True, True]
    again = await reader.page(*place, after=first.end, limit=10)
    assert [each.text for each in again.lines] == [each.text for each in before.lines]
    assert again.later
    assert await reader.page(*place, after=again.end, limit=10) == replace(last, later=False)
    await kept.run(lambda: SHOP.info("new"), epoch=own.epoch)
    await kept.keeper.flush()
    assert [each.text for each in (await reader.page(*place, after=last.end)).lines] == ["new"]


async def test_page_after_a_place_reads_what_is_new(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """It continues behind lines of a lower level, and numbers what it has not read."""
    clock, find, read_rows = time.time(), LogStore.find, list[str]()

    async def count(store: LogStore, wanted: Any, **options: Any) -> AsyncIterator[Any]:
        async for row in find(store, wanted, **options):
            read_rows.append(row["_id"])
            yield row

    own = attempt()
    buffers = [kept.keeper.sink(replace(own, shard=shard), "w-1") for shard in (1, 2)]

    async def log(after_sec: float, level: int, *, shard: int = 1) -> None:
        buffer = buffers[shard - 1]
        assert buffer is not None
        buffer.add(HandlerLine(clock + after_sec, level, "shop", f"at {after_sec}"))
        await kept.keeper.flush()

    for number in range(10):
        await log(number, logging.ERROR if number == 0 else logging.INFO, shard=1 + number % 2)
    monkeypatch.setattr(LogStore, "find", count)
    reader, place = HandlerLogReader(kept.db), (own.task_id, own.node_id, own.epoch)
    page = await reader.page(*place, level="ERROR")
    assert ([each.text for each in page.lines], len(read_rows)) == (["at 0"], 10)
    read_rows.clear()
    await log(10, logging.INFO)
    await log(11, logging.INFO, shard=2)
    assert (await reader.page(*place, level="ERROR", after=page.end)).lines == []
    assert len(read_rows) == 4  # the last one of each log, and the new ones
    every = await reader.page(*place, after=page.end)
    assert [(each.text, each.left_out) for each in every.lines] == [("at 10", 0), ("at 11", 0)]
    assert (await reader.page(*place, after=every.end)).end == every.end


@pytest.mark.parametrize("by_page", [False, True])
async def test_events_are_followed_whatever_the_clocks_of_worker_and_bridge(by_page: bool) -> None:
    """The worker is an hour fast, and the second bridge an hour slow."""
    db, own = memory_database(), {"task_id": "t", "node_id": "ext", "attempt_epoch": 1}
    await db.dispatches.insert_one({**own})
    reader, now = HandlerLogReader(db), datetime.now(UTC)
    found, cursor, seen = reader.lines("t"), "", list[str]()
    for number in range(4):
        await db.worker_events.insert_one(
            {
                **own,
                "ts_ms": int((now.timestamp() + 3_600 + number) * 1000),
                "created_at": now - timedelta(hours=number // 2),
                "payload": {"kind": "BATCH_OK", "batch_uid": f"b{number}"},
            }
        )
        if by_page:
            page = await reader.page("t", "ext", 1, after=cursor)
            cursor = page.end
            seen += [each.text for each in page.lines]
        else:
            async for lines in found:
                if not lines:
                    break
                seen += [each.text for each in lines]
    assert seen == [f"batch ok  batch_uid=b{number}" for number in range(4)]


def stored_row(log: str, row: int, at: datetime, stored_at: datetime, **line: Any) -> dict[str, Any]:
    """Return a document with one line as MongoDB has it."""
    own = attempt()
    return {
        "_id": f"{log * 16}-{row:08d}",
        "task_id": own.task_id,
        "node_id": own.node_id,
        "attempt_epoch": own.epoch,
        "shard": 0,
        "worker_id": log,
        "at": at,
        "until": at,
        "created_at": stored_at,
        "lines": [
            {"n": row, "at": at, "level": logging.INFO, "logger": "shop", "text": f"{log}{row}", **line}
        ],
    }


async def test_look_that_breaks_off_loses_no_rows_that_were_stored_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first row waited long for MongoDB. The next ones were stored earlier, and were not read when it failed."""
    db, now, find = memory_database(), datetime.now(UTC), LogStore.find
    hour = timedelta(hours=1)
    await db.attempt_logs.insert_one(stored_row("a", 1, now - 3 * hour, now))
    await db.attempt_logs.insert_one(stored_row("b", 1, now - 2 * hour, now - 2 * hour))

    async def break_off(store: LogStore, wanted: Any, **options: Any) -> AsyncIterator[Any]:
        async for row in find(store, wanted, **options):
            yield row
            raise StoreUnavailable("no server responds")

    found = HandlerLogReader(db).lines(attempt().task_id)
    monkeypatch.setattr(LogStore, "find", break_off)
    with pytest.raises(StoreUnavailable):
        await anext(found)
    monkeypatch.setattr(LogStore, "find", find)
    texts: list[str] = []
    while lines := await anext(found):
        texts += [each.text for each in lines]
    assert texts == ["a1", "b1"]


async def test_page_shows_no_line_again_before_lines_that_are_missing_are_counted() -> None:
    """The lines that are missing come before one of a lower level, so the next shown line will count them."""
    db, own, now = memory_database(), attempt(), datetime.now(UTC)
    reader, cursor, seen = HandlerLogReader(db), "", list[tuple[str, int]]()
    rows = [
        stored_row("a", 1, now, now),
        stored_row("a", 50, now, now, level=logging.DEBUG),
        stored_row("a", 51, now, now),
    ]
    for new in (rows[:2], rows[2:]):
        await db.attempt_logs.insert_many(new)
        for _ in range(2):
            page = await reader.page(own.task_id, own.node_id, own.epoch, level="INFO", after=cursor)
            cursor = page.end
            seen += [(each.text, each.left_out) for each in page.lines]
    assert seen == [("a1", 0), ("a51", 48)]


@pytest.mark.parametrize(
    "text", ["", "x", "5~", "1" * 30, "5~zz=1.2", "5~worker_events=1.a~", "5~" + "a" * 16]
)
async def test_text_that_is_no_cursor_is_before_all_lines(kept: Kept, text: str) -> None:
    await kept.run(lambda: SHOP.info("one"))
    await kept.keeper.flush()
    own = attempt()
    page = await HandlerLogReader(kept.db).page(own.task_id, own.node_id, own.epoch, after=text)
    assert [each.text for each in page.lines] == ["one"]


async def test_who_follows_a_task_gets_each_line_once(kept: Kept) -> None:
    await kept.run(lambda: SHOP.info("one"))
    await kept.keeper.flush()
    found = HandlerLogReader(kept.db).lines(attempt().task_id)

    async def now() -> list[str]:
        texts: list[str] = []
        async for lines in found:
            if not lines:
                break
            texts += [each.text for each in lines]
        return texts

    assert await now() == ["one"]
    assert await now() == []
    await kept.run(lambda: SHOP.info("two"), node_id="b")
    await kept.keeper.flush()
    assert await now() == ["two"]
    assert await now() == []


async def test_who_follows_a_task_gets_each_line_once_across_an_outage(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MongoDB fails between two documents, then several times, and the task ends meanwhile."""
    for number in range(3):
        await kept.run(lambda number=number: SHOP.info("line %d", number), node_id=f"n{number}")
        await kept.keeper.flush()
    await kept.db.tasks.insert_one({"id": attempt().task_id, "status": "running"})
    find, outages = LogStore.find, [1, 0, 0]

    async def break_off(store: LogStore, wanted: Any, **options: Any) -> AsyncIterator[Any]:
        left = outages.pop(0) if outages else 99
        async for row in find(store, wanted, **options):
            if not left:
                break
            left -= 1
            yield row
        if not left:
            raise StoreUnavailable("no server responds")
        if not outages:
            await kept.db.tasks.update_one({}, {"$set": {"status": "finished"}})

    monkeypatch.setattr(LogStore, "find", break_off)
    monkeypatch.setattr(lines_of_tasks, "_PAUSE_SEC", 0.01)
    monkeypatch.setattr(lines_of_tasks, "_LAST_LINES_SEC", 0.03)
    options = LineOptions(task_id=attempt().task_id, follow=True, as_json=True)
    assert await _print_found(TaskCatalog(kept.db), HandlerLogReader(kept.db), options) == 3
    printed = capsys.readouterr()
    texts = sorted(json.loads(each)["text"] for each in printed.out.splitlines())
    assert texts == ["line 0", "line 1", "line 2"]
    assert printed.err == "waiting for MongoDB: no server responds\n"


async def test_only_the_lines_before_those_that_are_followed_are_limited(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(what: str) -> None:
        for number in range(3):
            SHOP.info("%s %d", what, number)

    await kept.run(lambda: say("old"))
    await kept.keeper.flush()

    async def log_more(catalog: TaskCatalog, task_id: str) -> bool:
        await kept.run(lambda: say("new"))
        await kept.keeper.flush()
        return True

    monkeypatch.setattr(lines_of_tasks, "_has_ended", log_more)
    monkeypatch.setattr(lines_of_tasks, "_PAUSE_SEC", 0.01)
    monkeypatch.setattr(lines_of_tasks, "_LAST_LINES_SEC", 0.0)
    options = LineOptions(task_id=attempt().task_id, follow=True, as_json=True, most=1)
    await _print_found(TaskCatalog(kept.db), HandlerLogReader(kept.db), options)
    texts = [json.loads(each)["text"] for each in capsys.readouterr().out.splitlines()]
    assert texts == ["old 2", "new 0", "new 1", "new 2"]


async def test_who_follows_a_task_does_not_read_its_document_each_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    db = memory_database()
    await db.tasks.insert_many([{"id": "t-1", "status": "running"}, {"id": "t-2", "status": "finished"}])
    monkeypatch.delattr(TaskQueries, "document")
    ended = [await _has_ended(TaskCatalog(db), task_id) for task_id in ("t-1", "t-2", "t-3")]
    assert ended == [False, True, True]


async def test_lines_are_written_while_their_attempt_runs() -> None:
    """So a killed process loses those of the last pause only."""
    db = memory_database()
    keeper = HandlerLogKeeper(db, WorkerConfig(), pause_sec=0.01)
    keeper.start()
    kept = Kept(db, keeper)
    await kept.run(lambda: SHOP.info("one"))
    async with asyncio.timeout(EVENT_TIMEOUT_SEC):
        while not await read(db, attempt().task_id):
            await let_other_tasks_run()
    await keeper.stop()


async def test_outage_of_mongodb_keeps_lines_waiting(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(documents: Any) -> None:
        raise StoreUnavailable("no server responds")

    with monkeypatch.context() as outage:
        outage.setattr(kept.keeper._store, "append", refuse)
        await kept.run(lambda: SHOP.info("one"))
        assert not await kept.keeper.flush()
        await kept.run(lambda: SHOP.info("two"), node_id="b")
        assert not await kept.keeper.flush()
    assert kept.keeper.health.last_error == "no server responds"
    assert sorted(await kept.texts()) == ["one", "two"]


async def test_dropped_lines_are_counted_from_zero(kept: Kept) -> None:
    """Prometheus sees no increase in a counter that appears with its first value."""
    with measuring() as measured:
        await kept.run(lambda: SHOP.info("one"))
    role = attempt().role
    assert measured.counted(LOG_LINES_DROPPED) == {(role, "outage"): 0, (role, "refused"): 0}


def keep_a_tenth(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let a tenth of the lines fit an attempt. Return a number of lines that is too large for that."""
    for name in ("HEAD_BYTES", "TAIL_BYTES"):
        monkeypatch.setattr(log_buffer, name, getattr(log_buffer, name) // 10)
    return 2_400


@pytest.mark.parametrize("every", [300, 2_400])
@pytest.mark.parametrize("ends", [True, False])
async def test_each_line_counts_once_as_kept_or_dropped(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, ends: bool, every: int
) -> None:
    """Documents of the last part that later lines replace are dropped, and were never kept, written or not."""
    logged = keep_a_tenth(monkeypatch)

    async def run() -> None:
        begin_attempt(attempt(), "w-1", "run-1", kept.keeper)
        for number in range(logged):
            SHOP.info("line %d", number)
            if number % every == 0:
                await kept.keeper.flush()
        if ends:
            end_attempt()

    with measuring() as measured:
        await asyncio.create_task(run())
        if ends:
            await kept.keeper.flush()
        else:
            await kept.keeper.stop()
    dropped = sum(measured.counted(LOG_LINES_DROPPED).values())
    present = [each async for each in kept.db.attempt_logs.find({}, {"lines.n": 1})]
    count = sum(len(each["lines"]) for each in present)
    assert 0 < count < logged
    assert (measured.counted(LOG_LINES), dropped) == ({(attempt().role, "info"): count}, logged - count)


async def test_lines_replaced_while_mongodb_is_away_count_as_dropped(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged, append = keep_a_tenth(monkeypatch), LogStore.append

    async def fail(store: LogStore, documents: Any) -> None:
        raise StoreUnavailable("no server responds")

    async def run() -> None:
        begin_attempt(attempt(), "w-1", "run-1", kept.keeper)
        for number in range(logged):
            SHOP.info("line %d", number)
            if number == logged // 2:
                assert not await asyncio.create_task(kept.keeper.flush(), context=contextvars.Context())
        end_attempt()

    with measuring() as measured:
        monkeypatch.setattr(LogStore, "append", fail)
        await asyncio.create_task(run())
        monkeypatch.setattr(LogStore, "append", append)
        assert await kept.keeper.flush()
    present = [each async for each in kept.db.attempt_logs.find({}, {"lines.n": 1})]
    count = sum(len(each["lines"]) for each in present)
    assert measured.counted(LOG_LINES) == {(attempt().role, "info"): count}
    assert sum(measured.counted(LOG_LINES_DROPPED).values()) == logged - count


async def test_busy_attempt_causes_one_write_at_a_time(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it logs during a write waits for the next one, which is a second later."""
    append, writes = kept.keeper._store.append, list[int]()

    async def write(documents: Any) -> None:
        writes.append(len(documents))
        assert len(writes) < 5
        await append(documents)
        await kept.run(lambda: SHOP.info("during a write"))

    monkeypatch.setattr(kept.keeper._store, "append", write)
    await kept.run(lambda: SHOP.info("before"))
    assert await kept.texts() == ["before"]
    assert sorted(await kept.texts()) == ["before", "during a write"]
    assert writes == [1, 1]


async def test_rows_of_an_unknown_outcome_are_stored_once(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to a write may be lost, so it is repeated."""
    append = kept.keeper._store.append

    async def lose_the_reply(documents: Any) -> None:
        await append(documents)
        raise StoreUnavailable("no response in time")

    await kept.run(lambda: SHOP.info("one"))
    with monkeypatch.context() as outage:
        outage.setattr(kept.keeper._store, "append", lose_the_reply)
        assert not await kept.keeper.flush()
    assert await kept.texts() == ["one"]


async def test_external_worker_is_shown_by_its_events() -> None:
    db, own = memory_database(), {"task_id": "t", "node_id": "ext", "attempt_epoch": 1}
    payload = {"worker_id": "w-9", "reason_code": "boom", "error": "it broke"}
    await db.dispatches.insert_one({**own})
    await db.worker_events.insert_many(
        [
            {**own, "ts_ms": 2_000, "event_hash": "2", "payload": {**payload, "kind": "TASK_FAILED"}},
            {
                **own,
                "ts_ms": 1_000,
                "event_hash": "1",
                "payload": {"worker_id": "w-9", "kind": "TASK_ACCEPTED"},
            },
            {**own, "node_id": "native", "ts_ms": 1, "event_hash": "0", "payload": {"kind": "TASK_DONE"}},
        ]
    )
    lines = await read(db, "t")
    assert [(each.level, each.text, each.worker_id) for each in lines] == [
        ("INFO", "task accepted", "w-9"),
        ("ERROR", "task failed  reason_code=boom error=it broke", "w-9"),
    ]
    assert await read(db, "t", "native") == []


def crunch_lines() -> None:
    """Log as a handler in a process of its own."""
    for number in range(3):
        SHOP.info("line %d", number)


async def test_lines_of_a_process_come_back_with_their_attempt(kept: Kept) -> None:
    def body() -> None:
        wish = handler_lines.LineWish.current()
        collected: list[Any] = []
        with handler_lines.collecting(wish, collected.extend):
            crunch_lines()
        assert [each.text for each in collected] == ["line 0", "line 1", "line 2"]
        handler_lines.pass_on(pickle.loads(pickle.dumps(collected)))

    await kept.run(body)
    assert await kept.texts() == ["line 0", "line 1", "line 2"]


def test_very_many_lines_of_a_process_are_bounded() -> None:
    lines = handler_lines.CollectedLines(handler_lines.LineWish(level=20, prints=False, fields={}))
    for number in range(20_000):
        lines.add(handler_lines.HandlerLine(float(number), 20, "shop", f"line {number}"))
    kept_lines = lines.all()
    (note,) = [each.text for each in kept_lines if "left out" in each.text]
    assert kept_lines[0].text == "line 0"
    assert kept_lines[-1].text == "line 19999"
    assert f"{20_001 - len(kept_lines):,} lines left out" in note


@pytest.mark.parametrize(
    ("handler_level", "level"),
    [(None, logging.INFO), (logging.WARNING, logging.INFO), (logging.NOTSET, logging.WARNING)],
    ids=[
        "logging is not configured",
        "handlers have levels",
        "handlers print what the root logger lets through",
    ],
)
def test_capture_lowers_the_level_of_the_root_logger_only_where_nothing_else_changes(
    handler_level: int | None, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = logging.NullHandler(handler_level or logging.NOTSET)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [] if handler_level is None else [handler])
    root.setLevel(logging.WARNING)
    handler_lines.start_capture(logging.INFO, prints=False)
    handler_lines.stop_capture(prints=False)
    assert root.level == level
