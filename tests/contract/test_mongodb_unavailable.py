"""Every operation of a store without a server fails with a short message."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

import pytest
from bson.errors import InvalidDocument
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient, errors
from tests.contract.builders import AT, RUN, TASK, WORKER, attempt, close, new_task, opening, record, shown
from tests.contract.drivers import DRIVERS, connected

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.backfills import BackfillStore
from flowkit.adapters.claims import Claim, Claims
from flowkit.adapters.entries import Entry
from flowkit.adapters.mongo import is_outage, moment, translate_errors
from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.adapters.tasks.store import TaskStore
from flowkit.errors import FlowKitError, StoreDenied, StoreRefused, StoreTooLarge, StoreUnavailable
from flowkit.models import GraphChange, NodeOutcome, NodeStatus, Rerun, ResetNodes, SettleBatches
from flowkit.models.backfills import (
    BackfillOutcome,
    BackfillRun,
    BackfillRunStatus,
    BackfillState,
    Existing,
    Order,
    StoredBackfill,
)
from flowkit.models.waits import for_worker
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.adapters.tasks.attempts import Attempts
    from flowkit.adapters.tasks.cancel_flags import CancelFlags

MAX_MESSAGE_CHARS = 400


TASK_CALLS: dict[str, Callable[[TaskStore], Awaitable[object]]] = {
    "prepare": lambda tasks: tasks.prepare(),
    "database_id": lambda tasks: tasks.database_id(),
    "deployment": lambda tasks: tasks.deployment(),
    "insert_task": lambda tasks: tasks.insert_task(new_task("a")),
    "open_task": lambda tasks: tasks.open_task(opening("a")),
    "open_rejected": lambda tasks: tasks.open_rejected(opening("a"), "invalid_graph"),
    "reject_task": lambda tasks: tasks.reject_task(opening("a"), "invalid_graph"),
    "reopen": lambda tasks: tasks.reopen(TASK, RUN),
    "condition_values": lambda tasks: tasks.condition_values(TASK, with_nodes=True),
    "variables": lambda tasks: tasks.variables(TASK),
    "wiring": lambda tasks: tasks.wiring(TASK),
    "native": lambda tasks: tasks.native(TASK, ["a"]),
    "have_restarted": lambda tasks: tasks.have_restarted(TASK, {"a": 1}),
    "node_states": lambda tasks: tasks.node_states(TASK),
    "running": lambda tasks: tasks.running(TASK, ["a"], 45.0),
    "external_runs": lambda tasks: tasks.external_runs(TASK, ["a"]),
    "paused": lambda tasks: tasks.paused(TASK, ["a"]),
    "record": lambda tasks: tasks.record(record()),
    "close_task": lambda tasks: tasks.close_task(close()),
    "open_rerun": lambda tasks: tasks.open_rerun(opening("a"), Rerun(run_seq=1, closed_run_id=RUN, nodes=[])),
    "first_epochs": lambda tasks: tasks.first_epochs(TASK, ["a"]),
    "reset_nodes": lambda tasks: tasks.reset_nodes(
        ResetNodes(task_id=TASK, run_id=RUN, run_seq=1, revision=1, at=AT, nodes=[]),
        ArtifactStore(tasks.database),
    ),
    "settle_batches": lambda tasks: tasks.settle_batches(
        SettleBatches(task_id=TASK, index=0, node_id="a", epoch=1, generation=0, first_epoch=0),
        ArtifactStore(tasks.database),
    ),
    "change_graph": lambda tasks: tasks.change_graph(
        GraphChange(
            task_id=TASK, run_id=RUN, run_seq=1, revision=1, at=AT, added={"nodes": [{"node_id": "x"}]}
        ),
        {"nodes": [{"node_id": "a"}, {"node_id": "x"}]},
    ),
}
ATTEMPT_CALLS: dict[str, Callable[[Attempts], Awaitable[object]]] = {
    "begin": lambda attempts: attempts.begin(attempt(), RUN, {}, AT),
    "extend_lease": lambda attempts: attempts.extend_lease(attempt(), RUN, 1, AT),
    "show_failed_batches": lambda attempts: attempts.show_failed_batches(attempt(), RUN, 1),
    "show_lease": lambda attempts: attempts.show_lease(attempt(), RUN, {}, AT, AT),
    "show_wait": lambda attempts: attempts.show_wait(attempt(), RUN, for_worker(), holders="bridge-"),
    "finish": lambda attempts: attempts.finish(attempt(), RUN, AT),
    "check_fence": lambda attempts: attempts.check_fence(attempt(), RUN),
    "read_epoch": lambda attempts: attempts.read_epoch(attempt()),
    "find_holder": lambda attempts: attempts.find_holder(attempt()),
}
FLAG_CALLS: dict[str, Callable[[CancelFlags], Awaitable[object]]] = {
    "find_flagged": lambda flags: flags.find_flagged([TASK]),
    "find_flag": lambda flags: flags.find_flag(attempt()),
}


async def first_page(artifacts: ArtifactStore) -> object:
    return await anext(artifacts.pages(TASK, "a"))


ARTIFACT_CALLS: dict[str, Callable[[ArtifactStore], Awaitable[object]]] = {
    "prepare": lambda artifacts: artifacts.prepare(),
    "store_batch": lambda artifacts: artifacts.store_batch(attempt(), "b1", {"n": 1}, WORKER, AT),
    "store_failed_batch": lambda artifacts: artifacts.store_failed_batch(attempt(), "b1", "boom", AT),
    "store_final": lambda artifacts: artifacts.store_final(attempt(), {}, AT),
    "upsert_partial": lambda artifacts: artifacts.upsert_partial(attempt(), "b1", {}, WORKER, AT),
    "mark_complete": lambda artifacts: artifacts.mark_complete(TASK, "a", 1, {}, AT),
    "drop_marker": lambda artifacts: artifacts.drop_marker(attempt()),
    "scan": lambda artifacts: artifacts.scan(TASK, ["a"]),
    "metas": lambda artifacts: artifacts.metas(TASK, "a", [Entry("b1", None)]),
    "complete_meta": lambda artifacts: artifacts.complete_meta(attempt()),
    "restore_batch": lambda artifacts: artifacts.restore_batch(attempt(), "b1"),
    "count_settled": lambda artifacts: artifacts.count_settled(attempt()),
    "why_quarantined": lambda artifacts: artifacts.why_quarantined(attempt()),
    "find_set_aside": lambda artifacts: artifacts.find_set_aside(attempt(), ["b1"]),
    "batch_uids": lambda artifacts: artifacts.batch_uids(TASK, "a"),
    "seal": lambda artifacts: artifacts.seal(attempt()),
    "quarantined": lambda artifacts: artifacts.quarantined(attempt()),
    "skipped": lambda artifacts: artifacts.skipped(attempt()),
    "skip_quarantined": lambda artifacts: artifacts.skip_quarantined(attempt(), ["b1"]),
    "choose_quarantined": lambda artifacts: artifacts.choose_quarantined(attempt(), None),
    "forget_quarantined": lambda artifacts: artifacts.forget_quarantined(attempt(), ["1"]),
    "count_quarantined": lambda artifacts: artifacts.count_quarantined(attempt()),
    "count_batches": lambda artifacts: artifacts.count_batches(attempt()),
    "count_stored": lambda artifacts: artifacts.count_stored(attempt()),
    "stored_uids": lambda artifacts: artifacts.stored_uids(TASK, "a"),
    "has_batches": lambda artifacts: artifacts.has_batches(TASK, "a"),
    "delete_earlier_generations": lambda artifacts: artifacts.delete_earlier_generations(TASK, {"a": 2}, AT),
    "delete_other_nodes": lambda artifacts: artifacts.delete_other_nodes(TASK, ["a"]),
    "delete_earlier_rows": lambda artifacts: artifacts.delete_earlier_rows(TASK, {"a": 2}),
    "store_outcome": lambda artifacts: artifacts.store_outcome(attempt(), NodeOutcome(), AT),
    "pages": first_page,
    "mark_ended": lambda artifacts: artifacts.mark_ended(
        TASK, [shown("a", NodeStatus.SKIPPED, marker=True)], AT
    ),
}
CLAIM_CALLS: dict[str, Callable[[Claims], Awaitable[object]]] = {
    "prepare": lambda claims: claims.prepare(),
    "make": lambda claims: claims.make(attempt(), "a", ["b1"], AT),
    "counts": lambda claims: claims.counts(TASK, "a", ["b"]),
    "make_new": lambda claims: claims.make_new(attempt(), "a", ["b1"], AT),
    "of_others": lambda claims: claims.of_others(attempt(), "a"),
    "of_attempts": lambda claims: claims.of_attempts(attempt(), [1]),
    "take_over": lambda claims: claims.take_over(attempt(), Claim("a", "b1", 1, 1), AT),
    "delete": lambda claims: claims.delete(TASK, [{"consumer_node": "a"}]),
    "release": lambda claims: claims.release(attempt(), ["1"]),
}


async def first_open(tasks: OpenTasks, of: str | None = None) -> object:
    return await anext(tasks.pages(namespace_id="ns") if of is None else tasks.pages_of(of))


async def first_states(tasks: OpenTasks) -> object:
    return await anext(tasks.states(namespace_id="ns", database_id="db"))


OPEN_CALLS: dict[str, Callable[[OpenTasks], Awaitable[object]]] = {
    "pages": first_open,
    "pages_of": lambda tasks: first_open(tasks, "ns"),
    "prepare": lambda tasks: tasks.prepare(),
    "states": first_states,
    "counts": lambda tasks: tasks.counts(),
    "close_orphan": lambda tasks: tasks.close_orphan(TASK, RUN, "lost", AT),
    "take_turn": lambda tasks: tasks.take_turn("ns", "me", 1),
    "end_turn": lambda tasks: tasks.end_turn("ns", "me"),
}
BACKFILL = StoredBackfill(
    backfill_id="b",
    schedule="s",
    start=moment(AT),
    end=moment(AT + 60),
    timezone="UTC",
    order=Order.OLDEST,
    max_active=1,
    existing=Existing.NONE,
    total=1,
    queue="q",
    namespace_id="ns",
    state=BackfillState.RUNNING,
    created_at=moment(AT),
)
BACKFILL_RUN = BackfillRun(at=moment(AT), task_id=TASK, status=BackfillRunStatus.RUNNING)
BACKFILL_CALLS: dict[str, Callable[[BackfillStore], Awaitable[object]]] = {
    "prepare": lambda backfills: backfills.prepare(),
    "insert": lambda backfills: backfills.insert(BACKFILL, b"", [BACKFILL_RUN.at]),
    "complete": lambda backfills: backfills.complete(BACKFILL),
    "find": lambda backfills: backfills.find("b"),
    "task": lambda backfills: backfills.task("b"),
    "newest": lambda backfills: backfills.newest("ns", 1),
    "counts": lambda backfills: backfills.counts("b"),
    "runs": lambda backfills: backfills.runs("b", BackfillRunStatus.FAILED),
    "latest": lambda backfills: backfills.latest("b", 1),
    "claim": lambda backfills: backfills.claim(BACKFILL),
    "note_submission": lambda backfills: backfills.note_submission("b", BACKFILL_RUN),
    "is_submitted": lambda backfills: backfills.is_submitted("b", BACKFILL_RUN),
    "end_run": lambda backfills: backfills.end_run(
        "b", BACKFILL_RUN, BackfillOutcome(status=BackfillRunStatus.SUCCEEDED)
    ),
    "cancel": lambda backfills: backfills.cancel("b"),
    "cancel_pending": lambda backfills: backfills.cancel_pending("b"),
    "retry_failed": lambda backfills: backfills.retry_failed("b", b""),
    "close": lambda backfills: backfills.close(BACKFILL),
    "ended_before": lambda backfills: backfills.ended_before(AT, "ns"),
    "count_rows": lambda backfills: backfills.count_rows(["b"]),
    "remove": lambda backfills: backfills.remove(["b"]),
}
STORES = pytest.mark.parametrize(
    ("store", "calls"),
    [
        (TaskStore, TASK_CALLS),
        (lambda db: TaskStore(db).attempts, ATTEMPT_CALLS),
        (lambda db: TaskStore(db).flags, FLAG_CALLS),
        (ArtifactStore, ARTIFACT_CALLS),
        (Claims, CLAIM_CALLS),
        (OpenTasks, OPEN_CALLS),
        (BackfillStore, BACKFILL_CALLS),
    ],
    ids=["tasks", "attempts", "flags", "artifacts", "claims", "open tasks", "backfills"],
)


@STORES
def test_list_of_calls_is_complete(store: Callable[[Any], Any], calls: dict[str, object]) -> None:
    methods = vars(type(store(memory_database())))
    public = {name: member for name, member in methods.items() if name[0] != "_"}
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    assert set(calls) == {name for name, member in public.items() if any(kind(member) for kind in kinds)}


async def outcomes(store: Any, calls: dict[str, Callable[[Any], Awaitable[object]]]) -> dict[str, object]:
    """Return the outcomes of all calls, made concurrently because each waits for a server."""
    results = await asyncio.gather(*(call(store) for call in calls.values()), return_exceptions=True)
    return dict(zip(calls, results, strict=True))


@STORES
async def test_every_call_reports_an_unreachable_server_in_a_short_message(
    nowhere: Any, store: Any, calls: dict[str, Callable[[Any], Awaitable[object]]]
) -> None:
    found = await outcomes(store(nowhere), calls)
    assert {name: type(error) for name, error in found.items()} == dict.fromkeys(calls, StoreUnavailable)
    assert all(str(error).startswith("MongoDB is unavailable") for error in found.values())
    assert [name for name, error in found.items() if len(str(error)) >= MAX_MESSAGE_CHARS] == []


LONG = "topology " * 1000
CLOSED = "Cannot use MongoClient after close"


def bulk(*codes: int, concern: bool = False) -> errors.BulkWriteError:
    """Return the error of a bulk write in which writes failed with these codes."""
    problems = [{"index": place, "code": code, "errmsg": LONG} for place, code in enumerate(codes)]
    return errors.BulkWriteError({"writeErrors": problems, "writeConcernErrors": [{"code": 64}] * concern})


@pytest.mark.parametrize("kind", [AsyncIOMotorClient, AsyncMongoClient, MongoClient])
async def test_a_closed_client_of_each_driver_is_an_outage(kind: Any) -> None:
    """The drivers have no class for it, so only their text tells it from a misuse."""

    async def call(method: Callable[..., Any], *args: Any) -> None:
        if inspect.isawaitable(result := method(*args)):
            await result

    client = kind("mongodb://127.0.0.1:1", serverSelectionTimeoutMS=1)
    with pytest.raises(errors.ServerSelectionTimeoutError):
        await call(client.admin.command, "ping")
    await call(client.close)
    with pytest.raises(errors.InvalidOperation) as caught:
        await call(client.admin.command, "ping")
    assert is_outage(caught.value)


UNREACHABLE = [
    errors.ServerSelectionTimeoutError(LONG),
    errors.AutoReconnect(LONG),
    errors.NetworkTimeout(LONG),
    errors.NotPrimaryError(LONG),
    errors.WaitQueueTimeoutError(LONG),
    errors.ExecutionTimeout(LONG, 50),
    errors.WTimeoutError(LONG, 64),
    errors.OperationFailure(LONG, 189),
    errors.OperationFailure(LONG, 11600),
    errors.InvalidOperation(CLOSED),
]
"""The server is unavailable: no call can succeed at the moment."""

TEMPORARY = [
    errors.OperationFailure(LONG, 24),
    errors.CursorNotFound(LONG, 43),
    errors.OperationFailure(LONG, 112),
    errors.OperationFailure(LONG, 987_654),
    errors.ProtocolError(LONG),
    bulk(24, 987_654),
    bulk(concern=True),
]
"""This one call cannot succeed at the moment; others can."""

DENIED = [errors.OperationFailure(LONG, code) for code in (11, 13, 18)]
TOO_LARGE = [errors.WriteError(LONG, 17419), errors.OperationFailure(LONG, 10334), bulk(17420)]
PERMANENT = [
    *(errors.OperationFailure(LONG, code) for code in (2, 28, 40, 52, 57)),
    errors.DuplicateKeyError(LONG, 11000),
    errors.ConfigurationError(LONG),
    errors.InvalidName(LONG),
    errors.InvalidOperation("No operations to execute" + LONG),
    bulk(987_654, 2),
]


async def ours(error: Exception) -> FlowKitError:
    """Return FlowKit's error for an `error` of the driver."""

    @translate_errors
    async def fail() -> None:
        raise error

    with pytest.raises(FlowKitError) as caught:
        await fail()
    return caught.value


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((error, StoreUnavailable) for error in UNREACHABLE + TEMPORARY),
        *((error, StoreDenied) for error in DENIED),
        *((error, StoreTooLarge) for error in TOO_LARGE),
        *((error, StoreRefused) for error in PERMANENT),
    ],
)
async def test_driver_error_becomes_a_short_flowkit_error(
    error: errors.PyMongoError, expected: type[FlowKitError]
) -> None:
    caught = await ours(error)
    assert type(caught) is expected
    assert caught.retryable is issubclass(expected, StoreUnavailable)
    assert len(str(caught)) < MAX_MESSAGE_CHARS
    assert type(error).__name__ in str(caught)
    assert caught.__suppress_context__


async def test_driver_errors_for_too_large_and_unencodable_documents_are_distinguished() -> None:
    assert type(await ours(errors.DocumentTooLarge(LONG))) is StoreTooLarge
    assert type(await ours(InvalidDocument(LONG))) is StoreRefused


def test_only_an_unreachable_server_fails_a_whole_group_of_writes() -> None:
    assert [error for error in UNREACHABLE if not is_outage(error)] == []
    assert [error for error in [*TEMPORARY, *DENIED, *TOO_LARGE, *PERMANENT] if is_outage(error)] == []


@pytest.mark.server
async def test_closed_client_counts_as_an_unreachable_server(contract_mongo_url: str) -> None:
    for driver in DRIVERS:
        async with connected(driver, contract_mongo_url) as client:
            tasks = TaskStore(client.flowkit)
            await tasks.node_states(TASK)
        with pytest.raises(StoreUnavailable):
            await tasks.node_states(TASK)


async def test_missing_permissions_prevent_the_start_and_name_user_and_database() -> None:
    with pytest.raises(StoreDenied, match="denies user 'reader' access to database 'shop'"):
        await TaskStore(Denying("shop", "reader")).prepare()


class Denying:
    """A database that denies every operation to its user."""

    def __init__(self, name: str, user: str) -> None:
        self.name = name
        self._user = user

    def __getattr__(self, name: str) -> Denying:
        return self

    async def create_index(self, *args: Any, **options: Any) -> None:
        raise errors.OperationFailure("not authorized on shop to execute command { createIndexes }", 13)

    async def command(self, command: dict[str, Any]) -> dict[str, Any]:
        assert command == {"connectionStatus": 1}
        return {"authInfo": {"authenticatedUsers": [{"user": self._user, "db": "admin"}]}}
