"""What an attempt reads from MongoDB, and in place of its writes a record of them.

`ReadOnly` lets no write pass, whatever else calls the database. The stores above it record what the attempt writes,
with the checks of the real ones, and let it read its own writes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowkit.activities.builtin_functions import CoordinatorAdapters
from flowkit.activities.context import TaskVariables
from flowkit.adapters.aggregates import Aggregates
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.mongo import durable
from flowkit.adapters.tasks.store import TaskStore
from flowkit.adapters.vars import changes, rules
from flowkit.adapters.vars.changes import VarsChange
from flowkit.adapters.vars.store import Variables
from flowkit.attempt.storage import AttemptStorage
from flowkit.models.metas import read_meta

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection
    from datetime import datetime

    from flowkit.adapters.mongo import Database
    from flowkit.adapters.tasks.attempts import EntryWrite, NodeWrite, StoredParams
    from flowkit.adapters.vars.changes import Tree
    from flowkit.models import AttemptInput

_READS = frozenset({"find", "find_one", "count_documents", "distinct", "estimated_document_count", "name"})


class ReadOnly:
    """A database whose collections can only be read. Any other operation raises PermissionError."""

    def __init__(self, db: Database) -> None:
        self._db = durable(db)
        self.name = db.name

    def __getitem__(self, name: str) -> _ReadOnlyCollection:
        return _ReadOnlyCollection(self._db[name])

    def __getattr__(self, name: str) -> _ReadOnlyCollection:
        return self[name]


class _ReadOnlyCollection:
    def __init__(self, collection: Any) -> None:
        self._collection = collection

    def __getattr__(self, name: str) -> Any:
        if name not in _READS:
            raise PermissionError(f"`flowkit debug` writes nothing, so it cannot call {name} of a collection")
        return getattr(self._collection, name)


@dataclass(kw_only=True, slots=True)
class Written:
    """What an attempt would have written."""

    artifacts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The fields of the artifact of each batch, by uid."""
    complete: dict[str, Any] | None = None
    """The fields of the complete marker; None if the attempt writes none."""
    variables: list[VarsChange] = field(default_factory=list)
    """The changes of variables, oldest first."""
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The `stats` of nodes that `metrics.aggregate` has computed, by node id."""


class RecordedVariables(Variables):
    """The variables of a task as they are now, with the changes of the attempt. The changes are not stored."""

    def __init__(self, tasks: TaskStore, written: Written) -> None:
        super().__init__(tasks)
        self._written = written
        self._after: Tree | None = None

    async def read(self, task_id: str) -> Tree:
        """Return all variables. Raise AdapterError if the task is unknown."""
        return copy.deepcopy(self._after) if self._after is not None else await super().read(task_id)

    async def write(self, task_id: str, change: VarsChange, write: EntryWrite | None = None) -> bool | None:
        """Apply a change for later reads. Raise AdapterError for a conflict, or beyond the limit of the size."""
        before = await self.read(task_id)
        rules.size_after(before, change)
        if change.paths:
            self._after = rules.changed(before, change)
            self._written.variables.append(change)
        return not before

    async def prune(self, task_id: str) -> list[str]:
        """Remove all objects that contain no leaf and return their paths."""
        variables = await self.read(task_id)
        empty = rules.empty_objects(variables)
        self._after = rules.changed(variables, VarsChange(operation="unset", removes=tuple(empty)))
        return sorted(map(changes.full, empty))


class _RecordedAggregates(Aggregates):
    def __init__(self, db: Database, written: Written) -> None:
        super().__init__(db)
        self._written = written

    async def store_merged(self, task_id: str, node_id: str, meta: dict[str, Any], at: float) -> None:
        self._written.complete = {"node_id": node_id, "meta": meta}

    async def store_stats(
        self, task_id: str, node_id: str, stats: dict[str, float], at: datetime, write: NodeWrite | None
    ) -> None:
        await self.place_of(task_id, node_id)
        self._written.stats[node_id] = stats


class RecordedAdapters(CoordinatorAdapters):
    """The built-in functions, without their writes."""

    def __init__(self, *, tasks: RecordedTasks, written: Written) -> None:
        super().__init__(db=tasks.database)
        self._variables = tasks.recorded_variables
        self._aggregates = _RecordedAggregates(tasks.database, written)


class RecordedTaskVariables(TaskVariables):
    """The `ctx.vars` of a handler, without its writes."""

    def __init__(
        self, tasks: TaskStore, attempt: AttemptInput, run_id: str, adapters: CoordinatorAdapters
    ) -> None:
        super().__init__(tasks, attempt, run_id)
        self._adapters = adapters


class _NoAttempts:
    """The attempts of nodes, in an attempt that takes no epoch."""

    async def finish(self, attempt: AttemptInput, run_id: str, at: float) -> None:
        pass


class RecordedTasks(TaskStore):
    """The task documents, with the variables as the attempt has changed them."""

    def __init__(self, db: Database, written: Written) -> None:
        super().__init__(db)
        self.attempts: Any = _NoAttempts()
        self.recorded_variables = RecordedVariables(self, written)

    async def variables(self, task_id: str) -> dict[str, Any]:
        """Return all variables of a task."""
        return await self.recorded_variables.read(task_id)


class _Rows:
    """Records rows of `artifacts` in place of writing them."""

    def __init__(self, written: Written) -> None:
        self._written = written

    async def put(
        self, key: dict[str, Any], epoch: int, fields: dict[str, Any], *given: Any, **options: Any
    ) -> None:
        uid = key["batch_uid"]
        if isinstance(uid, str):
            self._written.artifacts[uid] = fields
        else:
            self._written.complete = {"node_id": key["node_id"], **fields}


class _NoRows:
    async def put(self, *given: Any, **options: Any) -> None:
        """Write nothing: the artifacts have the same metrics."""


class RecordedArtifacts(ArtifactStore):
    """The artifacts in MongoDB, with those that the attempt has written itself. These are not stored."""

    def __init__(self, db: Database, written: Written) -> None:
        super().__init__(db)
        self._written = written
        self._artifact_rows: Any = _Rows(written)
        self._metrics_rows: Any = _NoRows()

    async def _delete_failed_row(self, attempt: AttemptInput, batch_uid: str, fence: int) -> None:
        pass

    async def pages(
        self, task_id: str, node_id: str, skip: Collection[str] = (), first_epoch: int = 0
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the batches of a node: those that the attempt has written follow the others."""
        own = {
            uid: read_meta(fields)
            for uid, fields in self._written.artifacts.items()
            if fields["status"] == "partial"
        }
        async for page in super().pages(task_id, node_id, {*skip, *self._written.artifacts}, first_epoch):
            yield page
        yield [{"batch_uid": uid, "meta": meta} for uid, meta in own.items() if uid not in skip]


class RecordedStorage(AttemptStorage):
    """The begin and the end of an attempt that takes no epoch."""

    def __init__(
        self,
        tasks: RecordedTasks,
        artifacts: ArtifactStore,
        attempt: AttemptInput,
        run_id: str,
        worker_id: str,
        params: StoredParams,
    ) -> None:
        super().__init__(tasks, artifacts, attempt, run_id, worker_id)
        self._read["params"] = params
        self._recorded = tasks.recorded_variables

    async def begin(self) -> dict[str, Any]:
        """Return a lease. Write nothing."""
        return {"worker_id": self._worker_id}

    def _variables(self) -> Variables:
        return self._recorded
