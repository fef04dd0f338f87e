"""What a task and its nodes have stored: results, metrics, and pages of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit.client import UnknownTask
from flowkit.errors import ConfigError
from flowkit.models import ENGINE_TYPES, TaskStatus
from flowkit.reading.documents import reading
from flowkit.text import count_of, describe_set_aside, did_you_mean, shell_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.adapters.artifacts import FailedBatches
    from flowkit.adapters.tasks.queries import StoredBatch, StoredResult
    from flowkit.client import TaskCatalog
    from flowkit.reading.state import TaskView


_HINTS = 3
"""How many nodes `set_aside_hints` names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeResult:
    """What one node has stored."""

    node_id: str
    status: str
    batches: int
    """Number of stored batches; failed batches do not count."""
    failed_batches: int
    """Number of batches that were set aside so far."""
    metrics: dict[str, Any]
    """Its final metrics."""
    stats: dict[str, Any]
    """What `metrics.aggregate` has computed for it."""
    artifacts_ref: dict[str, Any] | None
    error: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultView:
    """The result of a task."""

    task_id: str
    status: str
    ended: bool
    """Whether nothing can change any more: a failing task has its final status before its attempts have stopped."""
    reason: str | None
    handled_failures: list[str]
    nodes: list[NodeResult]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPage:
    """Some of the batches of a node, oldest first."""

    batches: list[StoredBatch]
    offset: int
    """Number of older batches that the page omits."""
    total: int
    """Number of all batches, including failed ones."""

    @property
    def next_offset(self) -> int | None:
        """The offset of the next page; None if this is the last one."""
        after = self.offset + len(self.batches)
        return after if self.batches and after < self.total else None


async def read_result(
    catalog: TaskCatalog, task_id: str, node_id: str | None, limit: int, offset: int, *, failed: bool = False
) -> tuple[ResultView, BatchPage | None]:
    """Return the result of a task, or of only one node with a page of its batches.

    Raise UnknownTask, and ConfigError if the task has no such node.
    """
    document = await catalog.document(task_id)
    if document is None:
        raise UnknownTask(task_id)
    stored, batches = await catalog.results(task_id), await catalog.batches(task_id)
    set_aside = await catalog.set_aside(task_id)
    with reading(task_id):
        require_node(document, node_id)
        view = make_view(document, stored, batches, set_aside, node_id)
    if node_id is None:
        return view, None
    found, total = await catalog.batch_page(task_id, node_id, offset, limit, failed=failed)
    return view, BatchPage(batches=found, offset=offset, total=total)


def require_node(document: dict[str, Any], node_id: str | None) -> None:
    """Raise ConfigError if the task has no such node. None is no node."""
    known = [node["node_id"] for node in document["graph"]["nodes"]]
    if node_id is not None and node_id not in known:
        task_id = document["id"]
        shows = f"`{shell_command('flowkit status', task_id)}` shows its nodes"
        problem = ConfigError(f"task {task_id!r} has no node {node_id!r}")
        problem.add_note(did_you_mean(node_id, known, otherwise=shows))
        raise problem


def make_view(
    document: dict[str, Any],
    results: dict[str, StoredResult],
    batches: dict[str, int],
    set_aside: Mapping[str, FailedBatches],
    node_id: str | None = None,
) -> ResultView:
    """Return the result of a task, or of only one of its nodes, from its document and what its nodes have stored."""
    nodes = []
    for node in document["graph"]["nodes"]:
        name = node["node_id"]
        if node_id not in (None, name):
            continue
        stored = results.get(name)
        nodes.append(
            NodeResult(
                node_id=name,
                status=node["status"],
                batches=batches.get(name, 0),
                failed_batches=set_aside[name].count if name in set_aside else 0,
                metrics=stored.metrics if stored else {},
                stats=node.get("stats") or {},
                artifacts_ref=stored.artifacts_ref if stored else None,
                error=node.get("last_error") if node["status"] != "finished" else None,
            )
        )
    return ResultView(
        task_id=document["id"],
        status=document["status"],
        ended=TaskStatus(document["status"]).closed and document.get("finished_at") is not None,
        reason=document.get("reason"),
        handled_failures=(document.get("result") or {}).get("handled_failures") or [],
        nodes=nodes,
    )


def set_aside_hints(task: TaskView | ResultView) -> list[str]:
    """Return a hint for each node that has set batches aside, with the command that lists them; at most four hints."""
    counts = {node.node_id: node.failed_batches for node in task.nodes if node.failed_batches}
    hints = [
        f"{describe_set_aside(count)} in {node_id}: "
        f"`{shell_command('flowkit batches', task.task_id, node_id, options=['--failed'])}`"
        for node_id, count in [*counts.items()][:_HINTS]
    ]
    more = len(counts) - len(hints)
    return hints + ([f"{count_of(more, 'more node')} with batches that are set aside"] if more else [])


def debug_command(task_id: str, node_id: str, batch_uid: str | None = None) -> str:
    """Return the command that runs a node, or one of its batches, in the user's own process."""
    batch = [] if batch_uid is None else ["--batch", batch_uid]
    if batch_uid is not None and batch_uid.startswith("-"):
        batch = [f"--batch={batch_uid}"]
    return shell_command("flowkit debug", task_id, node_id, options=[*batch, "--handler", "MODULE:CLASS"])


def debug_node_command(task_id: str, node_id: str, role: str) -> str | None:
    """Return the command that runs a node in the user's own process; None if the engine executes the node itself."""
    return None if role in ENGINE_TYPES else debug_command(task_id, node_id)
