"""The first and last write of an attempt, and those that extend its lease. Concurrent writes share a group commit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pymongo import UpdateOne

from flowkit.adapters.group_commit import GroupCommit, Pace
from flowkit.adapters.tasks import fields as task_fields
from flowkit.errors import EpochTaken, Fenced, StoreRefused
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from flowkit.adapters.tasks.cancel_flags import CancelFlags
    from flowkit.models import AttemptInput

Fields = dict[str, Any]
Update = dict[str, Fields]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Write:
    attempt: AttemptInput
    fence: Fields
    """Filter under which a group may contain the write. It may be narrower than the filter of `alone`."""
    update: Update
    alone: Callable[[], Awaitable[None]]


class TriedBefore(Exception):
    """Raised if an earlier try of an attempt has begun. Temporal runs a local activity again after a crash."""

    def __init__(self, node_id: str, *, finished: bool) -> None:
        self.finished = finished
        """Whether the earlier try has also finished the node."""
        super().__init__(
            f"the engine that ran this attempt of node {node_id!r} stopped, or its workflow task timed out"
        )


class AttemptWrites:
    """Writes the begin, the lease and the end of attempts to the collection `tasks`. Each write's filter is its fence."""

    def __init__(
        self, tasks: Any, *, flags: CancelFlags, reopen: Callable[[str, str], Awaitable[None]]
    ) -> None:
        self._tasks = tasks
        self._flags = flags
        self._reopen = reopen
        """Called with a task id and the id of the run that continues the task."""
        self._writes = self._group_commit()
        self._leases = self._group_commit()
        """Their updates use another operator for a field that the begin and the end of an attempt change as well."""

    def _group_commit(self) -> GroupCommit[_Write]:
        return GroupCommit[_Write](
            alone=lambda write: write.alone(),
            together=self._write_together,
            pace=Pace(documents=lambda writes: len({write.attempt.task_id for write in writes})),
        )

    async def begin(
        self, attempt: AttemptInput, run_id: str, lease: Fields, at: float, *, once: bool = False
    ) -> None:
        """Take the node's epoch for an attempt.

        Raise EpochTaken if another run has used the epoch, Fenced if this run has closed the task, and Flagged if a
        cancel flag is set that is not from an earlier run. With `once`, raise TriedBefore if this run has taken the
        epoch with another lease.
        """
        update = {
            "$set": task_fields.attempt_begun(attempt, run_id, lease, at),
            "$unset": task_fields.attempt_unset(attempt),
        }
        fence = task_fields.fresh_attempt_filter(attempt)
        take = partial(self._begin_once, lease) if once else self._begin
        alone = partial(take, attempt, run_id, update)
        await self._writes.write(_Write(attempt=attempt, fence=fence, update=update, alone=alone))

    async def finish(self, attempt: AttemptInput, run_id: str, at: float) -> None:
        """Finish the node. Raise Fenced if a newer attempt has it. Do not change a node that is being cancelled."""
        update = {"$set": task_fields.attempt_finished(attempt, at)}
        fence, alone = (
            task_fields.fence_filter(attempt, run_id),
            partial(self._finish, attempt, run_id, update),
        )
        await self._writes.write(_Write(attempt=attempt, fence=fence, update=update, alone=alone))

    async def extend_lease(self, attempt: AttemptInput, run_id: str, deadline_ms: int, at: float) -> None:
        """Extend the lease of a running node to `deadline_ms`. Keep a later deadline."""
        fence = task_fields.fence_filter(attempt, run_id)
        update = {"$max": task_fields.lease_extended(attempt, deadline_ms, at)}
        alone = partial(self._extend, fence, update)
        await self._leases.write(_Write(attempt=attempt, fence=fence, update=update, alone=alone))

    async def check_hold(self, attempt: AttemptInput, run_id: str) -> None:
        """Raise Fenced unless the node still has the epoch and run of this attempt."""
        any_status = {f"graph.nodes.{attempt.index}.status": {"$exists": True}}
        held = {**task_fields.fence_filter(attempt, run_id), **any_status}
        if await self._tasks.find_one(held, {"_id": 1}) is None:
            raise Fenced(f"node {attempt.node_id!r} has replaced its attempt {attempt.epoch}")

    async def _begin_once(self, lease: Fields, attempt: AttemptInput, run_id: str, update: Update) -> None:
        """Take the epoch unless an earlier try has. The lease distinguishes a repeated write of this try."""
        begun = await self._tasks.update_one(task_fields.own_attempt_filter(attempt, lease), update)
        if not begun.matched_count:
            await self._check_tries(attempt, run_id)
            await self._begin(attempt, run_id, update)

    async def _check_tries(self, attempt: AttemptInput, run_id: str) -> None:
        """Raise TriedBefore if this run has already taken the epoch."""
        taken = {"node_id": attempt.node_id, "attempt_epoch": attempt.epoch, "run_id": run_id}
        stored = await self._tasks.find_one(
            {"id": attempt.task_id, "graph.nodes": {"$elemMatch": taken}}, task_fields.NODE_STATES
        )
        if stored is not None:
            finished = stored["graph"]["nodes"][attempt.index]["status"] == NodeStatus.FINISHED
            raise TriedBefore(attempt.node_id, finished=finished)

    async def _begin(self, attempt: AttemptInput, run_id: str, update: Update) -> None:
        begun = await self._tasks.update_one(task_fields.open_attempt_filter(attempt, run_id), update)
        if not begun.matched_count:
            await self._flags.clear_or_raise(attempt, run_id)
            await self._begin_again(attempt, run_id, update)

    async def _begin_again(self, attempt: AttemptInput, run_id: str, update: Update) -> None:
        """Begin in a document that was closed or flagged before. Raise the cause if the attempt must not begin."""
        may_begin = task_fields.attempt_filter(attempt, run_id) | task_fields.NOT_FLAGGED
        begun = await self._tasks.update_one(may_begin, update)
        if not begun.matched_count:
            await self._explain_refusal(attempt, run_id)
        await self._reopen(attempt.task_id, run_id)

    async def _explain_refusal(self, attempt: AttemptInput, run_id: str) -> None:
        wanted = {**task_fields.NODE_STATES, "closed_run_id": 1}
        stored = await self._tasks.find_one({"id": attempt.task_id}, wanted)
        if stored is None:
            raise StoreRefused(f"there is no document for task {attempt.task_id!r}")
        if stored.get("closed_run_id") == run_id:
            raise Fenced(f"task {attempt.task_id!r} has ended")
        nodes = stored["graph"]["nodes"]
        if attempt.index >= len(nodes) or nodes[attempt.index]["node_id"] != attempt.node_id:
            raise StoreRefused(f"the document of task {attempt.task_id!r} contains another graph")
        raise EpochTaken(nodes[attempt.index]["attempt_epoch"])

    async def _finish(self, attempt: AttemptInput, run_id: str, update: Update) -> None:
        done = await self._tasks.update_one(task_fields.fence_filter(attempt, run_id), update)
        if not done.matched_count:
            await self.check_hold(attempt, run_id)

    async def _extend(self, fence: Fields, update: Update) -> None:
        await self._tasks.update_one(fence, update)

    async def _write_together(self, writes: Sequence[_Write]) -> Sequence[int]:
        """Write one update for each task, all in one call. Return the indexes of the writes to perform one by one.

        If a fence does not match, return all indexes. The call's result does not show which writes succeeded, and
        repeating a write is safe.
        """
        together, later = _first_of_each_node(writes)
        updates = [_merged(of_task) for of_task in together.values()]
        if len(updates) == 1:
            done = await self._tasks.update_one(*updates[0])
        else:
            done = await self._tasks.bulk_write([UpdateOne(*each) for each in updates], ordered=False)
        return later if done.matched_count == len(updates) else range(len(writes))


def _first_of_each_node(writes: Sequence[_Write]) -> tuple[dict[str, list[_Write]], list[int]]:
    """Return the first write of each node, by task id, and the indexes of the remaining writes."""
    together: dict[str, list[_Write]] = {}
    later, seen = [], set()
    for index, write in enumerate(writes):
        node = (write.attempt.task_id, write.attempt.index)
        if node in seen:
            later.append(index)
        else:
            seen.add(node)
            together.setdefault(write.attempt.task_id, []).append(write)
    return together, later


def _merged(writes: Iterable[_Write]) -> tuple[Fields, Update]:
    """Return the combined filter and update of several writes to one document. Their paths do not overlap."""
    fence: Fields = {}
    update: Update = {}
    for write in writes:
        fence |= write.fence
        for operator, fields in write.update.items():
            update.setdefault(operator, {}).update(fields)
    return fence, update
