"""The `Backfill` workflow keeps the activity alive that starts the tasks of a backfill and awaits their ends.

The state of a backfill is in MongoDB, so that the history stays short whatever the number of its nominal times.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from pydantic import TypeAdapter, ValidationError

    from flowkit import reason_codes
    from flowkit.models import temporal_names
    from flowkit.models.backfills import BackfillCounts, RunBackfill
    from flowkit.text import count_of, shell_command
    from flowkit.workflows.display.summaries import fit_summary
    from flowkit.workflows.engine_calls import HEARTBEAT_TIMEOUT

_LONGEST = timedelta(days=365)
_RETRIES = RetryPolicy(initial_interval=timedelta(seconds=0.2), maximum_interval=timedelta(seconds=10))


@workflow.defn(name=temporal_names.BACKFILL)
class Backfill:
    """Run one backfill until each of its nominal times has ended."""

    def __init__(self) -> None:
        self._is_woken = False
        """Whether tasks were chosen to start again since the activity began."""
        self._activity: workflow.ActivityHandle[BackfillCounts] | None = None

    @workflow.signal(name=temporal_names.WAKE_BACKFILL)
    def wake(self) -> None:
        """Run the activity once more after its end."""
        self._is_woken = True

    @workflow.run
    async def run(self, given: Any = None) -> BackfillCounts:
        """Return what has become of the nominal times. A cancel starts no more tasks, and awaits those that run."""
        backfill = _parse(given)
        workflow.set_current_details(_describe(backfill))
        body = asyncio.create_task(self._run_to_end(backfill))
        while not body.done():
            try:
                await workflow.wait([body])
            except asyncio.CancelledError:
                # It interrupts only this wait. The next call of the activity knows of it.
                if self._activity is not None:
                    self._activity.cancel()
        counts = body.result()
        workflow.set_current_details(f"{_describe(backfill)}\n\n{counts.text}")
        if _cancel_requested():
            raise asyncio.CancelledError
        return counts

    async def _run_to_end(self, backfill: RunBackfill) -> BackfillCounts:
        while True:
            self._is_woken = False
            counts = await self._call(replace(backfill, cancels=_cancel_requested()))
            if counts is not None and not self._is_woken:
                return counts

    async def _call(self, backfill: RunBackfill) -> BackfillCounts | None:
        """Return the result of the activity; None if a cancel has interrupted it."""
        self._activity = workflow.start_activity(
            temporal_names.RUN_BACKFILL,
            backfill,
            result_type=BackfillCounts,
            start_to_close_timeout=_LONGEST,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            retry_policy=_RETRIES,
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            summary=fit_summary(f"start the tasks of {backfill.schedule}, and await their ends"),
        )
        try:
            return await self._activity
        except ActivityError as error:
            if is_cancelled_exception(error):
                return None
            raise


def _cancel_requested() -> bool:
    return workflow.cancellation_reason() is not None


def _parse(given: Any) -> RunBackfill:
    """Return the input. Raise ApplicationError, which fails the workflow, if it is none of a backfill."""
    try:
        return TypeAdapter(RunBackfill).validate_python(given)
    except ValidationError:
        raise ApplicationError(
            "a backfill is started with `flowkit backfill create`; its workflow alone starts nothing",
            type=reason_codes.INVALID_CONFIG,
            non_retryable=True,
        ) from None


def _describe(backfill: RunBackfill) -> str:
    return (
        f"{count_of(backfill.total, 'nominal time')} of the schedule {backfill.schedule}; "
        f"`{shell_command('flowkit backfill status', backfill.backfill_id)}` shows what has become of them"
    )
