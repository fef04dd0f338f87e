"""The outcome of a task that a test ran, with assertions that show the graph when they fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, overload

from flowkit.activities.json_types import JsonType
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.models import NodeStatus, TaskStatus
from flowkit.models.metas import read_meta
from flowkit.text import names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from flowkit.adapters.mongo import Database

    class HasNodeId(Protocol):
        """A node of a typed graph."""

        @property
        def node_id(self) -> str:
            """Its id."""


T = TypeVar("T")

Events = list[tuple[str, str]]
"""What has happened, oldest first: the id of a node, and `begins` or `ends`, which an attempt does."""

_COLUMNS = 100
_MOST_LINES = 100
_MOST_ERRORS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRun:
    """The outcome of one node."""

    status: str
    attempts: int
    batches: list[dict[str, Any]]
    """The `metrics` that its batches returned, oldest first, even if the node failed later."""
    final: dict[str, Any]
    """The metrics that `finalize` returned."""
    error: str | None
    """Why the node failed, as in `last_error` of the task document."""
    skip_reason: str | None
    reason_code: str | None = None
    """The code of the failure."""
    node_id: str = ""
    show: Callable[[], str] = field(default=lambda: "", repr=False, compare=False)
    """Returns the picture that assertions show."""

    def assert_finished(self) -> None:
        """Raise AssertionError, which shows the graph, unless the node has finished."""
        __tracebackhide__ = True
        self._assert_status(NodeStatus.FINISHED)

    def assert_failed(self, *, reason: str | None = None, error: str | None = None) -> None:
        """Raise AssertionError unless the node has failed, with this reason code and this text in its error."""
        __tracebackhide__ = True
        self._assert_status(NodeStatus.FAILED)
        if reason is not None and self.reason_code != reason:
            self._fail(f"failed with {self.reason_code!r}, not with {reason!r}")
        if error is not None and error not in (self.error or ""):
            self._fail(f"failed with the error {self.error!r}, which does not contain {error!r}")

    def assert_skipped(self, reason: str | None = None) -> None:
        """Raise AssertionError unless the node was skipped, for this reason, such as `condition`."""
        __tracebackhide__ = True
        self._assert_status(NodeStatus.SKIPPED)
        if reason is not None and self.skip_reason != reason:
            self._fail(f"was skipped because of {self.skip_reason!r}, not of {reason!r}")

    def assert_cancelled(self) -> None:
        """Raise AssertionError unless the node was cancelled."""
        __tracebackhide__ = True
        self._assert_status(NodeStatus.CANCELLED)

    def assert_attempts(self, number: int) -> None:
        """Raise AssertionError unless the node has had so many attempts."""
        __tracebackhide__ = True
        if self.attempts != number:
            self._fail(f"had {self.attempts} attempts, not {number}")

    def _assert_status(self, wanted: NodeStatus) -> None:
        __tracebackhide__ = True
        if self.status != wanted:
            self._fail(f"is {self.status}, not {wanted.value}")

    def _fail(self, problem: str) -> None:
        __tracebackhide__ = True
        raise AssertionError(f"node {self.node_id!r} {problem}\n\n{self.show()}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRun:
    """The outcome of a task that a test ran."""

    task_id: str
    status: str
    reason: str | None
    """Why the task failed, or None."""
    nodes: dict[str, NodeRun]
    vars: dict[str, Any]
    """The variables of the task at its end."""
    db: Database
    """The database with the documents of the task."""
    document: dict[str, Any] = field(default_factory=dict, repr=False)
    """The task document at the end."""
    events: Events = field(default_factory=list, repr=False)
    seconds: float = 0.0
    """How long the task took by its clock: of a simulated clock, the time that was skipped."""

    web_ui: str = ""
    """The address of the task in Temporal's Web UI, if it ran on a server."""

    def node(self, node: str | HasNodeId) -> NodeRun:
        """Return the outcome of a node, by its id or the node of a typed graph. Raise AssertionError for another."""
        node_id = node if isinstance(node, str) else node.node_id
        if node_id not in self.nodes:
            raise AssertionError(f"the graph has no node {node_id!r}; its nodes are {names([*self.nodes])}")
        return self.nodes[node_id]

    @overload
    def results(self, node: str | HasNodeId) -> list[dict[str, Any]]:
        """Return the results as objects."""

    @overload
    def results(self, node: str | HasNodeId, kind: type[T]) -> list[T]:
        """Return the results as values of a type."""

    def results(self, node: str | HasNodeId, kind: Any = None) -> list[Any]:
        """Return the results of the batches of a node, oldest first: as objects, or as values of the type `kind`."""
        return [_typed(each, kind) for each in self.node(node).batches]

    @overload
    def final(self, node: str | HasNodeId) -> dict[str, Any]:
        """Return the result as an object."""

    @overload
    def final(self, node: str | HasNodeId, kind: type[T]) -> T:
        """Return the result as a value of a type."""

    def final(self, node: str | HasNodeId, kind: Any = None) -> Any:
        """Return what `finalize` of a node returned: as an object, or as a value of the type `kind`."""
        return _typed(self.node(node).final, kind)

    def assert_finished(self) -> None:
        """Raise AssertionError, which shows the graph and the errors of its nodes, unless the task has finished."""
        __tracebackhide__ = True
        self._assert_status(TaskStatus.FINISHED)

    def assert_failed(self, reason: str | None = None) -> None:
        """Raise AssertionError unless the task has failed, with this text in its reason."""
        __tracebackhide__ = True
        self._assert_status(TaskStatus.FAILED)
        if reason is not None and reason not in (self.reason or ""):
            self._fail(f"the task failed: {self.reason}; this does not contain {reason!r}")

    def assert_cancelled(self) -> None:
        """Raise AssertionError unless the task was cancelled."""
        __tracebackhide__ = True
        self._assert_status(TaskStatus.CANCELLED)

    def assert_skipped(self, *nodes: str | HasNodeId) -> None:
        """Raise AssertionError unless all of these nodes were skipped."""
        __tracebackhide__ = True
        for each in nodes:
            self.node(each).assert_skipped()

    def assert_order(self, *nodes: str | HasNodeId) -> None:
        """Raise AssertionError unless each of these nodes has ended before the next one began."""
        __tracebackhide__ = True
        for earlier, later in pairwise(nodes):
            first, second = self.node(earlier).node_id, self.node(later).node_id
            ends = [place for place, event in enumerate(self.events) if event == (first, "ends")]
            begins = [place for place, event in enumerate(self.events) if event == (second, "begins")]
            if not begins or not ends:
                self._fail(f"node {(second if ends else first)!r} has not run")
            if ends[-1] > begins[0]:
                self._fail(f"node {second!r} began before node {first!r} had ended")

    def picture(self) -> str:
        """Return the graph with the state of each node, as text, and the errors of the nodes that have failed.

        Of a large graph, the nodes that have not finished come first.
        """
        from flowkit.pictures.model import make_picture
        from flowkit.pictures.text import to_text
        from flowkit.reading.graphs import view_graph
        from flowkit.reading.state import read_document

        graph = self.document["graph"]
        view = read_document(self.document, {name: len(node.batches) for name, node in self.nodes.items()})
        picture = make_picture(view_graph(graph), {row.node_id: row for row in view.nodes})
        lines = to_text(picture, _COLUMNS).plain.rstrip().splitlines()
        if len(lines) > _MOST_LINES:  # a list of layers, with a line for each node
            finished = tuple(
                f"  {box.heading} " for box in picture.boxes if box.status == NodeStatus.FINISHED
            )
            nodes = [line for line in lines[1:] if line.startswith("  ")]
            lines = [lines[0], "", *sorted(nodes, key=lambda line: line.startswith(finished))]
        errors = [f"{name}: {node.error}" for name, node in self.nodes.items() if node.error]
        links = [f"Temporal's Web UI: {self.web_ui}"] if self.web_ui else []
        shown = [*_take_first(lines, _MOST_LINES, "lines"), *([""] if errors or links else [])]
        return "\n".join([*shown, *_take_first(errors, _MOST_ERRORS, "errors"), *links])

    def _assert_status(self, wanted: TaskStatus) -> None:
        __tracebackhide__ = True
        if self.status != wanted:
            why = f": {self.reason}" if self.reason else ""
            self._fail(f"the task is {self.status}, not {wanted.value}{why}")

    def _fail(self, problem: str) -> None:
        __tracebackhide__ = True
        raise AssertionError(f"{problem}\n\n{self.picture()}")


def _take_first(lines: list[str], most: int, what: str) -> list[str]:
    """Return so many lines, and how many others there are."""
    left = len(lines) - most
    return [*lines[:most], f"… and {left:,} more {what}"] if left > 0 else lines


def _typed(stored: dict[str, Any], kind: Any) -> Any:
    """Return a stored result as a value of a type."""
    return stored if kind is None else JsonType(kind, "the type of results").from_meta(stored)


async def read_run(
    db: Database,
    task_id: str,
    *,
    events: Events | None = None,
    seconds: float | None = None,
    web_ui: str = "",
) -> GraphRun:
    """Return the outcome of an ended task from its document. Without `events`, derive them from it, too."""
    document: dict[str, Any] = await db.tasks.find_one({"id": task_id})
    nodes: dict[str, NodeRun] = {}
    run = GraphRun(
        task_id=task_id,
        status=document["status"],
        reason=document.get("reason"),
        nodes=nodes,
        vars=(document.get("coordinator") or {}).get("vars") or {},
        db=db,
        document=document,
        events=_read_events(document["graph"]["nodes"]) if events is None else events,
        seconds=_measure(document) if seconds is None else seconds,
        web_ui=web_ui,
    )
    for node in document["graph"]["nodes"]:
        nodes[node["node_id"]] = await _read_node(db, task_id, node, run.picture)
    return run


def _measure(document: dict[str, Any]) -> float:
    from flowkit.reading.state import read_document

    return read_document(document, {}).seconds or 0.0


async def _read_node(db: Database, task_id: str, node: dict[str, Any], show: Callable[[], str]) -> NodeRun:
    node_id, status, metas = node["node_id"], node["status"], []
    async for page in ArtifactStore(db).pages(task_id, node_id):
        metas += [partial["meta"] for partial in page]
    return NodeRun(
        node_id=node_id,
        status=status,
        attempts=node.get("attempt_epoch") or 0,
        batches=metas,
        final=await _read_final(db, task_id, node_id) if status == NodeStatus.FINISHED else {},
        error=node.get("last_error"),
        skip_reason=node.get("skip_reason"),
        reason_code=node.get("reason_code"),
        show=show,
    )


async def _read_final(db: Database, task_id: str, node_id: str) -> dict[str, Any]:
    marker = {"task_id": task_id, "node_id": node_id, "status": "complete"}
    complete: dict[str, Any] = await db.artifacts.find_one(marker) or {}
    return read_meta(complete) or {}


def _read_events(nodes: Sequence[dict[str, Any]]) -> Events:
    """Return when the latest attempt of each node began and ended, by the times in the document."""
    times = [
        (node[name], order, node["node_id"], kind)
        for node in nodes
        for order, (name, kind) in enumerate((("finished_at", "ends"), ("started_at", "begins")))
        if node.get(name) is not None
    ]
    return [(node_id, kind) for _, _, node_id, kind in sorted(times)]
