"""The actions, one row each, and how the input of an action is read. Pure.

From a row follow the update of the workflow with its validator, the checks of its input, and what the query
`preview` and the client accept. The signature of the coordinator's method and of the command stand where
they are called.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from flowkit.actions.plans import (
    Plan,
    TaskSnapshot,
    check_starts,
    plan_batches,
    plan_decision,
    plan_end,
    plan_graph_change,
    plan_pause,
    plan_resume,
    plan_retry,
    plan_satisfaction,
)
from flowkit.actions.preconditions import DIGEST_CHARS, check_revision, check_state
from flowkit.actions.records import (
    CHANGE_GRAPH,
    COMPLETE_NODE,
    DECIDE,
    FAIL_NODE,
    PAUSE,
    RESUME,
    RETRY_BATCHES,
    RETRY_NODE,
    SATISFY,
    SKIP_BATCHES,
    SKIP_NODE,
    Action,
    ChangeGraph,
    CompleteNode,
    Decide,
    FailNode,
    Pause,
    Resume,
    RetryBatches,
    RetryNode,
    Satisfy,
    SkipBatches,
    SkipNode,
)
from flowkit.actions.scopes import SCOPE_FORMS
from flowkit.errors import ActionRejected, RejectionCause
from flowkit.graph.changes import CHANGEABLE
from flowkit.graph.field_checks import json_bytes, node_field_problems
from flowkit.limits import (
    ACTION_BATCHES,
    ACTION_INPUT_BYTES,
    ACTION_SCOPES,
    ACTION_TEXT_CHARS,
    BATCH_UID_CHARS,
    GRAPH_CHANGE_BYTES,
    ID_CHARS,
)
from flowkit.models import APPROVE, REJECT
from flowkit.protocol.messages import FINAL_UID
from flowkit.text import clean, printed, suggestion
from flowkit.validation.values import batch_uid_problem, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_LARGEST_REVISION = 2**31 - 1
_DIGEST = re.compile(f"[0-9a-f]{{{DIGEST_CHARS}}}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionKind:
    """An action."""

    name: str
    """The name of the action, which is also the name of its update."""
    record: type[Action]
    """Its input. `_CHECKS` has the check of each field."""
    plan: Callable[[Any, TaskSnapshot], Plan]
    """Decides what an action of this kind changes in a task."""
    description: str
    """The description of the update, which Temporal's tools show."""


ACTIONS: Final[Mapping[str, ActionKind]] = {
    kind.name: kind
    for kind in (
        ActionKind(
            name=PAUSE,
            record=Pause,
            plan=plan_pause,
            description="Start nothing new in `scopes`: task, node:ID, below:ID or role:NAME. "
            "Running attempts finish, or stop with interrupt. "
            'Input: {"scopes": ["task"], "interrupt": false, "reason": "", "by": ""}',
        ),
        ActionKind(
            name=RESUME,
            record=Resume,
            plan=plan_resume,
            description='End the pause of `scopes`, or of all. Input: {"scopes": [], "reason": "", "by": ""}',
        ),
        ActionKind(
            name=RETRY_NODE,
            record=RetryNode,
            plan=plan_retry,
            description="Start a node again that has ended, is held or, with interrupt, runs, and what "
            "depends on it; or end its wait for a retry. "
            'Input: {"node_id": "a", "input_inline": {"limit": 5}, "interrupt": false, "reason": "", "by": ""}',
        ),
        ActionKind(
            name=SKIP_NODE,
            record=SkipNode,
            plan=plan_end,
            description='End a node as skipped. Input: {"node_id": "a", "interrupt": false, "reason": "", "by": ""}',
        ),
        ActionKind(
            name=COMPLETE_NODE,
            record=CompleteNode,
            plan=plan_end,
            description="End a node as finished, with these results. "
            'Input: {"node_id": "a", "metrics": {}, "batches": [{"batch_uid": "1", "metrics": {}}], '
            '"reason": "", "by": ""}',
        ),
        ActionKind(
            name=FAIL_NODE,
            record=FailNode,
            plan=plan_end,
            description='End a node as failed. Input: {"node_id": "a", "interrupt": false, "reason": "", "by": ""}',
        ),
        ActionKind(
            name=RETRY_BATCHES,
            record=RetryBatches,
            plan=plan_batches,
            description="Run a node again that has ended or is held, to try batches again that it has set aside. "
            'Input: {"node_id": "a", "batch_uids": [], "interrupt": false, "reason": "", "by": ""}',
        ),
        ActionKind(
            name=SKIP_BATCHES,
            record=SkipBatches,
            plan=plan_batches,
            description="Accept that batches are missing that a node has set aside. "
            'Input: {"node_id": "a", "batch_uids": [], "reason": "", "by": ""}',
        ),
        ActionKind(
            name=DECIDE,
            record=Decide,
            plan=plan_decision,
            description="Decide about a node of the type approval. "
            'Input: {"node_id": "a", "decision": "approve", "comment": "", "by": ""}; the other decision is reject',
        ),
        ActionKind(
            name=SATISFY,
            record=Satisfy,
            plan=plan_satisfaction,
            description="Fulfil a prerequisite of nodes, also before they are reached. "
            'Input: {"prerequisite": "data:eu", "reason": "", "by": ""}',
        ),
        ActionKind(
            name=CHANGE_GRAPH,
            record=ChangeGraph,
            plan=plan_graph_change,
            description="Add nodes to the graph, and change nodes that have not started. Input: "
            '{"nodes": [{"node_id": "b", "type": "load", "depends_on": ["a"]}], "changes": {"c": {"timeout_sec": 60}}, '
            '"reason": "", "by": ""}',
        ),
    )
}
"""The actions by name, in the order in which pages and errors list them."""

_KIND_OF: Final = {kind.record: kind for kind in ACTIONS.values()}


def plan(action: Action, task: TaskSnapshot) -> Plan:
    """Return what an action changes in a task.

    Raise ActionRejected, which says what would be allowed, if the action changes nothing or does not fit
    the task, or if the task, or a node that the action affects, is no longer as the action expects.
    """
    check_revision(action, task)
    planned = _KIND_OF[type(action)].plan(action, task)
    check_starts(planned, task)
    check_state(action.if_state, planned, task)
    return planned


def parse_action(name: str, given: object) -> Action:
    """Return the action with this name. Raise ActionRejected, which names the field, its value and what is allowed."""
    kind = ACTIONS.get(name)
    if kind is None:
        raise ActionRejected(
            f"there is no action {printed(name)}; the actions are {', '.join(ACTIONS)}",
            RejectionCause.INVALID,
        )
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise ActionRejected(
            f"the input of {name} is {printed(given)}; it must be an object such as {_EXAMPLE}",
            RejectionCause.INVALID,
        )
    known = [each.name for each in fields(kind.record)]
    values = {key: _read_field(name, key, value, known) for key, value in given.items() if value is not None}
    for key in ("node_id", "decision", "prerequisite"):
        if key in known and key not in values:
            raise ActionRejected(
                f"{name} needs {key}, which must be {_CHECKS[key](None)}", RejectionCause.INVALID
            )
    return kind.record(**values)


def _read_field(name: str, key: str, value: object, known: Sequence[str]) -> Any:
    if key not in known:
        hint = suggestion(key, known) or f"; {name} takes {', '.join(known)}"
        raise ActionRejected(f"{name} has the unknown field {printed(key)}{hint}", RejectionCause.INVALID)
    if problem := _CHECKS[key](value):
        raise ActionRejected(
            f"{name}: {key} is {printed(value)}; it must be {problem}", RejectionCause.INVALID
        )
    return _normalize(value)


def _normalize(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, (list, tuple)):
        return tuple(clean(each) if isinstance(each, str) else each for each in value)
    return value


_EXAMPLE = '{"reason": "..."}'


def _check_text(value: object) -> str | None:
    good = isinstance(value, str) and len(value) <= ACTION_TEXT_CHARS
    return None if good else f"a text of at most {ACTION_TEXT_CHARS:,} characters"


def _check_scopes(value: object) -> str | None:
    listed: Sequence[object] = value if isinstance(value, (list, tuple)) else [None]
    good = len(listed) <= ACTION_SCOPES and all(isinstance(each, str) for each in listed)
    return None if good else f"a list of at most {ACTION_SCOPES} of {SCOPE_FORMS}"


def _check_flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _check_revision(value: object) -> str | None:
    good = value is None or is_whole(value, 0, _LARGEST_REVISION)
    return None if good else "the revision that `flowkit status` and the query `status` show, a whole number"


def _check_state(value: object) -> str | None:
    good = value is None or (isinstance(value, str) and _DIGEST.fullmatch(value) is not None)
    return (
        None
        if good
        else f"the `state` that a preview of the action returns, {DIGEST_CHARS} hexadecimal digits"
    )


def _check_node_id(value: object) -> str | None:
    good = isinstance(value, str) and 1 <= len(value) <= ID_CHARS
    return None if good else "the id of a node of the task"


def _check_prerequisite(value: object) -> str | None:
    good = isinstance(value, str) and 1 <= len(value) <= ID_CHARS
    return None if good else f"a prerequisite, a text of 1 to {ID_CHARS} characters"


def _check_decision(value: object) -> str | None:
    return None if value in (APPROVE, REJECT) else f"{APPROVE!r} or {REJECT!r}"


def _check_object(value: object) -> str | None:
    good = value is None or (isinstance(value, dict) and json_bytes(value) <= ACTION_INPUT_BYTES)
    return None if good else f"an object of at most {ACTION_INPUT_BYTES:,} bytes of JSON"


def _check_batches(value: object) -> str | None:
    listed: Sequence[object] = value if isinstance(value, (list, tuple)) else [None]
    uids = [each.get("batch_uid") for each in listed if isinstance(each, dict) and _is_batch(each)]
    good = len(uids) == len(listed) <= ACTION_BATCHES and len({*uids}) == len(uids)
    if good and json_bytes([*listed]) <= ACTION_INPUT_BYTES:
        return None
    return (
        f"a list of at most {ACTION_BATCHES:,} objects with a 'batch_uid' of 1 to {BATCH_UID_CHARS} "
        f"characters, without NUL, that no other has and that is not {FINAL_UID!r}, 'metrics' and optionally "
        f"'artifacts_ref', and of at most {ACTION_INPUT_BYTES:,} bytes of JSON"
    )


def _check_batch_uids(value: object) -> str | None:
    listed: Sequence[object] = value if isinstance(value, (list, tuple)) else [None]
    good = len(listed) <= ACTION_BATCHES and all(
        isinstance(each, str) and 1 <= len(each) <= BATCH_UID_CHARS for each in listed
    )
    if good and json_bytes([*listed]) <= ACTION_INPUT_BYTES:
        return None
    return (
        f"a list of at most {ACTION_BATCHES:,} batch uids, as `flowkit batches --failed` shows them, and of at most "
        f"{ACTION_INPUT_BYTES:,} bytes of JSON; leave it out for all batches that are set aside"
    )


def _is_batch(given: dict[str, Any]) -> bool:
    uid, ref = given.get("batch_uid"), given.get("artifacts_ref")
    named = batch_uid_problem(uid) is None
    is_known = given.keys() <= {"batch_uid", "metrics", "artifacts_ref"}
    return named and is_known and isinstance(given.get("metrics", {}), dict) and isinstance(ref, dict | None)


def _check_nodes(value: object) -> str | None:
    listed: Sequence[object] = value if isinstance(value, (list, tuple)) else [None]
    good = all(isinstance(each, dict) and _check_node_id(each.get("node_id")) is None for each in listed)
    if good and json_bytes([*listed]) <= GRAPH_CHANGE_BYTES:
        return None
    return f"a list of nodes as in a graph, each with a 'node_id', of at most {GRAPH_CHANGE_BYTES:,} bytes of JSON"


def _check_edges(value: object) -> str | None:
    listed: Sequence[object] = value if isinstance(value, (list, tuple)) else [None]
    good = all(isinstance(each, (list, tuple)) and len(each) == len(("from", "to")) for each in listed)
    if good and json_bytes([*listed]) <= GRAPH_CHANGE_BYTES:
        return None
    return f"a list of [from, to] pairs of node ids, of at most {GRAPH_CHANGE_BYTES:,} bytes of JSON"


def _check_edges_ex(value: object) -> str | None:
    listed: Sequence[object] = value if isinstance(value, (list, tuple)) else [None]
    good = all(isinstance(each, dict) and {"from", "to"} <= each.keys() for each in listed)
    if good and json_bytes([*listed]) <= GRAPH_CHANGE_BYTES:
        return None
    return f"a list of objects with 'from' and 'to', of at most {GRAPH_CHANGE_BYTES:,} bytes of JSON"


def _check_changes(value: object) -> str | None:
    good = isinstance(value, dict) and all(
        isinstance(patch, dict) and patch and patch.keys() <= {*CHANGEABLE} for patch in value.values()
    )
    if good and json_bytes(value) <= GRAPH_CHANGE_BYTES:
        return None
    return (
        f"an object that has, by node id, new values of {', '.join(CHANGEABLE[:-1])} or {CHANGEABLE[-1]}, and at most "
        f"{GRAPH_CHANGE_BYTES:,} bytes of JSON"
    )


def _check_time_limit(value: object) -> str | None:
    return _check_node_field("timeout_sec", value)


def _check_retry_policy(value: object) -> str | None:
    return _check_node_field("retry_policy", value)


def _check_node_field(name: str, value: object) -> str | None:
    """Return what a field of a node must be, as the validation of graphs words it."""
    problem = None if value is None else next(node_field_problems(name, value), None)
    return None if problem is None else f"valid: {problem}"


_CHECKS: Mapping[str, Callable[[object], str | None]] = {
    "node_id": _check_node_id,
    "input_inline": _check_object,
    "input_ref": _check_object,
    "timeout_sec": _check_time_limit,
    "retry_policy": _check_retry_policy,
    "metrics": _check_object,
    "artifacts_ref": _check_object,
    "batches": _check_batches,
    "batch_uids": _check_batch_uids,
    "decision": _check_decision,
    "comment": _check_text,
    "prerequisite": _check_prerequisite,
    "nodes": _check_nodes,
    "edges": _check_edges,
    "edges_ex": _check_edges_ex,
    "changes": _check_changes,
    "scopes": _check_scopes,
    "interrupt": _check_flag,
    "reason": _check_text,
    "by": _check_text,
    "if_revision": _check_revision,
    "if_state": _check_state,
}
