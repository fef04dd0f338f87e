"""Stop single nodes of a running task: set a node's cancel flag, cancel its attempt, and let the node fail."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from temporalio import workflow

from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from flowkit.models import AttemptFailure
    from flowkit.workflows.document import TaskDocument
    from flowkit.workflows.running_nodes import RunningNodes
    from flowkit.workflows.scheduling.scheduler import Scheduler

_FLAG_TIMEOUT_SEC = 1.0
"""How long an attempt continues until its cancel flag has reached MongoDB, from which it learns the cancel reason."""


class NodeStops:
    """Stops single nodes. The other nodes of the task continue, as far as its rules for failures allow."""

    def __init__(self, scheduler: Scheduler, nodes: RunningNodes, document: TaskDocument) -> None:
        self._scheduler = scheduler
        self._nodes = nodes
        self._document = document
        self._cancelling: set[asyncio.Task[None]] = set()

    def stop_node(self, index: int, failure: AttemptFailure, reason: str) -> None:
        """End a node with `failure` when its attempt has ended. `reason` is the cancel reason of the attempt.

        A node that waits, for example for its retry, ends at once.
        """
        state = self._scheduler.states[index]
        if state.status is NodeStatus.RUNNING:
            state.status = NodeStatus.CANCELLING
            self._document.write_node(index, cancel_reason=reason)
            cancelling = asyncio.create_task(self._cancel_when_flagged(index))
            self._cancelling.add(cancelling)
            cancelling.add_done_callback(self._cancelling.discard)
        self._nodes.stop(index, failure)

    async def _cancel_when_flagged(self, index: int) -> None:
        with suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self._document.is_idle,
                timeout=_FLAG_TIMEOUT_SEC,
                timeout_summary="let the cancel flag reach MongoDB",
            )
        self._nodes.cancel_attempt(index)
