"""The command `flowkit`, with shorter intervals, and with tasks whose start fails.

Other processes soon notice that it was killed: its sessions and its share of Kafka end early.
"""

from __future__ import annotations

import os
from typing import Any, Final

from flowkit.admission import dispatcher, queue
from flowkit.bridge.kafka import consumer
from flowkit.cli import main
from flowkit.client import TaskClient
from flowkit.connection import TemporalUnavailable
from flowkit.errors import GraphError

SESSION_MS = 6_000
"""The shortest session that a broker permits."""
RECONCILE_SEC = 1.0
REFUSED: Final = "-refused-"
"""Part of the ids of tasks that the rules of the engine do not allow."""
DELAYED: Final = "-delayed-"
"""Part of the ids of tasks for which Temporal is unavailable at their first start by a process."""
BROKEN: Final = "-broken-"
"""Part of the ids of tasks whose first start by a process raises an error that nobody expects."""


def let_starts_fail() -> None:
    """Make the starts fail that the ids of their tasks name."""
    start, tried = TaskClient.start_task, set[str]()

    async def start_or_fail(client: TaskClient, task_id: str, **given: Any) -> object:
        is_first = task_id not in tried
        tried.add(task_id)
        if REFUSED in task_id:
            raise GraphError(["the engine does not allow it"])
        if DELAYED in task_id and is_first:
            raise TemporalUnavailable("Temporal is unavailable")
        if BROKEN in task_id and is_first:
            raise LookupError("a bug")
        return await start(client, task_id, **given)

    setattr(TaskClient, start.__name__, start_or_fail)


if __name__ == "__main__":
    vars(queue)["SESSION_SEC"] = float(os.environ["ADMISSION_SESSION_SEC"])
    vars(dispatcher)["RECONCILE_SEC"] = RECONCILE_SEC
    vars(consumer)["_SESSION_MS"] = SESSION_MS
    let_starts_fail()
    main()
