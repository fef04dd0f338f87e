"""Hooks of a handler: order, arguments, defaults and failures, as coroutines and plain functions."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from tests.unit.event_loop import let_other_tasks_run
from tests.unit.handler_runs import artifacts, finished, node, outcomes, rows, stored_node

from flowkit.core.utils import stable_hash
from flowkit.testing import memory_database, run_graph
from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from flowkit.worker.context import RunContext

PULL = "pull.from_artifacts"
NEVER_AGAIN = {"retry_policy": {"max": 0}}
SOON = {"retry_policy": {"max": 2, "backoff_sec": 0.1}}


class CallRecorder(RoleHandler):
    """Records all its calls; `batches` of the inline input is the number of batches."""

    role = "recorder"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def init(self, info: dict[str, Any]) -> None:
        self.calls.append(("init", info))

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        self.calls.append(("load_input", input_ref, input_inline))
        return {"loaded": True, **(input_inline or {})}

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        self.calls.append(("iter_batches", loaded))
        for number in range(loaded.get("batches", 2)):
            yield Batch(batch_uid=f"b{number}", payload={"number": number})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        self.calls.append(("process_batch", batch.batch_uid, batch.payload))
        return BatchResult(success=True, metrics={"uid": batch.batch_uid})

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        self.calls.append(("finalize", ctx.node_id))
        return FinalizeResult(metrics={"total": 7}, artifacts_ref={"bucket": "reports"})

    def names(self) -> list[str]:
        """Return the names of the hooks that were called."""
        return [call[0] for call in self.calls]


# --- order, arguments, defaults ---------------------------------------------------------------------------------


async def test_hooks_are_called_in_order_with_their_arguments() -> None:
    inline = {"batches": 2, "rows": [1, {"deep": None}]}
    given = node("a", "recorder", io={"input_ref": {"key": "s3"}, "input_inline": inline})
    recorder = CallRecorder()
    run = await finished([recorder], given)
    (_, info), *calls = recorder.calls
    worker_id = (await stored_node(run, "a"))["lease"]["worker_id"]
    assert info == {
        "task_id": run.task_id,
        "node_id": "a",
        "attempt_epoch": 1,
        "worker_id": worker_id,
        "role": "recorder",
    }
    assert calls == [
        ("load_input", {"key": "s3"}, inline),
        ("iter_batches", {"loaded": True, **inline}),
        ("process_batch", "b0", {"number": 0}),
        ("process_batch", "b1", {"number": 1}),
        ("finalize", "a"),
    ]


async def test_adapter_replaces_iter_batches() -> None:
    recorder = CallRecorder()
    await finished(
        [recorder], node("a", "recorder"), node("z", "recorder", "a", inline={"input_adapter": PULL})
    )
    begin = recorder.names().index("init", 1)
    load, *batches, final = recorder.calls[begin + 1 :]
    assert load == ("load_input", None, {"input_adapter": PULL, "input_args": {"from_nodes": ["a"]}})
    assert [(name, uid, payload["meta"]) for name, uid, payload in batches] == [
        ("process_batch", uid, {"uid": uid}) for uid in ("b0", "b1")
    ]
    assert final == ("finalize", "z")


async def test_finalize_is_called_even_without_batches() -> None:
    recorder = CallRecorder()
    await finished([recorder], node("a", "recorder", inline={"batches": 0}))
    assert recorder.names() == ["init", "load_input", "iter_batches", "finalize"]


async def test_handler_without_hooks_works() -> None:
    class Bare(RoleHandler):
        role = "bare"

    run = await finished([Bare()], node("a", "bare", inline={"rows": [1]}), node("b", "bare"))
    for node_id, payload in (
        ("a", {"input_ref": {}, "input_inline": {"rows": [1]}}),
        ("b", {"input_ref": {}, "input_inline": {}}),
    ):
        partial, marker = await artifacts(run, node_id=node_id)
        assert (partial["batch_uid"], partial["meta"]) == (
            stable_hash({"payload": payload}),
            {"processed": 1},
        )
        assert (marker["status"], marker["meta"], "batch_uid" in marker) == ("complete", {}, False)
    assert await run.db.metrics_raw.count_documents({"batch_uid": "__final__"}) == 0


async def test_one_handler_serves_many_runs_each_with_its_own_context() -> None:
    gate = asyncio.Barrier(4)

    class Counting(CallRecorder):
        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            ctx.kv["seen"] = [*ctx.kv.get("seen", []), ctx.node_id]
            await asyncio.wait_for(gate.wait(), 60)
            return BatchResult(success=True, metrics={"seen": ctx.kv["seen"]})

    run = await finished([Counting()], *(node(name, "recorder") for name in "abcd"))
    for name in "abcd":
        stored = await rows(run, name)
        assert [row["metrics"]["seen"] for row in stored] == [[name], [name, name]]


# --- stored results ---------------------------------------------------------------------------------------------


async def test_metrics_are_stored_as_batch_rows_and_a_final_row() -> None:
    run = await finished([CallRecorder()], node("a", "recorder"))
    *partials, marker = await artifacts(run)
    assert [(p["status"], p["batch_uid"], p["meta"]) for p in partials] == [
        ("partial", uid, {"uid": uid}) for uid in ("b0", "b1")
    ]
    assert (marker["meta"], marker["artifacts_ref"]) == ({"total": 7}, {"bucket": "reports"})
    stored = [row async for row in run.db.metrics_raw.find({"task_id": run.task_id}).sort("_id", 1)]
    assert [(row["batch_uid"], row["metrics"], row.get("final", False)) for row in stored] == [
        ("b0", {"uid": "b0"}, False),
        ("b1", {"uid": "b1"}, False),
        ("__final__", {"total": 7}, True),
    ]


@pytest.mark.parametrize("uid", [None, ""])
async def test_empty_uid_is_replaced_by_the_payload_hash(uid: str | None) -> None:
    class Unnamed(CallRecorder):
        async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
            yield Batch(batch_uid=uid, payload={"b": 1, "a": "é"})

    run = await finished([Unnamed()], node("a", "recorder"))
    (row,) = await rows(run, "a")
    assert row["batch_uid"] == stable_hash({"payload": {"a": "é", "b": 1}})


async def test_payload_without_uid_and_hash_is_a_permanent_failure_with_a_remedy() -> None:
    class Unhashable(CallRecorder):
        async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
            yield Batch(payload={"words": {"a", "set"}})

    found = await outcomes([Unhashable()], node("a", "recorder", **SOON))
    status, epoch, error = found["a"]
    assert (status, epoch, error.partition(":")[0]) == ("failed", 1, "bad_input")
    assert "set is not JSON serializable" in error
    assert "batch_uid" in error


async def test_row_of_a_failed_batch_is_replaced_by_its_later_success() -> None:
    db, first = memory_database(), {}

    class Flaky(CallRecorder):
        async def init(self, info: dict[str, Any]) -> None:
            if info["attempt_epoch"] == 2:
                first.update({row["batch_uid"]: row async for row in db.metrics_raw.find({})})
            await super().init(info)

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            if batch.batch_uid == "b1" and ctx.attempt_epoch == 1:
                return BatchResult(success=False, reason_code="rate_limited", error="slow down")
            return await super().process_batch(batch, ctx)

    flaky = Flaky()
    run = await run_graph({"nodes": [node("a", "recorder", inline={"batches": 3})]}, flaky, db=db)
    assert set(first) == {"b0", "b1"}, "the first failing batch ends the run"
    failed = first["b1"]
    assert (failed["failed"], failed["reason"], failed["metrics"]) == (True, "rate_limited", {})
    after = await rows(run, "a")
    assert sorted(row["batch_uid"] for row in after) == ["b0", "b1", "b2"]
    assert {row["failed"] for row in after} == {False}
    assert {row["metrics"]["uid"] for row in after} == {"b0", "b1", "b2"}
    assert flaky.names().count("finalize") == 1


# --- failures ---------------------------------------------------------------------------------------------------


class Breaking(CallRecorder):
    """Fails in the hook that the inline input names; `classified` holds the arguments of classify_error."""

    role = "breaking"

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, str] = {}
        self.classified: list[str] = []

    def _break(self, here: str, wish: str) -> None:
        if wish == here:
            raise ArithmeticError(f"broken in {here}")

    async def init(self, info: dict[str, Any]) -> None:
        self._break("init", info["node_id"])

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        self._break("load_input", input_inline["wish"])
        return input_inline

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        self._break("iter_batches", loaded["wish"])
        yield Batch(batch_uid="b0", payload=loaded)
        self._break("iter_batches_later", loaded["wish"])

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        self._break("process_batch", ctx.node_id)
        return BatchResult(success=True)

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        self._break("finalize", ctx.node_id)
        return None

    def classify_error(self, exc: BaseException) -> tuple[str, bool]:
        self.classified.append(str(exc))
        return f"code {exc}", True


HOOKS = ["init", "load_input", "iter_batches", "iter_batches_later", "process_batch", "finalize"]


async def test_classify_error_receives_exceptions_of_every_hook() -> None:
    breaking = Breaking()
    nodes = [node(hook, "breaking", inline={"wish": hook}) for hook in [*HOOKS, "fine"]]
    found = await outcomes([breaking], *nodes)
    assert found.pop("fine")[0] == "finished"
    at = "at tests/unit/test_handler_hooks.py"
    assert {
        hook: (status, epoch, text.partition(":2")[0]) for hook, (status, epoch, text) in found.items()
    } == {
        hook: ("failed", 1, f"code broken in {hook}: ArithmeticError: broken in {hook}, {at}")
        for hook in HOOKS
    }
    assert sorted(breaking.classified) == sorted(f"broken in {hook}" for hook in HOOKS)


class Raising(CallRecorder):
    """Raises the exception that the node's id names."""

    role = "raising"
    ERRORS: ClassVar[dict[str, type[BaseException]]] = {
        "type": TypeError,
        "value": ValueError,
        "key": KeyError,
        "os": OSError,
        "zero": ZeroDivisionError,
    }

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        raise self.ERRORS.get(ctx.node_id, ValueError)("no")


async def test_input_errors_are_permanent_and_others_are_retried() -> None:
    found = await outcomes([Raising()], *(node(name, "raising", **SOON) for name in Raising.ERRORS))
    assert {name: (epoch, error.partition(":")[0]) for name, (_, epoch, error) in found.items()} == {
        "type": (1, "bad_input"),
        "value": (1, "bad_input"),
        "key": (1, "bad_input"),
        "os": (3, "unexpected_error"),
        "zero": (3, "unexpected_error"),
    }


class Misclassifying(Raising):
    """Returns invalid values from classify_error."""

    def __init__(self, role: str, response: Any) -> None:
        super().__init__()
        self.role = role
        self._answer = response

    def classify_error(self, exc: BaseException) -> tuple[str, bool]:
        response: tuple[str, bool] = self._answer
        return response


async def test_invalid_return_value_of_classify_error_is_an_unexpected_error() -> None:
    responses = [None, "ab", (None, True), ("code",), 1, ("code", "maybe")]
    handlers = [Misclassifying(f"role{number}", response) for number, response in enumerate(responses)]
    found = await outcomes(handlers, *(node(h.role, h.role, **NEVER_AGAIN) for h in handlers))
    assert {name: error.partition(":")[0] for name, (_, _, error) in found.items()} == {
        handler.role: "unexpected_error" for handler in handlers
    }


async def test_failure_without_a_code_gets_the_code_error_and_ends_the_run() -> None:
    class Refusing(CallRecorder):
        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            await super().process_batch(batch, ctx)
            return BatchResult(success=batch.batch_uid == "b0", error="not today", permanent=True)

    refusing = Refusing()
    found = await outcomes([refusing], node("a", "recorder", inline={"batches": 5}))
    assert found == {"a": ("failed", 1, "error: not today")}
    assert refusing.names() == ["init", "load_input", "iter_batches", "process_batch", "process_batch"]


class Opening(CallRecorder):
    """Its generator of batches holds a resource, and its batch fails."""

    role = "opening"

    def __init__(self, iter_batches: Callable[[list[str]], Any]) -> None:
        super().__init__()
        self.order: list[str] = []
        self._iter_batches = iter_batches

    def iter_batches(self, loaded: Any) -> Any:
        return self._iter_batches(self.order)

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        ctx.on_cleanup(lambda: self.order.append("clean-up"))
        return BatchResult(success=False, permanent=True)


async def closing_later(order: list[str]) -> AsyncIterator[Batch]:
    """Yield batches from an async generator that closes slowly."""
    try:
        yield Batch(batch_uid="b0")
    finally:
        await let_other_tasks_run()
        order.append("closed")


def closing(order: list[str]) -> Iterator[Batch]:
    """Yield batches from a plain generator, which may block while it closes."""
    try:
        yield Batch(batch_uid="b0")
    finally:
        order.append("closed" if threading.current_thread() is not threading.main_thread() else "blocks")


@pytest.mark.parametrize("iter_batches", [closing_later, closing])
async def test_batch_generator_is_closed_before_the_clean_ups(
    iter_batches: Callable[[list[str]], Any],
) -> None:
    opening = Opening(iter_batches)
    await outcomes([opening], node("a", "opening"))
    assert opening.order == ["closed", "clean-up"]
