"""The external worker's runs: the order of events, failures, cancels, and each misbehavior of events."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.recording_database import RecordingDatabase, conflicts
from tests.unit.event_loop import let_other_tasks_run
from tests.unit.external import Bench, run_of

from flowkit.testing import memory_database
from flowkit.testing.external.handlers import (
    BaseHandler,
    Batch,
    EachBatch,
    Final,
    Result,
    as_handler,
    scripted,
)
from flowkit.testing.external.kafka import SendFailed
from flowkit.testing.external.misbehavior import Malformed, Misbehavior
from flowkit.testing.external.protocol import Incoming, stable_hash
from flowkit.testing.external.runs import Run
from flowkit.testing.external.settings import ExternalSettings
from flowkit.testing.external.store import cancel_flag
from flowkit.testing.external.worker import Admission, Seen
from flowkit.worker import BatchFailure, role
from flowkit.worker.handlers.base import Batch as SdkBatch
from flowkit.worker.handlers.base import BatchResult, FinalizeResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def two(run: Any) -> AsyncIterator[Any]:
    """Two batches."""
    yield {"count": 1}
    yield Result({"count": 2}, "second")
    yield Final({"total": 3})


async def test_a_run_reports_its_batches_and_its_end() -> None:
    bench = Bench()
    first, second, done = await bench.execute(two)
    assert bench.kinds == ["BATCH_OK", "BATCH_OK", "TASK_DONE"]
    assert first.payload["batch_uid"] == stable_hash({"payload": {"count": 1}})
    assert second.payload["artifacts_ref"] == {"task_id": "t", "node_id": "n", "batch_uid": "second"}
    assert done.payload["metrics"] == {"total": 3}
    assert (first.topic, first.key) == ("status.indexer.v1", "t:n")
    marker = await bench.db.artifacts.find_one({"status": "complete"})
    assert marker["meta"] == {"total": 3}
    assert "batch_uid" not in marker


async def test_without_partial_artifacts_the_reference_names_only_the_batch() -> None:
    bench = Bench(Misbehavior(partial_refused=True))
    sent = await bench.execute(two)
    assert sent[1].payload["artifacts_ref"] == {"batch_uid": "second"}
    assert await bench.db.artifacts.count_documents({}) == 1


@pytest.mark.parametrize(
    ("bench", "payload"),
    [(Bench(Misbehavior(partial_refused=True)), 1), (Bench(), 2**64)],
    ids=["refused", "no number of MongoDB"],
)
async def test_artifact_that_cannot_be_written_is_a_warning(
    bench: Bench, payload: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def two_batches(run: Any) -> AsyncIterator[Any]:
        yield Result({"count": payload})
        yield Result({"count": payload}, "second")

    await bench.execute(two_batches)
    refused = [entry for entry in caplog.records if "Cannot write the artifact" in entry.message]
    assert [entry.levelno for entry in refused] == [logging.WARNING, logging.WARNING]


async def test_no_update_of_a_worker_names_a_path_twice() -> None:
    db = RecordingDatabase(memory_database())
    bench = Bench(db=db)
    await bench.execute(two)
    assert len(db.updates) >= 3
    assert [update for update in db.updates if conflicts(update)] == []


@role("indexer")
def double(given: dict[str, int], *, times: int = 2) -> dict[str, int]:
    """Multiply a number."""
    if given["number"] < 0:
        raise BatchFailure("negative", reason_code="no_number", permanent=True)
    return {"number": given["number"] * times}


async def test_a_function_with_types_gets_its_item_and_its_parameters() -> None:
    batch, done = await (bench := Bench()).execute(double, run_of({"number": 2, "times": 3}))
    assert bench.kinds == ["BATCH_OK", "TASK_DONE"]
    assert (batch.payload["metrics"], done.payload["metrics"]) == ({"number": 6}, {})


@pytest.mark.parametrize(
    ("inline", "code"),
    [({"number": -1}, "no_number"), ({"number": "many"}, "bad_input"), ({"times": []}, "bad_input")],
)
async def test_a_failure_of_a_function_with_types_has_its_code(inline: dict[str, Any], code: str) -> None:
    *_, failed = await Bench().execute(double, run_of(inline))
    assert (failed.payload["reason_code"], failed.payload["permanent"]) == (code, True)


async def failing(run: Any) -> AsyncIterator[Any]:
    """A failed batch after a good one."""
    yield {"count": 1}
    yield Result(batch_uid="bad", success=False, reason_code="rate_limited", error="429")
    yield {"count": 3}


async def test_a_failed_batch_ends_the_run_with_the_same_failure() -> None:
    bench = Bench()
    _, batch, task = await bench.execute(failing)
    assert bench.kinds == ["BATCH_OK", "BATCH_FAILED", "TASK_FAILED"]
    assert batch.payload["artifacts_ref"] == {"batch_uid": "bad"}
    for payload in (batch.payload, task.payload):
        assert [payload[key] for key in ("reason_code", "permanent", "error")] == [
            "rate_limited",
            False,
            "429",
        ]


@pytest.mark.parametrize(("error", "permanent"), [(KeyError("k"), True), (OSError("disk"), False)], ids=str)
async def test_an_exception_in_a_batch_is_classified(error: Exception, permanent: bool) -> None:
    def fail(*_: Any) -> None:
        raise error

    bench = Bench()
    await bench.execute(EachBatch(fail))
    assert bench.kinds == ["BATCH_FAILED", "TASK_FAILED"]
    assert bench.sent[1].payload["permanent"] is permanent
    assert bench.sent[1].payload["reason_code"] == "unexpected_error"


async def broken(run: Any) -> AsyncIterator[Any]:
    """An exception between batches."""
    yield {"count": 1}
    raise ConnectionError("connection reset")


async def test_an_exception_between_batches_fails_only_the_task() -> None:
    bench = Bench()
    await bench.execute(broken)
    assert bench.kinds == ["BATCH_OK", "TASK_FAILED"]


async def test_metrics_without_json_form_fail_the_task() -> None:
    bench = Bench()
    await bench.execute(EachBatch(lambda *_: {"value": object()}))
    assert bench.kinds == ["TASK_FAILED"]


async def test_a_role_without_handler_fails_permanently() -> None:
    (failed,) = await Bench().execute(None)
    expected = {"reason_code": "no_handler", "permanent": True, "error": "handler not registered"}
    assert {key: failed.payload[key] for key in expected} == expected


async def test_a_cancel_before_a_batch_ends_in_cancelled() -> None:
    async def cancelling(run: Any) -> AsyncIterator[Any]:
        yield {"count": 1}
        run.run.request_cancel("user_request")
        yield {"count": 2}

    bench = Bench()
    *_, last = await bench.execute(cancelling)
    assert bench.kinds == ["BATCH_OK", "CANCELLED"]
    assert last.payload["reason"] == "cancelled"


async def test_a_cancel_in_the_last_batch_ends_in_task_done() -> None:
    bench, run = Bench(), run_of()
    await bench.execute(EachBatch(lambda *_: run.request_cancel("late") and {}), run)
    assert bench.kinds == ["BATCH_OK", "TASK_DONE"]


class SdkHandler(RoleHandler):
    """A handler written for the SDK."""

    role = "indexer"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[SdkBatch]:
        """Yield a batch for each word."""
        for word in loaded["input_inline"]["words"]:
            yield SdkBatch(batch_uid=word, payload={"word": word})

    async def process_batch(self, batch: SdkBatch, ctx: Any) -> BatchResult:
        """Measure the word."""
        return BatchResult(success=True, metrics={"length": len(batch.payload["word"])})

    async def finalize(self, ctx: Any) -> FinalizeResult:
        """Return the final metrics."""
        return FinalizeResult(metrics={"node": ctx.node_id})


async def test_handlers_of_the_sdk_run_unchanged() -> None:
    bench = Bench()
    await bench.execute(SdkHandler, run_of({"words": ["a", "bcd"]}))
    assert [entry.payload["metrics"] for entry in bench.sent] == [{"length": 1}, {"length": 3}, {"node": "n"}]


class Plain(BaseHandler):
    """A handler of plain functions."""

    def iter_batches(self, loaded: Any) -> Any:
        """Return a list."""
        return [Batch("a", {}), Batch("b", {})]

    def process_batch(self, batch: Any, ctx: Any) -> Any:
        """Return a result."""
        return Result({"uid": batch.batch_uid})


async def test_methods_may_be_plain_functions() -> None:
    bench = Bench()
    await bench.execute(Plain())
    assert bench.kinds == ["BATCH_OK", "BATCH_OK", "TASK_DONE"]


def test_an_object_without_process_batch_is_no_handler() -> None:
    with pytest.raises(TypeError, match="is no handler"):
        as_handler(7)


@pytest.mark.parametrize(
    ("misbehavior", "kinds"),
    [
        (Misbehavior(duplicate_events=1), ["BATCH_OK"] * 4 + ["TASK_DONE"] * 2),
        (Misbehavior(no_terminal=True), ["BATCH_OK", "BATCH_OK"]),
        (Misbehavior(leak_cancel_at=1), ["BATCH_OK", "CANCELLED"]),
        (Misbehavior(reorder_events=10), ["TASK_DONE", "BATCH_OK", "BATCH_OK"]),
        (Misbehavior(hold=["BATCH_OK"]), ["TASK_DONE"]),
        (
            Misbehavior(after_end=["TASK_HEARTBEAT", "TASK_FAILED", "BATCH_OK"]),
            ["BATCH_OK", "BATCH_OK", "TASK_DONE", "TASK_HEARTBEAT", "TASK_FAILED", "BATCH_OK"],
        ),
        (
            Misbehavior(malformed=[Malformed.not_json]),
            ["malformed", "BATCH_OK", "malformed", "BATCH_OK", "malformed", "TASK_DONE"],
        ),
    ],
    ids=["duplicate", "no terminal", "leak", "reorder", "hold", "after end", "malformed"],
)
async def test_misbehavior_changes_the_events(misbehavior: Misbehavior, kinds: list[str]) -> None:
    bench = Bench(misbehavior)
    await bench.execute(two)
    assert bench.kinds == kinds


async def test_held_events_are_sent_on_release() -> None:
    bench = Bench(Misbehavior(hold=["BATCH_OK"]))
    await bench.execute(two)
    await bench.sender.release()
    assert bench.kinds == ["TASK_DONE", "BATCH_OK", "BATCH_OK"]


async def test_events_that_follow_a_release_do_not_overtake_the_held_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(Misbehavior(hold=["BATCH_OK", "TASK_DONE"]))
    await bench.execute(two)
    send = bench.producer.send_and_wait

    async def send_slowly(*record: Any, **options: Any) -> Any:
        await let_other_tasks_run()
        return await send(*record, **options)

    monkeypatch.setattr(bench.producer, "send_and_wait", send_slowly)
    bench.misbehavior.hold = ()
    next_run = bench.sender.event(bench.messages.accepted(run_of(node="next")))
    await asyncio.gather(bench.sender.release(), next_run)
    assert bench.kinds == ["BATCH_OK", "BATCH_OK", "TASK_DONE", "TASK_ACCEPTED"]


async def test_a_stale_epoch_is_also_in_the_ids() -> None:
    bench = Bench(Misbehavior(epoch_shift=-1))
    *_, done = await bench.execute(two)
    assert done.attempt_epoch == 0
    assert done.message["dedup_id"] == stable_hash({"td": "t", "n": "n", "e": 0})


async def test_heartbeats_on_another_topic_have_its_role() -> None:
    bench = Bench()
    beat = bench.messages.heartbeat(run_of(), "enricher")
    assert (beat.topic, beat.message["step_type"]) == ("status.enricher.v1", "enricher")


async def test_a_failing_acceptance_raises() -> None:
    bench = Bench(Misbehavior(fail_accepted=True))
    with pytest.raises(SendFailed):
        await bench.sender.event(bench.messages.accepted(run_of()))


def test_misbehavior_can_be_given_as_text() -> None:
    parsed = Misbehavior.parse(["silence=true", "drop_commands=2", 'after_end=["BATCH_OK"]', "no_terminal"])
    assert parsed == Misbehavior(silence=True, drop_commands=2, after_end=["BATCH_OK"], no_terminal=True)
    with pytest.raises(ValueError, match="unknown misbehavior"):
        Misbehavior.parse(["sleepy=true"])


def test_reset_turns_every_switch_off() -> None:
    changed = Misbehavior(silence=True, hold=["TASK_DONE"])
    changed.reset()
    assert changed == Misbehavior()


def command(**changes: Any) -> Incoming:
    """A TASK_START command, changed."""
    message = {
        "msg_type": "cmd",
        "role": "coordinator",
        "dedup_id": "d1",
        "task_id": "t",
        "node_id": "n",
        "step_type": "indexer",
        "attempt_epoch": 1,
        "ts_ms": 0,
        "payload": {"cmd": "TASK_START", "cancel_token": "c"},
    }
    return Incoming.model_validate({**message, **changes})


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, None),
        ({"role": "worker"}, "not_a_command"),
        ({"msg_type": "event"}, "not_a_command"),
        ({"step_type": "enricher"}, "other_role"),
        ({"payload": {"cmd": "TASK_PAUSE"}}, "unknown_command"),
        ({"payload": {}}, "unknown_command"),
    ],
    ids=str,
)
def test_commands_are_refused_for_a_reason(changes: dict[str, Any], refusal: str | None) -> None:
    admission = Admission(ExternalSettings())
    assert admission.refusal(command(**changes), "indexer", 0) == refusal
    assert admission.refusal(command(**changes), "indexer", 1) == "duplicate"


def test_ids_are_remembered_for_a_time_and_up_to_a_number() -> None:
    seen = Seen(size=2, ttl_ms=100)
    assert [seen.add("a", 0), seen.add("a", 99), seen.add("a", 100)] == [True, False, True]
    assert [seen.add("b", 101), seen.add("c", 102), seen.add("a", 103)] == [True, True, True]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"coordinator": {"cancelled": True}}, True),
        ({"coordinator": {"cancelled": 1}}, False),
        ({"graph": {"nodes": [{"node_id": "n", "coordinator": {"cancelled": True}}]}}, True),
        ({"graph": {"nodes": [{"node_id": "n", "status": "cancelling"}]}}, True),
        ({"graph": {"nodes": [{"node_id": "m", "status": "cancelling"}]}}, False),
        ({}, False),
    ],
    ids=str,
)
def test_only_true_flags_of_the_task_or_its_node_request_a_cancel(
    document: dict[str, Any], expected: bool
) -> None:
    assert cancel_flag(document, "n") is expected


def test_a_stored_run_needs_exactly_its_fields() -> None:
    stored = run_of().stored()
    assert Run.from_state(stored).restored
    for wrong in ({**stored, "mood": "good"}, {k: v for k, v in stored.items() if k != "state"}):
        with pytest.raises(TypeError):
            Run.from_state(wrong)


async def test_a_scripted_node_says_what_its_batches_are() -> None:
    bench = Bench()
    inline = {"batches": 3, "fail_at": 1, "fail_until_epoch": 2, "permanent": True}
    await bench.execute(scripted, run_of(inline))
    assert bench.kinds == ["BATCH_OK", "BATCH_FAILED", "TASK_FAILED"]
    retried = run_of({**inline, "final": {"sum": 3}})
    retried.attempt_epoch = 2
    again = Bench()
    await again.execute(scripted, retried)
    assert again.kinds == ["BATCH_OK", "BATCH_OK", "BATCH_OK", "TASK_DONE"]
    assert again.sent[1].payload["batch_uid"] == "n-1"


async def test_waiting_ends_with_the_event_or_names_what_happened() -> None:
    bench = Bench()
    waiting = asyncio.create_task(bench.journal.wait_for(lambda entry: entry.kind == "TASK_DONE"))
    await bench.execute(two)
    assert (await waiting).kind == "TASK_DONE"
    with pytest.raises(TimeoutError, match="0 of 1 dance within 0.01 s; it recorded: BATCH_OK"):
        await bench.journal.wait_for(lambda _: False, within=0.01, what="dance")


def test_records_are_compact_json() -> None:
    bench = Bench()
    value = bench.messages.cancelled(run_of()).value
    assert value == json.dumps(json.loads(value), separators=(",", ":")).encode()
