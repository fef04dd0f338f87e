"""A dispatch that waits for Kafka or MongoDB is interrupted: the bridge stops, the task is cancelled,
another bridge adopts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.activity import ActivityCancellationDetails
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from tests.contract.bridges import UNUSED, Parts, context_of
from tests.contract.builders import AT, RUN, attempt, opened
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.unit.event_loop import until

from flowkit.bridge.commands import CommandSender, Placement
from flowkit.bridge.dispatcher import AttemptDispatcher
from flowkit.bridge.pulled_inputs import PulledInputs
from flowkit.errors import CommandTooLarge, FlowKitError, KafkaUnavailable

if TYPE_CHECKING:
    from flowkit.adapters.dispatches import Dispatch
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.models import AttemptInput

STOP = ActivityCancellationDetails(worker_shutdown=True)
CANCEL = ActivityCancellationDetails(cancel_requested=True)
OUTDATED = [ActivityCancellationDetails(not_found=True), ActivityCancellationDetails(timed_out=True)]


class Kafka:
    """A topic with one partition, which does not accept commands."""

    def __init__(self, error: FlowKitError | None = None) -> None:
        self.asked = asyncio.Event()
        self.refuse = asyncio.Event()
        self._error = error

    async def read_ends(self, _: str) -> dict[int, int]:
        """Return the end of the partition."""
        return {0: 0}

    async def read_members(self, _: str) -> Any:
        """Return no assignments."""
        raise KafkaUnavailable

    async def send(self, *_: Any) -> Any:
        """Wait; then raise the error, if there is one."""
        self.asked.set()
        await self.refuse.wait()
        raise self._error or KafkaUnavailable


class Names:
    """The names of the topics."""

    def cmd(self, role: str) -> str:
        """Return the topic of a role's commands."""
        return role


@dataclass
class Try:
    """A try of an attempt's activity, on a bridge of its own."""

    dispatcher: AttemptDispatcher
    temporal: ActivityEnvironment
    running: asyncio.Task[Any]
    kafka: Kafka

    async def interrupted(self, why: ActivityCancellationDetails) -> BaseException | None:
        """Cancel the activity, stop its bridge, and return the activity's error."""
        self.temporal.cancel(why)
        await asyncio.wait([self.running], timeout=EVENT_TIMEOUT_SEC)
        assert self.running.done(), "the dispatch still waits"
        await self.dispatcher.stop()
        return asyncio.CancelledError() if self.running.cancelled() else self.running.exception()


def started(db: Any, kafka: Kafka, given: AttemptInput | None = None) -> Try:
    """Start a try of the attempt."""
    context = replace(context_of(db, UNUSED, AT), bridge_id="bridge-1")
    context.at, context.topics = AT, any_of(Names())
    context.producer = context.offsets = any_of(kafka)
    parts = any_of(Parts())
    dispatcher = AttemptDispatcher(
        context,
        **dict.fromkeys(("delivery", "signals", "supervisor", "first_batches"), parts),
        inputs=PulledInputs(context),
        placement=Placement(context, list),
        sender=CommandSender(context),
    )
    temporal = ActivityEnvironment()
    temporal.info = replace(temporal.info, workflow_run_id=RUN)
    running = asyncio.ensure_future(temporal.run(dispatcher.run, given or attempt()))
    return Try(dispatcher, temporal, running, kafka)


def any_of(part: object) -> Any:
    """Return a replacement of a part."""
    return part


async def waiting_for_kafka(db: Any, tasks: TaskStore, error: FlowKitError | None = None) -> Try:
    """Start a try, and let it wait for Kafka."""
    await opened(tasks, "a")
    kafka = Kafka(error)
    made = started(db, kafka)
    await asyncio.wait_for(kafka.asked.wait(), EVENT_TIMEOUT_SEC)
    return made


async def stored(made: Try) -> Dispatch:
    """Return the dispatch record."""
    store = made.dispatcher._context.stores.dispatches
    found = await store.find(attempt().task_id, "a", 1)
    assert found is not None
    return found


async def adopted(made: Try) -> Dispatch:
    """Let another bridge adopt the attempt."""
    record = await stored(made)
    found = await made.dispatcher._context.stores.dispatches.adopt(record.key, "bridge-2", AT)
    assert found is not None
    return found


async def test_stop_leaves_the_record_to_the_next_bridge(db: Any, tasks: TaskStore) -> None:
    made = await waiting_for_kafka(db, tasks)
    before = await stored(made)
    error = await made.interrupted(STOP)
    assert isinstance(error, ApplicationError)
    assert (error.type, error.non_retryable) == ("bridge_stopping", False)
    assert await stored(made) == before


async def test_cancel_ends_the_record(db: Any, tasks: TaskStore) -> None:
    made = await waiting_for_kafka(db, tasks)
    assert isinstance(await made.interrupted(CANCEL), asyncio.CancelledError)
    record = await stored(made)
    assert (record.state, record.outcome and record.outcome.kind) == ("reported", "cancelled")


@pytest.mark.parametrize("why", OUTDATED, ids=["unknown", "timed out"])
async def test_outdated_try_leaves_the_record_to_the_next_one(
    db: Any, tasks: TaskStore, why: ActivityCancellationDetails
) -> None:
    made = await waiting_for_kafka(db, tasks)
    before = await stored(made)
    assert isinstance(await made.interrupted(why), asyncio.CancelledError)
    assert await stored(made) == before


async def test_record_of_another_bridge_outlives_the_cancel_of_an_outdated_try(
    db: Any, tasks: TaskStore
) -> None:
    made = await waiting_for_kafka(db, tasks)
    before = await adopted(made)
    await made.interrupted(CANCEL)
    assert await stored(made) == before


async def test_record_of_another_bridge_outlives_the_error_of_an_outdated_try(
    db: Any, tasks: TaskStore
) -> None:
    made = await waiting_for_kafka(db, tasks, CommandTooLarge())
    before = await adopted(made)
    made.kafka.refuse.set()
    await until(made.running.done)
    assert isinstance(made.running.exception(), ApplicationError)
    assert await stored(made) == before


async def test_stop_does_not_wait_for_mongodb(nowhere: Any) -> None:
    made = started(nowhere, Kafka())
    await asyncio.wait([made.running], timeout=0.1)
    error = await made.interrupted(STOP)
    assert isinstance(error, ApplicationError)
    assert error.type == "bridge_stopping"


async def test_attempt_of_a_task_that_pins_versions_is_rejected(db: Any, tasks: TaskStore) -> None:
    await opened(tasks, "a")
    made = started(db, Kafka(), replace(attempt(), pin=True))
    with pytest.raises(ApplicationError) as caught:
        await made.running
    assert (caught.value.type, caught.value.non_retryable) == ("invalid_graph", True)
    assert str(caught.value.message) == (
        "node 'a': type is the external role 'crawler', and graph.version_policy is 'pin', but "
        "FlowKit cannot choose the "
        "version of an external worker: remove version_policy, or run the role with native workers"
    )
    assert await made.dispatcher._context.stores.dispatches.find(attempt().task_id, "a", 1) is None
