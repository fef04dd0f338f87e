"""A node of a stored task as `flowkit debug` runs it: its attempt, the states of its sources, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.batch_uids import qualified
from flowkit.adapters.tasks.attempts import StoredParams
from flowkit.adapters.tasks.fields import graph_of, nodes_of
from flowkit.adapters.tasks.store import TaskStore
from flowkit.cli.errors import add_remedy
from flowkit.client import TaskCatalog, UnknownTask
from flowkit.errors import ConfigError
from flowkit.graph.validation import normalized
from flowkit.models import NodeState, NodeStatus, Settings
from flowkit.reading.results import require_node
from flowkit.text import did_you_mean
from flowkit.workflows.node import attempt_input
from flowkit.workflows.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.adapters.mongo import Database
    from flowkit.adapters.tasks.queries import StoredBatch, StoredResult
    from flowkit.models import AttemptInput, Node

_SHOWN_UIDS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSource:
    """A node from which the debugged one reads batches."""

    node_id: str
    status: NodeStatus
    batches: int
    """Number of batches that it has stored in its present generation."""
    first_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredNode:
    """A node of a task, with what MongoDB has of it."""

    node: Node
    attempt: AttemptInput
    """Its latest attempt, without what only an attempt of a worker needs."""
    begun: bool
    """Whether an attempt of the node has begun in its present generation."""
    status: NodeStatus
    reason_code: str | None
    last_error: str | None
    worker: str
    version: str
    """Version of the handler of the latest attempt; empty if unknown."""
    external: bool
    """Whether an external worker has run it."""
    params: StoredParams
    sources: tuple[StoredSource, ...]
    result: StoredResult | None


async def read_node(db: Database, task_id: str, node_id: str) -> StoredNode:
    """Return a node of a task. Raise UnknownTask, and ConfigError if there is no such node or it runs no code."""
    catalog = TaskCatalog(db)
    document = await catalog.document(task_id)
    if document is None:
        raise UnknownTask(task_id)
    require_node(document, node_id)
    scheduler = _restore(document)
    index = scheduler.index_of[node_id]
    node, entry = scheduler.nodes[index], nodes_of(document)[index]
    if node.is_engine_node:
        problem = ConfigError(f"node {node_id!r} is of type {node.type!r}, which runs no code")
        raise add_remedy(problem, "name a node with a role or a function")
    state, lease = scheduler.states[index], entry.get("lease") or {}
    return StoredNode(
        node=node,
        attempt=_make_attempt(scheduler, task_id, node),
        begun=state.epoch > state.first_epoch,
        status=state.status,
        reason_code=state.reason_code,
        last_error=state.last_error,
        worker=lease.get("worker_id") or "",
        version=lease.get("version") or "",
        external=await catalog.was_dispatched(task_id, node_id),
        params=StoredParams.of(document),
        sources=await _read_sources(db, scheduler, task_id, node),
        result=(await catalog.results(task_id)).get(node_id),
    )


def _restore(document: dict[str, Any]) -> Scheduler:
    """Return a scheduler with the graph and the node states of a document."""
    graph = normalized(graph_of(document))
    return Scheduler(graph, [_read_state(entry) for entry in nodes_of(document)])


def _read_state(entry: dict[str, Any]) -> NodeState:
    return NodeState(
        status=NodeStatus(entry["status"]),
        epoch=entry.get("attempt_epoch") or 0,
        generation=entry.get("generation") or 0,
        first_epoch=entry.get("first_epoch") or 0,
        last_error=entry.get("last_error"),
        reason_code=entry.get("reason_code"),
    )


def _make_attempt(scheduler: Scheduler, task_id: str, node: Node) -> AttemptInput:
    """Return the input of the latest attempt, or of the first one.

    It sets no batch aside, and no limit, signal or pin holds it.
    """
    given = attempt_input(scheduler, Settings(), task_id, node)
    return replace(
        given,
        epoch=max(given.epoch, given.first_epoch + 1),
        quarantine=None,
        max_ahead=0,
        followers=(),
        signal_first_batch=False,
        timeout_sec=None,
        pin=False,
    )


async def _read_sources(
    db: Database, scheduler: Scheduler, task_id: str, node: Node
) -> tuple[StoredSource, ...]:
    states = {name: scheduler.states[scheduler.index_of[name]] for name in node.pulls_from}
    artifacts = ArtifactStore(db)
    found = [
        StoredSource(
            node_id=name,
            status=state.status,
            batches=len(await artifacts.stored_uids(task_id, name, state.first_epoch)),
            first_epoch=state.first_epoch,
        )
        for name, state in states.items()
    ]
    return tuple(found)


async def read_stored(db: Database, stored: StoredNode, uids: Sequence[str]) -> dict[str, StoredBatch]:
    """Return what the node has stored of these batches, by uid."""
    attempt = stored.attempt
    return await TaskCatalog(db).named_batches(attempt.task_id, attempt.node_id, uids)


async def read_variables(db: Database, task_id: str) -> dict[str, Any]:
    """Return the variables of a task as they are now."""
    return await TaskStore(db).variables(task_id)


async def check_values(db: Database, stored: StoredNode) -> None:
    """Raise ConfigError if values of the node's expressions, or its items, are not stored."""
    attempt = stored.attempt
    if not attempt.by_expression and not attempt.maps:
        return
    values = TaskStore(db).values
    found, items = await values.stored((attempt.task_id, attempt.node_id, attempt.generation))
    if items is not None if attempt.maps else found:
        return
    what = "items" if attempt.maps else "values of the expressions"
    why = _explain_values(stored)
    problem = ConfigError(f"the {what} of node {attempt.node_id!r} are not in MongoDB: {why}")
    raise add_remedy(problem, "FlowKit evaluates them when the node starts; start or rerun the task")


def _explain_values(stored: StoredNode) -> str:
    if not stored.begun:
        return f"the node is {stored.status} and has not started in generation {stored.attempt.generation}"
    return "they were deleted"


async def explain_missing(db: Database, stored: StoredNode, uid: str, known: Sequence[str]) -> ConfigError:
    """Return the error for a batch that the input does not have: why, and which batches it has (`known`)."""
    why = await _explain_absence(db, stored, uid, known)
    problem = ConfigError(f"the input of node {stored.attempt.node_id!r} has no batch {uid!r}: {why}")
    return add_remedy(problem, did_you_mean(uid, known, otherwise=_describe_uids(sorted(known))))


def _describe_uids(known: Sequence[str]) -> str:
    if not known:
        return "it has no batches"
    some = ", ".join(repr(uid) for uid in known[:_SHOWN_UIDS])
    return f"it has {some}" if len(known) <= _SHOWN_UIDS else f"the first of its {len(known):,} are {some}"


async def _explain_absence(db: Database, stored: StoredNode, uid: str, known: Sequence[str]) -> str:
    """Return why the input has no batch with this uid."""
    attempt = stored.attempt
    if attempt.maps:
        items = "uids are the numbers of the batches of items, from 0"
        return "its items were deleted" if uid in known else items
    for source in stored.sources:
        if source.first_epoch and await _is_earlier(db, stored, source, uid):
            return f"source {source.node_id!r} stored it in an earlier generation"
    if own := await TaskCatalog(db).named_batches(attempt.task_id, attempt.node_id, [uid]):
        stored_by = f"attempt {own[uid].attempt} has processed it"
        if stored.sources:
            return f"{stored_by}, but its source no longer has it: it was deleted, or stored again with another uid"
        return f"{stored_by}, but the handler no longer yields it"
    open_sources = [f"{each.node_id} is {each.status}" for each in stored.sources if not each.status.ended]
    if open_sources:
        return f"no source has stored it yet ({', '.join(open_sources)})"
    return "no source has stored it" if stored.sources else "the handler does not yield it"


async def _is_earlier(db: Database, stored: StoredNode, source: StoredSource, uid: str) -> bool:
    """Return whether any generation of a source has stored a batch that the node names `uid`."""
    uids = await ArtifactStore(db).stored_uids(stored.attempt.task_id, source.node_id)
    if len(stored.sources) > 1:
        uids = {qualified(each, source.node_id, first=stored.sources[0].node_id) for each in uids}
    return uid in uids
