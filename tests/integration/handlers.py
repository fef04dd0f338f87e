"""Handlers that the tests run, in this process or in one that is to be killed.

What a node does stands in its `io.input_inline`; what happened is told in the collection `notes`.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient

from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.worker.context import RunContext


BREAK_AT = 7
"""At which batch of its first attempt a Relay breaks."""


async def note(entry: dict[str, Any]) -> None:
    """Tell the test what happened, through its database."""
    client: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    try:
        await client[os.environ["MONGO_DATABASE"]].notes.insert_one(entry)
    finally:
        client.close()


class Quick(RoleHandler):
    """`batches` batches (1), each worth `n`."""

    role = "quick"

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """The node's inline input."""
        return input_inline or {}

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Numbered batches."""
        for number in range(loaded.get("batches", 1)):
            yield Batch(batch_uid=f"b{number}", payload={**loaded, "number": number})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """One row."""
        return BatchResult(success=True, metrics={"n": 1, "number": batch.payload.get("number", 0)})

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        """Say who finished."""
        return FinalizeResult(metrics={"epoch": ctx.attempt_epoch})


class Paced(Quick):
    """Waits `pause` seconds in each batch; the wait ends early when the run is cancelled."""

    role = "paced"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, then one row; note a cancel when it is seen."""
        try:
            await ctx.cancellable(asyncio.sleep(batch.payload.get("pause", 0.1)))
        except asyncio.CancelledError:
            if ctx.cancelled():
                attempt = f"{ctx.node_id}.{ctx.attempt_epoch}"
                await note({"_id": attempt, "seen_at": time.time(), "reason": ctx.cancel_reason})
            raise
        return await super().process_batch(batch, ctx)


class Failing(Quick):
    """Fails in its first `failures` attempts with `code`."""

    role = "failing"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail, or one row."""
        if ctx.attempt_epoch <= batch.payload.get("failures", 0):
            return BatchResult(
                success=False,
                reason_code=batch.payload.get("code", "flaky"),
                permanent=batch.payload.get("permanent", False),
                error="as ordered",
            )
        return await super().process_batch(batch, ctx)


class Stubborn(Quick):
    """Never looks at its cancel flag and takes `pause` seconds."""

    role = "stubborn"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Swallow whatever wants to end it."""
        until = time.monotonic() + batch.payload.get("pause", 30)
        while time.monotonic() < until:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        return await super().process_batch(batch, ctx)


ALL: dict[str, RoleHandler] = {h.role: h for h in (Quick(), Paced(), Failing())}


class Relay(Quick):
    """Passes batches on; breaks once, at batch `break_at` of the first attempt, with something that may heal."""

    role = "relay"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """One row, or the break."""
        seen = ctx.kv["seen"] = ctx.kv.get("seen", 0) + 1
        if ctx.attempt_epoch == 1 and seen == BREAK_AT:
            raise ConnectionError("the source broke")
        number = batch.payload.get("number", batch.payload.get("meta", {}).get("number"))
        return BatchResult(success=True, metrics={"n": 1, "number": number})


class Hog(Quick):
    """Blocks its whole loop for `pause` seconds."""

    role = "hog"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """What no coroutine should do."""
        time.sleep(batch.payload["pause"])  # noqa: ASYNC251 - blocking the loop is what this handler is for
        return await super().process_batch(batch, ctx)


class Cruncher(Quick):
    """Computes in a plain function; tells in which process."""

    role = "cruncher"

    def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:  # type: ignore[override]
        """Die, wait for a cancel, or count."""
        if batch.payload.get("die") and ctx.attempt_epoch == 1:
            os._exit(9)
        if "tell" in batch.payload:
            Path(batch.payload["tell"]).write_text(f"{os.getpid()}\n", encoding="utf-8")
        while batch.payload.get("until_cancelled"):
            ctx.raise_if_cancelled()
            time.sleep(0.02)
        ctx.kv["done"] = ctx.kv.get("done", 0) + 1
        return BatchResult(success=True, metrics={"n": 1, "pid": os.getpid(), "done": ctx.kv["done"]})


class Crowd(Quick):
    """Counts how many of its role run at once in this process."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.now = self.most = 0

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Be there for a moment."""
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.1)
        self.now -= 1
        return await super().process_batch(batch, ctx)
