"""Handlers as users write them: the ones of the workers guide, word for word, and handlers with plain functions."""

from __future__ import annotations

import ast
import json
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC
from tests.unit.handler_runs import finished, node, outcomes, rows
from tests.unit.test_handler_hooks import SOON

from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler, WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from flowkit.testing import GraphRun


INTERFACE = """
from typing import AsyncIterator
from flowkit.worker.handlers.base import RoleHandler, Batch, BatchResult, FinalizeResult

class MyRole(RoleHandler):
    role = "probe"

    async def init(self, run_info: dict):  # optional
        pass

    async def load_input(self, input_ref, input_inline):
        # May return a *suggestion* for adapter when cmd doesn't provide one
        return {"input_ref": input_ref or {}, "input_inline": input_inline or {}}

    async def iter_batches(self, loaded) -> AsyncIterator[Batch]:
        # Used only when no adapter is selected
        yield Batch(batch_uid="b1", payload={"items": [1, 2]})

    async def process_batch(self, batch: Batch, ctx) -> BatchResult:
        return BatchResult(success=True, metrics={"count": len(batch.payload.get("items", []))})

    async def finalize(self, ctx) -> FinalizeResult | None:
        return FinalizeResult(metrics={})

    def classify_error(self, exc: BaseException) -> tuple[str, bool]:
        # Default behavior in core:
        #   TypeError/ValueError/KeyError -> permanent ("bad_input")
        #   otherwise -> transient ("unexpected_error")
        if isinstance(exc, (TypeError, ValueError, KeyError)):
            return ("bad_input", True)
        return ("unexpected_error", False)
"""

CONFIGURATION = """
from flowkit.worker.runner import WorkerConfig

cfg = WorkerConfig(
    kafka_bootstrap="kafka:9092",
    roles=["indexer", "probe"],
    lease_ttl_sec=60,
    hb_interval_sec=20,
    pull_poll_ms_default=300,
    pull_empty_backoff_ms_max=4000,
)
"""

LOAD = 'WorkerConfig.load(path="configs/worker.default.json", overrides={"roles": ["probe"]})'

COORDINATOR_WINS = """
{
  "io": {
    "start_when": "first_batch",
    "input_inline": {
      "input_adapter": "pull.from_artifacts.rechunk:size",
      "input_args": {"from_nodes": ["u"], "size": 2, "meta_list_key": "skus"}
    }
  }
}
"""

PULL = """
{
  "io": {
    "input_inline": {
      "input_adapter": "pull.from_artifacts",
      "input_args": {"from_nodes": ["u"], "poll_ms": 50}
    }
  }
}
"""

RECHUNK = """
{
  "io": {
    "input_inline": {
      "input_adapter": "pull.from_artifacts.rechunk:size",
      "input_args": {
        "from_node": "u",
        "size": 3,
        "poll_ms": 25,
        "meta_list_key": "skus"
      }
    }
  }
}
"""


async def executed(code: str, **names: Any) -> dict[str, Any]:
    """Run `code`, which may use `await` outside of functions, and return its names."""
    compiled = compile(code, "guide", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    namespace = {"__name__": "guide", **names}
    running = eval(compiled, namespace)
    if running is not None:
        await running
    return namespace


async def counts(run: GraphRun, node_id: str) -> list[int]:
    """Return what the guide's handlers have counted."""
    return [row["metrics"]["count"] for row in await rows(run, node_id)]


class SkuSource(RoleHandler):
    """The node `u` of the guide's graphs: seven SKUs in two batches."""

    role = "skus"

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        return {}

    async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        skus = ["a", "b", "c", "d", "e"]
        await ctx.artifacts.upsert_partial("b1", {"skus": skus})
        return BatchResult(success=True, metrics={"skus": ["f", "g"]})


# --- the guide --------------------------------------------------------------------------------------------------


async def test_complete_handler_interface_runs_without_an_adapter() -> None:
    my_role = (await executed(INTERFACE))["MyRole"]()
    run = await finished([my_role], node("a", "probe"))
    assert await counts(run, "a") == [2]
    assert my_role.classify_error(KeyError()) == ("bad_input", True)
    assert my_role.classify_error(OSError()) == ("unexpected_error", False)


@pytest.mark.parametrize(
    ("text", "expected"), [(COORDINATOR_WINS, [1, 2, 2, 2]), (PULL, [0, 0]), (RECHUNK, [2, 2, 3])]
)
async def test_input_routes_of_the_guide_deliver_their_batches(text: str, expected: list[int]) -> None:
    inline = json.loads(text)["io"]["input_inline"]
    handlers = [SkuSource(), (await executed(INTERFACE))["MyRole"]()]
    run = await finished(handlers, node("u", "skus"), node("z", "probe", "u", inline=inline))
    assert sorted(await counts(run, "z")) == expected


async def test_settings_of_the_guide_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = (await executed(CONFIGURATION))["cfg"]
    assert (cfg.kafka_bootstrap, cfg.roles) == ("kafka:9092", ["indexer", "probe"])
    assert (cfg.lease_ttl_sec, cfg.hb_interval_sec) == (60, 20)
    assert (cfg.pull_poll_ms_default, cfg.pull_empty_backoff_ms_max) == (300, 4000)
    loaded = eval(LOAD, {"WorkerConfig": WorkerConfig})
    assert (loaded.roles, loaded.lease_ttl_sec) == (["probe"], 60)


# --- plain functions --------------------------------------------------------------------------------------------


class Plain(RoleHandler):
    """Has only plain functions; records its calls and their threads."""

    role = "plain"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads: set[int] = set()

    def _record(self, hook: str) -> None:
        self.calls.append(hook)
        self.threads.add(threading.get_ident())

    def init(self, info: dict[str, Any]) -> None:
        self._record(f"init {info['node_id']}")

    def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        self._record("load_input")
        return input_inline

    def iter_batches(self, loaded: Any) -> Iterator[Batch]:
        for number in range(3):
            self._record(f"batch {number}")
            yield Batch(batch_uid=f"b{number}", payload=loaded)

    def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        self._record(f"process {batch.batch_uid}")
        return BatchResult(success=True, metrics={**batch.payload, "cancelled": ctx.cancelled()})

    def finalize(self, ctx: Any) -> FinalizeResult | None:
        self._record("finalize")
        return FinalizeResult(metrics={"all": 3})


async def test_every_hook_can_be_a_plain_function() -> None:
    plain = Plain()
    run = await finished([plain], node("a", "plain", inline={"x": 1}))
    steps = [step for number in range(3) for step in (f"batch {number}", f"process b{number}")]
    assert plain.calls == ["init a", "load_input", *steps, "finalize"]
    assert threading.get_ident() not in plain.threads
    assert [row["metrics"] for row in await rows(run, "a")] == [{"x": 1, "cancelled": False}] * 3


async def test_batches_can_be_returned_as_a_list() -> None:
    class Listing(Plain):
        def iter_batches(self, loaded: Any) -> Any:
            return [Batch(batch_uid=uid, payload={}) for uid in "xyz"]

    run = await finished([Listing()], node("a", "plain"))
    assert sorted(row["batch_uid"] for row in await rows(run, "a")) == ["x", "y", "z"]


async def test_blocking_plain_hook_does_not_block_other_runs_of_its_worker() -> None:
    released, barrier = threading.Event(), threading.Barrier(2)

    class Blocking(Plain):
        def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
            barrier.wait(TIMEOUT_SEC)
            assert released.wait(TIMEOUT_SEC)
            return super().process_batch(batch, ctx)

    class Releasing(RoleHandler):
        role = "releasing"

        async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
            released.set()
            return BatchResult(success=True)

    nodes = [node("a", "plain", inline={}), node("b", "plain", inline={}), node("c", "releasing")]
    run = await finished([Blocking(), Releasing()], *nodes)
    assert [len(await rows(run, name)) for name in "abc"] == [3, 3, 0]


class Wrong(Plain):
    """Returns an invalid value from the hook that the node's id names."""

    role = "wrong"
    RETURN_VALUES: ClassVar[dict[str, Any]] = {
        "iter_batches": None,
        "iter_batches of": [{"batch_uid": "b1"}],
        "process_batch": {"success": True},
        "process_batch of": None,
        "finalize": {"metrics": {}},
        "finalize of": {},
    }

    def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        return input_inline["wish"]

    def iter_batches(self, loaded: Any) -> Any:
        hook = "iter_batches"
        return self.RETURN_VALUES[loaded] if loaded.startswith(hook) else [Batch(batch_uid="b1", payload={})]

    def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        right = BatchResult(success=True)
        response: BatchResult = (
            self.RETURN_VALUES[ctx.node_id] if ctx.node_id.startswith("process") else right
        )
        return response

    def finalize(self, ctx: Any) -> FinalizeResult | None:
        response: FinalizeResult | None = (
            self.RETURN_VALUES[ctx.node_id] if ctx.node_id.startswith("final") else None
        )
        return response


async def test_invalid_return_value_is_a_permanent_failure_that_names_the_hook() -> None:
    nodes = [node(name, "wrong", inline={"wish": name}, **SOON) for name in [*Wrong.RETURN_VALUES, "right"]]
    found = await outcomes([Wrong()], *nodes)
    assert found.pop("right")[0] == "finished"
    assert {
        name: (epoch, error.partition(":")[0]) for name, (_, epoch, error) in found.items()
    } == dict.fromkeys(Wrong.RETURN_VALUES, (1, "bad_input"))
    assert [error for name, (_, _, error) in found.items() if name.split()[0] not in error] == []
