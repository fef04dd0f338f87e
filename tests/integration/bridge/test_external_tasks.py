"""Tasks with nodes that external workers run, from dispatch to delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from aiokafka import AIOKafkaProducer

from flowkit.adapters.dispatches import DispatchStore
from flowkit.core import instruments
from flowkit.testing.external import EachBatch, Final, Misbehavior, Result
from flowkit.testing.external.handlers import scripted
from tests.integration.harness import eventually, node
from tests.unit.measured import measuring

pytestmark = pytest.mark.server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.bridge.external_tasks import ExternalTasks


async def three(run: Any) -> AsyncIterator[Any]:
    """Yield three batches and final metrics."""
    for number in range(3):
        yield Result({"number": number, "skus": [f"s{number}"]}, f"b{number}")
    yield Final({"total": 3})


def copied(payload: dict[str, Any], run: Any) -> dict[str, Any]:
    """Return the items of a pulled chunk as metrics."""
    return {"from": payload["from_node"], "items": payload["items"]}


async def test_external_node_finishes_with_its_batches_and_final_metrics(external: ExternalTasks) -> None:
    await external.served_engine()
    await external.external(three)
    task_id = await external.create(node("extract", external.role))
    result = await external.result(task_id)
    assert result.status == "finished"
    rows = await external.rows(task_id, "extract")
    assert sorted(row["metrics"]["number"] for row in rows) == [0, 1, 2]
    final: Any = await external.db.metrics_raw.find_one({"task_id": task_id, "batch_uid": "__final__"})
    assert final["metrics"] == {"total": 3}
    marker: Any = await external.db.artifacts.find_one({"task_id": task_id, "status": "complete"})
    assert marker["meta"] == {"total": 3}
    await external.until_reported(task_id, "extract")
    record = await external.dispatch(task_id, "extract")
    assert (record["outcome"]["kind"], record["batches"]) == ("done", 3)


async def test_work_of_a_bridge_is_measured_by_role(external: ExternalTasks) -> None:
    with measuring() as measured:
        await external.served_engine()
        await external.external(three)
        malformed = external.bridge.context.topics.status(external.role)
        async with AIOKafkaProducer(bootstrap_servers=external.names.bootstrap) as producer:
            await producer.send_and_wait(malformed, b"not JSON")
        task_id = await external.create(node("extract", external.role))
        assert (await external.result(task_id)).status == "finished"
        await external.until_reported(task_id, "extract")
        role, other = external.role, external.other_role
        assert measured.counted(instruments.DISPATCHES) == {(role,): 1}
        kinds = {kind: count for (_, kind), count in measured.counted(instruments.BRIDGE_EVENTS).items()}
        assert (kinds["TASK_ACCEPTED"], kinds["BATCH_OK"], kinds["TASK_DONE"]) == (1, 3, 1)
        assert measured.counted(instruments.MALFORMED) == {(malformed,): 1}
        [waited_sec] = measured.observed(instruments.NODE_WAIT)[role,]
        assert waited_sec >= 0

        async def is_idle() -> bool:
            gauges = (instruments.BRIDGE_ATTEMPTS, instruments.BRIDGE_QUEUED, instruments.BRIDGE_LAG)
            return all(measured.shown(gauge) == {(role,): 0, (other,): 0} for gauge in gauges)

        await eventually(is_idle)
        await external.coordinator.stop()
        assert measured.shown(instruments.BRIDGE_ATTEMPTS) == {}


async def test_external_node_pulls_from_external_and_native_nodes(external: ExternalTasks) -> None:
    await external.served_engine()
    await external.worker()
    await external.external(three, EachBatch(copied))
    pull = {
        "input_adapter": "pull.from_artifacts.rechunk:size",
        "input_args": {"size": 2, "meta_list_key": "skus"},
    }
    task_id = await external.create(
        node("extract", external.role),
        node("native", "quick", inline={"batches": 4}),
        node("enrich", external.other_role, "extract", "native", inline=pull),
    )
    assert (await external.result(task_id)).status == "finished"
    assert len(await external.rows(task_id, "enrich")) == 3 + 4


async def test_nodes_read_what_failed_and_skipped_parents_have_stored(external: ExternalTasks) -> None:
    await external.served_engine()
    await external.worker()
    await external.external(scripted, EachBatch(copied))
    pull = {"input_adapter": "pull.from_artifacts.rechunk:size", "input_args": {"size": 5}}
    fails = {"batches": 3, "fail_at": 2, "permanent": True}
    sources = ("extract", "never", "native")
    task_id = await external.create(
        node("extract", external.role, inline=fails, allow_failure=True),
        node("never", "quick", "extract"),
        node("native", "quick"),
        node("enrich", external.other_role, *sources, inline=pull, fan_in="all_done"),
        node("sum", "quick", *sources, inline=pull, fan_in="all_done"),
    )
    assert (await external.result(task_id)).status == "finished"
    expected = {"extract": "failed", "never": "skipped", "native": "finished"}
    assert await external.statuses(task_id) == {**expected, "enrich": "finished", "sum": "finished"}
    rows = [len(await external.rows(task_id, name)) for name in ("enrich", "sum")]
    assert rows == [2 + 1, 2 + 1]


async def test_failure_of_an_external_worker_is_retried_with_its_code(external: ExternalTasks) -> None:
    await external.served_engine()
    await external.external(scripted)
    fails = {"fail_at": 0, "fail_until_epoch": 2, "reason_code": "flaky"}
    task_id = await external.create(
        node("extract", external.role, inline=fails, retry_policy={"max": 1, "backoff_sec": 0.1})
    )
    assert (await external.result(task_id)).status == "finished"
    outcomes = [record["outcome"] for record in await external.dispatches(task_id)]
    assert [outcome["kind"] for outcome in outcomes] == ["failed", "done"]
    assert outcomes[0]["failure"]["code"] == "flaky"


async def test_external_worker_receives_values_in_place_of_expressions(external: ExternalTasks) -> None:
    await external.served_engine()
    await external.external(scripted)
    fails = {"fail_at": {"$cel": "2"}, "fail_until_epoch": {"$cel": "1 + 1"}}
    task_id = await external.create(
        node(
            "extract",
            external.role,
            inline={"batches": {"$cel": "[{'day': 'mon' + 'day'}, {'n': 1}, {'n': 2}]"}, **fails},
            retry_policy={"max": 1, "backoff_sec": 0.1},
        )
    )
    assert (await external.result(task_id)).status == "finished"
    assert [row["metrics"] for row in await external.rows(task_id, "extract")] == [
        {"day": "monday"},
        {"n": 1},
        {"n": 2},
    ]
    records = await external.dispatches(task_id)
    assert ([record["attempt_epoch"] for record in records], "monday" in str(records)) == ([1, 2], False)


async def test_dropped_command_is_dispatched_again_without_a_retry(external: ExternalTasks) -> None:
    await external.served_engine()
    await external.external(three, misbehavior=Misbehavior(drop_commands=2))
    task_id = await external.create(node("extract", external.role, retry_policy={"max": 0}))
    assert (await external.result(task_id)).status == "finished"
    codes = [
        (record["outcome"].get("failure") or {}).get("code") for record in await external.dispatches(task_id)
    ]
    assert codes == ["dispatch_lost", "dispatch_lost", None]


@pytest.mark.slow
async def test_crash_of_a_worker_is_a_lost_lease(external: ExternalTasks) -> None:
    await external.served_engine()
    doomed = await external.external(three, misbehavior=Misbehavior(crash_after_accepted="after_commit"))
    task_id = await external.create(node("extract", external.role, retry_policy={"max": 0}))
    await doomed.wait_for("killed")
    await external.external(three)
    assert (await external.result(task_id)).status == "finished"
    failures = [record["outcome"].get("failure") for record in await external.dispatches(task_id)]
    assert failures[0]["code"] == "lease_lost"


async def test_second_delivery_of_an_outcome_keeps_the_final_metrics(external: ExternalTasks) -> None:
    """A bridge may adopt an attempt at the moment at which another bridge reports its outcome."""
    await external.served_engine()
    await external.external(three)
    task_id = await external.create(node("extract", external.role))
    await external.result(task_id)
    await external.until_reported(task_id, "extract")
    record = await DispatchStore(external.db).find(task_id, "extract", 1)
    assert record is not None
    await external.on_bridge(external.bridge.delivery.deliver(record))
    marker: Any = await external.db.artifacts.find_one({"task_id": task_id, "status": "complete"})
    assert marker["meta"] == {"total": 3}
