"""Input routes on a real worker: chosen by the node, by the handler, or replaced by the handler's own batches."""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo.monitoring import CommandListener

from flowkit.activities.batches import inputs
from flowkit.activities.batches.puller import Puller
from flowkit.hashing import stable_hash
from flowkit.worker import Batch, BatchResult, RoleHandler, Worker, WorkerConfig
from tests.integration.handlers import Paced, Quick
from tests.integration.harness import eventually, node, wait_seconds
from tests.integration.test_handler_hooks import SOON, outcomes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.worker.context import RunContext
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

PULL, RECHUNK = "pull.from_artifacts", "pull.from_artifacts.rechunk:size"


class ListSource(RoleHandler):
    """Yields one batch for each of its inline `lists`: b1, b2 and so on, with the list under `skus`."""

    role = "lists"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        for number, skus in enumerate(loaded["input_inline"]["lists"], 1):
            yield Batch(batch_uid=f"b{number}", payload={"skus": skus})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=True, metrics=batch.payload)


class Proposing(RoleHandler):
    """Proposes the route under `propose` of its inline input, and records its batches by node."""

    role = "proposing"

    def __init__(self) -> None:
        self.got: dict[str, list[tuple[str | None, dict[str, Any]]]] = {}

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        return (input_inline or {}).get("propose", {})

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        yield Batch(batch_uid="own", payload={})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        self.got.setdefault(ctx.node_id, []).append((batch.batch_uid, batch.payload))
        return BatchResult(success=True, metrics={"n": 1})

    def uids(self, node_id: str) -> list[str | None]:
        """Return the uids of the batches that a node received."""
        return [uid for uid, _ in self.got.get(node_id, [])]


def source(*lists: list[Any], node_id: str = "u") -> dict[str, Any]:
    """Return a node that produces these lists."""
    return node(node_id, "lists", inline={"lists": list(lists)})


def proposing(node_id: str, *parents: str, propose: Any = None, **route: Any) -> dict[str, Any]:
    """Return a node with its own route, whose handler proposes another one."""
    return node(node_id, "proposing", *parents, inline={**route, "propose": propose or {}}, **SOON)


def route(adapter: str, **args: Any) -> dict[str, Any]:
    """Return an input route."""
    return {"input_adapter": adapter, "input_args": args}


async def run(harness: Harness, *nodes: dict[str, Any]) -> Proposing:
    """Run nodes until the task finishes, and return the batches that their handler received."""
    handler = Proposing()
    await harness.engine()
    await harness.worker({"lists": ListSource(), "proposing": handler})
    await harness.result(await harness.create(*nodes))
    return handler


@asynccontextmanager
async def working(
    harness: Harness, *handlers: RoleHandler, db: Any = None, **settings: Any
) -> AsyncIterator[None]:
    """Start a worker with its own settings."""
    chosen = {handler.role: handler for handler in handlers}
    cfg = WorkerConfig(queue=harness.queue, roles=list(chosen), **settings)
    worker = Worker(db=db if db is not None else harness.db, cfg=cfg, handlers=chosen)
    await worker.start()
    try:
        yield
    finally:
        await worker.stop()


# --- choice of the route ----------------------------------------------------------------------------------------


def reported(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """Return the fields of an event's log records."""
    found = [
        vars(record) for record in caplog.records if vars(record).get("event") == f"worker.adapter.{event}"
    ]
    return [
        {name: record[name] for name in ("adapter", "from_nodes", "adapter_kwargs", "io_source")}
        for record in found
    ]


async def test_adapter_of_the_node_overrides_the_handler_and_both_are_logged(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="flowkit.worker")
    ordered = route(RECHUNK, from_node="u", size=2, meta_list_key="skus")
    proposed = route(PULL, from_nodes=["u"], poll_ms=20)
    got = await run(harness, source([1, 2, 3]), proposing("z", "u", propose=proposed, **ordered))
    assert [payload["items"] for _, payload in got.got["z"]] == [[1, 2], [3]]
    assert reported(caplog, "selected") == [
        {
            "adapter": RECHUNK,
            "from_nodes": ["u"],
            "adapter_kwargs": {"size": 2, "meta_list_key": "skus"},
            "io_source": "cmd",
        }
    ]
    (conflict,) = reported(caplog, "handler_conflict_ignored")
    assert (conflict["adapter"], conflict["from_nodes"]) == (PULL, ["u"])
    assert (conflict["adapter_kwargs"], conflict["io_source"]) == ({"poll_ms": 20}, "handler")


async def test_known_adapter_of_the_handler_overrides_iter_batches(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="flowkit.worker")
    got = await run(
        harness,
        source([1], [2]),
        proposing("all", "u", propose={"input_adapter": PULL}),
        proposing("alias", "u", propose=route(RECHUNK, from_node="u", size=9)),
    )
    assert got.uids("all") == ["b1", "b2"]
    assert [payload["items"] for _, payload in got.got["alias"]] == [[{"skus": [1]}], [{"skus": [2]}]]
    by_adapter = {record["adapter"]: record for record in reported(caplog, "selected")}
    assert {record["io_source"] for record in by_adapter.values()} == {"handler"}
    assert by_adapter[RECHUNK]["from_nodes"] == ["u"]
    assert by_adapter[PULL]["from_nodes"] == ["u"]
    assert reported(caplog, "handler_conflict_ignored") == []


async def test_iter_batches_is_used_for_unknown_adapters_and_without_an_adapter(harness: Harness) -> None:
    got = await run(
        harness,
        source([1]),
        proposing("unknown", "u", propose=route("kafka", from_nodes=["u"])),
        proposing("odd", "u", propose={"input_adapter": ["pull"]}),
        proposing("none", "u", propose={"input_adapter": None}),
        proposing("noop", "u", propose={"input_adapter": "noop"}),
        proposing("ordered", "u", propose={"input_adapter": PULL}, input_adapter="noop"),
    )
    names = ["unknown", "odd", "none", "noop", "ordered"]
    assert [got.uids(name) for name in names] == [["own"]] * len(names)


# --- invalid arguments ------------------------------------------------------------------------------------------

BAD: dict[str, dict[str, Any]] = {
    "size missing": route(RECHUNK, from_nodes=["u"]),
    "size zero": route(RECHUNK, from_nodes=["u"], size=0),
    "size text": route(RECHUNK, from_nodes=["u"], size="3"),
    "key number": route(RECHUNK, from_nodes=["u"], size=1, meta_list_key=7),
    "from_nodes text": route(PULL, from_nodes="u"),
    "from_node list": route(PULL, from_node=["u"]),
    "poll_ms zero": route(PULL, from_nodes=["u"], poll_ms=0),
    "poll_ms text": route(PULL, from_nodes=["u"], poll_ms="fast"),
    "backoff none": route(PULL, from_nodes=["u"], backoff_max_ms=None),
    "eof text": route(PULL, from_nodes=["u"], eof_on_task_done="yes"),
    "unknown name": route(PULL, from_nodes=["u"], pol_ms=5),
    "args list": {"input_adapter": PULL, "input_args": ["u"]},
}


async def assert_refused(harness: Harness, *nodes: dict[str, Any]) -> None:
    """Check that every node but `u` fails permanently as `bad_input_args`, and that its handler receives nothing."""
    handler = Proposing()
    found = await outcomes(harness, [ListSource(), handler], source([1]), *nodes)
    assert found.pop("u")[0] == "finished"
    assert {name: (epoch, error.partition(":")[0]) for name, (_, epoch, error) in found.items()} == {
        each["node_id"]: (1, "bad_input_args") for each in nodes
    }
    assert handler.got == {}


async def test_invalid_adapter_argument_of_a_handler_fails_the_node_permanently(harness: Harness) -> None:
    await assert_refused(harness, *(proposing(name, "u", propose=bad) for name, bad in BAD.items()))


async def test_handler_that_proposes_no_sources_fails_permanently(harness: Harness) -> None:
    await assert_refused(harness, proposing("orphan", propose={"input_adapter": PULL}))


@pytest.mark.parametrize("source", ["ghost", "z"])
async def test_handler_that_proposes_a_source_that_cannot_end_fails_permanently(
    harness: Harness, source: str
) -> None:
    await assert_refused(harness, proposing("z", "u", propose=route(PULL, from_nodes=[source])))


async def test_strict_worker_requires_the_key_of_chunks(harness: Harness) -> None:
    handler = Proposing()
    await harness.engine()
    async with working(harness, ListSource(), handler, strict_input_adapters=True):
        task_id = await harness.create(
            source([1, 2]),
            proposing("ordered", "u", **route(RECHUNK, size=2)),
            proposing("proposed", "u", propose=route(RECHUNK, size=2)),
            proposing("fine", "u", **route(RECHUNK, size=2, meta_list_key="skus")),
            on_node_failure="continue",
        )
        await harness.until_status(task_id, "failed")
    errors = {name: (await harness.node(task_id, name)).get("last_error") for name in ("ordered", "proposed")}
    assert {str(error).partition(" is missing")[0] for error in errors.values()} == {
        "bad_input_args: input_args.meta_list_key"
    }
    assert [*handler.got] == ["fine"]


# --- delivery ---------------------------------------------------------------------------------------------------


async def test_chunks_have_the_uids_of_the_protocol_and_keep_the_remainder(harness: Harness) -> None:
    args = route(RECHUNK, from_nodes=["u"], size=2, meta_list_key="skus")
    got = (await run(harness, source([1, 2, 3], [], [4, 5]), proposing("z", "u", **args))).got["z"]
    expected = [("b1", 0, [1, 2]), ("b1", 1, [3]), ("b3", 0, [4, 5])]
    assert got == [
        (
            stable_hash({"src": "u", "parent": uid, "idx": number}),
            {
                "from_node": "u",
                "items": items,
                "parent": {"ref": {"batch_uid": uid}, "meta_list_key": "skus"},
            },
        )
        for uid, number, items in expected
    ]
    assert got[0][0] == "ad2b7bfd0ae8f741de96ce46937202d382868d69"


async def test_empty_source_is_not_an_error_and_yields_no_batches(harness: Harness) -> None:
    chunks = route(RECHUNK, size=3, meta_list_key="skus")
    nodes = [proposing("pull", "u", **route(PULL)), proposing("chunks", "u", **chunks)]
    assert (await run(harness, source(), *nodes)).got == {}


async def test_parents_are_the_default_sources(harness: Harness) -> None:
    got = await run(
        harness,
        source([1], node_id="u"),
        source([2], node_id="v"),
        source([3], node_id="aside"),
        proposing("ordered", "u", "v", "aside", **route(RECHUNK, size=9)),
        proposing("proposed", "u", "v", propose=route(RECHUNK, size=9)),
    )
    sources = {name: [payload["from_node"] for _, payload in batches] for name, batches in got.got.items()}
    assert sources == {"ordered": ["u", "v", "aside"], "proposed": ["u", "v"]}


async def test_thousand_batches_arrive_once_each(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("u", inline={"batches": 1_000}), node("z", "quick", "u", inline={"input_adapter": PULL})
    )
    await harness.result(task_id)
    counted = await harness.rows(task_id, "z")
    assert len(counted) == 1_000
    assert {row["batch_uid"] for row in counted} == {f"b{number}" for number in range(1_000)}
    assert await harness.db.stream_progress.count_documents({"task_id": task_id}) == 1_000


# --- waiting ----------------------------------------------------------------------------------------------------


async def test_worker_settings_determine_the_poll_interval(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    class Watched(Puller):
        def __init__(self, **given: Any) -> None:
            seen.append((given["args"].poll_ms, given["args"].backoff_max_ms))
            super().__init__(**given)

    monkeypatch.setattr(inputs, "Puller", Watched)
    await harness.engine()
    async with working(
        harness, ListSource(), Proposing(), pull_poll_ms_default=20, pull_empty_backoff_ms_max=70
    ):
        task_id = await harness.create(
            source([1]),
            proposing("a", "u", **route(PULL)),
            proposing("b", "a", **route(PULL, poll_ms=30, backoff_max_ms=90)),
            proposing("c", "b", propose=route(PULL, poll_ms=40)),
        )
        await harness.result(task_id)
    assert seen == [(20, 70), (30, 90), (40, 70)]


class ReadRecorder(CommandListener):
    """Records when FlowKit reads documents from MongoDB."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def started(self, event: Any) -> None:
        if event.command_name in ("find", "aggregate", "getMore", "count", "distinct"):
            self.at.append(time.monotonic())

    def succeeded(self, event: Any) -> None:
        """Ignore the event."""

    failed = succeeded


async def test_waiting_puller_reads_at_most_five_times_a_second(harness: Harness) -> None:
    reads, seconds = ReadRecorder(), 6.0
    client: Any = AsyncIOMotorClient(harness.environment["MONGO_URL"], event_listeners=[reads])
    await harness.engine()
    async with working(harness, Quick(), Paced()), working(harness, Proposing(), db=client[harness.database]):
        task_id = await harness.create(
            node("u"),
            node("slow", "paced", inline={"pause": 600}),
            {**proposing("z", "u", "slow", **route(PULL, poll_ms=1, backoff_max_ms=1)), "fan_in": "any"},
        )
        await harness.until_batches(task_id, "z", 1)
        began = time.monotonic()
        await wait_seconds(seconds)
        asked = sum(began <= at <= began + seconds for at in reads.at)
        assert await harness.statuses(task_id) == {"u": "finished", "slow": "running", "z": "running"}
        assert 0 < asked <= 5 * seconds
        await harness.coordinator.cancel_task(task_id)
        await harness.until_status(task_id, "cancelled")
    client.close()


async def test_waiting_puller_yields_its_slot_to_its_source(harness: Harness) -> None:
    await harness.engine()
    quick = Quick()
    quick.role = "solo"
    async with working(harness, Paced()), working(harness, quick, max_concurrent=1):
        once = {"retry_policy": {"max": 0}}
        task_id = await harness.create(
            node("first", "solo"),
            node("later", "paced", inline={"pause": 2}),
            node("second", "solo", "later", inline={"batches": 3}),
            node("z", "solo", "first", "second", fan_in="any", inline=route(RECHUNK, size=9), **once),
        )
        await harness.result(task_id)
    assert len(await harness.rows(task_id, "z")) == 1 + 3
    assert (await harness.node(task_id, "z"))["attempt_epoch"] >= 2, "its budget allows no retry"

    async def slot_yielded() -> bool:
        query = {"task_id": task_id, "node_id": "z", "payload.reason_code": "yielded"}
        return await harness.db.worker_events.count_documents(query) > 0

    await eventually(slot_yielded)
