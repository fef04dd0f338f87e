"""External nodes that pull the batches of other nodes: every batch arrives, and counts once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.bridge import supervisor
from flowkit.models import TaskStatus
from flowkit.testing.external import EachBatch, Misbehavior, Result
from flowkit.testing.external.handlers import scripted
from tests.integration.bridge.external_tasks import codes
from tests.integration.harness import node

if TYPE_CHECKING:
    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server

ONCE: dict[str, Any] = {"retry_policy": {"max": 0}}
PULL = {"input_adapter": "pull.from_artifacts"}
PULL_QUICKLY = {"poll_ms": 50, "backoff_max_ms": 100}


def rechunk(**args: Any) -> dict[str, Any]:
    """Return the inline input of a node that rechunks its input."""
    return {"input_adapter": "pull.from_artifacts.rechunk:size", "input_args": {**PULL_QUICKLY, **args}}


def pull(*sources: str) -> dict[str, Any]:
    """Return the inline input of a node that pulls, from its parents if there are no `sources`."""
    named = {"from_nodes": list(sources)} if sources else {}
    return {**PULL, "input_args": {**PULL_QUICKLY, **named}}


class Reader:
    """A handler that records which batches it gets in which epoch, and can fail once at one of them."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.read: list[tuple[int, Any]] = []
        self._fail_at = fail_at
        self.handler = EachBatch(self._process)

    def in_epoch(self, epoch: int) -> list[Any]:
        """Return what the run of an epoch has read, sorted."""
        return sorted(what for at, what in self.read if at == epoch)

    def _process(self, payload: dict[str, Any], run: Any) -> Any:
        what = payload.get("items") or payload["meta"].get("number")
        self.read.append((run.attempt_epoch, what))
        if len(self.read) - 1 == self._fail_at:
            return Result(success=False, reason_code="flaky")
        return {"read": what, "from": payload["from_node"]}


async def assert_read_once(
    external: ExternalTasks, task_id: str, batches: int, node_id: str = "enrich"
) -> None:
    """Check that the node has stored each batch of its sources, once."""
    uids = Counter(row["batch_uid"] for row in await external.rows(task_id, node_id))
    assert (len(uids), set(uids.values())) == (batches, {1} if batches else set())


async def test_child_reads_batches_whose_artifacts_mongodb_refuses_from_workers(
    external: ExternalTasks,
) -> None:
    """H18: the bridge writes the artifacts from BATCH_OK."""
    await external.served_engine()
    await external.external(scripted, misbehavior=Misbehavior(partial_refused=True))
    await external.external(
        *[EachBatch(lambda payload, run: payload["meta"])] * 2, roles=[external.other_role]
    )
    task_id = await external.create(
        node("extract", external.role, inline={"batches": 5}),
        node("enrich", external.other_role, "extract", inline=pull(), **ONCE),
    )
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    await assert_read_once(external, task_id, 5)
    assert await codes(external, task_id, "enrich") == [None]


async def test_child_that_finishes_before_its_source_reads_the_rest_in_another_run(
    external: ExternalTasks,
) -> None:
    """H19: the worker sees the complete marker before the batches, which another run reads without a retry."""
    await external.served_engine()
    reader = Reader()
    late = Misbehavior(partial_refused=True, hold=("BATCH_OK", "TASK_DONE"))
    source = await external.external(scripted, misbehavior=late)
    child = await external.external(scripted, reader.handler, roles=[external.other_role])
    task_id = await external.create(
        node("extract", external.role, inline={"batches": 6}),
        node("enrich", external.other_role, inline=pull("extract"), **ONCE),
    )
    await child.wait_for("TASK_DONE", node="enrich", epoch=1)
    await source.release()
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    assert await codes(external, task_id, "enrich") == ["unclaimed_batches", None]
    assert reader.in_epoch(2) == [0, 1, 2, 3, 4, 5]
    await assert_read_once(external, task_id, 6)
    assert len(child.sent_for("enrich", "TASK_DONE")) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "adapter"),
    [
        (250, "whole"),
        (250, "rechunk"),
        pytest.param(1_000, "whole", marks=pytest.mark.nightly),
    ],
)
async def test_child_reads_all_batches_of_a_large_source(
    external: ExternalTasks, batches: int, adapter: str
) -> None:
    """H20: a worker sees the 200 oldest batches only."""
    await external.served_engine()
    await external.worker()
    child = await external.external(
        *[EachBatch(lambda payload, run: {"n": 1})] * 2, roles=[external.other_role]
    )
    task_id = await external.create(
        node("extract", inline={"batches": batches}),
        node(
            "enrich",
            external.other_role,
            "extract",
            inline=pull() if adapter == "whole" else rechunk(size=2),
            **ONCE,
        ),
    )
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    await assert_read_once(external, task_id, batches)
    assert set(await codes(external, task_id, "enrich")) <= {"unclaimed_batches", None}
    done = Counter(entry.payload["batch_uid"] for entry in child.sent_for("enrich", "BATCH_OK"))
    assert set(done.values()) == {1}


async def test_retry_gets_the_failed_batch_and_those_after_it(external: ExternalTasks) -> None:
    """H21."""
    await external.served_engine()
    reader = Reader(fail_at=2)
    await external.external(scripted, reader.handler)
    task_id = await external.create(
        node("extract", external.role, inline={"batches": 5}),
        node(
            "enrich",
            external.other_role,
            "extract",
            inline=pull(),
            retry_policy={"max": 1, "backoff_sec": 0.1},
        ),
    )
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    assert await codes(external, task_id, "enrich") == ["flaky", None]
    finished = {what for _, what in reader.read[:2]}
    assert len(reader.in_epoch(1)) == 3
    assert reader.in_epoch(2) == sorted({*range(5)} - finished)
    await assert_read_once(external, task_id, 5)


async def test_retry_gets_all_chunks_of_a_half_processed_batch(external: ExternalTasks) -> None:
    """H21: chunks of finished batches are not delivered again."""
    await external.served_engine()
    reader = Reader(fail_at=3)
    await external.external(scripted, reader.handler)
    lists = [{"skus": [f"{name}{i}" for i in range(4)]} for name in "abc"]
    task_id = await external.create(
        node("extract", external.role, inline={"batches": lists}),
        node(
            "enrich",
            external.other_role,
            "extract",
            inline=rechunk(size=2, meta_list_key="skus"),
            retry_policy={"max": 1, "backoff_sec": 0.1},
        ),
    )
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    assert reader.in_epoch(1) == [["a0", "a1"], ["a2", "a3"], ["b0", "b1"], ["b2", "b3"]]
    assert reader.in_epoch(2) == [["b0", "b1"], ["b2", "b3"], ["c0", "c1"], ["c2", "c3"]]
    await assert_read_once(external, task_id, 6)


async def test_sources_that_share_a_batch_uid_fail_the_node(external: ExternalTasks) -> None:
    """H22: the failure is permanent, because no retry can succeed."""
    await external.served_engine()
    await external.worker()
    child = await external.external(*[EachBatch(lambda payload, run: {"n": 1})] * 2)
    task_id = await external.create(
        node("one", inline={"batches": 2}),
        node("two", inline={"batches": 3}),
        node(
            "enrich",
            external.other_role,
            "one",
            "two",
            inline=pull(),
            retry_policy={"max": 3, "backoff_sec": 0.1},
        ),
    )
    await external.until_status(task_id, "failed")
    failed = await external.until_node(task_id, "enrich", "failed")
    assert failed["last_error"].startswith("batch_uid_clash: batch uid 'b")
    assert failed["attempt_epoch"] == 1
    assert child.sent_for("enrich") == []


@pytest.mark.parametrize("inline", [pull(), rechunk(size=1)], ids=["distinct uids", "rechunk"])
async def test_two_sources_without_a_clash_are_read_completely(
    external: ExternalTasks, inline: dict[str, Any]
) -> None:
    """H22: rechunking makes uids unique."""
    await external.served_engine()
    await external.worker()
    await external.external(scripted, EachBatch(lambda payload, run: {"n": 1}))
    rechunked = "size" in inline["input_args"]
    second = node("two") if rechunked else node("two", external.role, inline={"batches": 3})
    task_id = await external.create(
        node("one", inline={"batches": 3}),
        second,
        node("enrich", external.other_role, "one", "two", inline=inline, **ONCE),
    )
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    await assert_read_once(external, task_id, 4 if rechunked else 6)


async def test_worker_gets_complete_pull_arguments_and_no_noop(external: ExternalTasks) -> None:
    """H23."""
    await external.served_engine()
    worker = await external.external(scripted, EachBatch(lambda payload, run: {"n": 1}))
    task_id = await external.create(
        node("extract", external.role, inline={"input_adapter": "noop", "input_args": {}, "batches": 2}),
        node("parents", external.other_role, "extract", inline=PULL),
        node(
            "alias", external.other_role, "extract", inline={**PULL, "input_args": {"from_node": "extract"}}
        ),
    )
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    inputs = {run.node_id: run.input_inline or {} for run in worker.runs}
    assert inputs["extract"] == {"batches": 2}
    assert inputs["parents"]["input_args"] == {"from_nodes": ["extract"]}
    assert inputs["alias"]["input_args"] == {"from_nodes": ["extract"]}
    for node_id in ("parents", "alias"):
        await assert_read_once(external, task_id, 2, node_id)


async def test_child_ends_although_its_sources_have_no_worker_that_marks_them(
    external: ExternalTasks,
) -> None:
    """H24: the engine writes the complete markers of functions, and of skipped and failed nodes."""
    await external.served_engine()
    await external.worker()
    await external.external(scripted, EachBatch(lambda payload, run: {"n": 1}))
    task_id = await external.create(
        node("failed", "failing", inline={"failures": 9, "permanent": True}, allow_failure=True, **ONCE),
        node("skipped", "quick", "failed"),
        node("function", "coordinator_fn", io={"fn": "noop"}),
        node("native", inline={"batches": 3}),
        node("extract", external.role, inline={"batches": 2}),
        node(
            "enrich",
            external.other_role,
            "function",
            inline=pull("failed", "skipped", "function", "native", "extract"),
            **ONCE,
        ),
    )
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    assert (await external.statuses(task_id))["skipped"] == "skipped"
    await assert_read_once(external, task_id, 5)


async def test_batches_of_a_stale_run_do_not_count(external: ExternalTasks) -> None:
    """H25: a worker that lost its lease continues, and writes the same keys as the new run.

    The new run may be another one of the same worker, which has finished and is silent: it may lose its lease again.
    """
    external.settings["lease_ttl_sec"] = 2
    await external.served_engine()
    quiet = Misbehavior(silence=True, hold=("BATCH_OK", "TASK_DONE", "CANCELLED"))
    stale = await external.external(
        scripted, misbehavior=quiet, lease_ttl_sec=1.0, db_cancel_poll_ms=3_600_000
    )
    task_id = await external.create(
        node("extract", external.role, inline={"batches": 3}), node("after", "coordinator_fn", "extract")
    )
    await stale.wait_for("held", node="extract", count=4)
    await external.external(scripted)
    await external.dispatch(task_id, "extract", epoch=2)
    await stale.release()
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    *lost, last = await codes(external, task_id, "extract")
    assert (set(lost), last) == ({"lease_lost"}, None)
    rows = await external.rows(task_id, "extract")
    assert Counter(row["batch_uid"] for row in rows) == {f"extract-{n}": 1 for n in range(3)}
    assert {row["attempt_epoch"] for row in rows} == {len(lost) + 1}


async def test_node_that_waits_for_a_queued_source_frees_its_worker_for_the_source(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5: the only worker runs a pulling node, and the command of its source waits for that worker.

    It yields, and makes no further attempt until the source runs, whose parent does not run yet.
    """
    monkeypatch.setattr(supervisor, "_IDLE_SEC", 1.0)
    await external.served_engine()
    await external.external(scripted)
    task_id = await external.create(
        node("gate", "quick"),
        node("enrich", external.role, inline=pull("extract"), **ONCE),
        node("extract", external.role, "gate", inline={"batches": 3}, **ONCE),
    )
    await external.until_node(task_id, "enrich", "deferred")
    await external.worker()
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    assert set(await codes(external, task_id, "enrich")) == {"yielded", None}
    assert await codes(external, task_id, "extract") == [None]
    await assert_read_once(external, task_id, 3)


async def test_native_child_waits_until_the_batches_of_a_running_external_source_are_stored(
    external: ExternalTasks,
) -> None:
    """H19: the worker writes its complete marker before the bridge has received its batches."""
    await external.served_engine()
    await external.worker()
    worker = await external.external(
        scripted, lease_ttl_sec=60.0, misbehavior=Misbehavior(hold=("BATCH_OK", "TASK_DONE"))
    )
    task_id = await external.create(
        node("u", external.role, inline={"batches": 3}), node("child", "quick", inline=pull("u"))
    )
    await worker.wait_for("held", count=4)
    await external.until_node(task_id, "child", "running")
    announced = [each for each in worker.sent if each.kind == "WORKER_ONLINE"]
    await worker.wait_for("WORKER_ONLINE", count=len(announced) + 2)
    await worker.release()
    assert (await external.result(task_id)).status == "finished"
    assert len(await external.rows(task_id, "child")) == 3
