"""A waiting puller reacts to batches of its own process at once, and reads MongoDB rarely while nothing arrives."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import AT, WORKER, attempt, begun, opened
from tests.contract.pulling_node import Pull, WatchedArtifacts, end
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC
from tests.integration.harness import wait_seconds

from flowkit.activities.batches import puller
from flowkit.adapters import notifier
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.errors import StoreUnavailable

if TYPE_CHECKING:
    from flowkit.activities.batches.puller import Delivery
    from flowkit.models import NodeStatus

RARELY: Any = {"poll_ms": 60_000, "backoff_max_ms": 60_000}
"""Arguments of a pull that scans its sources once during a test, unless a notification makes it scan earlier."""


@pytest.fixture
async def artifacts(db: Any) -> WatchedArtifacts:
    store = WatchedArtifacts(db)
    await store.prepare()
    return store


class Stream:
    """The batches of a waiting pull."""

    def __init__(self, pull: Pull, *sources: str, **args: Any) -> None:
        self._batches = pull.puller(*sources, **RARELY, **args).batches()
        self._next: asyncio.Future[Delivery] | None = None

    def start(self) -> None:
        """Begin to wait for the next batch."""
        self._next = asyncio.ensure_future(anext(self._batches))

    async def uid(self) -> str:
        """Return the uid of the next batch."""
        if self._next is None:
            self.start()
        assert self._next is not None
        uid, _ = await asyncio.wait_for(self._next, TIMEOUT_SEC)
        self._next = None
        return uid


async def store(artifacts: ArtifactStore, *uids: str, node: str = "u") -> None:
    """Store batches of a source."""
    for age, uid in enumerate(uids):
        await artifacts.upsert_partial(attempt(node), uid, {"uid": uid}, WORKER, AT + age)


async def waiting(artifacts: WatchedArtifacts, stream: Stream) -> int:
    """Wait until the first scan has ended without a batch, and return the number of scans."""
    stream.start()
    async with asyncio.timeout(TIMEOUT_SEC):
        while not artifacts.scans:
            await wait_seconds(0)
    await wait_seconds(0.1)
    return artifacts.scans


async def test_batches_of_the_same_process_are_delivered_without_another_scan(
    artifacts: WatchedArtifacts, pull: Pull
) -> None:
    stream = Stream(pull, "u", "v")
    scans = await waiting(artifacts, stream)
    await store(artifacts, "b1", "b2")
    assert [await stream.uid(), await stream.uid()] == ["b1", "b2"]
    await store(artifacts, "b3")
    await store(artifacts, "b4", node="v")
    assert [await stream.uid(), await stream.uid()] == ["b3", "b4@v"]
    assert artifacts.scans == scans


async def test_batches_that_were_stored_during_a_delivery_are_delivered_once(
    artifacts: WatchedArtifacts, pull: Pull
) -> None:
    await store(artifacts, "b1")
    stream = Stream(pull, "u")
    assert await stream.uid() == "b1"
    await store(artifacts, "b1", "b2", "b3", "b2")
    assert [await stream.uid(), await stream.uid()] == ["b2", "b3"]
    await store(artifacts, "b4")
    assert await stream.uid() == "b4"


async def test_marker_of_the_same_process_ends_the_pull(artifacts: WatchedArtifacts, pull: Pull) -> None:
    running = pull.start("u", **RARELY)
    await artifacts_scanned(artifacts)
    await store(artifacts, "b1")
    await end(artifacts, "u")
    assert [uid for uid, _ in await asyncio.wait_for(running, TIMEOUT_SEC)] == ["b1"]


async def artifacts_scanned(artifacts: WatchedArtifacts) -> None:
    """Wait for the first scan."""
    async with asyncio.timeout(TIMEOUT_SEC):
        while not artifacts.scans:
            await wait_seconds(0)


async def test_more_batches_than_notifications_are_kept_are_all_delivered(
    artifacts: WatchedArtifacts, tasks: TaskStore, pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "MOST_KEPT", 10)
    await opened(tasks, "u", "sink")
    await begun(tasks, attempt("u"))
    await store(artifacts, "first")
    stream = Stream(pull, "u")
    assert await stream.uid() == "first"
    uids = [f"b{number:04}" for number in range(25)]
    await asyncio.gather(*(store(artifacts, uid) for uid in uids))
    assert sorted([await stream.uid() for _ in uids]) == uids


async def test_batch_whose_read_fails_is_delivered_by_an_early_scan(
    artifacts: WatchedArtifacts, pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = artifacts.metas

    async def unavailable(*args: Any) -> Any:
        monkeypatch.setattr(artifacts, "metas", read)
        raise StoreUnavailable("the primary stepped down")

    stream = Stream(pull, "u")
    await waiting(artifacts, stream)
    monkeypatch.setattr(artifacts, "metas", unavailable)
    await store(artifacts, "b1")
    assert await stream.uid() == "b1"


class CountingTasks(TaskStore):
    """Counts the reads of task documents."""

    reads = 0

    async def node_states(self, task_id: str) -> dict[str, tuple[NodeStatus, int]]:
        self.reads += 1
        return await super().node_states(task_id)

    async def have_restarted(self, *args: Any) -> bool:
        self.reads += 1
        return await super().have_restarted(*args)


async def test_source_that_starts_during_a_long_pause_is_not_idle(
    artifacts: WatchedArtifacts, tasks: TaskStore, pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states that the pull read before the pause say that no source runs."""
    monkeypatch.setattr(puller, "_YIELD_AFTER_SEC", 0.0)
    await opened(tasks, "u", "sink")
    running = pull.start("u", **RARELY)
    await artifacts_scanned(artifacts)
    await wait_seconds(0.1)
    await begun(tasks, attempt("u"), deadline_ms=10**14)
    await store(artifacts, "b1")
    await end(artifacts, "u")
    assert [uid for uid, _ in await asyncio.wait_for(running, TIMEOUT_SEC)] == ["b1"]


async def test_idle_puller_with_default_settings_reads_less_than_twice_a_second(
    db: Any, artifacts: WatchedArtifacts
) -> None:
    """From the first scan on: scans after 0.3 s, 0.9 s, 2.1 s and 4.5 s; the states of the sources every 2 s."""
    tasks, seconds = CountingTasks(db), 4.0
    await tasks.prepare()
    await opened(tasks, "u", "sink")
    await begun(tasks, attempt("u"))
    running = Pull(artifacts, tasks).start("u", poll_ms=300, backoff_max_ms=4_000)
    began = time.monotonic()
    await wait_seconds(seconds)
    reads = artifacts.scans + tasks.reads
    seconds = time.monotonic() - began
    await end(artifacts, "u")
    assert await asyncio.wait_for(running, TIMEOUT_SEC) == []
    assert 0 < reads <= 2 * seconds - 1


async def test_batches_of_another_process_arrive_within_poll_ms_of_each_other(
    db: Any, artifacts: WatchedArtifacts, pull: Pull
) -> None:
    """The pause between two scans does not grow while batches arrive, and includes the time of the handler."""
    elsewhere = ArtifactStore(db)
    batches = pull.puller("u", poll_ms=100, backoff_max_ms=3_600_000).batches()
    for number in range(13):
        await store(elsewhere, f"b{number}")
        # A pause that grows is longer than this at the end.
        await asyncio.wait_for(anext(batches), TIMEOUT_SEC)
