"""Whether a task is still as the caller of an action has seen it. Pure.

A preview returns the revision of the task, and a digest of the nodes that the action affects. An action that carries
them is rejected once one of them differs: another action was applied, or a node has started, ended or been reset.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from flowkit.actions.inputs import DIGEST_CHARS
from flowkit.actions.plans import name_state
from flowkit.core.utils import dumps
from flowkit.errors import ActionRejected, RejectionCause
from flowkit.text import names, printed

if TYPE_CHECKING:
    from flowkit.actions.plans import Plan, TaskSnapshot
    from flowkit.actions.records import Action

_REMEDY = "look at what the action would affect now, then decide again"


def digest(*seen: object) -> str:
    """Return a digest of JSON values that a caller has seen."""
    return hashlib.sha256(dumps(seen)).hexdigest()[:DIGEST_CHARS]


def state_of(planned: Plan, task: TaskSnapshot) -> str:
    """Return the digest of the nodes that a plan affects: the status, epoch and generation of each."""
    return digest(task.run_seq, [_describe(index, task) for index in _affected(planned, task)])


def check_revision(action: Action, task: TaskSnapshot) -> None:
    """Raise ActionRejected if the task no longer has the revision that an action expects."""
    if action.if_revision is None or action.if_revision == task.revision:
        return
    since = [each for each in task.applied if each.revision > action.if_revision]
    applied = [f"{each.action} of {each.what}" + (f" by {each.by}" if each.by else "") for each in since]
    raise ActionRejected(
        f"if_revision is {action.if_revision}, and the task has revision {task.revision}: another action was applied "
        f"meanwhile{f' ({names(applied)})' if applied else ''}; {_REMEDY}",
        RejectionCause.OUTDATED,
    )


def check_state(if_state: str | None, planned: Plan, task: TaskSnapshot) -> None:
    """Raise ActionRejected if the nodes that a plan affects are no longer in the state that an action expects."""
    if if_state is None or if_state == state_of(planned, task):
        return
    now = [_phrase(index, task) for index in _affected(planned, task)]
    raise ActionRejected(
        f"if_state is {printed(if_state)}, and what the action affects has changed meanwhile: now "
        f"{names(now) if now else 'it affects no node that the task has'}; {_REMEDY}",
        RejectionCause.OUTDATED,
    )


def run_of(first_run_id: str | None) -> str:
    """Return the digest of the run of a task that a cancellation ends. None means that the task has not started."""
    return digest(first_run_id)


def check_run(if_state: str | None, first_run_id: str | None) -> None:
    """Raise ActionRejected if a cancellation expects another run of the task."""
    if if_state is not None and if_state != run_of(first_run_id):
        raise ActionRejected(
            f"if_state is {printed(if_state)}, and the task has started meanwhile; {_REMEDY}",
            RejectionCause.OUTDATED,
        )


def _affected(planned: Plan, task: TaskSnapshot) -> list[int]:
    """Return the nodes that a plan affects, without those that it adds."""
    return sorted({each.index for each in planned.changes if each.index < len(task.nodes)})


def _describe(index: int, task: TaskSnapshot) -> tuple[str, str, int, int]:
    node, state = task.nodes[index], task.states[index]
    return node.node_id, name_state(node, state), state.epoch, state.generation


def _phrase(index: int, task: TaskSnapshot) -> str:
    node_id, status, epoch, _ = _describe(index, task)
    return f"{node_id} is {status}" + (f" (attempt {epoch})" if epoch else "")
