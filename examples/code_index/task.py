"""One task: created, followed to its end, cancelled when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from temporalio.client import WorkflowFailureError, WorkflowQueryFailedError
from temporalio.exceptions import CancelledError, FailureError
from temporalio.service import RPCError

from code_index.errors import DemoError
from code_index.progress import Follower
from flowkit import Coordinator, CoordinatorConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from temporalio.client import Client, WorkflowHandle

    from code_index.progress import Progress

LOOK_EVERY_SECONDS = 0.2
LOOK_SHARE = 0.2
"""Of the time: a look at a large task takes long, and what it takes is missing elsewhere."""
CANCEL_PATIENCE_SECONDS = 5.0


class IndexTask:
    """A task of the demo; its Coordinator is not started, because the engine runs elsewhere."""

    def __init__(self, client: Client, db: Any, task_id: str, queue: str) -> None:
        self._task_id = task_id
        self._coordinator = Coordinator(db=db, cfg=CoordinatorConfig(queue=queue), client=client)
        self._handle: WorkflowHandle[Any, Any] = client.get_workflow_handle(task_id)
        self._follower = Follower(self._handle, db)

    async def create(self, graph: dict[str, Any]) -> None:
        """Start the task."""
        await self._coordinator.create_task(
            task_id=self._task_id, params={"pipeline_name": "code_index"}, graph=graph
        )

    async def follow(self, look: Callable[[Progress], Awaitable[None]], check: Callable[[], None]) -> None:
        """Let `look` see the task until it has finished, calling `check` in between; if one raises, cancel the task.

        A DemoError says why a task did not finish.
        """
        end = asyncio.create_task(self._handle.result())
        try:
            while not end.done():
                check()
                since = time.monotonic()
                await self._look(look)
                took = time.monotonic() - since
                await asyncio.wait([end], timeout=max(LOOK_EVERY_SECONDS, took / LOOK_SHARE))
            await self._look(look)
            end.result()
        except WorkflowFailureError as error:
            raise DemoError(_why(error)) from error
        except BaseException:
            await self._cancel()
            raise
        finally:
            end.cancel()

    async def _look(self, look: Callable[[Progress], Awaitable[None]]) -> None:
        # A query that comes before the first engine has seen the task fails; the next one will do.
        with suppress(RPCError, WorkflowQueryFailedError):
            await look(await self._follower.progress())

    async def _cancel(self) -> None:
        """Cancel the task and wait for its end, so that the next engine does not go on with it."""
        with suppress(RPCError, WorkflowFailureError, TimeoutError):
            async with asyncio.timeout(CANCEL_PATIENCE_SECONDS):
                await self._coordinator.cancel_task(self._task_id, reason="demo_ended")
                await self._handle.result()


def _why(error: WorkflowFailureError) -> str:
    if isinstance(error.cause, CancelledError):
        return "somebody cancelled the task"
    reason = error.cause.message if isinstance(error.cause, FailureError) else str(error.cause)
    return f"the task failed: {reason}"
