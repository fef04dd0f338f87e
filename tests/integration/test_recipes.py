"""The recipes of the coordinators' guide and of docs/monitoring.md work word for word on FlowKit's documents."""

from __future__ import annotations

import ast
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError

from tests.integration.handlers import Failing, Gated, Paced, Quick
from tests.integration.harness import ROOT, eventually, node

if TYPE_CHECKING:
    from flowkit import Coordinator
    from flowkit.worker import RoleHandler
    from tests.integration.harness import Harness

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning"),
]

# --- the guide's text, unchanged ------------------------------------------------------------------

CREATE = """
async def create_pipeline_task(coordinator):
    graph = {
        "nodes": [
            {
                "node_id": "extract",
                "type": "extractor",
                "depends_on": [],
                "io": {"input_inline": {"source": "database"}}
            },
            {
                "node_id": "transform",
                "type": "processor",
                "depends_on": ["extract"],
                "io": {
                    "input_inline": {
                        "input_adapter": "pull.from_artifacts",
                        "input_args": {"from_nodes": ["extract"]}
                    }
                }
            }
        ],
        "edges": [["extract", "transform"]]
    }

    task_id = await coordinator.create_task(
        params={"pipeline_name": "etl_demo"},
        graph=graph
    )

    return task_id
"""

MONITOR = """
async def monitor_task(coordinator, task_id):
    # Get task document from database
    task_doc = await coordinator.db.tasks.find_one({"id": task_id})

    # Check overall status
    print(f"Task status: {task_doc['status']}")

    # Check individual node statuses
    for node in task_doc["graph"]["nodes"]:
        print(f"Node {node['node_id']}: {node['status']}")

    # Check artifacts
    artifacts = await coordinator.db.artifacts.find(
        {"task_id": task_id}
    ).to_list(100)
    print(f"Artifacts created: {len(artifacts)}")
"""

HEALTH = """
async def check_coordinator_health(coordinator):
    # Check if coordinator is running
    if not coordinator._running:
        return "stopped"

    # Check active workers
    workers = await coordinator.db.worker_registry.find(
        {"status": "online"}
    ).to_list(100)

    # Check pending tasks
    pending = await coordinator.db.tasks.count_documents(
        {"status": {"$in": ["queued", "running"]}}
    )

    return {
        "status": "healthy",
        "active_workers": len(workers),
        "pending_tasks": pending
    }
"""

METRICS = """
async def collect_coordinator_metrics(coordinator):
    # Task metrics
    tasks_by_status = await coordinator.db.tasks.aggregate([
        {"$group": {"_id": "$status", "count": {"$sum": 1}}}
    ]).to_list(10)

    # Worker metrics
    workers_by_status = await coordinator.db.worker_registry.aggregate([
        {"$group": {"_id": "$status", "count": {"$sum": 1}}}
    ]).to_list(10)

    # Recent events
    from datetime import datetime, timedelta
    recent_events = await coordinator.db.worker_events.count_documents({
        "created_at": {"$gte": datetime.utcnow() - timedelta(hours=1)}
    })

    return {
        "tasks": {x["_id"]: x["count"] for x in tasks_by_status},
        "workers": {x["_id"]: x["count"] for x in workers_by_status},
        "recent_events": recent_events
    }
"""

CANCEL = """
await coordinator.cascade_cancel(
    task_id="abc123",
    reason="upstream_failure"
)
"""

# --- running the recipes --------------------------------------------------------------------------


def function(text: str) -> Any:
    """Return the function that a recipe defines."""
    made: dict[str, Any] = {}
    eval(compile(text, "recipe", "exec"), made)
    return next(value for name, value in made.items() if not name.startswith("__"))


async def run(text: str, **names: Any) -> None:
    """Run a recipe that is a statement."""
    code = compile(text, "recipe", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, names)


create_pipeline_task = function(CREATE)
monitor_task = function(MONITOR)
check_coordinator_health = function(HEALTH)
collect_coordinator_metrics = function(METRICS)

ETL: dict[str, RoleHandler] = {"extractor": Quick(), "processor": Quick()}


async def until_events(harness: Harness, count: int) -> None:
    """Wait for a number of events, which FlowKit writes about once a second."""

    async def look() -> bool:
        return await harness.db.worker_events.count_documents({}) >= count

    await eventually(look)


async def ended(harness: Harness, task_id: str) -> None:
    """Wait for the end of a task that does not finish."""
    with pytest.raises(WorkflowFailureError):
        await harness.result(task_id)


async def test_pipeline_of_the_guide_runs_and_is_monitored(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    task_id = await create_pipeline_task(harness.coordinator)
    await monitor_task(harness.coordinator, task_id)
    assert capsys.readouterr().out.splitlines() == [
        "Task status: queued",
        "Node extract: queued",
        "Node transform: queued",
        "Artifacts created: 0",
    ]
    await harness.engine()
    await harness.worker(ETL)
    await harness.result(task_id)
    await monitor_task(harness.coordinator, task_id)
    assert capsys.readouterr().out.splitlines() == [
        "Task status: finished",
        "Node extract: finished",
        "Node transform: finished",
        "Artifacts created: 4",
    ], "one batch and one complete marker for each node"
    assert (await harness.document(task_id))["params"] == {"pipeline_name": "etl_demo"}


async def health(coordinator: Coordinator) -> Any:
    """Return the result of the guide's health check."""
    return await check_coordinator_health(coordinator)


def healthy(workers: int, pending: int) -> dict[str, Any]:
    """Return the result of a health check without problems."""
    return {"status": "healthy", "active_workers": workers, "pending_tasks": pending}


async def test_health_check_reflects_engine_workers_and_tasks(harness: Harness) -> None:
    assert await health(harness.coordinator) == "stopped"
    gated = Gated()
    task_id = await harness.create(node("only", "gated"))
    engine = await harness.engine()
    assert await health(engine) == healthy(0, 1)
    worker = await harness.worker({"gated": gated})
    other = await harness.worker({"gated": gated})
    assert await health(engine) == healthy(2, 1)
    gated.gate.set()
    await harness.result(task_id)
    assert await health(engine) == healthy(2, 0)
    await other.stop()
    assert await health(engine) == healthy(1, 0)
    await worker.stop()
    assert await health(engine) == healthy(0, 0)
    await engine.stop()
    assert await health(engine) == "stopped"


@pytest.mark.usefixtures("quick_attempts")
async def test_metrics_count_tasks_and_workers_by_status_and_recent_events(harness: Harness) -> None:
    engine = await harness.engine()
    assert await collect_coordinator_metrics(engine) == {"tasks": {}, "workers": {}, "recent_events": 0}
    await harness.worker({"quick": Quick(), "failing": Failing()})
    left = await harness.worker({"quick": Quick()})
    await left.stop()
    for task_id in [await harness.create(node("good")) for _ in range(2)]:
        await harness.result(task_id)
    await ended(
        harness, await harness.create(node("bad", "failing", inline={"failures": 9, "permanent": True}))
    )
    await until_events(harness, 5)
    assert await collect_coordinator_metrics(engine) == {
        "tasks": {"finished": 2, "failed": 1},
        "workers": {"online": 1, "offline": 1},
        "recent_events": 5,
    }


@pytest.mark.usefixtures("quick_attempts")
async def test_recent_events_are_those_of_the_last_hour(harness: Harness) -> None:
    engine = await harness.engine()
    await harness.worker({"quick": Quick()})
    await harness.result(await harness.create(node("only")))
    await until_events(harness, 1)
    for minutes, expected in ((59, 1), (61, 0)):
        then = datetime.now(UTC) - timedelta(minutes=minutes)
        await harness.db.worker_events.update_many({}, {"$set": {"created_at": then}})
        assert (await collect_coordinator_metrics(engine))["recent_events"] == expected


async def test_task_can_be_cancelled_with_the_command_of_the_guide(harness: Harness) -> None:
    await harness.engine()
    await harness.worker({"paced": Paced()})
    task_id = await harness.create(
        node("long", "paced", inline={"pause": 60}), node("after", "paced", "long")
    )
    await harness.until_node(task_id, "long", "running")
    await run(CANCEL.replace("abc123", task_id), coordinator=harness.coordinator)
    await ended(harness, task_id)
    document = await harness.document(task_id)
    assert document["status"] == "cancelled"
    assert document["coordinator"]["cancel_reason"] == "upstream_failure"
    assert await harness.statuses(task_id) == {"long": "cancelled", "after": "skipped"}


# --- docs/monitoring.md ---------------------------------------------------------------------------------------------


def own_recipes() -> dict[str, Any]:
    """Return the functions of docs/monitoring.md by name."""
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    recipes = page.partition("\n## Recipes\n")[2].partition("\n## ")[0]
    [text] = re.findall(r"```python\n(.*?)```", recipes, re.DOTALL)
    made: dict[str, Any] = {}
    eval(compile(text, "docs/monitoring.md", "exec"), made)
    return made


@pytest.mark.usefixtures("quick_attempts")
async def test_recipes_of_the_monitoring_page_report_what_happened(harness: Harness) -> None:
    own, db = own_recipes(), harness.db
    engine = await harness.engine()
    await harness.worker({"quick": Quick(), "failing": Failing()})
    await harness.result(await harness.create(node("good")))
    bad = await harness.create(
        node("bad", "failing", inline={"failures": 9, "permanent": True, "code": "full"})
    )
    await ended(harness, bad)
    without_worker = await harness.create(
        node("never", "nobody"), node("fn", "coordinator_fn", io={"fn": "noop"})
    )
    await harness.until_status(without_worker, "running")
    await until_events(harness, 4)
    assert await own["health"](engine) == {"engine": "running", "workers": 1, "open_tasks": 1}
    assert await own["by_status"](db.tasks) == {"finished": 1, "failed": 1, "running": 1}
    assert await own["by_status"](db.worker_registry) == {"online": 1}
    assert await own["failures"](db) == {"full": 1}
    kinds = ("TASK_ACCEPTED", "BATCH_FAILED", "TASK_FAILED")
    assert await own["attempts"](db, bad) == [("bad", 1, kind) for kind in kinds]
    assert await own["roles_without_worker"](db) == ["nobody"]


async def test_health_check_does_not_count_a_killed_worker(harness: Harness) -> None:
    health_check = own_recipes()["health"]
    engine = await harness.engine()
    await harness.worker({"quick": Quick()})
    silent = datetime.now(UTC) - timedelta(minutes=4)
    await harness.db.worker_registry.update_many({}, {"$set": {"last_seen": silent}})
    assert (await health_check(engine))["workers"] == 0
    assert (await health(engine))["active_workers"] == 1
