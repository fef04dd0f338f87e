"""Records that are not messages of the protocol, on every topic that the bridge reads."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from flowkit.bridge.kafka.offsets import Offsets
from flowkit.models import TaskStatus
from flowkit.testing.external.handlers import scripted
from flowkit.testing.external.misbehavior import Malformed
from tests.integration.bridge.gates import Gate
from tests.integration.harness import eventually, node
from tests.kafka_batches import Codec, good_large_good, peak_memory_mb, reset_peak_memory, send_batch

if TYPE_CHECKING:
    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server

FOREIGN = {Malformed.unknown_kind, Malformed.no_kind}
"""Valid messages of a kind that the protocol does not have; the bridge ignores them."""

BATCHES = {Malformed.nul_character, Malformed.huge_integer, Malformed.huge}
"""Valid messages about batches that MongoDB may not store."""


def topic_of(external: ExternalTasks, name: str) -> str:
    """Return a topic that the bridge reads."""
    topics = external.bridge.context.topics
    return {"status": topics.status(external.role), "announce": topics.announce, "reply": topics.reply}[name]


def group_of(external: ExternalTasks, name: str) -> str:
    """Return the group in which the bridge reads a topic."""
    context = external.bridge.context
    return context.status_group(external.role) if name == "status" else context.announce_group


async def until_read(external: ExternalTasks, name: str) -> None:
    """Wait until the bridge has committed everything that a topic contains now."""
    topic, group = topic_of(external, name), group_of(external, name)
    offsets = Offsets(external.names.connection)
    try:
        ends = await offsets.read_ends(topic)

        async def look() -> bool:
            return await offsets.has_caught_up(group, topic, ends)

        await eventually(look)
    finally:
        await offsets.close()


def logged(caplog: pytest.LogCaptureFixture, topic: str) -> list[tuple[object, ...]]:
    """Return partition and offset of the records that the bridge has logged as malformed."""
    found = [each.args for each in caplog.records if each.msg.startswith("skipped a malformed record")]
    return [args[1:3] for args in found if isinstance(args, tuple) and args[0] == topic]


async def assert_works(external: ExternalTasks) -> None:
    """Check that a task runs to its end."""
    task_id = await external.create(node("extract", external.role, inline={"batches": 2}))
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    assert len(await external.rows(task_id, "extract")) == 2


@pytest.mark.parametrize(
    ("name", "valid"),
    [("status", FOREIGN | BATCHES), ("announce", FOREIGN | BATCHES), ("reply", set())],
)
async def test_malformed_records_are_skipped_counted_and_logged_once(
    external: ExternalTasks, caplog: pytest.LogCaptureFixture, name: str, valid: set[Malformed]
) -> None:
    """H1."""
    await external.served_engine()
    worker = await external.external(scripted)
    topic = topic_of(external, name)
    for kind in Malformed:
        await worker.send_malformed(kind, topic)
    await until_read(external, name)
    sent = {e.reason: (e.partition, e.offset) for e in worker.sent if e.kind == "malformed"}
    expected = [place for kind, place in sent.items() if kind not in valid]
    assert Counter(logged(caplog, topic)) == Counter(expected)
    assert external.bridge.context.malformed.counts == {topic: len(expected)}
    await assert_works(external)


@pytest.mark.parametrize("name", ["status", "announce", "reply"])
async def test_a_record_of_300_mb_is_skipped_without_taking_its_memory(
    external: ExternalTasks, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """H26: a compressed record can be larger than the limit of the broker."""
    await external.served_engine()
    await external.external(scripted)
    topic = topic_of(external, name)
    reset_peak_memory()
    before = peak_memory_mb()
    await send_batch(external.names.bootstrap, topic, good_large_good(Codec.zstd))
    await until_read(external, name)
    assert peak_memory_mb() - before < 100
    assert len(logged(caplog, topic)) == 3
    assert caplog.text.count("the record has more than 4,000,000 bytes") == 1
    await assert_works(external)


async def test_batches_beside_a_record_of_300_mb_are_stored(external: ExternalTasks) -> None:
    await external.served_engine()
    worker = await external.external(Gate().handler)
    task_id = await external.create(node("extract", external.role))
    like = await worker.wait_for("BATCH_OK", node="extract")

    def batch_ok(number: int) -> bytes:
        payload = {**like.payload, "batch_uid": f"beside-{number}"}
        return json.dumps({**like.message, "payload": payload, "dedup_id": f"beside-{number}"}).encode()

    raw = good_large_good(Codec.zstd, good=batch_ok)
    await send_batch(external.names.bootstrap, topic_of(external, "status"), raw)
    await until_read(external, "status")
    stored = {row["batch_uid"] for row in await external.rows(task_id, "extract")}
    assert stored >= {"beside-0", "beside-2"}


@pytest.mark.parametrize("kind", sorted(BATCHES - {Malformed.huge}))
async def test_batch_that_mongodb_cannot_store_fails_its_attempt(
    external: ExternalTasks, kind: Malformed
) -> None:
    """The worker gets a cancel signal, and the other batches stay stored."""
    await external.served_engine()
    worker = await external.external(Gate().handler)
    task_id = await external.create(node("extract", external.role, retry_policy={"max": 0}))
    like = await worker.wait_for("BATCH_OK", node="extract")
    await worker.send_malformed(kind, like=like)
    await external.until_node(task_id, "extract", "failed")
    await worker.wait_for("CANCELLED", node="extract")
    failed = await external.node(task_id, "extract")
    assert failed["last_error"].startswith("bad_metrics: ")
    assert [row["batch_uid"] for row in await external.rows(task_id, "extract")] == ["b0"]


@pytest.mark.parametrize("kind", [Malformed.deep, Malformed.payload_wrong_types])
async def test_malformed_record_of_a_run_ends_its_attempt_instead_of_losing_a_batch(
    external: ExternalTasks, kind: Malformed
) -> None:
    """H1: one that only its key attributes to the run, and one whose envelope can be read."""
    await external.served_engine()
    worker = await external.external(Gate().handler)
    task_id = await external.create(node("extract", external.role, retry_policy={"max": 0}))
    like = await worker.wait_for("BATCH_OK", node="extract")
    await worker.send_malformed(kind, like=like)
    await external.until_node(task_id, "extract", "failed")
    await worker.wait_for("CANCELLED", node="extract")
    failed = await external.node(task_id, "extract")
    assert failed["last_error"].startswith("bad_metrics: the worker sent a record that cannot be read: ")
    assert [record["attempt_epoch"] for record in await external.dispatches(task_id)] == [1]
    assert external.bridge.context.malformed.counts == {}
