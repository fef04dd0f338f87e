"""Sources with many batches are scanned for new batches only, and yet no batch is missed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import AT, TASK, WORKER, attempt, batches, begun, documents_of, opened
from tests.contract.pulling_node import Pull, WatchedArtifacts, end
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC
from tests.unit.event_loop import let_other_tasks_run

from flowkit.activities.batches import puller
from flowkit.activities.batches.puller import Scanner
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.batch_uids import qualified
from flowkit.adapters.entries import Mark
from flowkit.adapters.mongo import moment
from flowkit.errors import StoreUnavailable

if TYPE_CHECKING:
    from flowkit.adapters.tasks.store import TaskStore

HOUR = 3600.0
PULLING = attempt("p")
MARK = Mark(epoch=2, written_at=moment(AT))


@pytest.fixture
async def artifacts(db: Any) -> WatchedArtifacts:
    store = WatchedArtifacts(db)
    await store.prepare()
    return store


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let three batches be many, and never let a complete scan become due."""
    monkeypatch.setattr(puller, "MANY", 3)
    monkeypatch.setattr(puller, "_FULL_SEC", HOUR)


async def stored(store: ArtifactStore, uid: str, *, at: float = AT, node: str = "u", epoch: int = 1) -> None:
    """Store a batch."""
    await store.upsert_partial(attempt(node, epoch=epoch), uid, {"uid": uid}, WORKER, at)


# --- one scan -----------------------------------------------------------------------------------------------------


async def test_batches_before_the_mark_are_omitted(artifacts: WatchedArtifacts) -> None:
    for epoch in (1, 2, 3):
        for seconds in (-1, 0, 1):
            await stored(artifacts, f"{epoch}:{seconds}", at=AT + seconds, epoch=epoch)
    found = await artifacts.scan(TASK, ["u"], {"u": MARK})
    assert sorted(found.batches["u"]) == ["1:0", "1:1", "2:0", "2:1", "3:-1", "3:0", "3:1"]
    assert found.newest == {"u": Mark(epoch=3, written_at=moment(AT + 1))}


async def test_mark_of_one_source_does_not_omit_batches_of_another(artifacts: WatchedArtifacts) -> None:
    for node in ("u", "v"):
        await stored(artifacts, "old", at=AT - HOUR, node=node)
    found = await artifacts.scan(TASK, ["u", "v"], {"u": MARK})
    assert {source: [*uids] for source, uids in found.batches.items()} == {"u": [], "v": ["old"]}


@pytest.mark.parametrize(
    "fields", [{"attempt_epoch": None}, {"updated_at": None}, {"updated_at": "2020-01-01"}, {}]
)
async def test_batches_of_other_programs_are_never_omitted(
    db: Any, artifacts: WatchedArtifacts, fields: dict[str, Any]
) -> None:
    row = {"task_id": TASK, "node_id": "u", "batch_uid": "b1", "status": "partial"}
    await db.artifacts.insert_one({**row, "created_at": moment(AT - HOUR), **fields})
    found = await artifacts.scan(TASK, ["u"], {"u": MARK})
    assert [*found.batches["u"]] == ["b1"]
    assert found.newest == {}


async def test_old_complete_markers_are_not_omitted(artifacts: WatchedArtifacts) -> None:
    await artifacts.mark_complete(TASK, "u", 1, {}, AT - HOUR)
    assert (await artifacts.scan(TASK, ["u"], {"u": MARK})).markers == {"u": 1}


async def test_failed_batch_that_a_retry_repeats_counts_as_new(artifacts: WatchedArtifacts) -> None:
    await artifacts.store_failed_batch(attempt("u", epoch=2), "b1", "torn", AT - 1)
    await stored(artifacts, "b1", at=AT - HOUR, epoch=3)
    assert [*(await artifacts.scan(TASK, ["u"], {"u": MARK})).batches["u"]] == ["b1"]


# --- one scan after the other -------------------------------------------------------------------------------------


async def uids(scans: Scanner, *, complete: bool = False) -> list[str]:
    """Return the uids that the next scan of `u` finds."""
    return sorted((await scans.scan(complete=complete)).batches["u"])


@pytest.mark.usefixtures("few")
async def test_later_scans_read_only_the_last_seconds(artifacts: WatchedArtifacts) -> None:
    for number in range(3):
        await stored(artifacts, f"b{number}", at=AT + 10 * number)
    scans = Scanner(artifacts, PULLING, ["u"])
    assert await uids(scans) == ["b0", "b1", "b2"]
    assert await uids(scans) == ["b2"]
    await stored(artifacts, "b3", at=AT + 19)
    assert await uids(scans) == ["b2", "b3"]
    await stored(artifacts, "b4", at=AT + 30)
    assert await uids(scans) == ["b2", "b3", "b4"]
    assert await uids(scans) == ["b4"]


@pytest.mark.usefixtures("few")
async def test_source_with_few_batches_is_always_scanned_completely(artifacts: WatchedArtifacts) -> None:
    scans = Scanner(artifacts, PULLING, ["u"])
    for number in range(3):
        await stored(artifacts, f"b{number}", at=AT + HOUR * number)
        assert len(await uids(scans)) == number + 1
    assert await uids(scans) == ["b2"]


@pytest.mark.usefixtures("few")
async def test_only_the_largest_of_several_sources_are_read_for_new_batches(
    artifacts: WatchedArtifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller, "MOST_MARKS", 2)
    sizes = {"u": 2, "v": 4, "w": 3}
    for node, size in sizes.items():
        for number in range(size):
            await stored(artifacts, f"b{number}", at=AT + HOUR * number, node=node)
    scans = Scanner(artifacts, PULLING, [*sizes])

    async def counts() -> dict[str, int]:
        found = await scans.scan(complete=False)
        return {source: len(batches) for source, batches in found.batches.items()}

    assert await counts() == sizes
    assert await counts() == {"u": 2, "v": 1, "w": 1}
    for number in (7, 8):
        await stored(artifacts, f"b{number}", at=AT + HOUR * number, node="u")
    assert await counts() == {"u": 4, "v": 1, "w": 1}
    assert await counts() == {"u": 4, "v": 1, "w": 1}, "two sources have marks"
    assert (await scans.scan(complete=True)).batches["v"].keys() == {"b0", "b1", "b2", "b3"}
    assert await counts() == {"u": 1, "v": 1, "w": 3}


@pytest.mark.usefixtures("few")
async def test_retry_on_a_machine_whose_clock_is_behind_is_read_at_once(artifacts: WatchedArtifacts) -> None:
    for number in range(3):
        await stored(artifacts, f"b{number}")
    scans = Scanner(artifacts, PULLING, ["u"])
    await uids(scans)
    await stored(artifacts, "retried", at=AT - HOUR, epoch=2)
    assert "retried" in await uids(scans)
    await stored(artifacts, "next", at=AT - HOUR + 1, epoch=2)
    assert "next" in await uids(scans)
    await stored(artifacts, "last", at=AT - HOUR + 20, epoch=2)
    assert {"next", "last"}.intersection(await uids(scans)) == {"next", "last"}
    assert {"next", "last"}.intersection(await uids(scans)) == {"last"}


@pytest.mark.usefixtures("few")
async def test_complete_scan_finds_a_batch_that_was_stored_late(
    artifacts: WatchedArtifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        await stored(artifacts, f"b{number}")
    scans = Scanner(artifacts, PULLING, ["u"])
    await uids(scans)
    await stored(artifacts, "late", at=AT - HOUR)
    assert "late" not in await uids(scans)
    assert "late" in await uids(scans, complete=True)
    assert "late" not in await uids(scans)
    scans.restart()
    assert "late" in await uids(scans)
    monkeypatch.setattr(puller, "_FULL_SEC", 0.0)
    monkeypatch.setattr(puller, "_FULL_SHARE", 0.0)
    scans.restart()
    assert ["late" in await uids(scans) for _ in range(3)] == [True] * 3


# --- a pulling node -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few")
async def test_batch_stored_late_is_delivered_at_the_end_at_the_latest(
    db: Any, artifacts: WatchedArtifacts, pull: Pull
) -> None:
    for number in range(3):
        await stored(artifacts, f"b{number}")
    running = pull.start("u")
    await artifacts.next_scan()
    await stored(ArtifactStore(db), "late", at=AT - HOUR)
    await artifacts.next_scan()
    await end(artifacts, "u")
    found = await asyncio.wait_for(running, TIMEOUT_SEC)
    assert [uid for uid, _ in found] == ["b0", "b1", "b2", "late"]


@pytest.mark.usefixtures("few")
async def test_batches_whose_read_fails_are_read_again_however_old_they_are(
    artifacts: WatchedArtifacts, pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = artifacts.metas

    async def unavailable(*args: Any) -> Any:
        monkeypatch.setattr(artifacts, "metas", read)
        raise StoreUnavailable("the primary stepped down")

    monkeypatch.setattr(artifacts, "metas", unavailable)
    for number in range(4):
        await stored(artifacts, f"b{number}", at=AT + HOUR * number)
    deliveries = pull.puller("u").batches()
    found = [(await asyncio.wait_for(anext(deliveries), TIMEOUT_SEC))[0] for _ in range(4)]
    assert found == ["b0", "b1", "b2", "b3"]


class Writer:
    """One process that runs the attempts of a source, with a clock of its own. Some writes arrive late, or twice."""

    def __init__(self, store: ArtifactStore, node: str, seed: int) -> None:
        self._store = store
        self._node = node
        self._random = random.Random(f"{seed} {node}")
        self._clock = AT

    async def run(self, wanted: list[str]) -> None:
        """Store each batch in one of three attempts, of which each repeats some batches of those before it."""
        done: list[str] = []
        for epoch, share in enumerate((wanted[:20], wanted[20:40], wanted[40:]), 1):
            self._clock = AT + self._random.uniform(-HOUR, HOUR)
            repeated = self._random.sample(done, k=min(5, len(done)))
            await self._attempt(epoch, [*repeated, *share])
            done += share
        await end(self._store, self._node, epoch=3)

    async def _attempt(self, epoch: int, uids: list[str]) -> None:
        late: list[asyncio.Task[None]] = []
        for uid in uids:
            self._clock += self._random.choice((0.0, 0.01, 2.0, 8.0, -3.0))
            if self._random.random() < 0.1:
                await self._store.store_failed_batch(
                    attempt(self._node, epoch=epoch), uid, "torn", self._clock
                )
            write = stored(self._store, uid, at=self._clock, node=self._node, epoch=epoch)
            if self._random.random() < 0.2:
                late.append(asyncio.create_task(_after(self._random.randrange(50), write)))
            else:
                await write
        await asyncio.gather(*late)


async def _after(turns: int, write: Any) -> None:
    for _ in range(turns):
        await let_other_tasks_run()
    await write


@pytest.mark.parametrize("seed", range(4))
async def test_concurrent_writers_with_wrong_clocks_lose_no_batch(
    db: Any,
    artifacts: WatchedArtifacts,
    tasks: TaskStore,
    pull: Pull,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Every batch is delivered once and claimed once, whichever attempt stored it, and at whatever time."""
    monkeypatch.setattr(puller, "MANY", 3)
    monkeypatch.setattr(puller, "OVERLAP", timedelta(seconds=seed))
    monkeypatch.setattr(puller, "_FULL_SEC", (0.01, 0.1, HOUR)[seed % 3])
    sources = ("u", "v", "w")
    await opened(tasks, *sources, "sink")
    for index, source in enumerate(sources):
        await begun(tasks, attempt(source, epoch=3, index=index))
    running = pull.start(*sources)
    expected = {source: [f"{source}{number}" for number in range(60)] for source in sources}
    await asyncio.gather(
        *(Writer(ArtifactStore(db), source, seed).run(uids) for source, uids in expected.items())
    )
    delivered = Counter(uid for uid, _ in await asyncio.wait_for(running, TIMEOUT_SEC))
    wanted = Counter(
        qualified(uid, source, first=sources[0]) for source, uids in expected.items() for uid in uids
    )
    assert delivered == wanted, f"seed {seed}"
    claims = await documents_of(db.stream_progress)
    assert Counter(claim["batch_uid"] for claim in claims) == Counter(
        uid for uids in expected.values() for uid in uids
    )


@pytest.mark.usefixtures("few")
async def test_late_batch_is_delivered_while_the_source_runs(
    db: Any, artifacts: WatchedArtifacts, pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller, "_FULL_SEC", 0.05)
    monkeypatch.setattr(puller, "_FULL_SHARE", 0.0)
    await batches(artifacts, "u", "b0", "b1", "b2")
    deliveries = pull.puller("u").batches()
    assert [(await anext(deliveries))[0] for _ in range(3)] == ["b0", "b1", "b2"]
    await stored(ArtifactStore(db), "late", at=AT - HOUR)
    assert (await asyncio.wait_for(anext(deliveries), TIMEOUT_SEC))[0] == "late"
