"""The pull adapters as standalone functions, for programs other than workers that read the artifacts of a task.

A worker does not need them: it pulls the input that `io.input_inline` specifies.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from flowkit.activities.batches.puller import Puller, SourcesIdle
from flowkit.activities.handlers import Batch
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.config import WorkerConfig
from flowkit.graph.input_adapters import PULL, RECHUNK, parse_pull
from flowkit.models import AttemptInput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine

    from flowkit.activities.batches.puller import Delivery
    from flowkit.adapters.mongo import Database
    from flowkit.core.time import Clock
    from flowkit.graph.input_adapters import PullArgs

    Adapter = Callable[..., AsyncGenerator[Batch, None]]


class PullAdapters:
    """The two pull adapters over one database.

    Each adapter yields the batches of `from_nodes` for which `consumer_node` has no stored result, and claims them for
    that node. It ends when all sources have ended or `cancel_flag` is set. Pass the adapter's `input_args` as further
    keywords; invalid ones raise BadInput. `cfg` sets the default waiting times and strictness. `clock` is ignored.

    With several sources, batches of the first source keep their uid, and the others get the uid `<uid>@<source>`, as
    in a worker.
    """

    def __init__(self, *, db: Database, clock: Clock | None = None, cfg: WorkerConfig | None = None) -> None:
        self._artifacts = ArtifactStore(db)
        self._tasks = TaskStore(db)
        self._cfg = cfg or WorkerConfig()

    async def from_artifacts(
        self,
        *,
        task_id: str,
        consumer_node: str,
        cancel_flag: asyncio.Event | None = None,
        **input_args: Any,
    ) -> AsyncGenerator[Batch, None]:
        """Yield upstream batches unchanged (`pull.from_artifacts`)."""
        args = self._parsed(PULL, input_args)
        async with aclosing(self._batches(task_id, consumer_node, args, cancel_flag)) as batches:
            async for batch in batches:
                yield batch

    async def rechunk(
        self,
        *,
        task_id: str,
        consumer_node: str,
        cancel_flag: asyncio.Event | None = None,
        **input_args: Any,
    ) -> AsyncGenerator[Batch, None]:
        """Yield the items of upstream batches in chunks of `size` (`pull.from_artifacts.rechunk:size`)."""
        args = self._parsed(RECHUNK, input_args)
        async with aclosing(self._batches(task_id, consumer_node, args, cancel_flag)) as batches:
            async for batch in batches:
                yield batch

    def _parsed(self, adapter: str, input_args: dict[str, Any]) -> PullArgs:
        defaults = {
            "poll_ms": self._cfg.pull_poll_ms_default,
            "backoff_max_ms": self._cfg.pull_empty_backoff_ms_max,
        }
        inline = {"input_adapter": adapter, "input_args": input_args}
        return parse_pull(inline, defaults=defaults, strict=self._cfg.strict_input_adapters)

    async def _batches(
        self, task_id: str, consumer_node: str, args: PullArgs, cancel_flag: asyncio.Event | None
    ) -> AsyncGenerator[Batch, None]:
        seen: set[tuple[str, str]] = set()
        attempt = await self._reader(task_id, consumer_node, args)
        while True:
            puller = Puller(artifacts=self._artifacts, tasks=self._tasks, attempt=attempt, args=args)
            async with aclosing(_until(cancel_flag, puller)) as deliveries:
                try:
                    async for uid, payload in deliveries:
                        if (payload["from_node"], uid) not in seen:
                            seen.add((payload["from_node"], uid))
                            yield Batch(batch_uid=uid, payload=payload)
                        del payload
                    return
                except SourcesIdle:
                    continue

    async def _reader(self, task_id: str, consumer_node: str, args: PullArgs) -> AttemptInput:
        """Return the consumer's current attempt. Assume epoch 1 for a node that the task document does not contain."""
        states = await self._tasks.node_states(task_id)
        epochs = {name: epoch for name, (_, epoch) in states.items()}
        return AttemptInput(
            task_id=task_id,
            node_id=consumer_node,
            index=0,
            role="",
            epoch=max(1, epochs.get(consumer_node, 1)),
            sources={name: epochs.get(name, 0) for name in args.from_nodes},
        )


async def _until(flag: asyncio.Event | None, puller: Puller) -> AsyncGenerator[Delivery, None]:
    """Yield the deliveries of `puller` until it ends or `flag` is set."""
    stop: asyncio.Future[Any] = asyncio.ensure_future((flag or asyncio.Event()).wait())
    batches: Any = puller.batches()
    async with aclosing(batches):
        try:
            while not stop.done() and (delivery := await _first(_next(batches), stop)) is not None:
                yield delivery
        finally:
            stop.cancel()


async def _next(batches: AsyncIterator[Delivery]) -> Delivery | None:
    try:
        return await anext(batches)
    except StopAsyncIteration:
        return None


async def _first(step: Coroutine[Any, Any, Delivery | None], stop: asyncio.Future[Any]) -> Delivery | None:
    """Return the result of `step`. If `stop` finishes first, cancel `step` and return None."""
    task = asyncio.ensure_future(step)
    both: list[asyncio.Future[Any]] = [task, stop]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def build_input_adapters(
    *, db: Database, clock: Clock | None = None, cfg: WorkerConfig | None = None
) -> dict[str, Adapter]:
    """Return the pull adapters by name, each an async generator function (see PullAdapters)."""
    adapters = PullAdapters(db=db, clock=clock, cfg=cfg)
    return {PULL: adapters.from_artifacts, RECHUNK: adapters.rechunk}
