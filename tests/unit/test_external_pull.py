"""The external worker's input adapters: arguments, chunks, claims, and the end of the input."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.external import Bench, NoWaiting, run_of

from flowkit.testing.external.handlers import EachBatch
from flowkit.testing.external.pipeline import PULL, RECHUNK, find_problem, normalize_args, rechunk
from flowkit.testing.external.protocol import stable_hash
from flowkit.testing.external.settings import ExternalSettings

SETTINGS = ExternalSettings()
DEFAULTS = {"poll_ms": 300, "eof_on_task_done": True, "backoff_max_ms": 4000}


@pytest.mark.parametrize(
    ("args", "sources"),
    [
        ({"from_nodes": ["a", "b"]}, ["a", "b"]),
        ({"from_node": "a"}, ["a"]),
        ({}, []),
        ({"from_nodes": "ab"}, ["a", "b"]),
    ],
)
def test_the_sources_are_from_nodes_or_from_node(args: dict[str, Any], sources: list[str]) -> None:
    assert normalize_args(args, SETTINGS) == {"from_nodes": sources, **DEFAULTS}


def test_other_arguments_are_passed_on() -> None:
    given = {"from_node": "a", "poll_ms": 5, "color": "red"}
    assert normalize_args(given, SETTINGS) == {**DEFAULTS, "from_nodes": ["a"], "poll_ms": 5, "color": "red"}


SIZE = "missing or invalid 'size' (positive int required)"
KEY = "'meta_list_key' must be a string if provided"
STRICT = "strict mode: 'meta_list_key' is required and must be a string"


@pytest.mark.parametrize(
    ("adapter", "args", "strict", "error"),
    [
        (RECHUNK, {}, False, SIZE),
        (RECHUNK, {"size": 0}, False, SIZE),
        (RECHUNK, {"size": "3"}, False, SIZE),
        (RECHUNK, {"size": 3, "meta_list_key": 5}, False, KEY),
        (RECHUNK, {"size": 3}, True, STRICT),
        (RECHUNK, {"size": 3}, False, None),
        (RECHUNK, {"size": 3, "meta_list_key": "rows"}, True, None),
        (PULL, {"anything": 1}, True, None),
    ],
)
def test_only_the_rechunk_adapter_checks_its_arguments(
    adapter: str, args: dict[str, Any], strict: bool, error: str | None
) -> None:
    assert find_problem(adapter, args, strict=strict) == error


def test_chunks_slice_a_list_and_derive_their_uids() -> None:
    document = {"batch_uid": "b1", "meta": {"rows": [1, 2, 3, 4, 5]}}
    chunks = list(rechunk(document, "u", 2, "rows"))
    assert [chunk.payload["items"] for chunk in chunks] == [[1, 2], [3, 4], [5]]
    assert chunks[0].batch_uid == "ad2b7bfd0ae8f741de96ce46937202d382868d69"
    assert chunks[2].batch_uid == stable_hash({"src": "u", "parent": "b1", "idx": 2})
    assert chunks[0].payload["parent"] == {"ref": {"batch_uid": "b1"}, "meta_list_key": "rows"}


@pytest.mark.parametrize("key", [None, "other", "count"])
def test_without_a_list_the_whole_meta_is_one_chunk(key: str | None) -> None:
    meta = {"rows": [1, 2, 3], "count": 3}
    (chunk,) = rechunk({"batch_uid": "b1", "meta": meta}, "u", 2, key)
    assert chunk.payload["items"] == [meta]
    assert chunk.payload["parent"]["meta_list_key"] is None


def test_an_empty_list_yields_no_chunk() -> None:
    assert list(rechunk({"batch_uid": "b1", "meta": {"rows": []}}, "u", 2, "rows")) == []


def pulling(adapter: str = PULL, **args: Any) -> dict[str, Any]:
    """The inline input of a pulling node."""
    return {"input_adapter": adapter, "input_args": args}


async def test_a_pulling_run_claims_and_reports_each_batch_of_its_sources() -> None:
    bench = Bench()
    await bench.store.ensure_indexes()
    for node, uid in (("a", "a1"), ("a", "a2"), ("b", "b1")):
        await bench.partial(node, uid, {"uid": uid})
    for node in ("a", "b"):
        await bench.complete(node)
    got: list[dict[str, Any]] = []

    def take(payload: dict[str, Any], _: object) -> dict[str, Any]:
        got.append(payload)
        return {"seen": payload["meta"]["uid"]}

    await bench.execute(EachBatch(take), run_of(pulling(from_nodes=["a", "b"])))
    assert bench.kinds == ["BATCH_OK", "BATCH_OK", "BATCH_OK", "TASK_DONE"]
    assert [entry.payload["batch_uid"] for entry in bench.sent[:3]] == ["a1", "a2", "b1"]
    ref = {"task_id": "t", "node_id": "a", "batch_uid": "a1"}
    assert got[0] == {"from_node": "a", "ref": ref, "meta": {"uid": "a1"}}
    claims = [claim async for claim in bench.db.stream_progress.find({"consumer_node": "n"})]
    assert [(claim["from_node"], claim["batch_uid"]) for claim in claims] == [
        ("a", "a1"),
        ("a", "a2"),
        ("b", "b1"),
    ]


async def test_claimed_batches_are_not_delivered_again() -> None:
    bench = Bench()
    await bench.store.ensure_indexes()
    await bench.partial("a", "a1", {})
    await bench.complete("a")
    await bench.store.claim(run_of(), "a", "a1")
    await bench.execute(EachBatch(lambda *_: {}), run_of(pulling(from_node="a")))
    assert bench.kinds == ["TASK_DONE"]


async def test_the_pause_doubles_up_to_its_maximum_while_a_source_is_not_complete() -> None:
    async def between(_: int) -> None:
        if sum(pause != 0.5 for pause in clock.sleeps) == 5:
            await bench.complete("a")

    clock = NoWaiting(between)
    bench = Bench(clock=clock)
    run = run_of(pulling(from_node="a", poll_ms=100, backoff_max_ms=300))
    await bench.execute(EachBatch(lambda *_: {}), run)
    pauses = [pause for pause in clock.sleeps if pause != 0.5]
    assert pauses == [0.1, 0.2, 0.3, 0.3, 0.3]
    assert bench.kinds == ["TASK_DONE"]


async def test_a_cancel_while_waiting_ends_in_task_done() -> None:
    async def between(_: int) -> None:
        run.request_cancel("user_request")

    bench = Bench(clock=NoWaiting(between))
    run = run_of(pulling(from_node="a"))
    await bench.execute(EachBatch(lambda *_: {}), run)
    assert bench.kinds == ["TASK_DONE"]


async def test_without_sources_a_run_is_an_empty_success() -> None:
    bench = Bench()
    await bench.execute(EachBatch(lambda *_: {}), run_of(pulling()))
    assert bench.kinds == ["TASK_DONE"]


@pytest.mark.parametrize(
    ("inline", "reason", "permanent", "error"),
    [
        (pulling("pull.unknown"), "bad_input_adapter", True, "unknown input_adapter 'pull.unknown'"),
        (pulling(RECHUNK, from_node="a"), "bad_input_args", True, SIZE),
        (pulling(PULL, from_node="a", meta_list_key="rows"), "unexpected_error", True, None),
        ({"input_adapter": PULL, "input_args": "text"}, "unexpected_error", False, None),
    ],
    ids=["unknown adapter", "invalid size", "unknown key", "no object"],
)
async def test_wrong_inputs_fail_the_run(
    inline: dict[str, Any], reason: str, permanent: bool, error: str | None
) -> None:
    bench = Bench()
    (failed,) = await bench.execute(EachBatch(lambda *_: {}), run_of(inline))
    assert failed.kind == "TASK_FAILED"
    assert (failed.payload["reason_code"], failed.payload["permanent"]) == (reason, permanent)
    assert error in (None, failed.payload["error"])
