"""Encode a task's state as input of the next run of its workflow (continue-as-new), and decode it there. Pure.

Temporal rejects payloads of 2 MB. The graph and params of a task have at most 1 MB, so the rest of the state may have
at most 1 MB as well. To fit, the states of the nodes are encoded as columns, and equal texts are stored once. Texts
that do not fit are truncated, the longest first. In addition, large parts are compressed.
"""

from __future__ import annotations

from dataclasses import field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

from pydantic import TypeAdapter
from pydantic import dataclasses as wire

from flowkit.limits import CARRIED_STATE_BYTES
from flowkit.models import NodeState, Opened, Rerun, SkipReason, StatusChange, StoredGraph
from flowkit.models.actions import RERUN, ActionState
from flowkit.models.columns import pack, status_column, statuses_of, unpack
from flowkit.workflows.payloads import json_size, truncate_longest

if TYPE_CHECKING:
    from collections.abc import Sequence

STORED_GRAPH = "stored_graph"
"""Key of the reference to a stored graph, in the input of a task and in the state that one run hands over
to the next."""

Columns = dict[str, Any]
"""The states of all nodes: for each field of `NodeState`, a list or text with the values in the order of the nodes."""

_REASON_LETTERS: dict[SkipReason | None, str] = {
    None: "-",
    SkipReason.ROUTING: "r",
    SkipReason.CONDITION: "c",
    SkipReason.UPSTREAM_FAILED: "u",
    SkipReason.TASK_FAILED: "f",
    SkipReason.TASK_CANCELLED: "k",
    SkipReason.USER: "m",
}
_RESULT_LETTERS = {None: "-", False: "f", True: "t"}
_RESULT_BY_LETTER = {letter: result for result, letter in _RESULT_LETTERS.items()}
_REASON_BY_LETTER = {letter: reason for reason, letter in _REASON_LETTERS.items()}

_COUNTS = ("epoch", "generation", "first_epoch", "failures", "losses", "settled", "yields", "failed_batches")
_FLAGS = ("free", "streamed", "ordinary", "evaluated", "kept")
_TIMES = ("next_retry_at", "deadline_at", "retry_left", "deadline_left", "held_until", "waits_since")
_TEXTS = ("last_error", "reason_code")
_TEXT_OVERHEAD_BYTES = len('"",')


@wire.dataclass(kw_only=True, slots=True)
class TaskState:
    """The complete state of a task that one run of its workflow hands over to the next."""

    params: dict[str, Any]
    graph: dict[str, Any]
    opened: Opened
    nodes: list[NodeState]
    status_history: list[StatusChange]
    status_history_omitted: int = 0
    """Number of entries dropped from the middle of `status_history`."""
    actions: ActionState = field(default_factory=ActionState)
    stored: StoredGraph | None = None
    """Where graph and params are stored, if `create_task` stored them. The next run reads them again."""
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    """For each role, the versions that have run its attempts, each with the worker that was the first to run it."""
    rerun: Rerun | None = None
    """What starts again in an ended task. Only in its first run."""
    pins: dict[str, str] = field(default_factory=dict)
    """For each role, the version that the task has fixed, as far as the workflow knows; the document has them all."""
    recorded_at: float = 0.0
    """Time of the latest record for the document."""


def is_state(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether `value` is a state that `encode_state` returned, and not the input of a new task."""
    return isinstance(value, dict) and "opened" in value


def is_stored(given: object) -> TypeGuard[dict[str, Any]]:
    """Return whether the input of a task refers to a stored graph."""
    return isinstance(given, dict) and isinstance(given.get(STORED_GRAPH), dict)


def input_of(stored: StoredGraph) -> dict[str, Any]:
    """Return the input with which `create_task` starts a task whose graph is stored."""
    return {STORED_GRAPH: TypeAdapter(StoredGraph).dump_python(stored)}


def rerun_input(stored: StoredGraph, rerun: Rerun) -> dict[str, Any]:
    """Return the input with which a client starts an ended task again."""
    return {**input_of(stored), RERUN: TypeAdapter(Rerun).dump_python(rerun)}


def rerun_in(given: dict[str, Any]) -> Rerun | None:
    """Return what starts again, if an input for which `is_stored` is true continues an ended task."""
    return TypeAdapter(Rerun).validate_python(given[RERUN]) if RERUN in given else None


def stored_in(given: dict[str, Any]) -> StoredGraph:
    """Return the reference in an input or a state for which `is_stored` is true."""
    return TypeAdapter(StoredGraph).validate_python(given[STORED_GRAPH])


def encode_state(state: TaskState) -> dict[str, Any]:
    """Return `state` as input of the next run, in at most CARRIED_STATE_BYTES plus the size of graph and params.

    If graph and params are stored, the result only refers to them.
    """
    carried = {
        "opened": _opened_adapter().dump_python(replace(state.opened, epochs=[]), mode="json"),
        "status_history": [[change.from_, change.to, change.at] for change in state.status_history],
        "status_history_omitted": state.status_history_omitted,
        "recorded_at": state.recorded_at,
        **({"versions": state.versions} if state.versions else {}),
        **({"pins": state.pins} if state.pins else {}),
    }
    if state.actions.applied:
        carried["actions"] = _actions_adapter().dump_python(state.actions, mode="json")
    remaining = CARRIED_STATE_BYTES - json_size(carried)
    if state.stored is None:
        task = {"task": pack({"graph": state.graph, "params": state.params})}
    else:
        task = input_of(state.stored)
    return {**carried, **task, "nodes": pack(columns_of(state.nodes, remaining))}


def parse_state(value: dict[str, Any], task: dict[str, Any] | None = None) -> TaskState:
    """Decode the state that the previous run of the task handed over.

    `task` is the stored graph and params, if the state refers to them.
    """
    stored = stored_in(value) if is_stored(value) else None
    return TaskState(
        **(unpack(value["task"]) if stored is None else task or {}),
        stored=stored,
        opened=_opened_adapter().validate_python(value["opened"]),
        nodes=states_of(unpack(value["nodes"])),
        status_history=[StatusChange(from_=from_, to=to, at=at) for from_, to, at in value["status_history"]],
        status_history_omitted=value["status_history_omitted"],
        versions=value.get("versions", {}),
        actions=_actions_adapter().validate_python(value.get("actions", {})),
        pins=value.get("pins", {}),
        recorded_at=value.get("recorded_at", 0.0),
    )


@cache
def _opened_adapter() -> TypeAdapter[Opened]:
    return TypeAdapter(Opened)


@cache
def _actions_adapter() -> TypeAdapter[ActionState]:
    return TypeAdapter(ActionState)


def columns_of(states: Sequence[NodeState], limit: int) -> Columns:
    """Encode the nodes' states as columns, one for each field that any node has set.

    A table holds each text once, and the columns refer to its entries by position, counted from 1. Texts are truncated
    so that the result has at most `limit` bytes of JSON.
    """
    columns: Columns = {"status": status_column(state.status for state in states)}
    for name in _COUNTS:
        _add_column(columns, name, [getattr(state, name) for state in states])
    for name in _FLAGS:
        flags = [getattr(state, name) for state in states]
        _add_column(columns, name, flags, "".join("01"[flag] for flag in flags))
    for name in _TIMES:
        _add_column(columns, name, [getattr(state, name) or 0 for state in states])
    if any(state.skip_reason for state in states):
        columns["skip_reason"] = "".join(_REASON_LETTERS[state.skip_reason] for state in states)
    if any(state.condition is not None for state in states):
        columns["condition"] = "".join(_RESULT_LETTERS[state.condition] for state in states)
    _add_column(columns, "edges", [_signed(state.edges) for state in states])
    table: dict[str, int] = {}
    for name in _TEXTS:
        _add_column(columns, name, [_text_position(table, getattr(state, name)) for state in states])
    if table:
        columns["texts"] = []
        columns["texts"] = truncate_longest(
            list(table), limit - json_size(columns) - _TEXT_OVERHEAD_BYTES * len(table)
        )
    return columns


def _signed(edges: dict[int, bool]) -> list[int]:
    """Return the results of edges as positions of parents, counted from 1, with a minus sign for a false one."""
    return [parent + 1 if result else -parent - 1 for parent, result in edges.items()]


def _unsigned(edges: Sequence[int]) -> dict[int, bool]:
    return {abs(position) - 1: position > 0 for position in edges}


def _add_column(columns: Columns, name: str, values: list[Any], encoded: str | None = None) -> None:
    """Add a column if any node has a value."""
    if any(values):
        columns[name] = values if encoded is None else encoded


def _text_position(table: dict[str, int], text: str | None) -> int:
    """Return the position of `text` in `table`, counted from 1, and add it if it is new. 0 for no text."""
    return table.setdefault(text, len(table) + 1) if text else 0


def states_of(columns: Columns) -> list[NodeState]:
    """Decode the nodes' states from `columns`."""
    states = [NodeState(status=status) for status in statuses_of(columns["status"])]
    for name in _COUNTS:
        _set_column(states, name, columns.get(name, ()))
    for name in _FLAGS:
        _set_column(states, name, [digit == "1" for digit in columns.get(name, "")])
    for name in _TIMES:
        _set_column(states, name, [at or None for at in columns.get(name, ())])
    _set_column(
        states, "skip_reason", [_REASON_BY_LETTER[letter] for letter in columns.get("skip_reason", "")]
    )
    _set_column(states, "condition", [_RESULT_BY_LETTER[letter] for letter in columns.get("condition", "")])
    _set_column(states, "edges", [_unsigned(edges) for edges in columns.get("edges", ())])
    texts = [None, *columns.get("texts", ())]
    for name in _TEXTS:
        _set_column(states, name, [texts[position] for position in columns.get(name, ())])
    return states


def _set_column(states: list[NodeState], name: str, values: Sequence[Any]) -> None:
    for state, value in zip(states, values, strict=False):
        setattr(state, name, value)
