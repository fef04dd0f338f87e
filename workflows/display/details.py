"""Render the Markdown that Temporal's Web UI shows as a run's current details. Pure.

The Web UI shows about eight lines without scrolling, so the most important information comes first: counts of nodes,
then a table of nodes with a note about each, which says what the node waits for or why it ended.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from flowkit import reason_codes
from flowkit.graph.description import format_parents
from flowkit.limits import VERSION_CHARS
from flowkit.models import NodeStatus, SkipReason, StartWhen, TaskStatus, waits
from flowkit.models.temporal_names import role_queue
from flowkit.text import count_of, describe_set_aside, format_duration, names, shorten, visible
from flowkit.workflows.display.summaries import next_attempt
from flowkit.workflows.payloads import longest_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from flowkit.models import Node, NodeState
    from flowkit.models.actions import PausedScope
    from flowkit.models.waits import NodeWait
    from flowkit.workflows.scheduling.scheduler import Scheduler

DISPLAY_ORDER = (
    NodeStatus.FAILED,
    NodeStatus.CANCELLING,
    NodeStatus.DEFERRED,
    NodeStatus.RUNNING,
    NodeStatus.CANCELLED,
    NodeStatus.SKIPPED,
    NodeStatus.QUEUED,
    NodeStatus.FINISHED,
)
"""Node statuses in display order: those that need attention come first."""

ROWS = 40
"""Largest number of nodes in the table."""

BYTES = 20_000
"""Largest size of the current details that Temporal keeps."""

_LAST_LINE_BYTES = 100
"""Bytes reserved for the last line, which shows how many nodes the table omits."""

_RANK = {status: position for position, status in enumerate(DISPLAY_ORDER)}
_TABLE_HEADER = ("| node | role | status | attempt | note |", "|:---|:---|:---|:---:|:---|")
_LINE_BREAK = "  \n"  # in Markdown
_EMPTY_LINE = "\N{NO-BREAK SPACE}"
"""The Web UI cuts off the lower half of the last line."""

_NAME_CHARS = 60
_NOTE_CHARS = 80
_NOTES_CHARS = 1_200
"""Characters for all notes of a small graph together. Each note may always have `_NOTE_CHARS`."""

_REASON_CHARS = 200
_EXPRESSION_CHARS = 60
_MIXED_ROLES = 3
"""Largest number of roles whose different versions are named."""
_VERSIONS_CHARS = 500
_PAUSES = 3
"""Largest number of paused scopes in the heading."""
_ROLES = 6
"""Largest number of links to task queues."""

_MARKDOWN = re.compile(r"[\\`*\[\]<>|~&]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.", re.IGNORECASE)
"""Characters that format text or make an address a link. An underscore within a word does not."""

_NOT_IN_URL = re.compile(rb"[^A-Za-z0-9_.~-]")
_URL_SAFE = re.compile(r"[A-Za-z0-9_.@+-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotLimits:
    """The largest number of attempts in flight, by role and over all roles."""

    window: int = 100
    max_in_flight: int = 1_000


_DEFAULT_LIMITS = SlotLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskQueues:
    """The namespace of a task and the prefix of the task queues that run its attempts."""

    namespace: str
    prefix: str


def render(
    status: TaskStatus,
    scheduler: Scheduler,
    queues: TaskQueues,
    reason: str | None = None,
    limits: SlotLimits = _DEFAULT_LIMITS,
    now: float = 0.0,
    silent_nodes: Collection[str] = (),
    versions: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    pins: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return Markdown with node counts, links to the task queues of running nodes, and a table of nodes.

    `versions` are the versions that have run attempts of each role, with a worker of each; roles with
    several are named. `pins` are the versions that the task has fixed; the links lead to their task queues.
    """
    shown = sorted(scheduler.nodes, key=lambda node: _RANK[scheduler.states[node.index].status])[:ROWS]
    note_chars = max(_NOTE_CHARS, _NOTES_CHARS // len(shown))
    heading = _LINE_BREAK.join(
        [
            _format_heading(status, scheduler, reason),
            *_describe_versions(versions),
            *_list_pauses(scheduler),
            *_link_queues(scheduler, shown, queues, pins),
        ]
    )
    above_rows = [heading, "", *_TABLE_HEADER]
    notes = Notes(scheduler, limits, now, silent_nodes)
    all_rows = (_format_row(notes, node, note_chars) for node in shown)
    rows = longest_prefix(
        all_rows, _count_bytes, BYTES - _LAST_LINE_BYTES - sum(map(_count_bytes, above_rows))
    )
    hidden = len(scheduler.nodes) - len(rows)
    last = f"… and {hidden:,} more nodes; the query `status` has them all" if hidden else _EMPTY_LINE
    return "\n".join([*above_rows, *rows, "", last])


def add_page_link(details: str, page_url: str | None, task_id: str) -> str:
    """Return details with a link to the task on FlowKit's page; unchanged if they are empty, or if it is too long."""
    if not details or page_url is None:
        return details
    link = f"[Graph and actions on FlowKit's page]({page_url.rstrip('/')}/?task={_quote(task_id)})"
    linked = f"{link}{_LINE_BREAK}{details}"
    return linked if len(linked.encode()) <= BYTES else details


def _quote(text: str) -> str:
    """Return a text as a part of a URL. Workflow code imports no module for I/O, which urllib is."""
    return _NOT_IN_URL.sub(lambda found: b"%%%02X" % ord(found[0]), text.encode()).decode("ascii")


@lru_cache(maxsize=4096)
def _count_bytes(line: str) -> int:
    return len(line.encode("utf-8", "replace")) + 1


def _format_heading(status: TaskStatus, scheduler: Scheduler, reason: str | None) -> str:
    counts, total = scheduler.counts(), len(scheduler.nodes)
    parts = ", ".join(f"{counts[kind]} {kind.value}" for kind in DISPLAY_ORDER if counts[kind])
    why = f" ({_format_cell(reason, _REASON_CHARS)})" if reason else ""
    return f"Task **{status.value}**{why}: {parts}, of {count_of(total, 'node')}"


def _describe_versions(versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a line for each role whose attempts ran with different versions of its handler."""
    mixed = [(role, workers) for role, workers in versions.items() if len(workers) > 1]
    lines = [_describe_mix(*each) for each in mixed[:_MIXED_ROLES]]
    more = len(mixed) - _MIXED_ROLES
    return [*lines, f"… and {more:,} more roles"] if more > 0 else lines


def _describe_mix(role: str, workers: Mapping[str, str]) -> str:
    ran = ", ".join(f"{version} ({shorten(worker)})" for version, worker in workers.items())
    return _format_cell(f"Attempts of role {role} ran with different versions: {ran}", _VERSIONS_CHARS)


def _list_pauses(scheduler: Scheduler) -> list[str]:
    """Name the paused scopes, which only `resume` starts again."""
    paused = scheduler.pauses.scopes
    shown = [_format_cell(format_pause(each), _REASON_CHARS) for each in paused[:_PAUSES]]
    more = f" and {len(paused) - _PAUSES} more" if len(paused) > _PAUSES else ""
    return [f"**Paused**; the action `resume` continues it: {'; '.join(shown)}{more}"] if paused else []


def _link_queues(
    scheduler: Scheduler, shown: list[Node], queues: TaskQueues, pins: Mapping[str, str]
) -> list[str]:
    """Link to the task queues of running roles. Only these pages show whether a worker has taken an attempt."""
    running = (node for node in shown if scheduler.states[node.index].status is NodeStatus.RUNNING)
    roles = list(dict.fromkeys(node.type for node in running if not node.is_function))
    if not roles:
        return []
    links = [_link_queue(role, queues, pins.get(role, "")) for role in roles[:_ROLES]]
    more = [f"{len(roles) - _ROLES} more"] if len(roles) > _ROLES else []
    owner = "its role" if len(roles) == 1 else "its roles"
    return [f"A running node may still wait for a worker. Workers of {owner}: {', '.join([*links, *more])}"]


@lru_cache(maxsize=1024)
def _link_queue(role: str, queues: TaskQueues, version: str) -> str:
    """Link to the page of the role's task queue, relative to the root of the Web UI."""
    queue = role_queue(queues.prefix, role, version)
    pinned = f" with version {_format_cell(version, VERSION_CHARS)} (pinned by this task)" if version else ""
    if all(_URL_SAFE.fullmatch(part) for part in (queues.namespace, queue)):
        return f"[{role}](namespaces/{queues.namespace}/task-queues/{queue}){pinned}"
    return f"{_format_cell(f'{role}, queue {queue}', _NAME_CHARS)}{pinned}"


def _format_row(notes: Notes, node: Node, note_chars: int) -> str:
    state, label = notes.scheduler.states[node.index], node.io.fn if node.is_function else node.type
    return _format_cells(
        node.node_id, label, state.status.value, state.epoch, notes.describe(node), note_chars
    )


@lru_cache(maxsize=4096)
def _format_cells(node_id: str, label: str, status: str, epoch: int, note: str, note_chars: int) -> str:
    """Return one row. Cached because usually only one or two rows change between two updates."""
    attempt = str(epoch) if epoch else ""
    names = (_format_cell(node_id, _NAME_CHARS), _format_cell(label, _NAME_CHARS), status)
    return "| " + " | ".join([*names, attempt, _format_cell(note, note_chars)]) + " |"


def _format_cell(text: str, max_chars: int) -> str:
    """Return a text of a user or a worker on one line, cut and escaped: it adds no link, image, HTML or column."""
    return _MARKDOWN.sub(r"\\\g<0>", shorten(visible(text), max_chars))


class Notes:
    """The notes about the nodes of one task at one moment."""

    def __init__(
        self, scheduler: Scheduler, limits: SlotLimits, now: float, silent_nodes: Collection[str] = ()
    ) -> None:
        self.scheduler = scheduler
        self._silent_nodes = silent_nodes
        self.limits = limits
        self.now = now

    @cached_property
    def in_flight(self) -> Counter[str]:
        """Number of attempts in flight by role."""
        pairs = zip(self.scheduler.nodes, self.scheduler.states, strict=True)
        return Counter(
            node.type for node, state in pairs if state.status in (NodeStatus.RUNNING, NodeStatus.CANCELLING)
        )

    def index(self, node_id: str) -> int:
        """Return the index of a node."""
        return self.scheduler.index_of[node_id]

    def state(self, node_id: str) -> NodeState:
        """Return the state of a node."""
        return self.scheduler.states[self.index(node_id)]

    def open(self, node_ids: Iterable[str]) -> list[str]:
        """Return those of the nodes that have not ended."""
        return [node_id for node_id in node_ids if not self.state(node_id).status.ended]

    def _is_paused(self, node: Node) -> bool:
        return node.index in self.scheduler.pauses.paused

    def _describe_deferred(self, node: Node, state: NodeState) -> str:
        if wait := _describe_long_wait(self, node, state):
            return f"waits for {wait}"
        if state.wait or state.next_retry_at or self._is_paused(node):
            return _describe_retry(self, node, state, state.next_retry_at or 0.0)
        return _describe_last_attempt(state.last_error or "")

    def describe(self, node: Node) -> str:
        """Return the note about `node`; empty if there is nothing to say."""
        state = self.scheduler.states[node.index]
        error = state.last_error or ""
        if node.node_id in self._silent_nodes:
            return "sends no heartbeats"
        if state.status is NodeStatus.FINISHED:
            return describe_set_aside(state.failed_batches) if state.failed_batches else ""
        match state.status:
            case NodeStatus.QUEUED:
                texts = [text for rule in BEFORE_START if (text := rule(self, node))]
                return f"waits for {'; and for '.join(texts)}" if texts else _describe_last_attempt(error)
            case NodeStatus.DEFERRED:
                return self._describe_deferred(node, state)
            case NodeStatus.CANCELLING:
                return "waits for its attempt to stop"
            case NodeStatus.FAILED:
                return f"{_describe_handling(self, node)}{error}"
            case NodeStatus.SKIPPED if state.skip_reason:
                return _describe_skip(self, node, state.skip_reason)
            case _:
                return "; ".join(filter(None, [_describe_shards(self, node), _describe_last_attempt(error)]))


def _describe_shards(notes: Notes, node: Node) -> str:
    """Return how many shards of a node are in flight; empty for a node without shards."""
    if node.parallel == 1:
        return ""
    epochs = notes.scheduler.shard_epochs.get(node.index, ())
    return f"{count_of(len(epochs), 'shard')} of up to {node.parallel:,}" if epochs else "ends the node"


def find_decision(node: Node, state: NodeState) -> NodeWait | None:
    """Return which decision of a person a node waits for; None if it waits for none."""
    if state.held_until is not None:
        return waits.for_decision(f"failed with {state.reason_code}")
    if node.approval is not None and state.status is NodeStatus.DEFERRED:
        return waits.for_decision("approve or reject")
    return None


def find_outside_wait(node: Node, state: NodeState, missing: Sequence[str]) -> NodeWait | None:
    """Return what a node waits for that only somebody outside the task can bring about; None if it waits for nothing.

    `missing` are its prerequisites that are not satisfied.
    """
    if decision := find_decision(node, state):
        return decision
    return waits.for_prerequisites(missing) if missing and state.status is NodeStatus.QUEUED else None


def _describe_long_wait(notes: Notes, node: Node, state: NodeState) -> str:
    """Return what a held node, an approval or a delay waits for; empty for any other node."""
    if state.held_until is not None:
        failed = waits.for_decision(f"failed with {state.last_error or state.reason_code}")
        return f"{failed.text}; held until {_format_moment(max(state.held_until, 0.0))}"
    if pause := _describe_pause(notes, node):
        return "" if node.delay is None and node.approval is None else pause
    if node.approval is not None and (decision := find_decision(node, state)):
        return f"{decision.text}; {node.approval.text}".rstrip("; ")
    if node.delay is not None and state.next_retry_at is not None:
        return f"its delay, until {_format_moment(state.next_retry_at)}"
    return ""


def _format_moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _describe_last_attempt(error: str) -> str:
    return f"last attempt: {error}" if error else ""


# --- before a node starts -----------------------------------------------------------------------------------------


def _describe_parents(notes: Notes, node: Node) -> str:
    if not notes.scheduler.waits_for_parents(node.index):
        return ""
    parents = notes.open(node.depends_on)
    if node.streams_from:
        parents = format_parents(node, [each for each in parents if not _has_batch(notes, node, each)])
    if node.streams_from and node.io.start_when is StartWhen.FIRST_BATCH:
        without = [each for each in notes.open(node.streams_from) if not _has_batch(notes, node, each)]
        batch = f"the first batch of {names(without, last=' or ')}"
        return batch if without else names(notes.open(node.depends_on))
    match node.fan_in.mode:
        case "any":
            return _name_some(1, parents)
        case "count":
            return _name_some(node.fan_in.count - notes.scheduler.satisfied_parents(node.index), parents)
        case _:
            return names(parents)


def _has_batch(notes: Notes, node: Node, parent: str) -> bool:
    return notes.state(parent).streamed and notes.scheduler.streams.leads(notes.index(parent), node.index)


def _name_some(needed: int, parents: list[str]) -> str:
    if needed >= len(parents):
        return names(parents)
    return f"{'any' if needed == 1 else needed} of {names(parents, last=', ')}"


def _describe_routers(notes: Notes, node: Node) -> str:
    """Return the routers that can still start a target, or that must end before it starts."""
    if not node.conditional:
        return ""
    routing, nodes = notes.scheduler.routing, notes.scheduler.nodes
    routers = [nodes[each] for each in routing.open_routers(node.index, notes.scheduler.states)]
    route = routing.gate(node.index)
    if not routers or route is None:
        return ""
    if route.fired:
        return f"the end of {names([each.node_id for each in routers])}"
    success = [each.node_id for each in routers if node.node_id in each.on_success]
    failure = [each.node_id for each in routers if node.node_id in each.on_failure]
    by_list = {"on_success": success, "on_failure": failure}
    if success == failure:
        by_list = {"on_success or on_failure": success}
    return f"a route from {', '.join(f'{names(found)} ({key})' for key, found in by_list.items() if found)}"


def _describe_edges(notes: Notes, node: Node) -> str:
    if not node.edge_when or not notes.scheduler.waits_for_parents(node.index):
        return ""
    decided = notes.scheduler.states[node.index].edges
    due = [
        parent
        for parent in node.edge_when
        if notes.index(parent) not in decided
        and (notes.state(parent).status is NodeStatus.FINISHED or _has_batch(notes, node, parent))
    ]
    return f"the condition of the edge from {names(due)}" if due else ""


def _describe_condition(notes: Notes, node: Node) -> str:
    if node.when is None or notes.scheduler.states[node.index].condition is not None:
        return ""
    return "its condition" if notes.scheduler.has_opened(node.index) else ""


def _describe_values(notes: Notes, node: Node) -> str:
    state = notes.scheduler.states[node.index]
    if not node.expressions or state.evaluated or _describe_condition(notes, node):
        return ""
    return "its values by expression" if notes.scheduler.has_opened(node.index) else ""


def _describe_slot(notes: Notes, node: Node) -> str:
    state = notes.scheduler.states[node.index]
    if not notes.scheduler.has_opened(node.index) or _describe_condition(notes, node):
        return ""
    if _describe_values(notes, node):
        return ""
    if state.wait:
        return state.wait.text
    limits, of_role, total = notes.limits, notes.in_flight[node.type], notes.in_flight.total()
    if of_role >= limits.window:
        return f"a slot of role {node.type} ({of_role:,} of {limits.window:,})"
    if total >= limits.max_in_flight:
        return f"a slot of the task ({total:,} of {limits.max_in_flight:,})"
    return ""


def _describe_prerequisites(notes: Notes, node: Node) -> str:
    missing = notes.scheduler.missing_prerequisites(node.index)
    return waits.for_prerequisites(missing).text if missing else ""


def _describe_pause(notes: Notes, node: Node) -> str:
    paused = notes.scheduler.pauses.scope_of(node.index)
    return waits.for_resume(paused.scope).text if paused is not None else ""


def wait_for_sources(node: Node, scheduler: Scheduler) -> NodeWait:
    """Return for which nodes one waits that has yielded to them: those from which it pulls and that have not ended."""
    states, index_of = scheduler.states, scheduler.index_of
    return waits.for_sources(
        [source for source in node.pulls_from if not states[index_of[source]].status.ended]
    )


def format_pause(paused: PausedScope) -> str:
    """Return what is paused, by whom and why, in words."""
    by = f" by {paused.by}" if paused.by else ""
    reason = f": {paused.reason}" if paused.reason else ""
    return f"{paused.scope} paused{by}{reason}"


BEFORE_START: tuple[Callable[[Notes, Node], str], ...] = (
    _describe_pause,
    _describe_routers,
    _describe_parents,
    _describe_edges,
    _describe_prerequisites,
    _describe_condition,
    _describe_values,
    _describe_slot,
)
"""What a node can wait for before its first attempt, in the order of the note."""


# --- after that ---------------------------------------------------------------------------------------------------


def _describe_retry(notes: Notes, node: Node, state: NodeState, at: float) -> str:
    if (state.wait or at <= notes.now) and (slot := _describe_slot(notes, node)):
        return f"waits for {slot}; {state.last_error or ''}"
    if pause := _describe_pause(notes, node):
        return f"waits for {pause}{_describe_retry_left(state)}; {state.last_error or ''}".rstrip("; ")
    when = _format_moment(at)
    idle = notes.open(node.pulls_from) if state.reason_code == reason_codes.YIELDED else []
    if idle:
        return f"waits until {names(idle, last=' or ')} runs; next attempt at {when} at the latest"
    return f"{next_attempt(node, state)} at {when}; {state.last_error or ''}"


def _describe_retry_left(state: NodeState) -> str:
    return f", then {format_duration(state.retry_left)} for its retry" if state.retry_left else ""


def _describe_handling(notes: Notes, node: Node) -> str:
    """Return, for a failure that need not fail the task, which node handles it; otherwise an empty string."""
    if node.allow_failure:
        return "tolerated; "
    if notes.scheduler.routing.is_handled(node.index):
        finished = [each for each in node.on_failure if notes.state(each).status is NodeStatus.FINISHED]
        return f"handled by {names(finished)}; " if finished else "handled; "
    pending = notes.open(node.on_failure) if notes.scheduler.routing.is_pending(node.index) else []
    return f"{names(pending, last=' or ')} can handle it; " if pending else ""


def _describe_skip(notes: Notes, node: Node, reason: SkipReason) -> str:
    """Return the reason and, if it lies in other nodes, how those ended."""
    if reason in (SkipReason.TASK_FAILED, SkipReason.TASK_CANCELLED):
        return reason.value
    routers = [notes.scheduler.nodes[each].node_id for each in notes.scheduler.routing.routers(node.index)]
    causes = {each: notes.state(each) for each in (*routers, *node.depends_on)}
    by_status = {
        status: [
            each
            for each, state in causes.items()
            if state.status is status and state.skip_reason in (None, reason)
        ]
        for status in (NodeStatus.FAILED, NodeStatus.CANCELLED, NodeStatus.SKIPPED)
    }
    parts = [f"{names(found)} {status.value}" for status, found in by_status.items() if found]
    if reason is SkipReason.CONDITION:
        parts = [*_describe_false_conditions(notes, node), *parts]
    if reason is SkipReason.ROUTING and routers and not parts:
        parts = [f"no route from {names(routers)}"]
    return f"{reason.value}: {', '.join(parts)}" if parts else reason.value


def _describe_false_conditions(notes: Notes, node: Node) -> Iterator[str]:
    state = notes.scheduler.states[node.index]
    if state.condition is False:
        yield f"{shorten(node.when or '', _EXPRESSION_CHARS)} is false"
    edges = [parent for parent in node.edge_when if state.edges.get(notes.index(parent)) is False]
    if edges:
        yield f"the edge from {names(edges)} is false"
