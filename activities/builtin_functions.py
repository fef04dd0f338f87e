"""CoordinatorAdapters: the built-in coordinator functions, for graphs and for Python (spec: CoordinatorAdapters).

A call from Python takes effect every time. When a `coordinator_fn` node calls a function, it takes effect once for
each generation of the node, even if the attempt is retried or its engine crashes.
"""

from __future__ import annotations

import copy
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flowkit.adapters.aggregates import Aggregates
from flowkit.adapters.tasks.store import TaskStore
from flowkit.adapters.vars import changes
from flowkit.adapters.vars.sensitive import Detector
from flowkit.adapters.vars.store import Variables
from flowkit.errors import AdapterError
from flowkit.models import temporal_names
from flowkit.validation.arguments import (
    clock_problem,
    database_problem,
    node_id_problem,
    require,
    task_id_problem,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from flowkit.adapters.mongo import Database
    from flowkit.adapters.tasks.attempts import EntryWrite, NodeWrite
    from flowkit.adapters.vars.changes import VarsChange

    Answer = Awaitable[dict[str, Any]]

_logger = logging.getLogger("flowkit.coord.adapters")

METHODS = {
    "vars.set": "vars_set",
    "vars.merge": "vars_merge",
    "vars.incr": "vars_incr",
    "vars.unset": "vars_unset",
    "merge.generic": "merge_generic",
    "metrics.aggregate": "metrics_aggregate",
    temporal_names.NOOP: "noop",
}
"""Methods of CoordinatorAdapters by the names that graphs use."""

IN_ONE_UPDATE = frozenset({"vars_set", "vars_merge", "vars_incr", "vars_unset", "noop"})
"""Methods that start and finish their function node in the same write that makes their change."""


class CoordinatorAdapters:
    """Changes a task's variables and aggregates its results. Every call is validated before it writes anything.

    `db` is a Motor database or an object with the same interface. `clock` supplies the timestamps in documents (see
    `flowkit.core.time`). `detector` decides which values look like secrets, in any of the forms of
    `sensitive.Detector`.

    Raise AdapterError for an unknown task, an invalid path or value, or an exceeded limit. Raise StoreUnavailable when
    MongoDB does not respond. In that case the call may or may not have taken effect, because a call from Python has no
    identity that would make it idempotent.
    """

    def __init__(self, *, db: Database, clock: Any = None, detector: Any = None) -> None:
        require(database_problem(db), clock_problem(clock))
        self._now = clock.now_dt if clock is not None else lambda: datetime.now(UTC)
        self._variables = Variables(TaskStore(db), self._now)
        self._aggregates = Aggregates(db)
        self.detector = Detector(detector)
        self._node: NodeWrite | None = None
        self._write: EntryWrite | None = None

    def for_node(self, write: NodeWrite) -> CoordinatorAdapters:
        """Return a copy whose calls belong to one attempt of a function node."""
        bound = self.for_write(write)
        bound._node = write
        return bound

    def for_write(self, write: EntryWrite) -> CoordinatorAdapters:
        """Return a copy whose change of variables belongs to one attempt."""
        bound = copy.copy(self)
        bound._write = write
        return bound

    async def vars_set(self, /, task_id: str, **kv: Any) -> dict[str, Any]:
        """Set variables in one atomic write.

        Pass `kv={...}` or keywords, with dotted paths or nested objects. `block_sensitive=True` rejects values that
        look like secrets. Return `{"ok": True, "touched": paths}`.
        """
        return await self._change(task_id, lambda: changes.setting(kv))

    async def vars_merge(self, /, task_id: str, **kv: Any) -> dict[str, Any]:
        """Merge a tree into the variables; its leaves overwrite existing values.

        Pass `data={...}`, `kv={...}` or keywords. `block_sensitive=True` rejects values that look like secrets.
        Return `{"ok": True, "touched": paths}`.
        """
        return await self._change(task_id, lambda: changes.merging(kv))

    async def vars_incr(self, task_id: str, *, key: str, by: float = 1) -> dict[str, Any]:
        """Add `by` to a numeric variable; a missing one becomes `by`. Return `{"ok": True, "key": key, "by": by}`."""
        await self._change(task_id, lambda: changes.incrementing(key, by))
        return {"ok": True, "key": key, "by": by}

    async def vars_unset(
        self, task_id: str, *paths: str, keys: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Remove variables, then every object that has no leaf left. A missing variable is not an error.

        Return `{"ok": True, "touched": n}`, where n is the number of paths passed, duplicates included.
        """
        result = await self._change(task_id, lambda: changes.unsetting(paths, keys))
        if result["touched"] and (pruned := await self._variables.prune(task_id)):
            self._log("coord.vars.unset.prune", task_id, keys=pruned, n=len(pruned))
        return result

    async def merge_generic(
        self, task_id: str, from_nodes: Sequence[str], target: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write a summary of which `from_nodes` are complete into the complete marker of `target["node_id"]`.

        The summary contains status information, not the nodes' data. If `target` has no `node_id`, a function node is
        its own target; a call from Python uses `coordinator`. Return `{"ok": True, "meta": summary}`.
        """
        _require_task(task_id)
        names = _node_ids(from_nodes)
        if not isinstance(target, dict):
            raise AdapterError(f"merge.generic: 'target' must be a dict, not {changes.kind(target)}")
        node_id = target.get("node_id") or "coordinator"
        require(node_id_problem(node_id, "merge.generic: target['node_id']"), error=AdapterError)
        await self._aggregates.place_of(task_id)
        at = self._now().timestamp()
        meta = await self._aggregates.merged(task_id, names, at, self._first_epochs)
        await self._aggregates.store_merged(task_id, node_id, meta, at)
        return {"ok": True, "meta": meta}

    async def metrics_aggregate(self, task_id: str, node_id: str, *, mode: str = "sum") -> dict[str, Any]:
        """Replace a node's `stats` with the sum of its metrics, or with their mean if `mode="mean"`.

        Final metrics are included. If a handler's `finalize` returns totals under the same keys as its batches, those
        values count twice. Return `{"ok": True, "mode": mode, "stats": {...}}`.
        """
        _require_task(task_id)
        require(node_id_problem(node_id, "metrics.aggregate: 'node_id'"), error=AdapterError)
        stats = await self._aggregates.aggregated(task_id, node_id, mode, self._first_epochs)
        await self._aggregates.store_stats(task_id, node_id, stats, self._variables.moment(), self._node)
        return {"ok": True, "mode": mode, "stats": stats}

    @property
    def _first_epochs(self) -> Mapping[str, int] | None:
        """The generations of the nodes that a function node reads, which its attempt knows; None for calls
        from Python.
        """
        return None if self._node is None else self._node.attempt.source_first_epochs

    async def noop(self, /, task_id: str, **anything: Any) -> dict[str, Any]:
        """Do nothing. Accept any keyword arguments and return `{"ok": True}`."""
        _require_task(task_id)
        if self._write is not None:
            await self._variables.write(task_id, changes.NOTHING, self._write)
        return {"ok": True}

    async def _change(self, task_id: str, rule: Callable[[], VarsChange]) -> dict[str, Any]:
        _require_task(task_id)
        change = rule()
        hits = self._hits(change)
        first = await self._variables.write(task_id, change, self._write)
        if change.paths and first is not None:
            self._log_change(task_id, change, hits, first=first)
        return {"ok": True, "touched": change.touched}

    def _hits(self, change: VarsChange) -> int:
        hits = self.detector.hits(change.values)
        if hits and change.block_sensitive:
            raise AdapterError(f"vars.{change.operation} blocked: {hits} sensitive-looking values")
        return hits

    def _log_change(self, task_id: str, change: VarsChange, hits: int, *, first: bool) -> None:
        """Log one record with paths and counts. Values are never logged, because they may be secrets."""
        if not _logger.isEnabledFor(logging.INFO):
            return
        fields: dict[str, Any] = {"keys": change.paths, "n": len(change.paths)}
        if change.sets:
            fields["sensitive_hits"] = hits
        for path, amount in change.adds.items():
            fields |= {"key": changes.full(path), "by": amount}
        operation = "set" if first and len(change.sets) > 1 else change.operation
        self._log(f"coord.vars.{operation}", task_id, **fields)

    def _log(self, event: str, task_id: str, **fields: Any) -> None:
        extra = {"event": event, "task_id": task_id, **fields}
        _logger.info(
            "%s task_id=%s %s", event, task_id, " ".join(f"{k}={v}" for k, v in fields.items()), extra=extra
        )


def default_adapters(*, db: Database, clock: Any = None, detector: Any = None) -> dict[str, Any]:
    """Return the built-in coordinator functions by the names that graphs use."""
    adapters = CoordinatorAdapters(db=db, clock=clock, detector=detector)
    return {name: getattr(adapters, method) for name, method in METHODS.items()}


def detector_of(functions: Mapping[str, Any]) -> Detector:
    """Return the detector of the built-in functions among these, or the default one if all of them are replaced."""
    owners = (getattr(function, "__self__", None) for function in functions.values())
    return next((owner.detector for owner in owners if isinstance(owner, CoordinatorAdapters)), Detector())


def _node_ids(given: Any) -> list[str]:
    if isinstance(given, (str, bytes)) or not isinstance(given, (list, tuple, set, frozenset)):
        raise AdapterError(
            f"merge.generic: 'from_nodes' must be a list of node ids, not {type(given).__name__}"
        )
    for name in given:
        require(node_id_problem(name, "merge.generic: an entry of 'from_nodes'"), error=AdapterError)
    return list(given)


def _require_task(task_id: object) -> None:
    """Raise AdapterError unless `task_id` is a valid id. Used in a filter, another value could match other tasks."""
    require(task_id_problem(task_id), error=AdapterError)
