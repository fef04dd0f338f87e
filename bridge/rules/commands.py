"""Builds the messages that a bridge sends to external workers: commands, signals and queries. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.bridge.rules.worker_input import worker_input
from flowkit.protocol.envelope import Envelope, Message
from flowkit.protocol.ids import dedup_id
from flowkit.protocol.kinds import CommandKind, MsgType, QueryKind, Role
from flowkit.protocol.payloads import CmdTaskStart, QTaskDiscover, SigCancel

if TYPE_CHECKING:
    from flowkit.models import AttemptInput


def task_start(attempt: AttemptInput, cancel_token: str, at: float) -> Envelope:
    """Return the command that starts an attempt. Its dedup id is the same for every call with the same epoch."""
    payload = CmdTaskStart(
        cmd=CommandKind.TASK_START,
        input_ref=attempt.io.input_ref,
        input_inline=worker_input(attempt),
        batching=attempt.io.batching,
        cancel_token=cancel_token,
    )
    return _envelope(MsgType.cmd, attempt, payload, at)


def cancel_signal(
    attempt: AttemptInput, reason: str, at: float, *, worker_id: str | None, deadline: float | None = None
) -> Envelope:
    """Return the signal that stops one epoch of a node on `worker_id`, or on every worker if it is None.

    Handlers see `deadline`, in seconds since the Unix epoch. Workers do not enforce it.
    """
    payload = SigCancel(
        sig="CANCEL", reason=reason, deadline_ts_ms=None if deadline is None else int(deadline * 1000)
    )
    return _envelope(MsgType.event, attempt, payload, at, target=worker_id)


def task_discover(attempt: AttemptInput, at: float) -> Envelope:
    """Return the query for the worker that runs an attempt. It reaches only one worker, so it may get no reply."""
    payload = QTaskDiscover(query=QueryKind.TASK_DISCOVER, want_epoch=attempt.epoch)
    return _envelope(MsgType.query, attempt, payload, at)


def key_of(attempt: AttemptInput) -> str:
    """Return the record key of a command."""
    return f"{attempt.task_id}:{attempt.node_id}"


def _envelope(
    msg_type: MsgType, attempt: AttemptInput, payload: Message, at: float, *, target: str | None = None
) -> Envelope:
    envelope = Envelope(
        msg_type=msg_type,
        role=Role.coordinator,
        dedup_id="",
        task_id=attempt.task_id,
        node_id=attempt.node_id,
        step_type=attempt.role,
        attempt_epoch=attempt.epoch,
        ts_ms=int(at * 1000),
        payload=payload.model_dump(mode="json"),
        target_worker_id=target,
    )
    return envelope.model_copy(update={"dedup_id": dedup_id(envelope)})
