"""Signals of an attempt to its workflow: it has stored its first batch, or a shard has begun.

A signal only makes other nodes or shards start earlier. It therefore never fails an attempt.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from temporalio import activity
from temporalio.service import RPCError, RPCStatusCode
from tenacity import AsyncRetrying, retry_if_exception, wait_exponential_jitter

from flowkit.attempt.workflows import is_absent
from flowkit.core.user_code import error_text
from flowkit.models import FirstBatch, ShardStarted, temporal_names

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from temporalio.client import Client

    from flowkit.models import AttemptInput

_logger = logging.getLogger("flowkit.worker")

_RPC_TIMEOUT = timedelta(seconds=10)
_LONGEST_PAUSE_SEC = 5.0

_LAST_CHANCE_SEC = 5.0
"""How long an attempt that has ended waits for its signal. While Temporal is unavailable, its end cannot be
sent either."""

_FINAL = (RPCStatusCode.INVALID_ARGUMENT, RPCStatusCode.PERMISSION_DENIED)


class Signal(NamedTuple):
    """A signal of an attempt."""

    name: str
    content: object
    consequence: str
    """What follows if it cannot be sent, for the log."""


def first_batch_of(attempt: AttemptInput, run_id: str) -> Signal:
    """Return the signal that an attempt has stored its first batch."""
    content = FirstBatch(node_id=attempt.node_id, run_id=run_id, epoch=attempt.epoch)
    return Signal(
        temporal_names.FIRST_BATCH, content, "first batch; the nodes that stream from it start later"
    )


def shard_started(attempt: AttemptInput) -> Signal:
    """Return the signal that the attempt of a shard has begun."""
    content = ShardStarted(node_id=attempt.node_id, epoch=attempt.epoch)
    return Signal(temporal_names.SHARD_STARTED, content, "begin; further shards start when it has ended")


async def signal_first_batch(client: Client, attempt: AttemptInput, run_id: str) -> None:
    """Signal the workflow that an attempt has stored its first batch, as `send_signal` does."""
    await send_signal(client, attempt, run_id, first_batch_of(attempt, run_id))


async def send_signal(client: Client, attempt: AttemptInput, run_id: str, signal: Signal) -> None:
    """Signal the workflow. Try again until Temporal accepts the signal, or until the run of the workflow has ended.

    The signal addresses the run, so that it cannot reach a later run of the task.
    """
    run = client.get_workflow_handle(attempt.task_id, run_id=run_id)
    try:
        async for each in AsyncRetrying(
            retry=retry_if_exception(_is_transient),
            wait=wait_exponential_jitter(multiplier=0.1, max=_LONGEST_PAUSE_SEC),
            reraise=True,
        ):
            with each:
                await run.signal(signal.name, signal.content, rpc_timeout=_RPC_TIMEOUT)
    except (RPCError, RuntimeError) as error:
        level = logging.DEBUG if _is_moot(error) else logging.WARNING
        text = "node %s could not signal its %s: %s"
        _logger.log(level, text, attempt.node_id, signal.consequence, error_text(error))


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, RPCError) and error.status not in _FINAL and not is_absent(error)


def _is_moot(error: Exception) -> bool:
    return isinstance(error, RPCError) and is_absent(error)


class AttemptSignal:
    """Sends one signal of an attempt, which runs as the current activity. Use it as a context manager around it."""

    def __init__(self, attempt: AttemptInput, signal: Signal) -> None:
        self._attempt = attempt
        self._signal = signal
        self._loop = asyncio.get_running_loop()
        self._wanted = asyncio.Event()

    def send(self) -> None:
        """Send the signal in the background, if it has not been sent. Any thread may call this."""
        self._loop.call_soon_threadsafe(self._wanted.set)

    async def __aenter__(self) -> Self:
        self._sending = asyncio.create_task(self._send())
        return self

    async def _send(self) -> None:
        await self._wanted.wait()
        run_id = activity.info().workflow_run_id or ""
        try:
            client = activity.client()
        except RuntimeError as error:
            _logger.warning("node %s cannot signal its workflow: %s", self._attempt.node_id, error)
        else:
            await send_signal(client, self._attempt, run_id, self._signal)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._wanted.is_set() and (error is None or isinstance(error, Exception)):
            await asyncio.wait([self._sending], timeout=_LAST_CHANCE_SEC)
        self._sending.cancel()
