"""`run_graph` as users' tests call it: whole tasks without a server."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.processor_time import growth_problem

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.errors import ConfigError, GraphError, StoreUnavailable
from flowkit.testing import memory_database, run_graph
from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.testing import GraphRun
    from flowkit.worker.context import RunContext

PULL = {"input_inline": {"input_adapter": "pull.from_artifacts"}}


class Split(RoleHandler):
    """Yields a batch for each text. On request, its first attempts fail, permanently or not."""

    role = "split"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield the texts."""
        given = loaded["input_inline"]
        for number, text in enumerate(given["texts"]):
            yield Batch(batch_uid=f"text-{number}", payload={**given, "text": text})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the words, or fail."""
        number = batch.payload["texts"].index(batch.payload["text"])
        if number >= batch.payload.get("breaks_at", 0) and ctx.attempt_epoch <= batch.payload.get(
            "breaks", 0
        ):
            permanent = batch.payload.get("permanent", False)
            return BatchResult(success=False, reason_code="torn", error="no ink", permanent=permanent)
        return BatchResult(success=True, metrics={"words": batch.payload["text"].split()})


class Count(RoleHandler):
    """Counts the words of the batches that it pulls."""

    role = "count"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Count the words of one batch."""
        return BatchResult(success=True, metrics={"n": len(batch.payload["meta"]["words"])})

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        """Return the total."""
        return FinalizeResult(
            metrics={"all": sum([part["meta"]["n"] async for part in ctx.artifacts.partials()])}
        )


class Endless(RoleHandler):
    """Waits until it is cancelled."""

    role = "endless"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait forever."""
        await asyncio.Event().wait()
        raise AssertionError("no code sets that event")


def split(node_id: str = "split", *texts: Any, **fields: Any) -> dict[str, Any]:
    """Return a node that splits; `order` makes it fail."""
    inline = {"texts": texts or ("a b", "c d e"), **fields.pop("order", {})}
    return {"node_id": node_id, "type": "split", "io": {"input_inline": inline}, **fields}


def count(*parents: str, **fields: Any) -> dict[str, Any]:
    """Return a node that counts the words of its parents."""
    return {"node_id": "count", "type": "count", "depends_on": list(parents), "io": PULL, **fields}


def function(fn: str, *parents: str, **fn_args: Any) -> dict[str, Any]:
    """Return a node with a coordinator function."""
    io = {"fn": fn, "fn_args": fn_args}
    return {"node_id": fn, "type": "coordinator_fn", "depends_on": list(parents), "io": io}


async def ran(*nodes: dict[str, Any], **graph: Any) -> GraphRun:
    """Return the outcome of a graph."""
    return await run_graph({"nodes": list(nodes), **graph}, Split(), Count(), Endless())


def statuses(run: GraphRun) -> dict[str, str]:
    """Return the status of each node."""
    return {node_id: node.status for node_id, node in run.nodes.items()}


async def test_node_pulls_what_another_has_stored() -> None:
    run = await ran(split(), count("split"))
    assert (run.status, run.reason) == ("finished", None)
    assert run.nodes["split"].batches == [{"words": ["a", "b"]}, {"words": ["c", "d", "e"]}]
    assert run.nodes["count"].batches == [{"n": 2}, {"n": 3}]
    assert run.nodes["count"].final == {"all": 5}


async def test_document_ends_as_with_an_engine() -> None:
    run = await run_graph({"nodes": [split()]}, Split(), params={"day": 1})
    document = await run.db.tasks.find_one({"id": run.task_id})
    assert (document["status"], document["params"]) == ("finished", {"day": 1})
    assert document["graph"]["nodes"][0]["status"] == "finished"
    assert [change["to"] for change in document["status_history"]] == ["queued", "running", "finished"]


async def test_retry_does_not_wait_for_its_backoff() -> None:
    run = await ran(split(order={"breaks": 2}, retry_policy={"max": 2, "backoff_sec": 3600}))
    assert (run.status, run.nodes["split"].attempts, run.nodes["split"].error) == ("finished", 3, None)


@pytest.mark.parametrize(("order", "attempts"), [({"breaks": 9}, 3), ({"breaks": 9, "permanent": True}, 1)])
async def test_node_fails_after_its_retries_or_on_a_permanent_failure(
    order: dict[str, Any], attempts: int
) -> None:
    run = await ran(split(order=order), count("split"))
    assert (run.status, run.reason) == ("failed", "node 'split' failed: torn: no ink")
    assert (run.nodes["split"].attempts, run.nodes["split"].error) == (attempts, "torn: no ink")
    assert (run.nodes["count"].status, run.nodes["count"].skip_reason) == ("skipped", "upstream_failed")


async def test_failure_cancels_running_nodes() -> None:
    run = await ran({"node_id": "other", "type": "endless"}, split(order={"breaks": 9}))
    assert statuses(run) == {"other": "cancelled", "split": "failed"}
    document = await run.db.tasks.find_one({"id": run.task_id})
    assert (document["status"], document["reason"]) == ("failed", run.reason)


async def test_independent_branch_continues_after_a_failure_if_the_graph_says_continue() -> None:
    run = await ran(split("bad", order={"breaks": 9}), split(), count("split"), on_node_failure="continue")
    assert statuses(run) == {"bad": "failed", "split": "finished", "count": "finished"}
    assert run.status == "failed"


class Report(RoleHandler):
    """Stores the failures that started its node, as `load_input` and as the context show them."""

    role = "report"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield one batch with the failures."""
        yield Batch(batch_uid="failures", payload={"failed": loaded["input_inline"].get("failed_nodes")})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the failures."""
        return BatchResult(
            success=True, metrics={"loaded": batch.payload["failed"], "context": ctx.failed_nodes}
        )


async def test_failure_starts_its_remediator_which_reads_why_and_the_task_finishes() -> None:
    bad = split("bad", order={"breaks": 9, "permanent": True}, routing={"on_failure": ["report", "note"]})
    seen: list[Any] = []

    async def note(task_id: str, failed_nodes: list[dict[str, Any]], level: str) -> None:
        seen.append((level, failed_nodes))

    graph = {"nodes": [bad, {"node_id": "report", "type": "report"}, function("note", level="high")]}
    run = await run_graph(graph, Split(), Report(), functions={"note": note})
    failed = [{"node_id": "bad", "attempt_epoch": 1, "reason_code": "torn", "error": "torn: no ink"}]
    assert statuses(run) == {"bad": "failed", "report": "finished", "note": "finished"}
    assert (run.status, run.reason) == ("finished", None)
    assert run.nodes["report"].batches == [{"loaded": failed, "context": failed}]
    assert seen == [("high", failed)]
    document = await run.db.tasks.find_one({"id": run.task_id})
    assert document["result"]["handled_failures"] == ["bad"]


async def test_branch_that_is_not_taken_is_skipped() -> None:
    run = await ran(
        split(routing={"on_success": ["split-2"], "on_failure": ["tidy"]}), split("split-2"), split("tidy")
    )
    assert statuses(run) == {"split": "finished", "split-2": "finished", "tidy": "skipped"}
    assert run.nodes["tidy"].skip_reason == "routing"


async def test_allowed_failure_finishes_the_task_and_pullers_do_not_wait_for_it() -> None:
    bad = split("bad", order={"breaks": 9}, allow_failure=True)
    run = await ran(bad, split(), count("bad", "split", fan_in="any"))
    assert (run.status, run.nodes["count"].final) == ("finished", {"all": 5})


async def test_all_done_join_reads_what_failed_and_skipped_parents_have_stored() -> None:
    """The second batch of `torn` fails, so one is stored. A task that stops starts no join."""
    torn = split("torn", "a b", "c", order={"breaks_at": 1, "breaks": 9, "permanent": True})
    never = split("never", depends_on=["torn"])
    join = count("torn", "never", "split", fan_in="all_done")
    run = await ran(torn | {"allow_failure": True}, never, split(), join)
    assert statuses(run) == {"torn": "failed", "never": "skipped", "split": "finished", "count": "finished"}
    assert (run.status, run.nodes["count"].final) == ("finished", {"all": 2 + 5})
    run = await ran(torn, never, split(), join)
    assert (run.status, run.nodes["count"].skip_reason) == ("failed", "task_failed")


async def test_values_by_expression_reach_handlers_and_functions() -> None:
    texts = [{"$cel": "params.text"}, {"$cel": "string(vars.n) + ' more'"}]
    seen = []

    async def look(task_id: str, **given: Any) -> None:
        seen.append(given)

    nodes = [
        function("vars.set", n={"$cel": "size(params.text)"}),
        split("split", *texts, depends_on=["vars.set"]),
        function("look", "split", status={"$cel": "nodes.split.status"}),
        split("bad", {"$cel": "params.missing"}, allow_failure=True),
    ]
    schema = {"properties": {"text": {"type": "string"}}}
    graph = {"nodes": nodes, "params_schema": schema}
    run = await run_graph(graph, Split(), params={"text": "a b"}, functions={"look": look})
    assert (run.status, seen, run.vars) == ("finished", [{"status": "finished"}], {"n": 3})
    assert run.nodes["split"].batches == [{"words": ["a", "b"]}, {"words": ["3", "more"]}]
    assert run.nodes["bad"].attempts == 0
    assert (run.nodes["bad"].error or "").startswith("bad_expression: io.input_inline.texts[0]: ")
    with pytest.raises(GraphError, match=r"params\.text: 7 is not of type 'string'"):
        await run_graph(graph, Split(), params={"text": 7})


async def test_built_in_and_user_functions_run() -> None:
    seen = []

    async def tell(task_id: str, *, who: str) -> None:
        seen.append((task_id, who))

    nodes = [function("vars.set", kv={"routing": {"sla": "gold"}}), function("tell", "vars.set", who="me")]
    run = await run_graph({"nodes": nodes}, functions={"tell": tell})
    assert run.vars == {"routing": {"sla": "gold"}}
    assert seen == [(run.task_id, "me")]


async def test_database_can_be_given() -> None:
    db = memory_database()
    first = await run_graph({"nodes": [split()]}, Split(), db=db)
    second = await run_graph({"nodes": [split()]}, Split(), db=db)
    assert {task["id"] async for task in db.tasks.find({})} == {first.task_id, second.task_id}


@pytest.mark.parametrize(
    ("nodes", "reported"),
    [([{"node_id": "a"}], "type"), ([function("tell")], "known here: merge.generic"), ([], "nodes")],
)
async def test_invalid_graph_is_rejected(nodes: list[dict[str, Any]], reported: str) -> None:
    with pytest.raises(GraphError, match=reported):
        await run_graph({"nodes": nodes})


async def test_role_requires_exactly_one_handler() -> None:
    with pytest.raises(ConfigError, match="no handler for role 'count'"):
        await run_graph({"nodes": [split(), count("split")]}, Split())
    with pytest.raises(ConfigError, match="two handlers are for role 'split'"):
        await run_graph({"nodes": [split()]}, Split(), Split())


def _processor_time(nodes: int) -> float:
    """Return the processor time of a chain of nodes, in seconds."""
    chain = [split(f"n{place}", depends_on=[f"n{place - 1}"] if place else []) for place in range(nodes)]
    began = time.process_time()
    assert asyncio.run(run_graph({"nodes": chain}, Split())).status == "finished"
    return time.process_time() - began


@pytest.mark.slow
def test_time_grows_with_the_nodes_and_not_faster() -> None:
    assert growth_problem(_processor_time, 200) is None


class Lazy(RoleHandler):
    """Returns generators in place of lists."""

    role = "lazy"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Store one batch itself, and return another."""
        await ctx.artifacts.upsert_partial("own", {"n": (each for each in range(3))})
        return BatchResult(success=True, metrics={"n": iter(range(3))}, artifacts_ref={"n": iter([4])})


async def test_write_that_is_retried_stores_all_items_of_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    write, failed = ArtifactStore._store_partial, []

    async def fails_once(self: ArtifactStore, attempt: Any, uid: str, *given: Any) -> None:
        if uid not in failed:
            failed.append(uid)
            raise StoreUnavailable("the primary stepped down")
        await write(self, attempt, uid, *given)

    monkeypatch.setattr(ArtifactStore, "_store_partial", fails_once)
    db = memory_database()
    await run_graph({"nodes": [{"node_id": "a", "type": "lazy"}]}, Lazy(), db=db)
    rows = {row.get("batch_uid"): row async for row in db.artifacts.find({})}
    assert [rows[uid]["meta"] for uid in failed] == [{"n": [0, 1, 2]}] * 2
    assert rows[failed[1]]["artifacts_ref"] == {"n": [4]}
