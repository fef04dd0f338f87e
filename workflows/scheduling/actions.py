"""Decide what an action changes in a running task, or why the task rejects it. Pure.

`parse_action` reads what a person or program has sent. `plan` returns what the action changes, for the states that the
nodes have now. The workflow applies a plan in the same workflow task in which it made it; the query `preview` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from flowkit.errors import ActionRejected
from flowkit.limits import (
    ACTION_AFFECTED,
    ACTION_SCOPES,
    ACTION_TEXT_CHARS,
    APPLIED_ACTIONS,
)
from flowkit.models import NodeStatus
from flowkit.models.actions import (
    ACTIONS,
    PAUSE,
    RESUME,
    TASK_SCOPE,
    Action,
    AppliedAction,
    Pause,
    PausedScope,
    Resume,
)
from flowkit.text import clean, names, printed, suggestion, truncate
from flowkit.validation.values import is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from flowkit.models import Node, NodeState

PAUSED = "paused"
"""What a plan calls the state of a paused node that runs no attempt."""

_LARGEST_REVISION = 2**31 - 1
_SCOPE_KINDS = ("node", "below", "role")
_SCOPE_FORMS = "'task', 'node:ID', 'below:ID' or 'role:NAME'"
_IN_FLIGHT = frozenset({NodeStatus.RUNNING, NodeStatus.CANCELLING})


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A node that an action affects: its state before and after, in words."""

    index: int
    from_: str
    to: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What an action changes."""

    what: str
    """What the action is about, for the audit."""
    changes: Sequence[Change] = ()
    notes: tuple[str, ...] = ()
    pauses: tuple[str, ...] = ()
    """Scopes that become paused."""
    resumes: frozenset[str] = frozenset()
    """Scopes whose pause ends."""
    interrupts: tuple[int, ...] = ()
    """Indexes of the nodes whose attempts are stopped."""


# --- reading an action ----------------------------------------------------------------------------------------------


def parse_action(name: str, given: object) -> Action:
    """Return the action with this name. Raise ActionRejected, which names the field, its value and what is allowed."""
    kind = _KINDS.get(name)
    if kind is None:
        raise ActionRejected(f"there is no action {printed(name)}; the actions are {', '.join(ACTIONS)}")
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise ActionRejected(
            f"the input of {name} is {printed(given)}; it must be an object such as {_EXAMPLE}"
        )
    known = [each.name for each in fields(kind)]
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            hint = suggestion(key, known) or f"; {name} takes {', '.join(known)}"
            raise ActionRejected(f"{name} has the unknown field {printed(key)}{hint}")
        if problem := _CHECKS[key](value):
            raise ActionRejected(f"{name}: {key} is {printed(value)}; it must be {problem}")
        values[key] = _normalize(value)
    return kind(**values)


def _normalize(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    return tuple(map(clean, value)) if isinstance(value, (list, tuple)) else value


_KINDS: Mapping[str, type[Action]] = {PAUSE: Pause, RESUME: Resume}
_EXAMPLE = '{"reason": "..."}'


def _check_text(value: object) -> str | None:
    good = isinstance(value, str) and len(value) <= ACTION_TEXT_CHARS
    return None if good else f"a text of at most {ACTION_TEXT_CHARS:,} characters"


def _check_scopes(value: object) -> str | None:
    listed: Sequence[object] = value if isinstance(value, (list, tuple)) else [None]
    good = len(listed) <= ACTION_SCOPES and all(isinstance(each, str) for each in listed)
    return None if good else f"a list of at most {ACTION_SCOPES} of {_SCOPE_FORMS}"


def _check_flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _check_revision(value: object) -> str | None:
    good = value is None or is_whole(value, 0, _LARGEST_REVISION)
    return None if good else "the revision that `flowkit status` and the query `status` show, a whole number"


_CHECKS: Mapping[str, Callable[[object], str | None]] = {
    "scopes": _check_scopes,
    "interrupt": _check_flag,
    "reason": _check_text,
    "by": _check_text,
    "if_revision": _check_revision,
}


# --- the nodes of a scope -------------------------------------------------------------------------------------------


def nodes_below(nodes: Sequence[Node], index: int) -> set[int]:
    """Return the nodes that depend on a node, directly or through others.

    A node depends on its parents, on the nodes from which it pulls, on the nodes that its function names, and on the
    nodes that route to it.
    """
    children = _children_of(nodes)
    found: set[int] = set()
    waiting = [index]
    while waiting:
        new = children[waiting.pop()] - found - {index}
        found |= new
        waiting += new
    return found


def _children_of(nodes: Sequence[Node]) -> list[set[int]]:
    index_of = {node.node_id: node.index for node in nodes}
    children: list[set[int]] = [set() for _ in nodes]
    for node in nodes:
        for source in (*node.depends_on, *node.pulls_from, *_list_function_sources(node)):
            if source in index_of:
                children[index_of[source]].add(node.index)
        children[node.index] |= {index_of[target] for target in (*node.on_success, *node.on_failure)}
    return children


def _list_function_sources(node: Node) -> Iterator[str]:
    """Yield the nodes that the arguments of a function name."""
    for name in ("from_nodes", "from_node", "node_id"):
        value = (node.io.fn_args or {}).get(name) if node.is_function else None
        yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str))


class Pauses:
    """The paused scopes of a task, and the nodes that start no attempt because of them."""

    def __init__(self, nodes: Sequence[Node], scopes: list[PausedScope]) -> None:
        """Continue with these scopes. The list changes in place, because it is part of the state of the task."""
        self._nodes = nodes
        self.scopes = scopes
        self._nodes_of: dict[str, Collection[int]] = {}
        """The nodes of each scope that was used."""
        self.held = self._find_held(each.scope for each in scopes)
        """The indexes of the nodes that must not start an attempt."""

    def _find_held(self, scopes: Iterable[str]) -> set[int]:
        return {index for scope in scopes for index in self.nodes_of(scope)}

    def nodes_of(self, scope: str) -> Collection[int]:
        """Return the indexes of the nodes in a scope. Raise ActionRejected if the task has no such scope."""
        if scope not in self._nodes_of:
            self._nodes_of[scope] = self._find_nodes(scope)
        return self._nodes_of[scope]

    def _find_nodes(self, scope: str) -> Collection[int]:
        if scope == TASK_SCOPE:
            return range(len(self._nodes))
        kind, colon, name = scope.partition(":")
        if not colon or kind not in _SCOPE_KINDS:
            raise ActionRejected(f"scopes has {printed(scope)}; a scope is {_SCOPE_FORMS}")
        if kind == "role":
            return self._nodes_of_role(scope, name)
        index = next((node.index for node in self._nodes if node.node_id == name), None)
        if index is None:
            hint = suggestion(name, (node.node_id for node in self._nodes))
            raise ActionRejected(
                f"scopes has {printed(scope)}, but the task has no node {printed(name)}{hint}"
            )
        if kind == "node":
            return (index,)
        below = nodes_below(self._nodes, index)
        if not below:
            raise ActionRejected(f"scopes has {printed(scope)}, but no node depends on {printed(name)}")
        return below

    def _nodes_of_role(self, scope: str, role: str) -> Collection[int]:
        found = [node.index for node in self._nodes if node.type == role]
        if not found:
            roles = sorted({node.type for node in self._nodes})
            raise ActionRejected(f"scopes has {printed(scope)}, but the roles of the task are {names(roles)}")
        return found

    @property
    def whole_task(self) -> bool:
        """Whether the whole task is paused, so that its deadline does not count."""
        return any(each.scope == TASK_SCOPE for each in self.scopes)

    def scope_of(self, index: int) -> PausedScope | None:
        """Return the earliest pause that holds a node."""
        return next((each for each in self.scopes if index in self.nodes_of(each.scope)), None)

    def held_with(self, more: Iterable[str]) -> set[int]:
        """Return the nodes that these scopes would hold in addition."""
        return self._find_held(more) - self.held

    def held_without(self, fewer: Collection[str]) -> set[int]:
        """Return the nodes that nothing would hold any more without these scopes."""
        rest = self._find_held(each.scope for each in self.scopes if each.scope not in fewer)
        return self.held - rest

    def change(self, more: Iterable[PausedScope], fewer: Collection[str]) -> None:
        """Pause the scopes `more`, and end the pause of the scopes `fewer`."""
        self.scopes[:] = [*(each for each in self.scopes if each.scope not in fewer), *more]
        self.held = self._find_held(each.scope for each in self.scopes)

    def drained(self, scope: str, in_flight: Collection[int]) -> bool:
        """Return whether no attempt of a scope is in flight. `in_flight` has the indexes of nodes with an attempt."""
        covered = self.nodes_of(scope)
        return not any(index in covered for index in in_flight)


# --- planning -------------------------------------------------------------------------------------------------------


def plan(action: Action, pauses: Pauses, states: Sequence[NodeState], revision: int) -> Plan:
    """Return what an action changes in a task with these states.

    Raise ActionRejected, which says what would be allowed, if the action changes nothing or does not fit the task, or if
    the task no longer has the revision that the action expects.
    """
    if action.if_revision is not None and action.if_revision != revision:
        raise ActionRejected(
            f"if_revision is {action.if_revision}, and the task has revision {revision}: another action was applied "
            "meanwhile; look at the task again, then repeat the action with its present revision"
        )
    if isinstance(action, Pause):
        return _plan_pause(action, pauses, states)
    return _plan_resume(action, pauses, states)


def _plan_pause(action: Pause, pauses: Pauses, states: Sequence[NodeState]) -> Plan:
    scopes = tuple(dict.fromkeys(action.scopes)) or (TASK_SCOPE,)
    known = {each.scope for each in pauses.scopes}
    new = tuple(scope for scope in scopes if scope not in known)
    if len(known) + len(new) > ACTION_SCOPES:
        raise ActionRejected(
            f"the task would have {len(known) + len(new)} paused scopes, and {ACTION_SCOPES} are allowed; resume some, or "
            "pause the whole task"
        )
    covered = {index for scope in scopes for index in pauses.nodes_of(scope)}
    running = sorted(index for index in covered if states[index].status is NodeStatus.RUNNING)
    interrupts = tuple(running) if action.interrupt else ()
    if not new and not interrupts:
        raise ActionRejected(
            f"{names(scopes)} {'is' if len(scopes) == 1 else 'are'} paused already; resume ends a pause, and "
            "interrupt=true stops attempts that still run"
        )
    held = pauses.held_with(new) | {*interrupts}
    open_nodes = [index for index in sorted(held) if not states[index].status.ended]
    if not open_nodes:
        raise ActionRejected(f"all nodes of {names(scopes)} have ended")
    in_flight = [index for index in open_nodes if states[index].status in _IN_FLIGHT]
    finish = [index for index in in_flight if index not in interrupts]
    notes = []
    if finish:
        notes.append(f"attempts that run until their end: {len(finish):,}; interrupt=true stops them")
    if interrupts:
        notes.append(
            f"attempts that stop, and run again after the pause without a retry: {len(interrupts):,}"
        )
    return Plan(
        what=", ".join(new or scopes),
        changes=[_paused(index, states[index], runs_on=index in finish) for index in open_nodes],
        notes=tuple(notes),
        pauses=new,
        interrupts=interrupts,
    )


def _paused(index: int, state: NodeState, *, runs_on: bool) -> Change:
    return Change(
        index=index,
        from_=state.status.value,
        to=f"{state.status.value}, then {PAUSED}" if runs_on else PAUSED,
    )


def _plan_resume(action: Resume, pauses: Pauses, states: Sequence[NodeState]) -> Plan:
    known = [each.scope for each in pauses.scopes]
    if not known:
        raise ActionRejected("nothing is paused, so there is nothing to resume; pause a scope first")
    for scope in action.scopes:
        if scope not in known:
            raise ActionRejected(f"scopes has {printed(scope)}, but the paused scopes are {', '.join(known)}")
    ends = frozenset(action.scopes or known)
    freed = pauses.held_without(ends)
    covered = {index for scope in ends for index in pauses.nodes_of(scope)}
    still = [index for index in covered - freed if not states[index].status.ended]
    rest = [scope for scope in known if scope not in ends]
    return Plan(
        what=", ".join(scope for scope in known if scope in ends),
        changes=[
            Change(index=index, from_=_held_name(states[index]), to=states[index].status.value)
            for index in sorted(freed)
            if not states[index].status.ended
        ],
        notes=(f"nodes that stay paused by {names(rest)}: {len(still):,}",) if still else (),
        resumes=ends,
    )


def _held_name(state: NodeState) -> str:
    return f"{state.status.value}, then {PAUSED}" if state.status in _IN_FLIGHT else PAUSED


# --- what was applied -----------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Audit:
    """The actions that were applied to a task: the latest APPLIED_ACTIONS of them, and their number."""

    entries: list[AppliedAction] = field(default_factory=list)
    """The list changes in place, because it is part of the state of the task."""

    @property
    def revision(self) -> int:
        """The number of actions that were applied."""
        return self.entries[-1].revision if self.entries else 0

    def find(self, update_id: str) -> AppliedAction | None:
        """Return the entry of an update that was applied before, in this run or in an earlier one."""
        return next((each for each in self.entries if each.update_id == update_id), None)

    def add(self, name: str, action: Action, planned: Plan, at: float, update_id: str) -> None:
        """Note an action that is applied now."""
        self.entries.append(
            AppliedAction(
                revision=self.revision + 1,
                action=name,
                at=at,
                by=action.by,
                reason=action.reason,
                what=truncate(planned.what, ACTION_TEXT_CHARS),
                affected=len(planned.changes),
                update_id=update_id,
            )
        )
        del self.entries[:-APPLIED_ACTIONS]


def result_of(planned: Plan, nodes: Sequence[Node], revision: int) -> dict[str, Any]:
    """Return the result of an action as JSON. It lists at most ACTION_AFFECTED nodes, and notes how many more there are."""
    shown, more = planned.changes[:ACTION_AFFECTED], len(planned.changes) - ACTION_AFFECTED
    return {
        "revision": revision,
        "affected": [
            {"node_id": nodes[each.index].node_id, "from": each.from_, "to": each.to} for each in shown
        ],
        "notes": [*planned.notes, *([f"and {more:,} more nodes"] if more > 0 else [])],
    }


def repeated_result(entry: AppliedAction) -> dict[str, Any]:
    """Return the result of an update whose id was applied before."""
    return {
        "revision": entry.revision,
        "affected": [],
        "notes": [f"this update was applied before, as revision {entry.revision}; it is not applied again"],
    }
