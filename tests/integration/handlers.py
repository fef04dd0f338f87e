"""Handlers for the tests, which run in the test's process or in a process that the test kills.

The `io.input_inline` of a node controls its handler. Handlers record events in the collection `notes`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient

from flowkit.attempt import storage
from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from flowkit.worker.context import RunContext


TICK_SEC = 0.05
BREAK_AT = 7
"""Number of the batch at which the first attempt of a Relay fails."""


async def note(entry: dict[str, Any]) -> None:
    """Record an event in the database, so that the test can read it."""
    client: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    try:
        await client[os.environ["MONGO_DATABASE"]].notes.insert_one(entry)
    finally:
        client.close()


class Quick(RoleHandler):
    """Produces `batches` batches (default 1) with the metric `n`."""

    role = "quick"

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Return the node's inline input."""
        return input_inline or {}

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield numbered batches."""
        for number in range(loaded.get("batches", 1)):
            yield Batch(batch_uid=f"b{number}", payload={**loaded, "number": number})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return one metrics row."""
        return BatchResult(success=True, metrics={"n": 1, "number": batch.payload.get("number", 0)})

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        """Record which node finished."""
        return FinalizeResult(metrics={"epoch": ctx.attempt_epoch})


class Tallying(Quick):
    """Reads the params and variables, changes variables, and increments one when it finishes."""

    role = "tallying"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Set a variable of the node from the params."""
        await ctx.vars.set(f"seen.{ctx.node_id}", [ctx.params["day"], await ctx.vars.get("seen.none", 0)])
        return await super().process_batch(batch, ctx)

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        """Count the node."""
        return FinalizeResult(vars={"incr": {"done": 1, f"by.{ctx.node_id}": 2}})


class InlineTallying(Tallying):
    """A Tallying that runs inside an engine."""

    role = "inline"
    inline = True


class Dying(Tallying):
    """A Tallying whose process dies in its first attempt, after the write that ends the node."""

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        """Count the node, and let the next write, of the complete marker, kill the process."""
        if ctx.attempt_epoch == 1:
            storage.mark = lambda *_, **__: os._exit(9)
        return await super().finalize(ctx)


class Poisoned(Quick):
    """Ends its process when it processes batch `b3`."""

    role = "poisoned"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """End the process, or return one metrics row."""
        if batch.batch_uid == "b3":
            os._exit(139)
        return await super().process_batch(batch, ctx)


class InlineDying(Dying):
    """A Dying that runs inside an engine."""

    role = "inline"
    inline = True


class Paced(Quick):
    """Waits `pause` seconds in each batch. A cancel of the run ends the wait early.

    Its first attempt waits at the batch `hold_at` until its process ends, so that a test cannot miss it.
    """

    role = "paced"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, then return one metrics row. Record a cancel."""
        number = batch.payload.get("number", batch.payload.get("meta", {}).get("number"))
        held = ctx.attempt_epoch == 1 and number == (ctx.input_inline or {}).get("hold_at", -1)
        pause = asyncio.Event().wait() if held else asyncio.sleep(batch.payload.get("pause", 0.1))
        try:
            await ctx.cancellable(pause)
        except asyncio.CancelledError:
            if ctx.cancelled():
                attempt = f"{ctx.node_id}.{ctx.attempt_epoch}"
                await note({"_id": attempt, "seen_at": time.time(), "reason": ctx.cancel_reason})
            raise
        return await super().process_batch(batch, ctx)


class Chatty(Quick):
    """Logs in each batch. Its first attempt fails."""

    role = "chatty"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Log a hostile line, and return one metrics row unless it is the first attempt."""
        logging.getLogger("shop").info("attempt %d begins \x1b[2J", ctx.attempt_epoch)
        if ctx.attempt_epoch == 1:
            raise ConnectionError("no route")
        ctx.log.warning("attempt %d ends", ctx.attempt_epoch, count=2)
        return await super().process_batch(batch, ctx)


class Ticking(Quick):
    """Its first attempt logs a number each `TICK_SEC` seconds for ever, and writes it into a file, too."""

    role = "ticking"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Log until the process is killed, or return one metrics row unless it is the first attempt."""
        with Path(batch.payload["file"]).open("a", buffering=1, encoding="utf-8") as numbers:  # noqa: ASYNC230
            for number in count() if ctx.attempt_epoch == 1 else ():
                ctx.log.info("%d", number)
                numbers.write(f"{number}\n")
                await asyncio.sleep(TICK_SEC)
        return await super().process_batch(batch, ctx)


class Gated(Quick):
    """Waits in each batch until the test opens its gate."""

    role = "gated"

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, then return one metrics row."""
        await ctx.cancellable(self.gate.wait())
        return await super().process_batch(batch, ctx)


class Failing(Quick):
    """Fails with `code` in its first `failures` attempts."""

    role = "failing"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail, or return one metrics row."""
        inline = ctx.input_inline or {}
        if ctx.attempt_epoch <= inline.get("failures", 0):
            return BatchResult(
                success=False,
                reason_code=inline.get("code", "flaky"),
                permanent=inline.get("permanent", False),
                error="as ordered",
            )
        return await super().process_batch(batch, ctx)


class Sharing(Paced):
    """A Paced for shards, which receive the batches of other nodes."""

    role = "shared"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, then return one metrics row."""
        await ctx.cancellable(asyncio.sleep(0.05))
        return await Quick.process_batch(self, batch, ctx)


class Stuck(Sharing):
    """Processes the first batch of its input, and never completes another one."""

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return one metrics row, or wait until the process ends."""
        if batch.payload["ref"]["batch_uid"] != "b0":
            await ctx.cancellable(asyncio.Event().wait())
        return await Quick.process_batch(self, batch, ctx)


class Stubborn(Quick):
    """Ignores its cancel flag and takes `pause` seconds."""

    role = "stubborn"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, and ignore every cancellation."""
        until = time.monotonic() + batch.payload.get("pause", 30)
        while time.monotonic() < until:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        return await super().process_batch(batch, ctx)


ALL: dict[str, RoleHandler] = {h.role: h for h in (Quick(), Paced(), Failing())}


class Relay(Quick):
    """Passes batches on, each after `pause` seconds. It fails once with a retryable error, at batch BREAK_AT."""

    role = "relay"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return one metrics row, or fail."""
        seen = ctx.kv["seen"] = ctx.kv.get("seen", 0) + 1
        if ctx.attempt_epoch == 1 and seen == BREAK_AT:
            raise ConnectionError("the source broke")
        await asyncio.sleep((ctx.input_inline or {}).get("pause", 0))
        number = batch.payload.get("number", batch.payload.get("meta", {}).get("number"))
        return BatchResult(success=True, metrics={"n": 1, "number": number})


class LoopBlocker(Quick):
    """Blocks its whole event loop for `pause` seconds."""

    role = "hog"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Block the event loop, as no coroutine should."""
        time.sleep(batch.payload["pause"])  # noqa: ASYNC251 - blocking the loop is what this handler is for
        return await super().process_batch(batch, ctx)


class Cruncher(Quick):
    """Computes in a plain function, and reports its process id."""

    role = "cruncher"

    def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:  # type: ignore[override]
        """Kill the process, wait for a cancel, or count."""
        if batch.payload.get("die") and ctx.attempt_epoch == 1:
            os._exit(9)
        if "tell" in batch.payload:
            Path(batch.payload["tell"]).write_text(f"{os.getpid()}\n", encoding="utf-8")
        while batch.payload.get("until_cancelled"):
            ctx.raise_if_cancelled()
            time.sleep(0.02)
        ctx.kv["done"] = ctx.kv.get("done", 0) + 1
        seen = {
            "pid": os.getpid(),
            "done": ctx.kv["done"],
            "given": [ctx.params, ctx.input_inline, ctx.input_ref],
        }
        return BatchResult(success=True, metrics={"n": 1, **seen})


def clean_up_when(stopping: Callable[[], bool], name: str, folder: Path) -> None:
    """Wait until the process stops. Then wait, as a long clean-up does, until the test lets it end."""
    (folder / f"{name}.begun").touch()
    while not stopping():
        time.sleep(TICK_SEC)
    (folder / f"{name}.stops").touch()
    while not (folder / "go").exists():
        time.sleep(TICK_SEC)
    (folder / f"{name}.clean").touch()


class Counted(Quick):
    """Notes each batch that it begins to process, and waits until the test lets all of them end."""

    role = "counted"

    def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:  # type: ignore[override]
        """Wait for the file `go` in the folder of the node's input."""
        folder = Path(ctx.input_inline["folder"])
        (folder / f"{batch.batch_uid}.{ctx.attempt_epoch}.begun").touch()
        while not (folder / "go").exists():
            time.sleep(TICK_SEC)
        return BatchResult(success=True, metrics={"n": 1})


class Polite(Quick):
    """Cleans up in a plain function when its process stops. Its second attempt does nothing."""

    role = "polite"

    def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:  # type: ignore[override]
        """Run until the process stops, in the first attempt."""
        if ctx.attempt_epoch == 1:
            clean_up_when(ctx.cancelled, self.role, Path(ctx.input_inline["folder"]))
        return BatchResult(success=True, metrics={"n": 1})


class PoliteInProcess(Polite):
    """A Polite for a worker with a pool of processes."""

    role = "polite_in_process"


def polite_function(task_id: str, *, folder: str) -> None:
    """Clean up in a coordinator function, which cannot see that its process stops. The second call does nothing."""
    if not Path(folder, "function.clean").exists():
        clean_up_when(lambda: True, "function", Path(folder))


class ConcurrencyCounter(Quick):
    """Counts how many attempts of its role run concurrently in this process."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.now = self.most = 0

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Count this attempt while its batch runs."""
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.1)
        self.now -= 1
        return await super().process_batch(batch, ctx)


class InlineDeadly(Quick):
    """A Quick that runs inside an engine, and kills it without waiting in epochs up to the batch's `deadly`."""

    role = "inline"
    inline = True

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Kill the process, or count."""
        if ctx.attempt_epoch <= batch.payload["deadly"]:
            os._exit(9)
        return await super().process_batch(batch, ctx)


class InlineQuick(Quick):
    """A Quick that runs inside an engine. It waits `pause` seconds in each batch, and counts its calls in `notes`.

    In the first attempt, it waits `first_pause` seconds instead, if that is given.
    """

    role = "inline"
    inline = True

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, and fail in the first `failures` attempts."""
        if batch.payload.get("noted"):
            await note({"node_id": ctx.node_id, "epoch": ctx.attempt_epoch, "worker_id": ctx.worker_id})
        first = batch.payload.get("first_pause") if ctx.attempt_epoch == 1 else None
        await asyncio.sleep(batch.payload.get("pause", 0) if first is None else first)
        if ctx.attempt_epoch <= batch.payload.get("failures", 0):
            permanent = batch.payload.get("permanent", False)
            return BatchResult(success=False, reason_code="flaky", permanent=permanent, error="as ordered")
        return await super().process_batch(batch, ctx)
