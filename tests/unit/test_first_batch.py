"""The signal about the first batch of an attempt: it is sent once, repeated if Temporal is away, and never
fails anything."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import ActivityEnvironment
from tests.contract import builders
from tests.contract.attempt_executors import worker_context
from tests.contract.builders import RUN, TASK, opened
from tests.unit.event_loop import until

from flowkit.activities.calls import Threads
from flowkit.activities.handlers import RoleHandler
from flowkit.activities.role_attempt import RoleActivities, RoleContext
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.dispatches import Dispatch
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.signals import AttemptSignal, first_batch_of, signal_first_batch
from flowkit.bridge.delivery import FirstBatches
from flowkit.models import AttemptInput, FirstBatch
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

DISPATCH: dict[str, Any] = {
    "run_id": "test-run",
    "queue": "q",
    "topic": "cmd.r.v1",
    "partition": 0,
    "end_offset": 0,
    "dedup_id": "d",
    "cancel_token": "c",
    "owner": "bridge",
    "created_at": 0.0,
}
BATCH = FirstBatch(node_id="a", run_id="test-run", epoch=2)


class FakeClient:
    """Records signals. The first calls raise `errors`; with `held`, a call waits before it takes effect."""

    def __init__(self, *errors: RPCStatusCode, held: bool = False) -> None:
        self.addressed: list[tuple[str, str | None]] = []
        self.received: list[tuple[str, FirstBatch]] = []
        self.calls = 0
        self.gate = asyncio.Event()
        self._errors = [*errors]
        if not held:
            self.gate.set()

    def get_workflow_handle(self, task_id: str, *, run_id: str | None = None) -> Any:
        """Return the handle of a run."""
        self.addressed.append((task_id, run_id))
        return self

    async def signal(self, name: str, batch: FirstBatch, *, rpc_timeout: object) -> None:
        """Record a signal, or raise the next error."""
        self.calls += 1
        await self.gate.wait()
        if self._errors:
            raise RPCError("refused", self._errors.pop(0), b"")
        self.received.append((name, batch))


def attempt() -> AttemptInput:
    """Return the second attempt of a node."""
    return AttemptInput(task_id="t", node_id="a", index=0, role="r", epoch=2, signal_first_batch=True)


async def in_activity(client: Any, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` as an activity."""
    await ActivityEnvironment(client).run(work)


async def test_signal_addresses_the_run_and_names_the_attempt() -> None:
    client: Any = FakeClient()
    await signal_first_batch(client, attempt(), "test-run")
    assert client.addressed == [("t", "test-run")]
    assert client.received == [("first_batch", BATCH)]


async def test_signal_is_repeated_while_temporal_is_unavailable() -> None:
    client: Any = FakeClient(RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED)
    await signal_first_batch(client, attempt(), "test-run")
    assert (client.calls, client.received) == (3, [("first_batch", BATCH)])


@pytest.mark.parametrize(
    "status, level",
    [(RPCStatusCode.NOT_FOUND, logging.DEBUG), (RPCStatusCode.PERMISSION_DENIED, logging.WARNING)],
)
async def test_refused_signal_is_logged_and_not_repeated(
    status: RPCStatusCode, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    client: Any = FakeClient(*[status] * 2)
    with caplog.at_level(logging.DEBUG, "flowkit.worker"):
        await signal_first_batch(client, attempt(), "test-run")
    assert client.calls == 1
    (record,) = [each for each in caplog.records if each.name == "flowkit.worker"]
    assert (record.levelno, "node a could not signal" in record.message) == (level, True)


async def test_attempt_sends_one_signal_for_many_batches() -> None:
    client = FakeClient()

    async def work() -> None:
        async with AttemptSignal(attempt(), first_batch_of(attempt(), "test-run")) as signal:
            for _ in range(3):
                await asyncio.to_thread(signal.send)
            await until(lambda: bool(client.received))

    await in_activity(client, work)
    assert client.received == [("first_batch", BATCH)]


async def test_attempt_without_a_batch_sends_no_signal() -> None:
    client = FakeClient()

    async def work() -> None:
        async with AttemptSignal(attempt(), first_batch_of(attempt(), "test-run")):
            await asyncio.to_thread(lambda: None)

    await in_activity(client, work)
    assert client.calls == 0


@pytest.mark.parametrize("wanted", [True, False])
async def test_activity_of_a_role_signals_its_first_batch_if_a_child_waits_for_it(wanted: bool) -> None:
    client, db = FakeClient(), memory_database()
    await opened(TaskStore(db), "a")
    given = replace(builders.attempt(), signal_first_batch=wanted)
    roles = RoleContext(
        artifacts=ArtifactStore(db), handlers={given.role: RoleHandler()}, threads=Threads(1, "test")
    )
    run_role = RoleActivities(worker=worker_context(db), roles=roles).activity_for(given.role)
    any_client: Any = client
    environment: Any = ActivityEnvironment(any_client)
    environment.info = replace(environment.info, workflow_id=TASK, workflow_run_id=RUN)
    assert (await environment.run(run_role, given)).batches == 1
    assert client.calls == wanted


@pytest.mark.parametrize("error", [None, ValueError("broken"), asyncio.CancelledError()])
async def test_attempt_that_has_ended_waits_for_its_signal_unless_it_was_cancelled(
    error: BaseException | None,
) -> None:
    """The end of a node may open no gate, and its next attempt may store no batch of its own."""
    client = FakeClient(held=True)

    async def work() -> None:
        with suppress(ValueError, asyncio.CancelledError):
            async with AttemptSignal(attempt(), first_batch_of(attempt(), "test-run")) as signal:
                signal.send()
                await until(lambda: client.calls == 1)
                asyncio.get_running_loop().call_later(0.01, client.gate.set)
                if error is not None:
                    raise error

    await in_activity(client, work)
    assert bool(client.received) is not isinstance(error, asyncio.CancelledError)


async def test_attempt_without_a_client_continues(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with AttemptSignal(attempt(), first_batch_of(attempt(), "test-run")) as signal:
            signal.send()
            await until(lambda: bool(caplog.records))

    await in_activity(None, work)
    assert "node a cannot signal its workflow" in caplog.text


async def test_bridge_sends_one_signal_for_each_attempt() -> None:
    client: Any = FakeClient()
    context: Any = SimpleNamespace(client=client)
    batches = FirstBatches(context)
    for epoch in (2, 2, 3):
        given = replace(attempt(), epoch=epoch)
        batches.batch_stored(Dispatch(**DISPATCH, attempt=given))
    batches.batch_stored(Dispatch(**DISPATCH, attempt=replace(attempt(), signal_first_batch=False)))
    await until(lambda: len(client.received) == 2)
    assert [batch.epoch for _, batch in client.received] == [2, 3]
    await batches.stop()


async def test_stopping_bridge_drops_its_signals() -> None:
    client: Any = FakeClient(held=True)
    context: Any = SimpleNamespace(client=client)
    batches = FirstBatches(context)
    batches.batch_stored(Dispatch(**DISPATCH, attempt=attempt()))
    await until(lambda: client.calls == 1)
    await batches.stop()
    client.gate.set()
    assert client.received == []
