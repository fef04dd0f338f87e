"""The checks: tasks whose exact results are known, with a retry, a cancel and a kill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deployment import wait_until
from interop.errors import InteropError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interop.deployment import Deployment

BATCHES, SIZE = 5, 4
EXTRACTED = sum(range(BATCHES * SIZE))
WAIT_SEC = 180.0
"""How long to wait for each event. A worker with default settings loses its lease after about 66 seconds."""


class Checks:
    """Runs the checks of one deployment."""

    def __init__(self, deployment: Deployment, say: Callable[[str], None]) -> None:
        self._deployment = deployment
        self._db = deployment.db
        self._say = say

    async def run(self) -> None:
        """Run all checks; raise InteropError at the first one that fails."""
        for check in (self.mixed_graph, self.cancelled_task, self.killed_worker):
            self._say(f"ok  {await check()}")

    async def mixed_graph(self) -> str:
        """Run external, native and coordinator nodes; the first attempt of the first node fails."""
        retry = {"max": 2, "backoff_sec": 0.5}
        numbers = {"batches": BATCHES, "size": SIZE, "flaky": True}
        task_id = await self._deployment.create(
            _node("extract", "extractor", numbers, retry_policy=retry),
            _node("double", "doubler", _pull(2, "extract"), depends_on=["extract"]),
            {
                "node_id": "merge",
                "type": "coordinator_fn",
                "depends_on": ["double"],
                "io": {"fn": "merge.generic", "fn_args": {"from_nodes": ["extract", "double"], "target": {}}},
            },
            _node("collect", "collector", _pull(3, "extract", "double"), depends_on=["extract", "merge"]),
        )
        await self._ends(task_id, "finished")
        sums = {name: await self._sum(task_id, name, "count") for name in ("extract", "double", "collect")}
        total = await self._sum(task_id, "collect", "sum")
        count = BATCHES * SIZE
        _equal("numbers", sums, {"extract": count, "double": count, "collect": 2 * count})
        _equal("sum of the numbers", total, 3 * EXTRACTED)
        _equal("attempts of extract", await self._outcomes(task_id, "extract"), ["flaky", "done"])
        return f"mixed graph: {2 * count} numbers with the sum {total:.0f}, after one retry"

    async def cancelled_task(self) -> str:
        """Cancel a task while its worker sleeps."""
        task_id = await self._deployment.create(_node("sleep", "sleeper", {"until_epoch": 100}))
        await self._accepted(task_id)
        await self._deployment.coordinator.cancel_task(task_id)
        await self._ends(task_id, "cancelled")
        event = {"task_id": task_id, "payload.kind": "CANCELLED"}
        await self._until("CANCELLED of the worker", lambda: self._db.worker_events.find_one(event))
        return "cancel: the worker stopped its handler and reported CANCELLED"

    async def killed_worker(self) -> str:
        """Kill the worker that runs a node. Another one runs the node again, without using the retry budget."""
        sleep = _node("sleep", "sleeper", {"until_epoch": 1}, retry_policy={"max": 0})
        task_id = await self._deployment.create(sleep)
        lease = (await self._accepted(task_id))["lease"]
        running = {worker.name: worker for worker in self._deployment.workers if worker.exit_code is None}
        doomed = [running[lease["worker_id"]]] if lease["worker_id"] in running else [*running.values()]
        for worker in doomed:
            worker.kill()
        for worker in doomed:
            self._deployment.start_worker(f"{worker.name}-again")
        await self._ends(task_id, "finished")
        outcomes = [code for code in await self._outcomes(task_id, "sleep") if code != "dispatch_lost"]
        _equal("attempts after the kill", outcomes, ["lease_lost", "done"])
        return f"kill: another worker ran the node after {lease['worker_id']} was killed"

    async def _ends(self, task_id: str, status: str) -> None:
        try:
            ended = await self._deployment.coordinator.wait(task_id, WAIT_SEC)
        except TimeoutError:
            ended = None
        _equal("status of the task", str(ended), status)

    async def _accepted(self, task_id: str) -> dict[str, Any]:
        accepted = {"task_id": task_id, "lease": {"$ne": None}}
        return dict(await self._until("TASK_ACCEPTED", lambda: self._db.dispatches.find_one(accepted)))

    async def _until(self, what: str, look: Callable[[], Awaitable[Any]]) -> Any:
        try:
            await wait_until(look, WAIT_SEC)
        except TimeoutError:
            raise InteropError(f"{what} has not arrived within {WAIT_SEC:.0f} s") from None
        return await look()

    async def _sum(self, task_id: str, node_id: str, metric: str) -> float:
        """Return the sum of one metric over the batches of a node, as stored by the bridge."""
        rows = self._db.metrics_raw.find({"task_id": task_id, "node_id": node_id, "failed": {"$ne": True}})
        return float(sum([row["metrics"].get(metric, 0) async for row in rows]))

    async def _outcomes(self, task_id: str, node_id: str) -> list[str]:
        """Return how the attempts of a node ended: `done`, or the code of the failure."""
        records = self._db.dispatches.find({"task_id": task_id, "node_id": node_id}).sort("attempt_epoch", 1)
        outcomes = [record["outcome"] async for record in records]
        return [(each["failure"] or {}).get("code") or each["kind"] for each in outcomes]


def _node(node_id: str, role: str, inline: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"node_id": node_id, "type": role, "io": {"input_inline": inline}, **fields}


def _pull(size: int, *sources: str) -> dict[str, Any]:
    args = {"from_nodes": list(sources), "size": size, "meta_list_key": "items", "poll_ms": 50}
    return {"input_adapter": "pull.from_artifacts.rechunk:size", "input_args": args}


def _equal(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise InteropError(f"{what}: {found!r} instead of {expected!r}")
