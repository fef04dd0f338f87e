"""Actions on running tasks, and reruns of ended ones."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from temporalio import exceptions as temporal
from temporalio.client import (
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from flowkit.actions.changed_nodes import changeable
from flowkit.actions.plans import TaskSnapshot, result_of
from flowkit.actions.preconditions import check_state, state_of
from flowkit.actions.records import PREVIEW_QUERY
from flowkit.actions.reruns import changed_nodes, check_keeps, choose_reruns, kept_sources, plan_rerun
from flowkit.actions.scopes import Pauses, children_of
from flowkit.actions.table import parse_action
from flowkit.adapters.tasks.fields import SCHEDULED_AT, graph_of, input_digest
from flowkit.attempt.workflows import QUERY_SEC, WorkflowState, is_absent, look_up, query, read_marker
from flowkit.client.workflows import bound_timeout, format_cause, memo_of, schedule_attributes
from flowkit.errors import ActionRejected, ActionUnanswered, RejectionCause, UnknownTask
from flowkit.graph.contracts import data_edges
from flowkit.graph.scheduled import Nominal, nominal_of
from flowkit.graph.validation import normalized
from flowkit.models import NodeState, NodeStatus, Rerun, SkipReason, temporal_names
from flowkit.models.ownership import Owner, task_owner
from flowkit.text import clean, one_line
from flowkit.validation.json_keys import EqualKeys, to_json_types
from flowkit.workflows.scheduling.scheduler import Scheduler
from flowkit.workflows.state_codec import rerun_input

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from temporalio.client import WorkflowExecutionDescription, WorkflowHandle

    from flowkit.actions.plans import Plan
    from flowkit.client.inputs import TaskInputs
    from flowkit.client.workflows import TaskWorkflows
    from flowkit.models import Graph


_logger = logging.getLogger("flowkit.client")

_CLOSING_SEC = 30.0
"""How long a rerun waits until the workflow of the ended run has closed, and how often it looks."""
_CLOSING_LOOK_SEC = 0.1
_ENDING_SEC = 60.0
"""How long a rerun waits for a task that is ending, whose attempts have `cancel_grace_sec` to stop."""
_UPDATE_PAUSES_SEC = (0.2, 0.4, 0.8, 1.6)
"""Seconds between the tries of an update. A run that continues as new may end while an update reaches it."""
_PREVIEW_TRIES = 2
_UNANSWERED = (
    RPCStatusCode.FAILED_PRECONDITION,
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.DEADLINE_EXCEEDED,
)
"""Errors after which it is unknown whether an update was applied: its workflow task has failed, or no
answer arrived."""


class TaskSteering:
    """Applies actions to the running tasks of one deployment, and starts ended ones again."""

    def __init__(self, workflows: TaskWorkflows, inputs: TaskInputs) -> None:
        self._workflows = workflows
        self._inputs = inputs

    async def act(
        self,
        task_id: str,
        name: str,
        given: Mapping[str, Any],
        update_id: str | None = None,
        *,
        wait_sec: float | None = None,
    ) -> dict[str, Any]:
        """Apply an action to a running task, and return its revision, the affected nodes and notes.

        `given` is the input of the action (see `flowkit.actions.records`). A call that is repeated with the same
        `update_id` is applied once. If Temporal does not answer, or the run ends just then to continue as new, the
        update is sent again with the same id.

        Raise ActionRejected, which says why and what is allowed, if the task rejects the action or has ended, and
        UnknownTask if it does not exist. The action may still be applied after two other errors:
        ActionUnanswered, if no engine applies it within `wait_sec` seconds, and RPCError, if Temporal does
        not respond.
        """
        parse_action(name, {**given})
        _check_keys(name, given)
        handle = await self._find_open(task_id, name)
        try:
            async with asyncio.timeout(bound_timeout(wait_sec)):
                result = await _send_update(handle, name, given, update_id or str(uuid.uuid4()))
        except TimeoutError:
            raise ActionUnanswered(task_id, name, wait_sec or 0.0) from None
        except WorkflowUpdateFailedError as error:
            raise _read_rejection(error.cause) from None
        except RPCError as error:
            if not is_absent(error):
                raise
            raise _ended(task_id, name) from None
        return result

    async def preview(self, task_id: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what an action would affect, in the form of `act`, and the `state` of the affected nodes.

        It changes nothing. An action with the `if_revision` and the `if_state` of its preview is rejected if the task
        is no longer as the preview has shown it.

        Raise ActionRejected and UnknownTask as `act` does. Temporal returns only the text of a rejected
        query, so `cause` does not say why the task rejects the action. Raise ActionUnanswered if no engine answers
        within 10 seconds: only the workflow knows what an action would affect.
        """
        parse_action(name, {**given})
        _check_keys(name, given)
        await self._find_open(task_id, name)
        try:
            result: dict[str, Any] = await query(
                self._workflows.temporal, task_id, PREVIEW_QUERY, name, {**given}, tries=_PREVIEW_TRIES
            )
        except TimeoutError:
            waited = _PREVIEW_TRIES * QUERY_SEC
            raise ActionUnanswered(task_id, name, waited, preview=True) from None
        except WorkflowQueryFailedError as error:
            raise ActionRejected(one_line(error)) from None
        return result

    async def rerun(
        self,
        task_id: str,
        nodes: Sequence[str] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Mapping[str, Any]] | None = None,
        limits: Mapping[str, Mapping[str, Any]] | None = None,
        failed_batches_of: Sequence[str] = (),
        reason: str = "",
        by: str = "",
        if_state: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Start an ended task again: `nodes` and what depends on them, in a new run with the same task id.

        By default, the nodes start that failed, were cancelled, or were skipped for a failure or the end of the task.
        Finished nodes, their artifacts and the variables stay. `params` replaces single params, and
        `inputs` single keys of the `input_inline` of nodes, by node id. `limits` replaces `timeout_sec` and
        single keys of `retry_policy`, of those nodes that start. The nodes in `failed_batches_of` also
        start; they keep their batches, and try those again that they have set aside. `nodes` is then empty
        by default. A call while the task is ending waits up to 60 seconds for the end, and until Temporal
        has closed the ended run.

        Return `{"task_id", "run_seq", "affected": [{"node_id", "from", "to"}], "notes"}`; with `dry_run`,
        start nothing, and return the `state` of these nodes, too. Raise ActionRejected if the task has not ended,
        nothing would start, or the state is not `if_state`, UnknownTask if MongoDB has no document of the task in
        this namespace, and GraphError if the changed params are not valid.
        """
        document = await self._ended_document(task_id)
        _check_keys("rerun", {"params": params, "inputs": inputs})
        given = {"params": {**document["params"], **(params or {})}, "graph": graph_of(document)}
        await asyncio.to_thread(self._inputs.check, task_id, given, None)
        parsed = normalized(given["graph"])
        keeps = [*dict.fromkeys(failed_batches_of)]
        chosen, planned, seen = _plan_again(document, parsed, nodes, keeps)
        check_state(if_state, planned, seen)
        again = {parsed.nodes[index].node_id for index in planned.resets}
        limited = {node_id: each for node_id, each in (limits or {}).items() if node_id in again}
        changed = changed_nodes(inputs or {}, limited, parsed.nodes)
        result = result_of(planned, parsed.nodes, 0)
        del result["revision"]
        sources = kept_sources(planned, parsed.nodes, data_edges(parsed))
        result["notes"] += await self._inputs.notes_of_stored(task_id, sources)
        if not dry_run:
            rerun = Rerun(
                run_seq=seen.run_seq,
                closed_run_id=document["closed_run_id"],
                nodes=chosen,
                keeps=keeps,
                changed=changed,
                reason=clean(reason),
                by=clean(by),
            )
            nominal = nominal_of(task_id, document.get(SCHEDULED_AT))
            await self._start_again(task_id, given, rerun, nominal=nominal)
        shown = {"state": state_of(planned, seen)} if dry_run else {}
        return {"task_id": task_id, "run_seq": seen.run_seq + 1, **result, **shown}

    async def run_again(
        self,
        task_id: str,
        *,
        params: dict[str, Any],
        graph: dict[str, Any],
        owner: Owner,
        nominal: Nominal,
        reason: str,
    ) -> bool:
        """Start all of an ended task again for an owner, in a new run with these params and this graph.

        Nothing of its earlier runs counts any more. Return False if the task has not ended, or something else has
        started it first. Raise GraphError if graph or params are invalid, and StoreUnavailable.
        """
        given, _ = await self._inputs.convert(task_id, params, graph, None)
        document = await self._workflows.catalog.ended_task(
            task_id, namespace_id=await self._workflows.namespace.id()
        )
        if document is None or document["finished_at"] is None:
            return False
        if (
            await self._workflows.look_up(task_id, owner)
        ).description is not None:  # The owner has started it before.
            return False
        nodes = normalized(given["graph"]).nodes
        later = frozenset().union(*children_of(nodes))
        rerun = Rerun(
            run_seq=document["run_seq"],
            closed_run_id=document.get("closed_run_id"),
            nodes=[node.node_id for node in nodes if node.index not in later],
            reason=reason,
            replaces=True,
        )
        try:
            await self._start_again(task_id, given, rerun, owner=owner, nominal=nominal)
        except ActionRejected as error:
            if error.cause is not RejectionCause.BUSY:
                raise
            return False
        return True

    async def _ended_document(self, task_id: str) -> dict[str, Any]:
        """Return the document of an ended task. Wait until a task has ended that is ending. Raise as `rerun` does."""
        document = await self._read_document(task_id)
        if _is_ending(document):
            await self._await_close(task_id)
            document = await self._read_document(task_id)
        if _is_ending(document):
            raise ActionRejected(
                f"task {task_id!r} is ending, but has not ended within {_ENDING_SEC:.0f} s: its attempts have "
                "cancel_grace_sec to stop, and an engine must run; try again when `flowkit status` shows its end",
                RejectionCause.BUSY,
            )
        if not _has_ended(document):
            raise ActionRejected(
                f"task {task_id!r} has not ended; retry_node starts a node of an open task again"
            )
        return document

    async def _read_document(self, task_id: str) -> dict[str, Any]:
        document = await self._workflows.catalog.ended_task(
            task_id, namespace_id=await self._workflows.namespace.id()
        )
        if document is None:
            raise UnknownTask(task_id, f"MongoDB has no document of task {task_id!r} in this namespace")
        return document

    async def _await_close(self, task_id: str) -> None:
        """Wait until the workflow of a task has closed, or _ENDING_SEC have passed."""
        until = time.monotonic() + _ENDING_SEC
        while time.monotonic() < until:
            if (await self._workflows.look_up(task_id)).state is not WorkflowState.OPEN:
                return
            await asyncio.sleep(_CLOSING_LOOK_SEC)

    async def _start_again(
        self,
        task_id: str,
        given: dict[str, Any],
        rerun: Rerun,
        *,
        owner: Owner | None = None,
        nominal: Nominal | None = None,
    ) -> None:
        latest = await self._closed_run(task_id, rerun.closed_run_id)
        marker = owner or (None if latest is None else await read_marker(latest))
        marker = marker or task_owner(task_id, await self._workflows.deployment())
        digest = await self._workflows.catalog.input_digest(task_id)
        if rerun.replaces:
            digest = await asyncio.to_thread(input_digest, given["params"], given["graph"])
        stored = await self._inputs.store(task_id, given)
        try:
            await self._workflows.temporal.start_workflow(
                temporal_names.TASK,
                rerun_input(stored, rerun),
                id=task_id,
                task_queue=self._workflows.queue if latest is None else latest.task_queue,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                memo=memo_of(marker, digest),
                search_attributes=schedule_attributes(nominal),
            )
        except WorkflowAlreadyStartedError:
            await self._workflows.check_owner(task_id, await look_up(self._workflows.temporal, task_id), None)
            raise ActionRejected(
                f"task {task_id!r} runs already; another rerun has started it", RejectionCause.BUSY
            ) from None

    async def _closed_run(self, task_id: str, run_id: str | None) -> WorkflowExecutionDescription | None:
        """Return the latest run of a task; None if Temporal does not know the task.

        Wait until `run_id`, the run that has written the end of the task, has closed: it closes a moment later. Raise
        ActionRejected if no engine closes it in time.
        """
        until = time.monotonic() + _CLOSING_SEC
        while (latest := (await self._workflows.look_up(task_id)).description) is not None:
            if latest.close_time is not None or latest.run_id != run_id:
                return latest
            if time.monotonic() > until:
                raise ActionRejected(
                    f"task {task_id!r} has ended, but no engine has closed its workflow within {_CLOSING_SEC:.0f} s; "
                    "check that an engine runs, and try again",
                    RejectionCause.BUSY,
                )
            await asyncio.sleep(_CLOSING_LOOK_SEC)
        return None

    async def _find_open(self, task_id: str, name: str) -> WorkflowHandle[Any, Any]:
        """Return the handle of a task that runs. Raise ActionRejected or UnknownTask."""
        found = await self._workflows.look_up(task_id)
        if found.state is WorkflowState.ABSENT:
            raise UnknownTask(task_id)
        if found.state is WorkflowState.CLOSED:
            raise _ended(task_id, name)
        return self._workflows.handle(task_id)


async def _send_update(
    handle: WorkflowHandle[Any, Any], name: str, given: Mapping[str, Any], update_id: str
) -> dict[str, Any]:
    """Return the result of an update. While its result is unknown, send it again with its id: it is applied once."""
    for pause in _UPDATE_PAUSES_SEC:
        try:
            return await _execute_update(handle, name, given, update_id)
        except RPCError as error:
            if error.status not in _UNANSWERED:
                raise
            _logger.debug("%s gets no answer, and is sent again: %s", name, format_cause(error))
        await asyncio.sleep(pause)
    return await _execute_update(handle, name, given, update_id)


async def _execute_update(
    handle: WorkflowHandle[Any, Any], name: str, given: Mapping[str, Any], update_id: str
) -> dict[str, Any]:
    """Return the result of an update.

    Raise RPCError after a time limit, and CancelledError if the caller was cancelled.
    """
    try:
        result: dict[str, Any] = await handle.execute_update(name, {**given}, id=update_id, result_type=dict)
    except WorkflowUpdateRPCTimeoutOrCancelledError as error:
        raise error.__cause__ or error from None
    return result


def _has_ended(document: Mapping[str, Any]) -> bool:
    return document["finished_at"] is not None and document.get("closed_run_id") is not None


def _is_ending(document: Mapping[str, Any]) -> bool:
    """Return whether the attempts of a task stop, because it has failed or was cancelled."""
    return document["finished_at"] is None and (document.get("coordinator") or {}).get("cancelled") is True


def _plan_again(
    document: Mapping[str, Any], graph: Graph, nodes: Sequence[str] | None, keeps: Sequence[str]
) -> tuple[list[str], Plan, TaskSnapshot]:
    """Return the nodes with which a rerun begins, what starts again, and the ended task. Raise ActionRejected."""
    entries = document["graph"]["nodes"]
    states = [_ended_state(each) for each in entries]
    named = None if nodes is None and not keeps else [*(nodes or ()), *keeps]
    chosen = choose_reruns(named, graph.nodes, states)
    _check_failed_batches(keeps, entries)
    planned = plan_rerun(chosen, graph.nodes, states, keeps)
    check_keeps(planned, graph.nodes, states)
    _check_goes_on(graph, states, planned.resets)
    pauses = Pauses(graph.nodes, [])
    ended = TaskSnapshot(nodes=graph.nodes, states=states, pauses=pauses, run_seq=document["run_seq"])
    return chosen, planned, ended


def _check_goes_on(graph: Graph, states: Sequence[NodeState], resets: Collection[int]) -> None:
    """Raise ActionRejected if a failure that a rerun leaves as it is would stop the new run at once."""
    again = [NodeState() if index in resets else state for index, state in enumerate(states)]
    failed = Scheduler(changeable(graph, {}), again).hard_failure
    if failed is not None:
        raise ActionRejected(
            f"node {failed.node_id!r} has failed, and its failure would stop the new run at once; "
            "name it, too, or leave "
            "out the nodes to run all again that did not finish"
        )


def _check_failed_batches(node_ids: Sequence[str], entries: Sequence[Mapping[str, Any]]) -> None:
    """Raise ActionRejected if one of these nodes has set no batch aside, and has not failed."""
    by_id = {entry["node_id"]: entry for entry in entries}
    for node_id in node_ids:
        entry = by_id[node_id]
        may_have = entry["status"] == NodeStatus.FAILED and entry.get("on_batch_failure") is not None
        if not entry.get("failed_batches") and not may_have:
            raise ActionRejected(f"node {node_id!r} has set no batch aside; name it to run all of it again")


def _ended_state(entry: Mapping[str, Any]) -> NodeState:
    """Return the state of a node in the document of an ended task."""
    status, reason = NodeStatus(entry["status"]), entry.get("skip_reason")
    return NodeState(
        status=status if status.ended else NodeStatus.CANCELLED,
        skip_reason=SkipReason(reason) if reason else None,
        epoch=entry.get("attempt_epoch") or 0,
        generation=entry.get("generation") or 0,
    )


def _check_keys(name: str, given: Mapping[str, Any]) -> None:
    """Raise ActionRejected if JSON would drop a part of the input of an action."""
    try:
        to_json_types({**given})
    except EqualKeys as error:
        raise ActionRejected(f"{name}: {error}", RejectionCause.INVALID) from None
    except (ValueError, RecursionError):
        return  # no JSON at all, which the checks of the single values report


def _read_rejection(error: BaseException) -> ActionRejected:
    """Return the error with which a task has rejected an update."""
    if not isinstance(error, temporal.ApplicationError):
        return ActionRejected(one_line(error))
    known = {each.value: each for each in RejectionCause}
    named = (known[each] for each in error.details if isinstance(each, str) and each in known)
    return ActionRejected(error.message, next(named, RejectionCause.NOT_ALLOWED))


def _ended(task_id: str, name: str) -> ActionRejected:
    return ActionRejected(
        f"task {task_id!r} has ended, so {name} can no longer change it; rerun starts nodes of an ended task again",
        RejectionCause.ENDED,
    )
