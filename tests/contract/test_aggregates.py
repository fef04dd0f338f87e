"""merge.generic, metrics.aggregate and noop: summaries of the stored results of nodes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import (
    AT,
    RUN,
    TASK,
    WORKER,
    attempt,
    batches,
    begun,
    documents_of,
    opened,
    seconds,
    stored,
    stored_node,
)
from tests.contract.variables import SECRET, refused, unchanged, write

from flowkit.adapters.vars.changes import kind
from flowkit.coordinator.adapters import CoordinatorAdapters
from flowkit.errors import Fenced

if TYPE_CHECKING:
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.store import TaskStore


class Clock:
    """A clock with a fixed time."""

    def now_dt(self) -> datetime:
        """Return a minute after all other dates."""
        return datetime.fromtimestamp(AT + 60, UTC)


@pytest.fixture
async def adapters(db: Any, tasks: TaskStore, artifacts: ArtifactStore) -> CoordinatorAdapters:
    """The functions, on a database with one open task."""
    await opened(tasks, "a", "b", "m")
    return CoordinatorAdapters(db=db, clock=Clock())


async def of_node(db: Any, node_id: str) -> list[dict[str, Any]]:
    """Return all artifacts of a node."""
    return [found for found in await documents_of(db.artifacts) if found["node_id"] == node_id]


# --- merge.generic ----------------------------------------------------------------------------------------------


async def test_merge_counts_the_artifacts_of_its_sources(
    db: Any, artifacts: ArtifactStore, adapters: CoordinatorAdapters
) -> None:
    await batches(artifacts, "a", "b1", "b2", "b3")
    await batches(artifacts, "b", "b1", "b4")
    await batches(artifacts, "other", "b9")
    for node in ("b", "a", "other"):
        await artifacts.mark_complete(TASK, node, 1, {}, AT)
    response = await adapters.merge_generic(TASK, ["b", "nobody", "a"], {"node_id": "m", "key": SECRET})
    meta = {
        "merged_from": ["b", "nobody", "a"],
        "complete_nodes": ["a", "b"],
        "partial_batches": 5,
        "distinct_batch_uids": 4,
        "merged_at": datetime.fromtimestamp(AT + 60, UTC).isoformat(),
    }
    assert response == {"ok": True, "meta": meta}
    [artifact] = await of_node(db, "m")
    assert (artifact["status"], artifact["meta"], artifact["attempt_epoch"]) == ("complete", meta, 0)
    assert seconds(artifact["created_at"]) == seconds(artifact["updated_at"]) == AT + 60
    assert "batch_uid" not in artifact


async def test_merge_without_artifacts_has_zero_counts(db: Any, adapters: CoordinatorAdapters) -> None:
    response = await adapters.merge_generic(TASK, [], {})
    found = response["meta"]
    assert (found["merged_from"], found["complete_nodes"]) == ([], [])
    assert (found["partial_batches"], found["distinct_batch_uids"]) == (0, 0)
    assert [artifact["node_id"] for artifact in await documents_of(db.artifacts)] == ["coordinator"]


async def test_merge_reads_artifacts_of_its_own_task_only(
    db: Any, artifacts: ArtifactStore, adapters: CoordinatorAdapters
) -> None:
    await artifacts.mark_complete("task-2", "a", 1, {}, AT)
    response = await adapters.merge_generic(TASK, ["a"], {})
    assert response["meta"]["complete_nodes"] == []


async def test_merge_replaces_the_complete_artifact_of_its_target_and_keeps_its_epoch(
    db: Any, artifacts: ArtifactStore, adapters: CoordinatorAdapters
) -> None:
    await artifacts.mark_complete(TASK, "m", 4, {"old": 1}, AT, worker_id=WORKER)
    response = await adapters.merge_generic(TASK, ("a",), {"node_id": "m"})
    [artifact] = await of_node(db, "m")
    assert (artifact["meta"], artifact["attempt_epoch"]) == (response["meta"], 4)
    assert seconds(artifact["created_at"]) == AT


async def test_merge_does_not_change_the_artifacts_of_batches(
    db: Any, artifacts: ArtifactStore, adapters: CoordinatorAdapters
) -> None:
    await batches(artifacts, "m", "b1", "b2")
    before = await of_node(db, "m")
    for _ in range(2):
        await adapters.merge_generic(TASK, ["m"], {"node_id": "m"})
    after = await of_node(db, "m")
    assert [artifact for artifact in after if "batch_uid" in artifact] == before
    assert [artifact["status"] for artifact in after if "batch_uid" not in artifact] == ["complete"]


async def test_concurrent_merges_leave_one_artifact(db: Any, adapters: CoordinatorAdapters) -> None:
    await asyncio.gather(*(adapters.merge_generic(TASK, ["a"], {"node_id": "m"}) for _ in range(20)))
    assert [artifact["status"] for artifact in await of_node(db, "m")] == ["complete"]


@pytest.mark.parametrize("target", [None, SECRET, ["m"], 5])
async def test_merge_requires_a_dict_as_target(db: Any, adapters: CoordinatorAdapters, target: Any) -> None:
    text = await refused(adapters.merge_generic(TASK, ["a"], target))
    assert f"'target' must be a dict, not {kind(target)}" in text
    assert await documents_of(db.artifacts) == []


@pytest.mark.parametrize("sources", [None, SECRET, b"a", 5, ["a", 5], ["a", None]])
async def test_merge_requires_a_list_of_node_ids(
    db: Any, adapters: CoordinatorAdapters, sources: Any
) -> None:
    text = await refused(adapters.merge_generic(TASK, sources, {}))
    assert text.startswith(
        ("merge.generic: 'from_nodes' must", "merge.generic: an entry of 'from_nodes' is ")
    )
    assert await documents_of(db.artifacts) == []


async def test_merge_of_an_unknown_task_fails_without_an_artifact(
    db: Any, adapters: CoordinatorAdapters
) -> None:
    assert "'stranger'" in await refused(adapters.merge_generic("stranger", ["a"], {}))
    assert "'stranger'" in await refused(adapters.metrics_aggregate("stranger", "a"))
    assert await documents_of(db.artifacts) == []


# --- metrics.aggregate ------------------------------------------------------------------------------------------


@pytest.fixture
async def measured(artifacts: ArtifactStore, adapters: CoordinatorAdapters) -> None:
    """Store rows of a node, one of which is final and one failed."""
    rows: dict[str, dict[str, Any]] = {
        "b1": {"n": 1, "text": "2.5", "flag": True, "word": "many", "list": [1], "odd": None},
        "b2": {"n": 2.5, "text": " 4 ", "flag": False, "once": 7, "nan": float("nan"), "inf": "inf"},
    }
    for uid, metrics in rows.items():
        await artifacts.store_batch(attempt("a"), uid, metrics, WORKER, AT)
    await artifacts.store_failed_batch(attempt("a"), "b3", "boom", AT)
    await artifacts.store_final(attempt("a"), {"n": 10, "total": 3}, AT)
    await artifacts.store_batch(attempt("b"), "b1", {"n": 1000}, WORKER, AT)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("mode", "stats"),
    [
        ("sum", {"n": 13.5, "text": 6.5, "flag": 1.0, "once": 7.0, "total": 3.0}),
        ("mean", {"n": 4.5, "text": 3.25, "flag": 0.5, "once": 7.0, "total": 3.0}),
        ("median", {"n": 13.5, "text": 6.5, "flag": 1.0, "once": 7.0, "total": 3.0}),
    ],
)
async def test_aggregate_counts_numbers_in_successful_rows(
    db: Any, adapters: CoordinatorAdapters, mode: str, stats: dict[str, float]
) -> None:
    response = await adapters.metrics_aggregate(TASK, "a", mode=mode)
    assert response == {"ok": True, "mode": mode, "stats": stats}
    node = await stored_node(db)
    assert node["stats"] == stats
    assert {type(value) for value in node["stats"].values()} == {float}
    assert seconds(node["stats_cached_at"]) == seconds((await stored(db))["updated_at"]) == AT + 60
    assert (await stored_node(db, 1))["stats"] == {}


@pytest.mark.usefixtures("measured")
async def test_aggregate_sums_by_default_and_can_be_repeated(db: Any, adapters: CoordinatorAdapters) -> None:
    first = await adapters.metrics_aggregate(TASK, "b")
    assert (
        first
        == await adapters.metrics_aggregate(TASK, "b")
        == {
            "ok": True,
            "mode": "sum",
            "stats": {"n": 1000.0},
        }
    )
    assert (await stored_node(db, 1))["stats"] == {"n": 1000.0}


async def test_aggregate_ignores_failed_rows_with_metrics(db: Any, adapters: CoordinatorAdapters) -> None:
    row = {"task_id": TASK, "node_id": "a", "metrics": {"n": 1}}
    await db.metrics_raw.insert_many(
        [
            {**row, "batch_uid": "old"},
            {**row, "batch_uid": "bad", "failed": True},
            {**row, "batch_uid": "empty", "metrics": None},
            {**row, "batch_uid": "good", "failed": False},
            {**row, "batch_uid": "alien", "task_id": "task-2"},
        ]
    )
    assert (await adapters.metrics_aggregate(TASK, "a"))["stats"] == {"n": 2.0}


@pytest.mark.parametrize("mode", ["sum", "mean"])
async def test_aggregate_without_rows_sets_empty_stats(
    db: Any, adapters: CoordinatorAdapters, mode: str
) -> None:
    await db.tasks.update_one({"id": TASK}, {"$set": {"graph.nodes.0.stats": {"old": 1.0}}})
    assert (await adapters.metrics_aggregate(TASK, "a", mode=mode))["stats"] == {}
    assert (await stored_node(db))["stats"] == {}


@pytest.mark.usefixtures("measured")
async def test_aggregate_of_an_unknown_node_names_the_node(db: Any, adapters: CoordinatorAdapters) -> None:
    async with unchanged(db):
        assert "has no node 'nobody'" in await refused(adapters.metrics_aggregate(TASK, "nobody"))


@pytest.mark.usefixtures("measured")
async def test_node_aggregates_only_while_its_attempt_holds_it(
    db: Any, tasks: TaskStore, adapters: CoordinatorAdapters
) -> None:
    own = write(1, node="m", index=2)
    async with unchanged(db):
        with pytest.raises(Fenced):
            await adapters.for_node(own).metrics_aggregate(TASK, "a")
    await begun(tasks, own.attempt)
    assert (await adapters.for_node(own).metrics_aggregate(TASK, "a"))["stats"]["n"] == 13.5
    assert (await stored_node(db))["stats"]["n"] == 13.5
    newer = write(2, node="m", index=2)
    await begun(tasks, newer.attempt)
    async with unchanged(db):
        with pytest.raises(Fenced):
            await adapters.for_node(own).metrics_aggregate(TASK, "a", mode="mean")


async def test_repeated_aggregate_of_a_finished_attempt_succeeds_without_a_write(
    db: Any, tasks: TaskStore, adapters: CoordinatorAdapters
) -> None:
    own = write(1, node="m", index=2)
    await begun(tasks, own.attempt)
    await tasks.attempts.finish(own.attempt, RUN, AT)
    async with unchanged(db):
        await adapters.for_node(own).metrics_aggregate(TASK, "a", mode="mean")


# --- noop -------------------------------------------------------------------------------------------------------


async def test_noop_accepts_any_arguments_and_does_nothing(db: Any, adapters: CoordinatorAdapters) -> None:
    async with unchanged(db):
        assert await adapters.noop(TASK) == {"ok": True}
        assert await adapters.noop(TASK, kv={"$a": object()}, keys=5, target=None) == {"ok": True}
