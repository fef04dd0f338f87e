"""The examples of the coordinator's and the workers' guides, in the form in which they are written, on
external workers.

Each test names the section of the guide that it follows. Handlers and graphs have the names and shapes of the guides;
only topics and the names of roles are those of the test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flowkit import Coordinator, CoordinatorConfig
from flowkit.testing import ExternalWorker
from flowkit.worker.handlers.base import Batch, BatchResult, FinalizeResult, RoleHandler
from tests.integration.bridge.external_tasks import QUICK_WORKER, SESSION_MS
from tests.integration.harness import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server

PARTS = 3
ROWS = 4


class Extractor(RoleHandler):
    """Reads the source that the node names, in batches (workers' guide: handler interface)."""

    role = "extractor"

    async def init(self, run_info: dict[str, Any]) -> None:
        """Remember the run, as the guide's optional hook."""
        self.run_info = run_info

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Return both inputs of the node, as in the guide."""
        return {"input_ref": input_ref or {}, "input_inline": input_inline or {}}

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield the rows of the source."""
        assert loaded["input_inline"]["source"] == "database"
        for part in range(PARTS):
            rows = [part * ROWS + row for row in range(ROWS)]
            yield Batch(batch_uid=f"{self.run_info['node_id']}-{part}", payload={"items": rows})

    async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        """Return the rows, which become the artifact of the batch."""
        return BatchResult(success=True, metrics={"items": batch.payload["items"], "count": ROWS})

    async def finalize(self, ctx: Any) -> FinalizeResult | None:
        """Return no final metrics."""
        return FinalizeResult(metrics={})


class Processor(RoleHandler):
    """Sums what it pulls (workers' guide: quick start)."""

    role = "processor"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield one batch; used only without an adapter."""
        yield Batch(batch_uid="b1", payload={"items": [1, 2, 3]})

    async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        """Return the number and the sum of the items of a batch, a chunk or an artifact."""
        items = batch.payload["items"] if "items" in batch.payload else batch.payload["meta"]["items"]
        return BatchResult(success=True, metrics={"count": len(items), "sum": sum(items)})


class ProposesAnother(Processor):
    """Proposes an adapter of its own in `load_input`, which the coordinator's choice overrides."""

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Propose chunks of one item."""
        args = {"from_nodes": ["nothing"], "size": 1, "meta_list_key": "items"}
        return {"input_adapter": "pull.from_artifacts.rechunk:size", "input_args": args}


class Doubler(Processor):
    """Runs natively: doubles the items that it pulls."""

    role = "doubler"

    async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        """Return twice each item."""
        items = [2 * item for item in batch.payload["items"]]
        return BatchResult(success=True, metrics={"items": items, "count": len(items)})


TOTAL = sum(range(PARTS * ROWS))


def pulled(adapter: str, **args: Any) -> dict[str, Any]:
    """Return the `io` of a node that pulls."""
    return {"input_inline": {"input_adapter": adapter, "input_args": {"poll_ms": 25, **args}}}


def rechunked(*sources: str, size: int = 2, **fields: Any) -> dict[str, Any]:
    """Return the `io` of a node that pulls chunks of `items`."""
    args = {"from_nodes": list(sources), "size": size, "meta_list_key": "items"}
    return {**pulled("pull.from_artifacts.rechunk:size", **args), **fields}


def database(external: ExternalTasks, node_id: str = "extract") -> dict[str, Any]:
    """Return the guide's node that reads a database."""
    source = {"input_inline": {"source": "database"}}
    return {"node_id": node_id, "type": external.role, "depends_on": [], "io": source}


async def totals(external: ExternalTasks, task_id: str, node_id: str) -> tuple[int, int]:
    """Return the number of rows of a node and the sum of `sum` over them."""
    rows = await external.rows(task_id, node_id)
    return len(rows), sum(row["metrics"]["sum"] for row in rows)


async def test_basic_setup_and_pipeline_of_the_coordinators_guide(external: ExternalTasks) -> None:
    """Basic setup; creating tasks; monitoring tasks."""
    config = external.names.config(queue=external.queue)
    coordinator = Coordinator(db=external.db, cfg=config, worker_types=[external.role, external.other_role])
    await coordinator.start()
    try:
        await external.external(Extractor(), Processor())
        transform = pulled("pull.from_artifacts", from_nodes=["extract"])
        graph = {
            "nodes": [
                database(external),
                {
                    "node_id": "transform",
                    "type": external.other_role,
                    "depends_on": ["extract"],
                    "io": transform,
                },
            ],
            "edges": [["extract", "transform"]],
        }
        task_id = await coordinator.create_task(params={"pipeline_name": "etl_demo"}, graph=graph)
        document = await external.until_status(task_id, "finished", "failed")
        assert document["status"] == "finished"
        assert {node["node_id"]: node["status"] for node in document["graph"]["nodes"]} == {
            "extract": "finished",
            "transform": "finished",
        }
        assert await totals(external, task_id, "transform") == (PARTS, TOTAL)
        artifacts = await external.db.artifacts.find({"task_id": task_id}).to_list(100)
        assert len(artifacts) == 2 * (PARTS + 1)
        online = await external.db.worker_registry.find({"status": "online"}).to_list(100)
        assert len(online) == 1
    finally:
        await coordinator.stop()


async def test_two_coordinators_with_different_worker_types_share_one_database(
    external: ExternalTasks,
) -> None:
    """Scaling: multiple coordinators."""
    config: CoordinatorConfig = external.names.config(queue=external.queue)
    coordinators = [
        Coordinator(db=external.db, cfg=config, worker_types=[role])
        for role in (external.role, external.other_role)
    ]
    for coordinator in coordinators:
        await coordinator.start()
    try:
        await external.external(Extractor(), Processor())
        sink = {
            "node_id": "sum",
            "type": external.other_role,
            "depends_on": ["extract"],
            "io": rechunked("extract"),
        }
        graph = {"nodes": [database(external), sink]}
        task_id = await coordinators[0].create_task(params={}, graph=graph)
        assert (await external.until_status(task_id, "finished", "failed"))["status"] == "finished"
        assert await totals(external, task_id, "sum") == (PARTS * ROWS // 2, TOTAL)
    finally:
        for coordinator in coordinators:
            await coordinator.stop()


@pytest.mark.slow
async def test_worker_without_an_adapter_runs_its_own_batches(external: ExternalTasks) -> None:
    """Workers' guide: quick start, with `Worker(db=…, cfg=…, handlers=…)`."""
    await external.served_engine()
    worker = ExternalWorker(
        external.db,
        {external.other_role: Processor()},
        bootstrap_servers=external.names.bootstrap,
        consumer={"session_timeout_ms": SESSION_MS, "heartbeat_interval_ms": 300},
        **{**QUICK_WORKER, **external.topics},
    )
    await worker.start()
    try:
        task_id = await external.create({"node_id": "n", "type": external.other_role})
        assert (await external.result(task_id)).status == "finished"
        assert await totals(external, task_id, "n") == (1, 6)
    finally:
        await worker.stop()


@pytest.mark.slow
async def test_adapter_of_the_graph_overrides_that_of_the_handler(external: ExternalTasks) -> None:
    """Workers' guide: adapter selection precedence, with the alias `from_node`."""
    await external.served_engine()
    await external.external(Extractor(), ProposesAnother())
    await external.external(Extractor(), ProposesAnother())
    io = pulled("pull.from_artifacts.rechunk:size", from_node="u", size=3, meta_list_key="items")
    task_id = await external.create(
        database(external, "u"),
        {
            "node_id": "w",
            "type": external.other_role,
            "depends_on": ["u"],
            "io": {**io, "start_when": "ready"},
        },
    )
    assert (await external.result(task_id)).status == "finished"
    assert await totals(external, task_id, "w") == (2 * PARTS, TOTAL)


async def test_combiner_merges_two_external_extracts_and_variables_are_set(external: ExternalTasks) -> None:
    """Coordinator functions; fan-in strategies; using adapters in a coordinator function."""
    await external.served_engine()
    await external.external(Extractor())
    merge = {"from_nodes": ["extract1", "extract2"], "target": {"node_id": "merger"}}
    kv = {"sla.max_delay": 500, "flags": {"ab": True, "beta": False}}
    task_id = await external.create(
        {"node_id": "seed_vars", "type": "coordinator_fn", "io": {"fn": "vars.set", "fn_args": {"kv": kv}}},
        {
            "node_id": "count_pages",
            "type": "coordinator_fn",
            "depends_on": ["seed_vars"],
            "io": {"fn": "vars.incr", "fn_args": {"key": "counters.pages", "by": 2}},
        },
        *(
            {**database(external, name), "retry_policy": {"max": 3, "backoff_sec": 0.1}}
            for name in ("extract1", "extract2")
        ),
        {
            "node_id": "merger",
            "type": "coordinator_fn",
            "depends_on": ["extract1", "extract2"],
            "fan_in": "all",
            "io": {"fn": "merge.generic", "fn_args": merge},
        },
    )
    assert (await external.result(task_id)).status == "finished"
    variables = (await external.document(task_id))["coordinator"]["vars"]
    assert variables["counters"] == {"pages": 2}
    assert (variables["sla"], variables["flags"]) == ({"max_delay": 500}, {"ab": True, "beta": False})
    marker: Any = await external.db.artifacts.find_one({"task_id": task_id, "node_id": "merger"})
    assert marker["meta"]["partial_batches"] == 2 * PARTS
    assert marker["meta"]["complete_nodes"] == ["extract1", "extract2"]


async def test_native_external_and_coordinator_nodes_feed_an_external_one(external: ExternalTasks) -> None:
    """A mixed graph: external and native nodes and a coordinator function before an external node that pulls."""
    await external.served_engine()
    await external.worker({"doubler": Doubler()})
    await external.external(Extractor(), Processor())
    aggregate = {"fn": "metrics.aggregate", "fn_args": {"node_id": "double"}}
    task_id = await external.create(
        database(external),
        {
            "node_id": "double",
            "type": "doubler",
            "depends_on": ["extract"],
            "io": rechunked("extract", size=3),
        },
        {"node_id": "total", "type": "coordinator_fn", "depends_on": ["double"], "io": aggregate},
        {
            "node_id": "load",
            "type": external.other_role,
            "depends_on": ["extract", "total"],
            "io": rechunked("extract", "double", size=2),
        },
    )
    assert (await external.result(task_id)).status == "finished"
    assert (await totals(external, task_id, "load"))[1] == 3 * TOTAL
    assert (await external.node(task_id, "double"))["stats"]["count"] == PARTS * ROWS


async def test_cascade_cancel_of_the_guide_stops_an_external_worker(external: ExternalTasks) -> None:
    """Error handling: cascade cancellation."""

    class Waits(Processor):
        async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
            """Wait for the cancel."""
            await ctx.cancel_flag.wait()
            await ctx.raise_if_cancelled()
            raise AssertionError("the flag was set without a cancel")

    await external.served_engine()
    worker = await external.external(Waits())
    task_id = await external.create({"node_id": "n", "type": external.role})
    await worker.wait_for("TASK_ACCEPTED", node="n")
    await external.coordinator.cascade_cancel(task_id=task_id, reason="upstream_failure")
    await worker.wait_for("CANCELLED", node="n")
    document = await external.until_status(task_id, "cancelled", "failed", "finished")
    assert (document["status"], document["coordinator"]["cancel_reason"]) == ("cancelled", "upstream_failure")
    online = {"worker_id": worker.worker_id, "status": "online"}
    await eventually(lambda: external.db.worker_registry.find_one(online))
