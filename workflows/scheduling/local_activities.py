"""Decide which attempts run as local activities, inside the engine, and for how long. Pure.

While a local activity runs, the server receives no commands of the workflow, and the workflow receives no cancel
requests. Local activities that follow each other without a break form a streak. It begins and ends within one workflow
task (an activation of the workflow by the server), so it also ends when the workflow waits for anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from flowkit.models import Node, NodeState
    from flowkit.workflows.scheduling.streams import Streams

MAX_START_SEC = 1.0
"""Age of a streak at which no further local activity starts."""

MAX_END_SEC = 2.0
"""Age of a streak at which its last local activity times out; also the longest time that an inline attempt has."""


MAX_BEGIN_SEC = 5.0
"""Age of a workflow task at which no local activity may begin.

It is half of Temporal's usual timeout of a workflow task. After that timeout, another engine runs the workflow, and an
engine that was frozen meanwhile would run local activities of a state that is outdated.
"""


def is_local_function(node: Node, state: NodeState, *, functions: Collection[str]) -> bool:
    """Return whether a node calls one of the built-in `functions`, which may run inside the engine."""
    return node.is_function and node.io.fn in functions and not state.ordinary


def is_inline(node: Node, state: NodeState, *, roles: Collection[str], streams: Streams) -> bool:
    """Return whether attempts of a node may run inside the engine, which hosts `roles`.

    A node that pulls or streams waits for other nodes. A node on which others stream must start them while it runs, and
    a node that fell back before is too slow, or its engine does not host the role.
    """
    return (
        node.type in roles
        and not node.is_function
        and not state.ordinary
        and not node.pulls
        and not node.streams_from
        and not streams.children(node.index)
    )


class Streak:
    """The local activities that follow each other in a workflow task, and what must wait for their end."""

    def __init__(self) -> None:
        self._workflow_task = -1
        """Length of the history in the workflow task to which the other fields apply."""
        self._entered_at = 0.0
        """Time at which the workflow task began, by the server's clock."""
        self._began_at: float | None = None
        """Time at which the streak began; None without one."""
        self._ordinary = False
        """Whether a command for an ordinary activity waits for the end of the workflow task, or is about to."""

    def enter(self, workflow_task: int, now: float) -> None:
        """Set the current workflow task. A new one begins without a streak.

        Call this before the first local activity of each workflow task, because that one changes the workflow's time.
        """
        if workflow_task != self._workflow_task:
            self._workflow_task, self._entered_at = workflow_task, now
            self._began_at, self._ordinary = None, False

    def begin_by(self, task_timeout_sec: float) -> float:
        """Return the time after which no attempt may begin. The server's timeout of a workflow task limits it."""
        return self._entered_at + min(MAX_BEGIN_SEC, task_timeout_sec / 2)

    def hold_for_ordinary(self) -> None:
        """Start no further local activity in this workflow task, because it would delay an ordinary activity."""
        self._ordinary = True

    @property
    def delays_ordinary(self) -> bool:
        """Whether a local activity that starts now would delay an ordinary one."""
        return self._ordinary

    def is_over(self, now: float) -> bool:
        """Return whether the streak is so old that the next attempt must wait for the next workflow task."""
        return self._began_at is not None and now - self._began_at >= MAX_START_SEC

    def start(self, now: float) -> float:
        """Count a local activity that starts now. Return the seconds after which it times out."""
        if self._began_at is None:
            self._began_at = now
        return MAX_END_SEC - (now - self._began_at)
