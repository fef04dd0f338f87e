"""A handler whose node says what it does, for workers that run as processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.testing.external.handlers import Final, Result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.testing.external.context import RunContext


async def scripted(run: RunContext) -> AsyncIterator[Any]:
    """Yield batches as the node's `input_inline` describes.

    * `batches`: a number of batches `{"number": n}`, or a list of metrics; 1 by default. The uids are
      `<node_id>-<n>`.
    * `pause_ms`: the time to wait before each batch.
    * `fail_at`: the number of the batch that fails; `reason_code`, `permanent` and `error` describe the failure.
    * `fail_until_epoch`: the first epoch that does not fail; without it, all fail.
    * `final`: the final metrics.
    """
    inline = run.input_inline or {}
    for number, metrics in enumerate(_metrics(inline)):
        await run.cancellable(run.clock.sleep(inline.get("pause_ms", 0) / 1000))
        uid = f"{run.node_id}-{number}"
        yield _failure(inline, uid) if _fails(inline, number, run.attempt_epoch) else Result(metrics, uid)
    yield Final(inline.get("final") or {})


def _metrics(inline: dict[str, Any]) -> list[dict[str, Any]]:
    batches = inline.get("batches", 1)
    return batches if isinstance(batches, list) else [{"number": number} for number in range(batches)]


def _fails(inline: dict[str, Any], number: int, epoch: int) -> bool:
    return inline.get("fail_at") == number and epoch < inline.get("fail_until_epoch", epoch + 1)


def _failure(inline: dict[str, Any], uid: str) -> Result:
    return Result(
        batch_uid=uid,
        success=False,
        reason_code=inline.get("reason_code", "scripted_failure"),
        permanent=inline.get("permanent", False),
        error=inline.get("error", "the node's script demands a failure"),
    )
