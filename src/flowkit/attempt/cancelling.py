"""Handles a cancel flag in a task document, so that Temporal learns of every cancel.

If the workflow set the flag, Temporal is about to deliver the cancel. If another client wrote the flag into the
document, the attempt sends a cancel request to Temporal. If Temporal does not cancel an attempt that must stop, the
attempt yields. The workflow retries it later and shows the reason in the task document.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio import activity
from temporalio.service import RPCError

from flowkit import reason_codes
from flowkit.attempt.failures import not_now
from flowkit.text import clean, error_text

if TYPE_CHECKING:
    from flowkit.adapters.tasks.cancel_flags import CancelFlag
    from flowkit.models import AttemptFailure, AttemptInput

_logger = logging.getLogger("flowkit.worker")

_RPC_TIMEOUT = timedelta(seconds=10)


async def request_cancel(attempt: AttemptInput, flag: CancelFlag) -> AttemptFailure | None:
    """Request that Temporal cancel the attempt's own run, unless the workflow itself set the flag.

    Return the failure of the attempt if Temporal rejects the request, otherwise None.
    """
    if flag.run_id is not None:
        return None
    try:
        await _cancel_own_run(attempt.task_id, flag.reason)
    except (RPCError, RuntimeError) as error:
        why = error_text(error)
        _logger.warning(
            "task %s has a cancel flag, but Temporal rejects the cancel request: %s", attempt.task_id, why
        )
        text = (
            f"coordinator.cancelled is set in the task document, but Temporal rejected the cancel of the "
            f"workflow ({why}): allow this worker to cancel workflows, or unset the flag"
        )
        return not_now(reason_codes.CANCEL_REFUSED, text)
    return None


async def _cancel_own_run(task_id: str, reason: str) -> None:
    run = activity.client().get_workflow_handle(task_id, run_id=activity.info().workflow_run_id)
    await run.cancel(reason=clean(reason), rpc_timeout=_RPC_TIMEOUT)


def pending(flag: CancelFlag) -> AttemptFailure:
    """Return the failure of an attempt that stopped because of a cancel flag before Temporal cancelled it."""
    raised_by = "the task document" if flag.run_id is None else f"run {flag.run_id} of the workflow"
    return not_now(
        reason_codes.CANCEL_PENDING,
        f"cancel requested by {raised_by} ({flag.reason}); Temporal has not cancelled the attempt yet",
    )
