"""Create a task of the demo, follow it to its end, and cancel it if the demo is interrupted."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from temporalio.client import WorkflowFailureError, WorkflowQueryFailedError
from temporalio.exceptions import CancelledError, FailureError
from temporalio.service import RPCError

from code_index.errors import DemoError
from code_index.flow import flow
from code_index.progress import ProgressReader
from flowkit import Coordinator, CoordinatorConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from temporalio.client import Client, WorkflowHandle

    from code_index.flow import Params
    from code_index.progress import Progress

POLL_SECONDS = 0.2
MAX_POLL_SHARE = 0.2
"""Upper limit for the share of time spent on reading progress, which is slow for a large task."""
MAX_POLL_SECONDS = 2.0
"""Upper limit for the time between two reads, also after one that failed when its time was up."""
CANCEL_TIMEOUT_SECONDS = 5.0


class IndexTask:
    """A task of the demo. Its Coordinator is not started, because the engine runs in its own process."""

    def __init__(self, client: Client, db: Any, task_id: str, queue: str) -> None:
        self._task_id = task_id
        self._coordinator = Coordinator(db=db, cfg=CoordinatorConfig(queue=queue), client=client)
        self._handle: WorkflowHandle[Any, Any] = client.get_workflow_handle(task_id)
        self._reader = ProgressReader(self._handle, db)

    async def create(self, params: Params) -> None:
        """Start the task."""
        await flow.submit(self._coordinator, params, task_id=self._task_id)

    async def follow(
        self, on_progress: Callable[[Progress], Awaitable[None]], check: Callable[[], None]
    ) -> None:
        """Call `check` and `on_progress` until the task has finished; if one of them raises, cancel the task.

        Raises DemoError with the reason if the task does not finish.
        """
        end = asyncio.create_task(self._handle.result())
        try:
            while not end.done():
                check()
                since = time.monotonic()
                await self._report(on_progress)
                took = time.monotonic() - since
                pause = min(MAX_POLL_SECONDS, max(POLL_SECONDS, took / MAX_POLL_SHARE))
                await asyncio.wait([end], timeout=pause)
            await self._report(on_progress)
            end.result()
        except WorkflowFailureError as error:
            raise DemoError(_why(error)) from error
        except BaseException:
            await self._cancel()
            raise
        finally:
            end.cancel()

    async def _report(self, on_progress: Callable[[Progress], Awaitable[None]]) -> None:
        # A query fails until an engine has started the task; the next one succeeds.
        with suppress(RPCError, WorkflowQueryFailedError):
            await on_progress(await self._reader.read())

    async def _cancel(self) -> None:
        """Cancel the task and wait for its end, so that the next engine does not continue it."""
        with suppress(RPCError, WorkflowFailureError, TimeoutError):
            async with asyncio.timeout(CANCEL_TIMEOUT_SECONDS):
                await self._coordinator.cancel_task(self._task_id, reason="demo_ended")
                await self._handle.result()


def _why(error: WorkflowFailureError) -> str:
    if isinstance(error.cause, CancelledError):
        return "the task was cancelled"
    reason = error.cause.message if isinstance(error.cause, FailureError) else str(error.cause)
    return f"the task failed: {reason}"
