"""Apply actions of operators to a running task: what updates do in the workflow.

The rules are pure (`flowkit.actions`). An action takes effect in one step: the handler plans it for the present state
and changes that state without an await in between. The event history is the audit; the task keeps a short form of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

from flowkit import reason_codes
from flowkit.actions.changed_nodes import changes_of, with_raw_changes
from flowkit.actions.plans import Audit, NodeEnd, TaskSnapshot, result_of
from flowkit.actions.preconditions import state_of
from flowkit.actions.records import ChangeGraph, Pause, RetryNode
from flowkit.actions.reruns import plan_rerun
from flowkit.actions.table import parse_action, plan
from flowkit.errors import ActionRejected, GraphError, RejectionCause
from flowkit.graph.changes import change_graph, change_problems, merge_patch
from flowkit.graph.validation import STEP_NODES, normalized, normalizing, parse_graph, raise_if
from flowkit.limits import REPORT_BYTES
from flowkit.models import (
    BatchesChecked,
    BatchesSettled,
    ChangedNode,
    GraphChange,
    GraphChanged,
    NodeReset,
    NodeStatus,
    ResetDone,
    ResetNodes,
    SettleBatches,
    temporal_names,
)
from flowkit.models.actions import RERUN, PausedScope
from flowkit.models.columns import pack
from flowkit.text import printed, shell_command
from flowkit.workflows.display.details import format_pause
from flowkit.workflows.document import write_timeout
from flowkit.workflows.engine_calls import HEARTBEAT_TIMEOUT, call_engine
from flowkit.workflows.opening import in_steps
from flowkit.workflows.payloads import json_size, split_by_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from temporalio.common import RawValue

    from flowkit.actions.plans import Plan, SetAside
    from flowkit.actions.records import Action
    from flowkit.models import Node, Rerun
    from flowkit.workflows.deadlines import Deadlines
    from flowkit.workflows.document import TaskDocument
    from flowkit.workflows.node import RunningNodes
    from flowkit.workflows.scheduling.scheduler import Scheduler
    from flowkit.workflows.state_codec import TaskState

MOST_UPDATES = 1_900
"""Number of updates after which a run rejects further actions. Temporal allows 2,000 in a run."""

_RESET_BYTES = 300
"""Upper bound for the size of a node's reset without its id, its changed fields and its results."""

FULL_UPDATES = 1_500
"""Number of updates after which a run without attempts in flight continues as new."""

MOST_EVENTS = 40_000
MOST_BYTES = 35_000_000
"""Length and size of the history from which a run rejects further actions. Temporal terminates a run with 51,200 events
or 50 MB, and what was accepted before takes some of them: its writes, and the ends of the attempts in flight."""


class TaskActions:
    """The actions on one task."""

    def __init__(
        self,
        state: TaskState,
        scheduler: Scheduler,
        nodes: RunningNodes,
        deadlines: Deadlines,
        document: TaskDocument,
    ) -> None:
        self._task = state
        self._state = state.actions
        self._audit = Audit(entries=state.actions.applied, results=state.actions.results)
        self._scheduler = scheduler
        self._nodes = nodes
        self._deadlines = deadlines
        self._document = document
        self.updates = 0
        """Number of updates that this run has accepted."""
        self._resets: list[asyncio.Task[None]] = []
        self._changes_graph = False
        """Whether a change of the graph is in progress."""
        self._settling = 0
        """Number of actions that skip batches of finished nodes at present."""

    def count_update(self) -> None:
        """Count an update of this run."""
        self.updates += 1

    @property
    def run_is_full(self) -> bool:
        """Whether the run has accepted so many updates that it should continue as new."""
        return self.updates >= FULL_UPDATES or self.is_exhausted

    @property
    def is_exhausted(self) -> bool:
        """Whether the run rejects actions, so that it must start no attempts until it continues as new."""
        return self._describe_exhaustion() is not None

    def _describe_exhaustion(self) -> str | None:
        info = workflow.info()
        return describe_exhaustion(
            self.updates, info.get_current_history_length(), info.get_current_history_size()
        )

    def check(self, action: Action, *, stopping: bool) -> None:
        """Raise ApplicationError, which says why, if the task rejects an action now."""
        if self._audit.find(_update_id()) is None:
            self._plan(action, stopping=stopping)

    async def apply(self, name: str, action: Action, *, stops: Callable[[], bool]) -> dict[str, Any]:
        """Apply an action and return its result. Raise ApplicationError if the task rejects it.

        An action takes effect at once, except a change of the graph, which an activity validates first, and the skip of
        batches of a finished node, which MongoDB holds. An activity also checks batches that an action
        names, before the action is planned for the state that the task then has. `stops` returns whether
        the task is ending.
        """
        self.count_update()
        if (before := self._audit.find(_update_id())) is not None:
            return before
        planned = self._plan(action, stopping=stops())
        for each in planned.batches:
            if each.batch_uids:
                await self._check_batches(each)
                planned = self._plan(action, stopping=stops())
        if isinstance(action, ChangeGraph):
            await self._change_graph(planned, action)
        elif planned.batches and not planned.resets:
            await self._skip_batches(planned)
        now, update_id = workflow.now().timestamp(), _update_id()
        self._audit.add(name, action, planned, now, update_id)
        if self._nodes.local is not None:
            self._nodes.local.yield_to_ordinary()
        self._take_effect(planned, action, now)
        self._document.write_actions()
        return self._audit.keep_result(
            update_id, result_of(planned, self._scheduler.nodes, self._audit.revision)
        )

    def _take_effect(self, planned: Plan, action: Action, now: float) -> None:
        if planned.resets:
            self._start_reset(planned)
        elif planned.end is not None:
            self._nodes.end_as_decided(planned.end)
        elif planned.ends_wait is not None:
            self._nodes.end_wait(planned.ends_wait)
        elif planned.satisfies is not None:
            self._scheduler.satisfy(planned.satisfies)
            self._document.write_prerequisites(each.index for each in planned.changes)
        elif planned.pauses or planned.resumes or planned.interrupts:
            self._change_pauses(planned, action, now)

    def _change_pauses(self, planned: Plan, action: Action, now: float) -> None:
        started = [
            PausedScope(scope=scope, since=now, by=action.by, reason=action.reason)
            for scope in planned.pauses
        ]
        pauses = self._scheduler.pauses
        pauses.change(started, planned.resumes)
        self._deadlines.pause_task(pauses.whole_task, now)
        self._nodes.pause(planned.interrupts)
        self._nodes.resume()
        self.show_drained()

    @property
    def is_idle(self) -> bool:
        """Whether no reset, no change of the graph and no skip of batches is in progress."""
        return not self._resets and not self._changes_graph and not self._settling

    async def settle(self) -> None:
        """Wait until every accepted action has taken effect, also in the document, because the task ends."""
        await workflow.wait_condition(lambda: self.is_idle)

    def _start_reset(self, planned: Plan) -> None:
        """Start nodes again. Attempts that run end first, then the task document shows the new generations."""
        scheduler, nodes = self._scheduler, self._nodes
        scheduler.resetting.update(planned.resets)
        interrupted = {*planned.interrupts}
        waiting = [index for index in planned.resets if index not in interrupted]
        nodes.give_up([*planned.resets, *planned.unblocks])
        if planned.changed is not None:
            self._change_node(planned.changed)
        scheduler.renew(waiting, planned.kept)
        scheduler.unblock(planned.unblocks)
        scheduler.rebuild(nodes.active)
        reset = asyncio.create_task(self._reset(planned, self._audit.revision))
        self._resets.append(reset)
        reset.add_done_callback(self._resets.remove)

    def start_rerun(self, rerun: Rerun) -> None:
        """Start nodes of an ended task again, with those that depend on them."""
        scheduler = self._scheduler
        planned = plan_rerun(rerun.nodes, scheduler.nodes, scheduler.states, rerun.keeps)
        action = RetryNode(by=rerun.by, reason=rerun.reason)
        self._audit.add(RERUN, action, planned, workflow.now().timestamp(), "")
        self._start_reset(planned)
        self._document.write_actions()

    def _change_node(self, node: Node) -> None:
        self._scheduler.change_node(node)
        self._state.changed[node.node_id] = changes_of(node)

    async def _reset(self, planned: Plan, revision: int) -> None:
        try:
            if planned.interrupts:
                await workflow.wait_condition(lambda: self._nodes.flying.isdisjoint(planned.interrupts))
                self._scheduler.renew(planned.interrupts, planned.kept)
            for each in planned.batches:
                await self._settle_batches(each)
            failure = await self._write_reset(planned, revision)
            self._finish_reset(planned, failure)
        except Exception as error:
            self._nodes.fail_with(error)
            raise
        finally:
            self._nodes.wake()

    async def _check_batches(self, aside: SetAside) -> None:
        """Raise ApplicationError if the node has not set a batch aside that an action names."""
        self._settling += 1
        try:
            checked: BatchesChecked = await call_engine(
                temporal_names.CHECK_BATCHES,
                self._describe_batches(aside),
                BatchesChecked,
                summary=f"look for batches of {self._scheduler.nodes[aside.index].node_id}",
                time_limit=write_timeout(1),
            )
        finally:
            self._settling -= 1
            self._nodes.wake()
        if checked.unknown:
            node_id, task_id = self._scheduler.nodes[aside.index].node_id, workflow.info().workflow_id
            raise rejection(
                ActionRejected(
                    f"batch_uids has {printed(checked.unknown[0])}, which node {printed(node_id)} has not set aside; "
                    f"`{shell_command('flowkit batches', task_id, node_id, options=['--failed'])}` lists the batches",
                    RejectionCause.UNKNOWN,
                )
            )

    def _describe_batches(self, aside: SetAside) -> SettleBatches:
        node, state = self._scheduler.nodes[aside.index], self._scheduler.states[aside.index]
        return SettleBatches(
            task_id=workflow.info().workflow_id,
            index=node.index,
            node_id=node.node_id,
            epoch=state.epoch,
            generation=state.generation,
            first_epoch=state.first_epoch,
            batch_uids=[*aside.batch_uids],
            skips=aside.skips,
            deployment=self._task.opened.settings.deployment,
        )

    async def _settle_batches(self, aside: SetAside) -> int:
        """Let the engine skip, or forget, batches that a node has set aside. Return how many are still set aside."""
        done: BatchesSettled = await call_engine(
            temporal_names.SETTLE_BATCHES,
            self._describe_batches(aside),
            BatchesSettled,
            summary=f"{'skip' if aside.skips else 'try again'} batches of {self._scheduler.nodes[aside.index].node_id}",
            time_limit=write_timeout(1),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
        )
        return done.left

    async def _skip_batches(self, planned: Plan) -> None:
        """Skip batches of finished nodes, which do not start again.

        Other actions cannot reset these nodes meanwhile.
        """
        scheduler, indexes = self._scheduler, {each.index for each in planned.batches}
        self._settling += 1
        scheduler.resetting.update(indexes)
        try:
            for each in planned.batches:
                state = scheduler.states[each.index]
                state.failed_batches = await self._settle_batches(each)
        finally:
            self._settling -= 1
            scheduler.resetting.difference_update(indexes)
            scheduler.rebuild(self._nodes.active)
            self._nodes.wake()

    async def _write_reset(self, planned: Plan, revision: int) -> tuple[str, str] | None:
        """Let the engine write that the nodes start again. Return why it rejects the results of a node, if it does.

        Temporal limits the size of payloads, so a large reset takes several calls.
        """
        states, now = self._scheduler.states, workflow.now().timestamp()
        resets = [self._make_reset(index, planned) for index in planned.resets]
        failure: tuple[str, str] | None = None
        for nodes in split_by_size(resets, _measure_reset, REPORT_BYTES):
            record = ResetNodes(
                task_id=workflow.info().workflow_id,
                run_id=workflow.info().run_id,
                run_seq=self._task.opened.run_seq,
                revision=revision,
                at=now,
                nodes=nodes,
                deployment=self._task.opened.settings.deployment,
            )
            epochs, problem = await self._try_reset(record)
            if problem is not None:
                without = replace(record, nodes=[replace(each, outcome=None) for each in nodes])
                epochs, _ = await self._try_reset(without)
            for node, epoch in zip(nodes, epochs, strict=True):
                states[node.index].epoch = epoch
                if not node.keeps:
                    states[node.index].first_epoch = epoch
            failure = failure or problem
        return failure

    async def _try_reset(self, record: ResetNodes) -> tuple[Sequence[int], tuple[str, str] | None]:
        """Return the reserved epochs, and code and text of the failure if the engine rejects the write for good."""
        try:
            done = await self._call(record)
        except ActivityError as error:
            cause = error.cause
            code = cause.type if isinstance(cause, ApplicationError) else None
            failure = code or reason_codes.UNEXPECTED_ERROR, _message_of(error)
            return [each.epoch for each in record.nodes], failure
        return done.epochs, None

    async def _call(self, record: ResetNodes) -> ResetDone:
        first, more = record.nodes[0].node_id, len(record.nodes) - 1
        done: ResetDone = await call_engine(
            temporal_names.RESET_NODES,
            record,
            ResetDone,
            summary=f"new generation of {first}" + (f" and {more:,} more" if more else ""),
            time_limit=write_timeout(len(record.nodes)),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
        )
        return done

    def _make_reset(self, index: int, planned: Plan) -> NodeReset:
        node, state, end = self._scheduler.nodes[index], self._scheduler.states[index], planned.end
        changes = self._state.changed.get(node.node_id, {})
        return NodeReset(
            index=index,
            node_id=node.node_id,
            epoch=state.epoch + 1,
            generation=state.generation,
            outcome=end.outcome if end is not None and end.index == index else None,
            io={name: changes[name] for name in ("input_inline", "input_ref") if changes} or None,
            fields={name: changes[name] for name in ("timeout_sec", "retry_policy") if changes},
            keeps=index in planned.kept,
        )

    def _finish_reset(self, planned: Plan, failure: tuple[str, str] | None) -> None:
        """Let the nodes of the new generations start, and end the node about which an operator has decided."""
        scheduler, end = self._scheduler, planned.end
        scheduler.resetting.difference_update(planned.resets)
        if failure is not None:
            end = NodeEnd(index=planned.changes[0].index, status=NodeStatus.FAILED, failure=failure)
        if end is not None:
            self._nodes.end_as_decided(end)
        else:
            scheduler.rebuild(self._nodes.active)
            self._document.write_changed_nodes()
        self._document.write_prerequisites(planned.resets)

    async def _change_graph(self, planned: Plan, action: ChangeGraph) -> None:
        """Let an activity validate and write a change of the graph, then apply it.

        Raise ApplicationError if it is rejected.

        Nodes that change do not start meanwhile.
        """
        scheduler, replaced = self._scheduler, planned.replaces
        added, changed = _added_by(action), self._find_changed(action)
        self._changes_graph = True
        scheduler.resetting.update(replaced)
        self._nodes.give_up(replaced)
        scheduler.rebuild(self._nodes.active)
        failure: ActionRejected | None = None
        try:
            done = await self._call_change(added, changed, planned)
        except ActivityError as error:
            failure = ActionRejected(_message_of(error), RejectionCause.INVALID)
            self._withdraw_change(replaced)
        else:
            graph = change_graph(self._task.graph, added, {each.index: each.node for each in changed})
            nodes = (await in_steps(normalizing(graph))).nodes
            self._apply_change(graph, done, [nodes[i] for i in replaced], nodes[len(scheduler.nodes) :])
        self._changes_graph = False
        scheduler.resetting.difference_update(replaced)
        scheduler.rebuild(self._nodes.active)
        self._document.write_changed_nodes()
        if failure is not None:
            self._nodes.wake()
            raise rejection(failure)

    def _find_changed(self, action: ChangeGraph) -> list[ChangedNode]:
        """Return the nodes that change, with the fields that earlier actions have changed."""
        index_of, states = self._scheduler.index_of, self._scheduler.states
        changed = []
        for node_id, patch in action.changes.items():
            index = index_of[node_id]
            raw = self._task.graph["nodes"][index]
            if (earlier := self._state.changed.get(node_id)) is not None:
                raw = with_raw_changes(raw, earlier)
            node = merge_patch(raw, patch)
            changed.append(ChangedNode(index=index, node=node, generation=states[index].generation + 1))
        return changed

    async def _call_change(
        self, added: dict[str, Any], changed: list[ChangedNode], planned: Plan
    ) -> GraphChanged:
        task, info = self._task, workflow.info()
        record = GraphChange(
            task_id=info.workflow_id,
            run_id=info.run_id,
            run_seq=task.opened.run_seq,
            revision=self._audit.revision + 1,
            at=workflow.now().timestamp(),
            task=pack({"graph": task.graph, "params": task.params}) if task.stored is None else {},
            stored=task.stored,
            added=added,
            changed=changed,
            deployment=task.opened.settings.deployment,
        )
        done: GraphChanged = await call_engine(
            temporal_names.CHANGE_GRAPH,
            record,
            GraphChanged,
            summary=f"change the graph: {planned.what}",
            time_limit=write_timeout(len(task.nodes)),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
        )
        return done

    def _apply_change(
        self, graph: dict[str, Any], done: GraphChanged, changed: Sequence[Node], added: Sequence[Node]
    ) -> None:
        self._task.graph, self._task.stored = graph, done.stored
        self._task.opened = replace(self._task.opened, document_bytes=done.document_bytes)
        for node in changed:
            self._state.changed.pop(node.node_id, None)
        self._scheduler.change_graph(changed, added, done.epochs)
        self._nodes.change_graph()
        self._document.change_graph()
        self._document.write_prerequisites(node.index for node in (*changed, *added))

    def _withdraw_change(self, replaced: Sequence[int]) -> None:
        """Let nodes start that waited for a rejected change. What was decided meanwhile is decided again."""
        for index in replaced:
            self._scheduler.forget_conditions(index)
            self._deadlines.restore(index)

    def _check_changed_graph(self, planned: Plan, action: ChangeGraph) -> str:
        """Raise ApplicationError if a change leads to a graph that is not valid. Return what was not checked."""
        if len(self._scheduler.nodes) + len(planned.adds) > STEP_NODES:
            return "the graph is large, so it is validated only when the change is made"
        added, changed = _added_by(action), {each.index: each.node for each in self._find_changed(action)}
        graph = change_graph(self._task.graph, added, changed)
        try:
            after = parse_graph(graph, max_nodes=None, max_bytes=None)
            raise_if([*change_problems(normalized(self._task.graph), after, added, changed)])
        except GraphError as error:
            raise rejection(ActionRejected(str(error), RejectionCause.INVALID)) from None
        return "conditions, functions and the limits of the engine are checked only when the change is made"

    def preview(self, action: Action, *, stopping: bool) -> dict[str, Any]:
        """Return the result that an action would have, with the present revision, and the `state` of the nodes that it
        affects. An action with both is rejected once one of them differs.
        """
        planned = self._plan(action, stopping=stopping)
        if isinstance(action, ChangeGraph):
            planned = replace(planned, notes=(self._check_changed_graph(planned, action),))
        result = result_of(planned, self._scheduler.nodes, self._audit.revision)
        return {**result, "state": state_of(planned, self._describe_task())}

    def view(self) -> dict[str, Any]:
        """Return the part of the query `status` about actions: the revision, and the paused scopes."""
        view: dict[str, Any] = {"revision": self._audit.revision} if self._audit.revision else {}
        paused = [format_pause(each) for each in self._state.paused]
        satisfied = {"satisfied": [*self._state.satisfied]} if self._state.satisfied else {}
        return view | ({"paused": paused} if paused else {}) | satisfied

    def show_drained(self) -> None:
        """Write to the document which paused scopes have no attempt in flight, if that has changed."""
        flying, pauses = self._nodes.flying, self._scheduler.pauses
        drained = (each.scope for each in pauses.scopes if pauses.drained(each.scope, flying))
        self._document.write_drained(frozenset(drained))

    def _plan(self, action: Action, *, stopping: bool) -> Plan:
        try:
            if stopping:
                raise ActionRejected(
                    "the task is ending, so no action can change it any more; rerun starts nodes of an "
                    "ended task again",
                    RejectionCause.ENDED,
                )
            stops_attempts = isinstance(action, Pause) and action.interrupt
            if not stops_attempts and (full := self._describe_exhaustion()):
                raise ActionRejected(full, RejectionCause.BUSY)
            return plan(action, self._describe_task())
        except ActionRejected as error:
            raise rejection(error) from None

    def _describe_task(self) -> TaskSnapshot:
        scheduler = self._scheduler
        return TaskSnapshot(
            nodes=scheduler.nodes,
            states=scheduler.states,
            pauses=scheduler.pauses,
            run_seq=self._task.opened.run_seq,
            revision=self._audit.revision,
            applied=self._audit.entries,
            resetting=scheduler.resetting,
            waiting=self._nodes.retry_waits.nodes,
            changes_graph=self._changes_graph,
            changed=self._state.changed,
            satisfied=self._state.satisfied,
            stoppers=scheduler.stoppers,
        )


def describe_exhaustion(updates: int, events: int, size: int) -> str | None:
    """Return why a run rejects actions, and what continues it, from its updates and the length and size of
    its history.
    """
    found = (
        (updates >= MOST_UPDATES, f"has accepted {updates:,} updates, and Temporal allows 2,000"),
        (events >= MOST_EVENTS, f"has a history of {events:,} events, and Temporal allows 51,200"),
        (size >= MOST_BYTES, f"has a history of {size / 1e6:.0f} MB, and Temporal allows 50"),
    )
    why = next((text for is_reached, text in found if is_reached), None)
    if why is None:
        return None
    return (
        f"this run {why}: the task starts no attempts, and continues in a new run when none is in flight; "
        "try again then, or pause it with interrupt=true, which stops its attempts"
    )


def _update_id() -> str:
    """Return the id of the update whose handler or validator runs."""
    info = workflow.current_update_info()
    assert info is not None, "actions are updates"
    return info.id


def _added_by(action: ChangeGraph) -> dict[str, Any]:
    return {"nodes": [*action.nodes], "edges": [*action.edges], "edges_ex": [*action.edges_ex]}


def _message_of(error: ActivityError) -> str:
    """Return the message with which the engine rejects a call."""
    return error.cause.message if isinstance(error.cause, ApplicationError) else str(error.cause)


def _measure_reset(node: NodeReset) -> int:
    """Return an upper bound for the size of a node's reset as JSON."""
    outcome = node.outcome
    results = [outcome.metrics, outcome.artifacts_ref, outcome.batches] if outcome is not None else []
    return _RESET_BYTES + json_size([node.node_id, node.io, node.fields, results])


def read_action(name: str, given: RawValue | None) -> Action:
    """Return the action in the input of an update. Raise ApplicationError if it is not valid."""
    value = None if given is None else workflow.payload_converter().from_payload(given.payload)
    try:
        return parse_action(name, value)
    except ActionRejected as error:
        raise rejection(error) from None


def rejection(error: ActionRejected) -> ApplicationError:
    """Return the error with which Temporal rejects an update."""
    return ApplicationError(
        str(error), error.cause.value, type=reason_codes.ACTION_REJECTED, non_retryable=True
    )
