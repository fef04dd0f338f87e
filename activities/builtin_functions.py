"""CoordinatorAdapters: the built-in coordinator functions, for graphs and for Python (spec: CoordinatorAdapters).

Called from Python they are done as often as they are called. Called by a `coordinator_fn` node they are done once for
each generation of the node, whatever is retried or dies in between.
"""

from __future__ import annotations

import copy
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flowkit.adapters.aggregates import Aggregates
from flowkit.adapters.tasks.task_store import TaskStore
from flowkit.adapters.vars import operations
from flowkit.adapters.vars.sensitive import Detector
from flowkit.adapters.vars.store import Variables
from flowkit.arguments import clock_problem, database_problem, node_id_problem, require, task_id_problem
from flowkit.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from flowkit.adapters.mongo import Database
    from flowkit.adapters.tasks.node_writes import NodeWrite
    from flowkit.adapters.vars.operations import Change

    Answer = Awaitable[dict[str, Any]]

_logger = logging.getLogger("flowkit.coord.adapters")

METHODS = {
    "vars.set": "vars_set",
    "vars.merge": "vars_merge",
    "vars.incr": "vars_incr",
    "vars.unset": "vars_unset",
    "merge.generic": "merge_generic",
    "metrics.aggregate": "metrics_aggregate",
    "noop": "noop",
}
"""Built-in functions by their names in graphs."""

IN_ONE_UPDATE = frozenset({"vars_set", "vars_merge", "vars_incr", "vars_unset", "noop"})
"""Methods whose one write takes a function node from its begin to its end."""


class CoordinatorAdapters:
    """Changes to a task's variables and bookkeeping, each checked before anything is written.

    `db` is a Motor database, or one with its interface; `clock` gives the times that documents show (see
    `flowkit.core.time`); `detector` judges which values look like secrets, in any of the forms of `sensitive.Detector`.

    AdapterError names what is wrong: an unknown task, a bad path or value, a limit. StoreUnavailable: MongoDB does not
    answer; whether the call was done is unknown then, as it has no identity.
    """

    def __init__(self, *, db: Database, clock: Any = None, detector: Any = None) -> None:
        require(database_problem(db), clock_problem(clock))
        self._now = clock.now_dt if clock is not None else lambda: datetime.now(UTC)
        self._variables = Variables(TaskStore(db), self._now)
        self._aggregates = Aggregates(db)
        self._detector = Detector(detector)
        self._node: NodeWrite | None = None

    def for_node(self, write: NodeWrite) -> CoordinatorAdapters:
        """The same functions as one attempt of a function node calls them."""
        bound = copy.copy(self)
        bound._node = write
        return bound

    async def vars_set(self, /, task_id: str, **kv: Any) -> dict[str, Any]:
        """Set variables: `kv={...}` or keywords, dotted paths or nested objects, all in one atomic write.

        `block_sensitive=True` refuses values that look like secrets. Answers `{"ok": True, "touched": paths}`.
        """
        return await self._change(task_id, lambda: operations.setting(kv))

    async def vars_merge(self, /, task_id: str, **kv: Any) -> dict[str, Any]:
        """Merge a tree (`data={...}`, `kv={...}` or keywords) into the variables: its leaves overwrite.

        `block_sensitive=True` refuses values that look like secrets. Answers `{"ok": True, "touched": paths}`.
        """
        return await self._change(task_id, lambda: operations.merging(kv))

    async def vars_incr(self, task_id: str, *, key: str, by: float = 1) -> dict[str, Any]:
        """Add `by` to a number, or begin with it. Answers `{"ok": True, "key": key, "by": by}`."""
        await self._change(task_id, lambda: operations.incrementing(key, by))
        return {"ok": True, "key": key, "by": by}

    async def vars_unset(
        self, task_id: str, *paths: str, keys: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Remove variables, present or not, then every object that is left without a leaf.

        Returns `{"ok": True, "touched": n}`, where n counts every path as often as it was named.
        """
        answer = await self._change(task_id, lambda: operations.unsetting(paths, keys))
        if answer["touched"] and (pruned := await self._variables.prune(task_id)):
            self._log("coord.vars.unset.prune", task_id, keys=pruned, n=len(pruned))
        return answer

    async def merge_generic(
        self, task_id: str, from_nodes: Sequence[str], target: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Sum up which of `from_nodes` are complete, in the complete artifact of `target["node_id"]`.

        It merges bookkeeping, not data. A function node is its own target unless it names one; elsewhere that is
        `coordinator`. Answers `{"ok": True, "meta": summary}`.
        """
        _require_task(task_id)
        names = _node_ids(from_nodes)
        if not isinstance(target, dict):
            raise AdapterError(f"merge.generic: 'target' must be a dict, not {operations.kind(target)}")
        node_id = target.get("node_id") or "coordinator"
        require(node_id_problem(node_id, "merge.generic: target['node_id']"), error=AdapterError)
        await self._aggregates.place_of(task_id)
        at = self._now().timestamp()
        meta = await self._aggregates.merged(task_id, names, at)
        await self._aggregates.store_merged(task_id, node_id, meta, at)
        return {"ok": True, "meta": meta}

    async def metrics_aggregate(self, task_id: str, node_id: str, *, mode: str = "sum") -> dict[str, Any]:
        """Replace a node's `stats` with the sum of its metrics, or their mean with `mode="mean"`.

        Final metrics count as well: a handler that returns totals under the keys of its batches counts twice.
        Answers `{"ok": True, "mode": mode, "stats": {...}}`.
        """
        _require_task(task_id)
        require(node_id_problem(node_id, "metrics.aggregate: 'node_id'"), error=AdapterError)
        stats = await self._aggregates.aggregated(task_id, node_id, mode)
        await self._aggregates.store_stats(task_id, node_id, stats, self._variables.moment(), self._node)
        return {"ok": True, "mode": mode, "stats": stats}

    async def noop(self, /, task_id: str, **anything: Any) -> dict[str, Any]:
        """Do nothing, whatever the arguments."""
        _require_task(task_id)
        if self._node is not None:
            await self._variables.write(task_id, operations.NOTHING, self._node)
        return {"ok": True}

    async def _change(self, task_id: str, rule: Callable[[], Change]) -> dict[str, Any]:
        _require_task(task_id)
        change = rule()
        hits = self._hits(change)
        first = await self._variables.write(task_id, change, self._node)
        if change.paths and first is not None:
            self._tell(task_id, change, hits, first=first)
        return {"ok": True, "touched": change.touched}

    def _hits(self, change: Change) -> int:
        hits = self._detector.hits(change.values)
        if hits and change.block_sensitive:
            raise AdapterError(f"vars.{change.operation} blocked: {hits} sensitive-looking values")
        return hits

    def _tell(self, task_id: str, change: Change, hits: int, *, first: bool) -> None:
        """One record with paths and counts, never a value."""
        fields: dict[str, Any] = {"keys": change.paths, "n": len(change.paths)}
        if change.sets:
            fields["sensitive_hits"] = hits
        for path, amount in change.adds.items():
            fields |= {"key": operations.full(path), "by": amount}
        operation = "set" if first and len(change.sets) > 1 else change.operation
        self._log(f"coord.vars.{operation}", task_id, **fields)

    def _log(self, event: str, task_id: str, **fields: Any) -> None:
        told = {"event": event, "task_id": task_id, **fields}
        _logger.info(
            "%s task_id=%s %s", event, task_id, " ".join(f"{k}={v}" for k, v in fields.items()), extra=told
        )


def default_adapters(*, db: Database, clock: Any = None, detector: Any = None) -> dict[str, Any]:
    """The built-in coordinator functions by their names in graphs."""
    adapters = CoordinatorAdapters(db=db, clock=clock, detector=detector)
    return {name: getattr(adapters, method) for name, method in METHODS.items()}


def _node_ids(given: Any) -> list[str]:
    if isinstance(given, (str, bytes)) or not isinstance(given, (list, tuple, set, frozenset)):
        raise AdapterError(
            f"merge.generic: 'from_nodes' must be a list of node ids, not {type(given).__name__}"
        )
    for name in given:
        require(node_id_problem(name, "merge.generic: an entry of 'from_nodes'"), error=AdapterError)
    return list(given)


def _require_task(task_id: object) -> None:
    """AdapterError for what is no task id: as part of a filter, it may be met by other tasks."""
    require(task_id_problem(task_id), error=AdapterError)
