"""A store without a server says so in a short text, whatever is asked of it."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

import pytest
from pymongo import errors
from tests.contract.builders import AT, RUN, TASK, WORKER, attempt, close, new_task, opening, record
from tests.contract.drivers import DRIVERS, connected

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.entries import Entry
from flowkit.adapters.mongo import shortened
from flowkit.adapters.store import TaskStore
from flowkit.errors import FlowKitError, StoreRefused, StoreUnavailable
from flowkit.local.ports import HOST, free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

SHORT = 400


@pytest.fixture(params=DRIVERS)
async def nowhere(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A database on a port where nobody listens."""
    url = f"mongodb://{HOST}:{free_port()}"
    async with connected(request.param, url, serverSelectionTimeoutMS=20) as client:
        yield client.flowkit


TASK_CALLS: dict[str, Callable[[TaskStore], Awaitable[object]]] = {
    "prepare": lambda tasks: tasks.prepare(),
    "deployment": lambda tasks: tasks.deployment(),
    "insert_task": lambda tasks: tasks.insert_task(new_task("a")),
    "open_task": lambda tasks: tasks.open_task(opening("a")),
    "begin_attempt": lambda tasks: tasks.begin_attempt(attempt(), RUN, {}, AT),
    "reopen": lambda tasks: tasks.reopen(TASK, RUN),
    "extend_lease": lambda tasks: tasks.extend_lease(attempt(), RUN, 1, AT),
    "finish_attempt": lambda tasks: tasks.finish_attempt(attempt(), RUN, AT),
    "check_hold": lambda tasks: tasks.check_hold(attempt(), RUN),
    "cancel_flag": lambda tasks: tasks.cancel_flag(attempt()),
    "flagged": lambda tasks: tasks.flagged([TASK]),
    "flagged_by_hand": lambda tasks: tasks.flagged_by_hand(attempt()),
    "variables": lambda tasks: tasks.variables(TASK),
    "wiring": lambda tasks: tasks.wiring(TASK),
    "moved_on": lambda tasks: tasks.moved_on(TASK, {"a": 1}),
    "node_states": lambda tasks: tasks.node_states(TASK),
    "record": lambda tasks: tasks.record(record()),
    "close_task": lambda tasks: tasks.close_task(close()),
    "open_documents": lambda tasks: tasks.open_documents(),
    "abandon": lambda tasks: tasks.abandon(TASK, RUN, "lost", AT),
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
    "batch_uids": lambda artifacts: artifacts.batch_uids(TASK, "a"),
    "pages": first_page,
    "claim": lambda artifacts: artifacts.claim(attempt(), "a", ["b1"], AT),
}


@pytest.mark.parametrize(
    ("store", "calls"), [(TaskStore, TASK_CALLS), (ArtifactStore, ARTIFACT_CALLS)], ids=["tasks", "artifacts"]
)
def test_these_calls_are_all_there_are(store: type, calls: dict[str, object]) -> None:
    public = {name for name, member in vars(store).items() if inspect.isfunction(member) and name[0] != "_"}
    assert set(calls) == public


async def outcomes(store: Any, calls: dict[str, Callable[[Any], Awaitable[object]]]) -> dict[str, object]:
    """What comes of all calls, made at the same time because each waits for a server."""
    results = await asyncio.gather(*(call(store) for call in calls.values()), return_exceptions=True)
    return dict(zip(calls, results, strict=True))


@pytest.mark.parametrize(
    ("store", "calls"), [(TaskStore, TASK_CALLS), (ArtifactStore, ARTIFACT_CALLS)], ids=["tasks", "artifacts"]
)
async def test_every_call_says_in_short_that_no_server_answers(
    nowhere: Any, store: Any, calls: dict[str, Callable[[Any], Awaitable[object]]]
) -> None:
    found = await outcomes(store(nowhere), calls)
    assert {name: type(error) for name, error in found.items()} == dict.fromkeys(calls, StoreUnavailable)
    assert all(str(error).startswith("MongoDB does not answer") for error in found.values())
    assert [name for name, error in found.items() if len(str(error)) >= SHORT] == []


LONG = "topology " * 1000


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (errors.ServerSelectionTimeoutError(LONG), StoreUnavailable),
        (errors.AutoReconnect(LONG), StoreUnavailable),
        (errors.NetworkTimeout(LONG), StoreUnavailable),
        (errors.NotPrimaryError(LONG), StoreUnavailable),
        (errors.WaitQueueTimeoutError(LONG), StoreUnavailable),
        (errors.ExecutionTimeout(LONG, 50), StoreUnavailable),
        (errors.WTimeoutError(LONG, 64), StoreUnavailable),
        (errors.OperationFailure(LONG, 189), StoreUnavailable),
        (errors.OperationFailure(LONG, 11600), StoreUnavailable),
        (errors.WriteError(LONG, 17419), StoreRefused),
        (errors.OperationFailure(LONG, 13), StoreRefused),
        (errors.ConfigurationError(LONG), StoreRefused),
    ],
)
async def test_an_error_of_the_driver_becomes_a_short_one_of_ours(
    error: errors.PyMongoError, ours: type[FlowKitError]
) -> None:
    @shortened
    async def fail() -> None:
        raise error

    with pytest.raises(ours) as caught:
        await fail()
    assert type(caught.value) is ours
    assert len(str(caught.value)) < SHORT
    assert type(error).__name__ in str(caught.value)
    assert caught.value.__suppress_context__
