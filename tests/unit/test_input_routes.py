"""Input routes: chosen by the node, by the handler, or replaced by the handler's own batches."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.handlers import Quick
from tests.unit.handler_runs import finished, node, outcomes, rows
from tests.unit.test_handler_hooks import SOON

from flowkit.core.utils import stable_hash
from flowkit.testing import run_graph
from flowkit.worker import Batch, BatchResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.testing import GraphRun
    from flowkit.worker.context import RunContext

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


async def run(*nodes: dict[str, Any], **graph: Any) -> tuple[GraphRun, Proposing]:
    """Run nodes until the task finishes. Return its outcome, and the handler with the batches that it received."""
    handler = Proposing()
    ended = await run_graph({"nodes": list(nodes), **graph}, ListSource(), Quick(), handler)
    assert ended.status == "finished", ended.reason
    return ended, handler


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
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="flowkit.worker")
    ordered = route(RECHUNK, from_node="u", size=2, meta_list_key="skus")
    proposed = route(PULL, from_nodes=["u"], poll_ms=20)
    _, got = await run(source([1, 2, 3]), proposing("z", "u", propose=proposed, **ordered))
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


async def test_known_adapter_of_the_handler_overrides_iter_batches(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="flowkit.worker")
    _, got = await run(
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


async def test_iter_batches_is_used_for_unknown_adapters_and_without_an_adapter() -> None:
    _, got = await run(
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


async def assert_refused(*nodes: dict[str, Any]) -> None:
    """Check that every node but `u` fails permanently as `bad_input_args`, and that its handler receives nothing."""
    handler = Proposing()
    found = await outcomes([ListSource(), handler], source([1]), *nodes)
    assert found.pop("u")[0] == "finished"
    assert {name: (epoch, error.partition(":")[0]) for name, (_, epoch, error) in found.items()} == {
        each["node_id"]: (1, "bad_input_args") for each in nodes
    }
    assert handler.got == {}


async def test_invalid_adapter_argument_of_a_handler_fails_the_node_permanently() -> None:
    await assert_refused(*(proposing(name, "u", propose=bad) for name, bad in BAD.items()))


async def test_handler_that_proposes_no_sources_fails_permanently() -> None:
    await assert_refused(proposing("orphan", propose={"input_adapter": PULL}))


@pytest.mark.parametrize("source", ["ghost", "z"])
async def test_handler_that_proposes_a_source_that_cannot_end_fails_permanently(source: str) -> None:
    await assert_refused(proposing("z", "u", propose=route(PULL, from_nodes=[source])))


# --- delivery ---------------------------------------------------------------------------------------------------


async def test_chunks_have_the_uids_of_the_protocol_and_keep_the_remainder() -> None:
    args = route(RECHUNK, from_nodes=["u"], size=2, meta_list_key="skus")
    _, handler = await run(source([1, 2, 3], [], [4, 5]), proposing("z", "u", **args))
    got = handler.got["z"]
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


async def test_empty_source_is_not_an_error_and_yields_no_batches() -> None:
    chunks = route(RECHUNK, size=3, meta_list_key="skus")
    nodes = [proposing("pull", "u", **route(PULL)), proposing("chunks", "u", **chunks)]
    assert (await run(source(), *nodes))[1].got == {}


async def test_parents_are_the_default_sources() -> None:
    _, got = await run(
        source([1], node_id="u"),
        source([2], node_id="v"),
        source([3], node_id="aside"),
        proposing("ordered", "u", "v", "aside", **route(RECHUNK, size=9)),
        proposing("proposed", "u", "v", propose=route(RECHUNK, size=9)),
    )
    sources = {name: [payload["from_node"] for _, payload in batches] for name, batches in got.got.items()}
    assert sources == {"ordered": ["u", "v", "aside"], "proposed": ["u", "v"]}


# --- several sources ------------------------------------------------------------------------------------------------


async def test_batches_with_equal_uids_from_several_sources_are_all_stored() -> None:
    sources = [node(name, "quick", inline={"batches": 3}) for name in ("u", "v", "w")]
    ended, handler = await run(
        *sources,
        proposing("ordered", "u", "v", "w", **route(PULL)),
        proposing("proposed", "u", "v", "w", propose=route(PULL, from_nodes=["v", "u"])),
        proposing("single", "u", **route(PULL)),
        node("after", "proposing", "ordered", inline=route(PULL, from_nodes=["ordered", "single"])),
    )
    uids = [f"b{number}" for number in range(3)]
    assert handler.uids("ordered") == [*uids, *(f"{uid}@v" for uid in uids), *(f"{uid}@w" for uid in uids)]
    assert handler.uids("proposed") == [*uids, *(f"{uid}@u" for uid in uids)]
    assert handler.uids("single") == uids
    for name, count in (("ordered", 9), ("proposed", 6), ("single", 3)):
        stored = await rows(ended, name)
        assert sorted(row["batch_uid"] for row in stored) == sorted(map(str, handler.uids(name)))
        assert len(stored) == count
    nested = handler.uids("after")
    assert len(set(nested)) == 12
    assert "b0%40v@ordered" in nested
    assert "b0@single" in nested


async def test_interrupted_attempt_resumes_every_source() -> None:
    class Breaking(Proposing):
        """Fails in the middle of its first attempt."""

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            if ctx.attempt_epoch == 1 and len(self.got.get("z", [])) == 4:
                raise ConnectionError("the source broke")
            return await super().process_batch(batch, ctx)

    handler = Breaking()
    sources = [node(name, "quick", inline={"batches": 3}) for name in ("u", "v")]
    ended = await finished([Quick(), handler], *sources, proposing("z", "u", "v", **route(PULL)))
    assert handler.uids("z") == ["b0", "b1", "b2", "b0@v", "b1@v", "b2@v"]
    assert ended.nodes["z"].attempts == 2


# --- routes that handlers propose -----------------------------------------------------------------------------------


async def test_parents_from_extended_edges_are_the_default_sources() -> None:
    nodes = [source([1], node_id="u"), source([2], node_id="v"), proposing("z", propose=route(PULL))]
    edges = [{"from": "v", "to": "z"}, {"from": "u", "to": "z"}]
    _, handler = await run(*nodes, edges_ex=edges)
    assert [payload["from_node"] for _, payload in handler.got["z"]] == ["v", "u"]


@pytest.mark.parametrize("adapter", [route(PULL), route(RECHUNK, size=2)])
async def test_empty_source_list_of_a_handler_is_an_input_without_batches(adapter: dict[str, Any]) -> None:
    adapter["input_args"]["from_nodes"] = []
    ended, handler = await run(source([1]), proposing("z", "u", propose=adapter))
    assert handler.got == {}
    assert ended.status == "finished"


async def test_handler_that_pulls_from_a_descendant_fails_permanently() -> None:
    found = await outcomes(
        [ListSource(), Proposing()],
        source([1]),
        proposing("z", "u", propose=route(PULL, from_nodes=["u", "after"])),
        proposing("middle", "z"),
        proposing("after", "middle"),
    )
    status, epoch, error = found["z"]
    assert (status, epoch) == ("failed", 1)
    assert error.startswith("bad_input_args: input_args.from_nodes names 'after'")
    assert "z -> middle -> after -> z" in error
