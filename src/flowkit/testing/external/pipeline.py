"""Executes one run: its input, batches and final result, and the events that report them in the documented order."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from flowkit.testing.external.handlers import Batch, FromGenerator, each, settled
from flowkit.testing.external.protocol import Fields, jsonable, stable_hash
from flowkit.testing.external.store import WriteFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from flowkit.testing.external.handlers import Handler, RunContext
    from flowkit.testing.external.kafka import Sender
    from flowkit.testing.external.messages import MessageBuilder, Outgoing
    from flowkit.testing.external.misbehavior import Misbehavior
    from flowkit.testing.external.runs import Run
    from flowkit.testing.external.settings import Clock, ExternalSettings
    from flowkit.testing.external.store import Store

logger = logging.getLogger(__name__)

Args = dict[str, Any]
Document = dict[str, Any]

PULL = "pull.from_artifacts"
RECHUNK = "pull.from_artifacts.rechunk:size"
ADAPTERS = frozenset({PULL, RECHUNK})


class RunFailed(Exception):
    """Raised when a run ends with TASK_FAILED for a known reason."""

    def __init__(self, reason_code: str, permanent: bool, error: str | None) -> None:
        super().__init__(error)
        self.failure: Fields = {"reason_code": reason_code, "permanent": permanent, "error": error}


class Pipeline:
    """The execution of one run."""

    def __init__(
        self,
        run: Run,
        handler: Handler | None,
        context: RunContext,
        *,
        store: Store,
        sender: Sender,
        messages: MessageBuilder,
        misbehavior: Misbehavior,
    ) -> None:
        self._run = run
        self._handler = handler
        self._context = context
        self._store = store
        self._sender = sender
        self._messages = messages
        self._misbehavior = misbehavior
        self._last_ok: Outgoing | None = None

    async def execute(self) -> None:
        """Run everything and send the terminal event. Raise an error only if that event cannot be sent."""
        terminal = await self._outcome()
        self._run.outcome = terminal.kind
        await self._sender.event(terminal)
        for kind in self._misbehavior.after_end:
            await self._sender.event(self._late(kind))

    async def poll_cancel(self) -> None:
        """Set the cancel flag as soon as the task document requests it."""
        while not self._run.cancel_flag.is_set():
            try:
                if await self._store.cancel_requested(self._run):
                    self._run.request_cancel("db_flag")
                    return
            except PyMongoError as error:
                logger.warning("Cannot read the cancel flag of task %s: %s", self._run.task_id, error)
            await self._context.clock.sleep(self._messages.settings.db_cancel_poll_ms / 1000)

    async def _outcome(self) -> Outgoing:
        try:
            return await self._steps()
        except asyncio.CancelledError:
            if self._sender.ended.is_set():
                raise
            return self._messages.cancelled(self._run)
        except RunFailed as failed:
            return self._messages.failed(self._run, failed.failure)
        except Exception as error:
            logger.exception("The run of %s/%s failed", self._run.task_id, self._run.node_id)
            return self._messages.failed(self._run, self._classified(error))

    async def _steps(self) -> Outgoing:
        if self._handler is None:
            raise RunFailed("no_handler", True, "handler not registered")
        await settled(self._handler.init(self._info()))
        loaded = await settled(self._handler.load_input(self._run.input_ref, self._run.input_inline))
        batches = self._batches(self._handler, loaded)
        poller = asyncio.create_task(self.poll_cancel())
        try:
            async with aclosing(batches):
                await self._each_batch(self._handler, batches)
            return await self._finish(self._handler)
        finally:
            poller.cancel()

    async def _each_batch(self, handler: Handler, batches: AsyncIterator[Any]) -> None:
        number = 0
        async for batch in batches:
            if number == self._misbehavior.leak_cancel_at:
                raise asyncio.CancelledError("leaked by a misbehavior")
            await self._context.raise_if_cancelled()
            await self._process(handler, batch)
            number += 1

    async def _process(self, handler: Handler, batch: Any) -> None:
        uid = batch.batch_uid or stable_hash({"payload": jsonable(batch.payload)})
        try:
            result = await self._result(handler, batch)
        except RunFailed as failed:
            await self._sender.event(self._messages.batch_failed(self._run, uid, failed.failure))
            raise
        metrics = jsonable(dict(result.metrics or {}))
        ref = await self._write_partial(uid, metrics, result.artifacts_ref)
        self._last_ok = self._messages.batch_ok(self._run, uid, metrics, ref)
        await self._sender.event(self._last_ok)

    async def _result(self, handler: Handler, batch: Any) -> Any:
        """Return the result of a successful batch. Raise RunFailed for a failure or an exception."""
        try:
            result = await settled(handler.process_batch(batch, self._context))
        except Exception as error:
            raise RunFailed(**self._classified(error)) from error
        if not result.success:
            raise RunFailed(result.reason_code or "error", result.permanent, result.error)
        return result

    async def _write_partial(self, uid: str, metrics: Fields, own_ref: Fields | None) -> Fields:
        """Write the artifact of a batch, and return the reference for its event. A failure is logged only."""
        try:
            return await self._store.write_partial(self._run, uid, metrics)
        except WriteFailed as error:
            self._store.log_refusal(uid, error)
            return own_ref or {"batch_uid": uid}

    async def _finish(self, handler: Handler) -> Outgoing:
        final = await settled(handler.finalize(self._context))
        metrics = jsonable(getattr(final, "metrics", final) or {})  # of a typed handler, only the metrics
        await self._store.write_complete(self._run, metrics)
        return self._messages.done(self._run, metrics, getattr(final, "artifacts_ref", None))

    def _batches(self, handler: Handler, loaded: Any) -> Any:
        """Return the batches of the input route. Raise RunFailed for an unknown adapter or invalid arguments."""
        adapter, args = route(self._run.input_inline or {}, loaded)
        if adapter is None:
            return each(handler.iter_batches(self._context if isinstance(handler, FromGenerator) else loaded))
        if adapter not in ADAPTERS:
            raise RunFailed("bad_input_adapter", True, f"unknown input_adapter '{adapter}'")
        settings = self._messages.settings
        arguments = normalize_args(args, settings)
        if error := find_problem(adapter, arguments, strict=settings.strict_input_adapters):
            raise RunFailed("bad_input_args", True, error)
        return Puller(self._run, self._store, self._context.clock).batches(adapter, arguments)

    def _classified(self, error: BaseException) -> Fields:
        code, permanent = ("unexpected_error", False)
        if hasattr(error, "reason_code") and hasattr(error, "permanent"):  # a BatchFailure of the SDK
            code, permanent = error.reason_code, error.permanent
        elif self._handler is not None:
            code, permanent = self._handler.classify_error(error)
        return {"reason_code": code, "permanent": permanent, "error": str(error)}

    def _info(self) -> Fields:
        return {
            "task_id": self._run.task_id,
            "node_id": self._run.node_id,
            "attempt_epoch": self._run.attempt_epoch,
            "worker_id": self._context.worker_id,
            "role": self._run.step_type,
        }

    def _late(self, kind: str) -> Outgoing:
        """Return an event after the end, for `Misbehavior.after_end`."""
        late = {"reason_code": "unexpected_error", "permanent": False, "error": "late failure"}
        again = self._last_ok or self._messages.batch_ok(self._run, "late", {}, {"batch_uid": "late"})
        return {
            "TASK_HEARTBEAT": self._messages.heartbeat(self._run, self._run.step_type),
            "BATCH_OK": again,
            "TASK_DONE": self._messages.done(self._run, {}, None),
            "TASK_FAILED": self._messages.failed(self._run, late),
            "CANCELLED": self._messages.cancelled(self._run),
        }[kind]


def route(inline: Fields, loaded: Any) -> tuple[str | None, Any]:
    """Return the input adapter of a run and its arguments; None means that the handler yields the batches.

    The command's adapter counts even if it is unknown; the adapter that `load_input` proposes only if it is known.
    """
    if inline.get("input_adapter"):
        return inline["input_adapter"], inline.get("input_args") or {}
    proposed = loaded.get("input_adapter") if isinstance(loaded, dict) else None
    if proposed in ADAPTERS:
        return proposed, loaded.get("input_args") or {}
    return None, {}


def normalize_args(args: Any, settings: ExternalSettings) -> Args:
    """Return the arguments with their defaults. Every key except `from_node` is passed on, also an unknown one."""
    rest = {key: value for key, value in args.items() if key not in ("from_node", "from_nodes")}
    sources = args.get("from_nodes")
    if sources is None:
        sources = [args["from_node"]] if args.get("from_node") else []
    defaults = {
        "poll_ms": settings.pull_poll_ms_default,
        "eof_on_task_done": True,
        "backoff_max_ms": settings.pull_empty_backoff_ms_max,
    }
    return {"from_nodes": list(sources), **defaults, **rest}


def find_problem(adapter: str, args: Args, *, strict: bool) -> str | None:
    """Return the error text of invalid arguments, or None. Only the rechunk adapter has rules."""
    if adapter != RECHUNK:
        return None
    size, key = args.get("size"), args.get("meta_list_key")
    if not isinstance(size, int) or size <= 0:
        return "missing or invalid 'size' (positive int required)"
    if strict and not isinstance(key, str):
        return "strict mode: 'meta_list_key' is required and must be a string"
    if key is not None and not isinstance(key, str):
        return "'meta_list_key' must be a string if provided"
    return None


def rechunk(document: Document, source: str, size: int, meta_list_key: str | None) -> Iterator[Batch]:
    """Yield the chunks of one artifact. Chunks never span artifacts, and an empty list yields nothing."""
    parent, meta = document["batch_uid"], document.get("meta") or {}
    listed = meta.get(meta_list_key) if meta_list_key else None
    used = meta_list_key if isinstance(listed, list) else None
    items = listed if isinstance(listed, list) else [meta]
    for index, start in enumerate(range(0, len(items), size)):
        payload = {
            "from_node": source,
            "items": items[start : start + size],
            "parent": {"ref": {"batch_uid": parent}, "meta_list_key": used},
        }
        yield Batch(stable_hash({"src": source, "parent": parent, "idx": index}), payload)


class Puller:
    """Delivers the batches of other nodes to a run."""

    def __init__(self, run: Run, store: Store, clock: Clock) -> None:
        self._run = run
        self._store = store
        self._clock = clock

    def batches(self, adapter: str, args: Args) -> AsyncIterator[Batch]:
        """Return the batches of an adapter. Raise TypeError for an argument that the adapter does not have."""
        return (self._rechunked if adapter == RECHUNK else self._whole)(**args)

    async def _whole(
        self, *, from_nodes: list[str], poll_ms: int, eof_on_task_done: bool, backoff_max_ms: int
    ) -> AsyncIterator[Batch]:
        async for source, document in self._claimed(from_nodes, poll_ms, eof_on_task_done, backoff_max_ms):
            uid = document["batch_uid"]
            ref = {"task_id": self._run.task_id, "node_id": source, "batch_uid": uid}
            yield Batch(uid, {"from_node": source, "ref": ref, "meta": document.get("meta") or {}})

    async def _rechunked(
        self,
        *,
        from_nodes: list[str],
        poll_ms: int,
        eof_on_task_done: bool,
        backoff_max_ms: int,
        size: int,
        meta_list_key: str | None = None,
    ) -> AsyncIterator[Batch]:
        async for source, document in self._claimed(from_nodes, poll_ms, eof_on_task_done, backoff_max_ms):
            for batch in rechunk(document, source, size, meta_list_key):
                yield batch

    async def _claimed(
        self, sources: list[str], poll_ms: int, eof: bool, backoff_max_ms: int
    ) -> AsyncIterator[tuple[str, Document]]:
        """Yield each artifact that this run claims, until the sources are complete or a cancel is requested."""
        pause = poll_ms
        while sources and not self._run.cancel_flag.is_set():
            found = False
            async for claimed in self._one_pass(sources):
                found = True
                yield claimed
            if found:
                pause = poll_ms
            elif eof and await self._all_complete(sources):
                return
            else:
                await self._clock.sleep(pause / 1000)
                pause = min(pause * 2, backoff_max_ms)

    async def _one_pass(self, sources: list[str]) -> AsyncIterator[tuple[str, Document]]:
        for source in sources:
            for document in await self._store.partials(self._run.task_id, source):
                if await self._store.claim(self._run, source, document["batch_uid"]):
                    yield source, document

    async def _all_complete(self, sources: list[str]) -> bool:
        complete = [await self._store.is_complete(self._run.task_id, source) for source in sources]
        return all(complete)
