"""Complete markers of nodes that ended without one: written in bulk, fenced by epoch, and only where missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import AT, TASK, WORKER, attempt, documents_of, shown
from tests.contract.recording_database import RecordingDatabase

from flowkit.adapters import artifacts as artifacts_module
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.notifier import ArtifactNotifier
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from flowkit.adapters.entries import Entry
    from flowkit.models import NodeRecord

MANY = 120


class RecordingNotifier(ArtifactNotifier):
    """Records its notifications."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[str] = []

    def notify(self, task_id: str, node: str, row: Entry | None = None) -> None:
        """Record the notification."""
        self.nodes.append(node)
        super().notify(task_id, node, row)


@pytest.fixture
def recording(db: Any, artifacts: ArtifactStore) -> RecordingDatabase:
    """`db` with its indexes, recording its updates."""
    assert artifacts is not None
    return RecordingDatabase(db)


def notifying(db: Any, notifier: ArtifactNotifier) -> ArtifactStore:
    """Return a store with this notifier."""
    store = ArtifactStore(db)
    store.notifier = notifier
    return store


def skipped(node_id: str, epoch: int = 1, status: NodeStatus = NodeStatus.SKIPPED) -> NodeRecord:
    """Return a skipped node that another node pulls from."""
    return shown(node_id, status, epoch=epoch, marker=True)


async def markers(db: Any) -> dict[str, tuple[int, Any]]:
    """Return epoch and meta of each marker."""
    rows = [row for row in await documents_of(db.artifacts) if "batch_uid" not in row]
    assert len({row["node_id"] for row in rows}) == len(rows), "one each"
    return {row["node_id"]: (row["attempt_epoch"], row["meta"]) for row in rows}


async def test_many_markers_are_written_in_a_few_calls(
    db: Any, recording: RecordingDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts_module, "_MARKERS_AT_ONCE", 50)
    notifier, calls = RecordingNotifier(), []

    async def count() -> None:
        calls.append(1)

    recording.before["artifacts"] += [count] * MANY
    await notifying(recording, notifier).mark_ended(TASK, [skipped(f"n{i}") for i in range(MANY)], AT)
    assert await markers(db) == {f"n{i}": (1, {"ended": "skipped"}) for i in range(MANY)}
    assert len(calls) == 3
    assert set(notifier.nodes) == set(await markers(db))


async def test_marker_has_the_form_that_pulling_nodes_and_external_workers_expect(
    db: Any, recording: RecordingDatabase
) -> None:
    await ArtifactStore(recording).mark_ended(TASK, [skipped("a", epoch=3)], AT)
    [row] = await documents_of(db.artifacts)
    del row["_id"], row["created_at"], row["updated_at"]
    assert row == {
        "task_id": TASK,
        "node_id": "a",
        "status": "complete",
        "meta": {"ended": "skipped"},
        "confirmed": True,
        "attempt_epoch": 3,
        "worker_id": "",
    }


async def test_repeated_call_writes_only_missing_markers(db: Any, recording: RecordingDatabase) -> None:
    notifier = RecordingNotifier()
    await ArtifactStore(recording).mark_ended(TASK, [skipped("a"), skipped("b")], AT)
    await notifying(recording, notifier).mark_ended(TASK, [skipped("a"), skipped("b"), skipped("c")], AT)
    assert set(await markers(db)) == {"a", "b", "c"}
    assert notifier.nodes == ["c"]
    assert recording.updates == []


async def test_higher_epoch_replaces_a_marker_and_a_lower_one_does_not(
    db: Any, artifacts: ArtifactStore, recording: RecordingDatabase
) -> None:
    await artifacts.mark_complete(TASK, "old", 1, {"n": 1}, AT, worker_id=WORKER)
    await artifacts.mark_complete(TASK, "same", 2, {"n": 1}, AT, worker_id=WORKER)
    await artifacts.mark_complete(TASK, "new", 3, {"n": 1}, AT, worker_id=WORKER)
    failed = [skipped(name, 2, NodeStatus.FAILED) for name in ("old", "same", "new")]
    await ArtifactStore(recording).mark_ended(TASK, failed, AT)
    ended = (2, {"ended": "failed"})
    assert await markers(db) == {"old": ended, "same": ended, "new": (3, {"n": 1})}


async def test_result_of_a_finished_node_is_kept_when_another_node_begins_to_pull_from_it(
    db: Any, artifacts: ArtifactStore, recording: RecordingDatabase
) -> None:
    await artifacts.mark_complete(TASK, "by hand", 2, {"n": 1}, AT, worker_id=WORKER)
    await artifacts.mark_complete(TASK, "again", 1, {"ended": "failed"}, AT, worker_id=WORKER)
    names = ("by hand", "again", "approval")
    decided = [
        shown(each, NodeStatus.FINISHED, epoch=1 + (each == "by hand"), marker=True, decided=True)
        for each in names
    ]
    await ArtifactStore(recording).mark_ended(TASK, decided, AT)
    ended = (1, {"ended": "finished"})
    assert await markers(db) == {"by hand": (2, {"n": 1}), "again": ended, "approval": ended}


async def test_concurrent_marker_of_a_newer_attempt_is_kept(
    db: Any, artifacts: ArtifactStore, recording: RecordingDatabase
) -> None:
    async def newer() -> None:
        await artifacts.mark_complete(TASK, "a", 5, {}, AT)

    recording.before["artifacts"].append(newer)
    await ArtifactStore(recording).mark_ended(TASK, [skipped("a"), skipped("b")], AT)
    assert await markers(db) == {"a": (5, {}), "b": (1, {"ended": "skipped"})}


async def test_batches_are_not_markers(
    db: Any, artifacts: ArtifactStore, recording: RecordingDatabase
) -> None:
    await artifacts.store_batch(attempt("a", epoch=4), "b1", {"n": 1}, WORKER, AT)
    await ArtifactStore(recording).mark_ended(TASK, [skipped("a")], AT)
    assert await markers(db) == {"a": (1, {"ended": "skipped"})}


async def test_only_unsuccessful_sources_of_other_nodes_get_a_marker(
    db: Any, recording: RecordingDatabase
) -> None:
    nodes = [
        shown("no pulling node", NodeStatus.SKIPPED),
        skipped("finished", status=NodeStatus.FINISHED),
        skipped("runs again", status=NodeStatus.DEFERRED),
        skipped("cancelled", status=NodeStatus.CANCELLED),
    ]
    await ArtifactStore(recording).mark_ended(TASK, nodes, AT)
    assert set(await markers(db)) == {"cancelled"}
