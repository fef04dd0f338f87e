"""Writes of an attempt: it takes its epoch once, keeps its lease, and finishes only a node that it still holds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import (
    AT,
    RUN,
    TASK,
    WORKER,
    attempt,
    begun,
    close,
    new_task,
    opened,
    record,
    seconds,
    shown,
    stored,
    stored_node,
)

from flowkit.adapters.tasks.attempts import KnownParams, StoredParams
from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.adapters.tasks.queries import TaskQueries
from flowkit.attempt.storage import AttemptStorage
from flowkit.errors import EpochTaken, Fenced, StoreRefused, VersionPinned
from flowkit.models import NodeReset, NodeStatus, ResetNodes, SkipReason, TaskStatus

if TYPE_CHECKING:
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.models import AttemptInput


@pytest.fixture(autouse=True)
async def _open(tasks: TaskStore) -> None:
    await opened(tasks, "a", "b")


# --- taking the epoch -------------------------------------------------------------------------------------------


async def test_first_write_records_the_worker_of_the_node(db: Any, tasks: TaskStore) -> None:
    lease = {"worker_id": "w-1", "lease_id": "l", "deadline_ts_ms": 5}
    await tasks.attempts.begin(attempt("b", index=1, epoch=1), RUN, lease, AT + 5)
    node = await stored_node(db, 1)
    assert (node["status"], node["attempt_epoch"], node["run_id"]) == ("running", 1, RUN)
    assert node["lease"] == lease
    assert seconds(node["started_at"]) == seconds((await stored(db))["updated_at"]) == AT + 5
    assert (await stored_node(db, 0))["status"] == "queued"


async def test_an_attempt_shows_how_many_have_failed_before_it_until_the_node_starts_again(
    db: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    for epoch, failures in ((1, 0), (2, 1), (3, 1)):
        await begun(tasks, replace(attempt(epoch=epoch), failures=failures))
        assert (await stored_node(db)).get("failures", 0) == failures
    again = NodeReset(index=0, node_id="a", epoch=4, generation=1)
    reset = ResetNodes(task_id=TASK, run_id=RUN, run_seq=1, revision=1, at=AT, nodes=[again])
    await tasks.reset_nodes(reset, artifacts)
    assert "failures" not in await stored_node(db)


async def test_begin_reads_the_params_of_each_task_alone_and_in_groups(tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a", task_id="other", params={"day": "2026-01-31"}))
    nodes = [attempt(), attempt("b", index=1), replace(attempt(), task_id="other"), attempt(epoch=2)]
    read: list[dict[str, Any]] = [{} for _ in nodes]
    await asyncio.gather(
        *(
            tasks.attempts.begin(node, RUN, {"lease_id": str(index)}, AT, once=True, read=read[index])
            for index, node in enumerate(nodes)
        )
    )
    assert [each["params"].decode() for each in read] == [{"n": 1}, {"n": 1}, {"day": "2026-01-31"}, {"n": 1}]


async def test_begin_that_a_closed_document_refuses_first_reads_the_params_too(tasks: TaskStore) -> None:
    await tasks.close_task(close())
    await opened(tasks, "a", "b", run="run-2")
    read: dict[str, Any] = {}
    await tasks.attempts.begin(attempt(), "run-2", {"lease_id": "l"}, AT, once=True, read=read)
    assert read["params"].decode() == {"n": 1}


@pytest.mark.parametrize("params", [{"n": 1}, {"n": 1, "text": "x" * 40_000}], ids=["small", "large"])
async def test_attempts_of_one_run_in_a_process_share_what_they_have_read_of_the_params(
    db: Any, tasks: TaskStore, artifacts: ArtifactStore, params: dict[str, Any]
) -> None:
    await db.tasks.update_one({"id": TASK}, {"$set": {"params": params}})

    async def read_by(epoch: int, run: str = RUN) -> StoredParams:
        storage = AttemptStorage(tasks, artifacts, attempt(epoch=epoch), run, WORKER)
        await storage.begin()
        return storage.take_params()

    read = await read_by(1)
    assert await read_by(2) is read
    own = read.decode()
    own["n"] = 2
    assert read.decode() == params
    later = {**params, "n": 3}
    await db.tasks.update_one({"id": TASK}, {"$set": {"params": later}})
    is_small = len(params) == 1
    del read
    assert (await read_by(3)).decode() == (params if is_small else later)
    assert (await read_by(4, "run-2")).decode() == later


async def test_params_of_ended_attempts_take_a_limited_amount_of_memory() -> None:
    known, most = KnownParams(), 4_000
    for number in range(most):
        known.note(TASK, f"run-{number}", StoredParams(stored={"n": number}))
    kept = [number for number in range(most) if known.get(TASK, f"run-{number}") is not None]
    assert 500 < len(kept) <= 2 * 2**20 / 1_000
    assert kept[-1] == most - 1


# --- versions ---------------------------------------------------------------------------------------------------


def pinning(node: AttemptInput, version: str, role: str = "crawler") -> AttemptInput:
    """Return an attempt that fixes its version for the task."""
    return replace(node, role=role, version=version, pin=True)


async def test_first_attempt_of_a_role_fixes_its_version(db: Any, tasks: TaskStore) -> None:
    first, second = attempt(), attempt("b", index=1)
    await asyncio.gather(begun(tasks, pinning(first, "1.4")), begun(tasks, pinning(second, "7", "mail.in")))
    assert await TaskQueries(db).pins(TASK) == {"crawler": "1.4", "mail.in": "7"}
    await begun(tasks, pinning(attempt(epoch=2), "1.4"))
    before = await stored(db)
    with pytest.raises(VersionPinned) as caught:
        await begun(tasks, pinning(attempt("b", index=1, epoch=2), "1.5"))
    assert caught.value.pinned == "1.4"
    assert await stored(db) == before
    with pytest.raises(EpochTaken):
        await tasks.attempts.begin(pinning(first, "1.5"), "run-0", {"lease_id": "l"}, AT)


async def test_only_one_of_two_concurrent_first_attempts_fixes_its_version(db: Any, tasks: TaskStore) -> None:
    versions = ("1.4", "1.5")
    attempts = [
        pinning(node, version)
        for node, version in zip((attempt(), attempt("b", index=1)), versions, strict=True)
    ]
    ends = await asyncio.gather(
        *(tasks.attempts.begin(each, RUN, {"lease_id": each.version}, AT, once=True) for each in attempts),
        return_exceptions=True,
    )
    [lost] = [each for each in ends if each is not None]
    assert isinstance(lost, VersionPinned)
    fixed = (await TaskQueries(db).pins(TASK))["crawler"]
    assert (lost.pinned, ends.index(None)) == (fixed, versions.index(fixed))
    statuses = [node["status"] for node in (await stored(db))["graph"]["nodes"]]
    assert sorted(statuses) == ["queued", "running"]


async def test_reset_to_the_start_forgets_the_versions(db: Any, tasks: TaskStore) -> None:
    await begun(tasks, pinning(attempt(), "1.4"))
    await opened(tasks, "a", "b", run="run-2")
    await begun(tasks, pinning(attempt(epoch=2), "1.5"), run="run-2")
    assert await TaskQueries(db).pins(TASK) == {"crawler": "1.5"}


# --- later epochs -----------------------------------------------------------------------------------------------


async def test_higher_epoch_is_accepted(db: Any, tasks: TaskStore) -> None:
    await begun(tasks, attempt(epoch=1))
    await begun(tasks, attempt(epoch=4))
    assert (await stored_node(db))["attempt_epoch"] == 4


async def test_same_run_can_start_the_same_epoch_again(db: Any, tasks: TaskStore) -> None:
    await begun(tasks, attempt(epoch=2))
    await begun(tasks, attempt(epoch=2))
    assert (await stored_node(db))["attempt_epoch"] == 2


@pytest.mark.parametrize(("epoch", "run"), [(3, "other-run"), (2, RUN), (2, "other-run")])
async def test_used_epoch_is_rejected_with_the_current_one(
    db: Any, tasks: TaskStore, epoch: int, run: str
) -> None:
    await begun(tasks, attempt(epoch=3))
    before = await stored(db)
    with pytest.raises(EpochTaken) as caught:
        await begun(tasks, attempt(epoch=epoch), run=run)
    assert caught.value.current == 3
    assert await stored(db) == before


async def test_one_of_fifty_runs_with_the_same_epoch_starts(db: Any, tasks: TaskStore) -> None:
    results = await asyncio.gather(
        *(begun(tasks, attempt(epoch=1), run=f"run-{n}") for n in range(50)), return_exceptions=True
    )
    losers = [result for result in results if isinstance(result, EpochTaken)]
    assert len(losers) == 49
    assert {loser.current for loser in losers} == {1}
    assert (await stored_node(db))["run_id"] == f"run-{results.index(None)}"


async def test_no_attempt_starts_after_its_own_run_has_closed_the_task(db: Any, tasks: TaskStore) -> None:
    await tasks.close_task(close(shown("a", NodeStatus.SKIPPED), status=TaskStatus.FAILED))
    before = await stored(db)
    with pytest.raises(Fenced, match="ended"):
        await begun(tasks, attempt(epoch=1))
    assert await stored(db) == before


async def test_no_attempt_starts_without_a_document(db: Any, tasks: TaskStore) -> None:
    await db.tasks.delete_many({})
    with pytest.raises(StoreRefused, match="no document"):
        await begun(tasks, attempt())


@pytest.mark.parametrize(("node_id", "index"), [("stranger", 0), ("a", 7)])
async def test_no_attempt_starts_if_the_document_has_another_graph(
    tasks: TaskStore, node_id: str, index: int
) -> None:
    with pytest.raises(StoreRefused, match="another graph"):
        await begun(tasks, attempt(node_id, index=index))


async def test_newer_run_reopens_a_task_that_the_sweep_has_closed(db: Any, tasks: TaskStore) -> None:
    await begun(tasks, attempt(epoch=1))
    assert await OpenTasks(tasks.database).close_orphan(TASK, RUN, "terminated", AT)
    await begun(tasks, attempt(epoch=2), run="run-2")
    document = await stored(db)
    assert (document["status"], document["run_id"]) == ("running", "run-2")
    assert document["finished_at"] is document["reason"] is None
    assert document["coordinator"] == {"liveness": {"state": "ok"}}
    assert document["graph"]["nodes"][0]["status"] == "running"


async def test_reopened_task_has_no_result(db: Any, tasks: TaskStore) -> None:
    await tasks.close_task(close())
    await begun(tasks, attempt(epoch=2), run="run-2")
    assert (await stored(db))["result"] is None


@pytest.mark.parametrize("status", [NodeStatus.FAILED, NodeStatus.CANCELLED])
async def test_outdated_attempt_does_not_reopen_its_closed_node(
    db: Any, tasks: TaskStore, status: NodeStatus
) -> None:
    await begun(tasks, attempt(epoch=1))
    await tasks.record(record(shown("a", status, epoch=1)))
    with pytest.raises((Fenced, EpochTaken)):
        await begun(tasks, attempt(epoch=1))
    assert (await stored_node(db))["status"] == status.value


async def test_outdated_attempt_of_an_older_run_does_not_reopen_a_closed_task(
    db: Any, tasks: TaskStore
) -> None:
    await begun(tasks, attempt(epoch=1))
    await tasks.attempts.finish(attempt(epoch=1), RUN, AT)
    run_seq = await opened(tasks, "a", "b", run="run-2")
    await tasks.close_task(close(run="run-2", run_seq=run_seq))
    with pytest.raises((Fenced, EpochTaken)):
        await begun(tasks, attempt(epoch=1))
    assert (await stored(db))["status"] == "finished"


async def test_cancel_of_an_earlier_attempt_does_not_stop_a_new_one(tasks: TaskStore) -> None:
    await begun(tasks, attempt(epoch=1))
    await tasks.record(record(shown("a", NodeStatus.CANCELLING, epoch=1), cancel="user_request"))
    await tasks.close_task(close(shown("a", NodeStatus.CANCELLED, epoch=1), status=TaskStatus.CANCELLED))
    await opened(tasks, "a", "b", run="run-2")
    await begun(tasks, attempt(epoch=2), run="run-2")
    assert await tasks.flags.find_flag(attempt(epoch=2)) is None


async def test_new_attempt_clears_the_outcome_of_the_earlier_one(db: Any, tasks: TaskStore) -> None:
    ended = shown("a", NodeStatus.SKIPPED, last_error="x", skip_reason=SkipReason.USER)
    await tasks.record(record(ended))
    await begun(tasks, attempt(epoch=1))
    node = await stored_node(db)
    assert (node.get("finished_at"), node.get("skip_reason")) == (None, None)


# --- holding the epoch ------------------------------------------------------------------------------------------


async def test_lease_only_moves_forward(db: Any, tasks: TaskStore) -> None:
    await begun(tasks, attempt(), deadline_ms=100)
    for deadline, expected in ((200, 200), (150, 200), (300, 300)):
        await tasks.attempts.extend_lease(attempt(), RUN, deadline, AT)
        assert (await stored_node(db))["lease"] == {"worker_id": "w-1", "deadline_ts_ms": expected}


async def test_last_event_only_moves_forward(db: Any, tasks: TaskStore) -> None:
    await begun(tasks, attempt())
    for at, expected in ((AT + 9, AT + 9), (AT + 5, AT + 9)):
        await tasks.attempts.extend_lease(attempt(), RUN, 1, at)
        assert (await stored(db))["last_event_recv_ms"] == int(expected * 1000)


async def test_older_attempt_does_not_extend_the_lease_of_a_newer_one(db: Any, tasks: TaskStore) -> None:
    await begun(tasks, attempt(epoch=2), deadline_ms=100)
    await tasks.attempts.extend_lease(attempt(epoch=1), RUN, 999, AT)
    await tasks.attempts.extend_lease(attempt(epoch=2), "other-run", 999, AT)
    assert (await stored_node(db))["lease"]["deadline_ts_ms"] == 100
