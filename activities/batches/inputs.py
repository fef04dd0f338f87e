"""Selects the source of a node's batches (spec: input routing).

The source is the input adapter that the graph names, the one that the handler proposes, or the handler itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit import reason_codes
from flowkit.activities.batches.puller import ITEMS, Puller, SharedPuller, SourcesIdle, StoredItems
from flowkit.activities.calls import context_for, is_async_generator_function, is_coroutine_function
from flowkit.activities.handlers import RoleHandler
from flowkit.activities.results import Batch
from flowkit.activities.typed import ItemBatch
from flowkit.adapters.outages import retry_while_unavailable
from flowkit.attempt.failures import cut, failure
from flowkit.attempt.supervision import AttemptFailed
from flowkit.errors import BadInput
from flowkit.graph.input_adapters import ADAPTERS, NOOP, PULL, PullArgs, parse_pull, replace_alias
from flowkit.graph.validation import dependency_path, format_path, parents_of
from flowkit.models import AttemptFailure, FailureKind, pulled_sources
from flowkit.text import printed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from flowkit.activities.batches.backpressure import Backpressure
    from flowkit.activities.batches.puller import ByteBudget
    from flowkit.activities.calls import Threads
    from flowkit.activities.context import RunContext
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.models import AttemptInput

T = TypeVar("T")

_logger = logging.getLogger("flowkit.worker")

_MAPPED = PullArgs(from_nodes=(ITEMS,))
"""The arguments for a node with `map`, which pulls from its items."""


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """The settings of a worker for the inputs of its nodes."""

    defaults: Mapping[str, int] = field(default_factory=dict)
    """`poll_ms` and `backoff_max_ms` for nodes that do not set them."""
    strict: bool = False
    budget: ByteBudget | None = None


class Wait:
    """Tracks whether an attempt waits for its next batch, so that a cancel can end the wait at once."""

    def __init__(self) -> None:
        self._waiting: asyncio.Task[Any] | None = None

    def end(self) -> None:
        """Raise CancelledError in the attempt's wait. Do nothing if the attempt is processing a batch."""
        if self._waiting is not None:
            self._waiting.cancel()

    def interruptible(self) -> AbstractContextManager[None]:
        """Mark the block as a wait that `end` can interrupt. Use it on the attempt's own task."""
        return _Interruptible(self)

    async def iterate(self, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield the items; `end` can interrupt the wait for each of them."""
        async with aclosing(items):
            while True:
                try:
                    with self.interruptible():
                        item = await anext(items)
                except StopAsyncIteration:
                    return
                yield item
                del item


class _Interruptible:
    """The block of `Wait.interruptible`. It is entered for each batch, so it is no generator."""

    __slots__ = ("_outer", "_wait")

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def __enter__(self) -> None:
        wait = self._wait
        self._outer, wait._waiting = wait._waiting, asyncio.current_task()

    def __exit__(self, *_: object) -> None:
        self._wait._waiting = self._outer


class DistinctUids:
    """Refuses a batch whose uid an earlier batch of the same attempt has. It keeps 16 bytes of each uid."""

    def __init__(self, handler: RoleHandler) -> None:
        self._handler = handler
        self._seen: set[bytes] = set()

    def add(self, uid: str) -> bool:
        """Remember the uid of a batch. Return whether no earlier batch has it."""
        digest = hashlib.blake2b(uid.encode(errors="surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True

    def describe(self, batch: Batch, first: Any, ctx: RunContext) -> AttemptFailure:
        """Return the failure, which is permanent, for a batch whose uid an earlier one has.

        `first` is the `meta` of the earlier one; None if it is not stored.
        """
        types = self._handler._flowkit_types
        if types is not None and types.is_source:
            text = types.describe_duplicate(first, batch, ctx)
        else:
            text = _explain_duplicate(type(self._handler).__name__, batch)
        return failure(reason_codes.DUPLICATE_UID, text, permanent=True)


def _explain_duplicate(handler: str, batch: Batch) -> str:
    if batch.batch_uid:
        yields = f"yields two batches with the uid {printed(batch.batch_uid)}"
        remedy = "give each batch its own batch_uid"
    else:
        yields = (
            "yields two batches with equal payloads and without batch_uid, so that both have the same uid"
        )
        remedy = "set a different batch_uid for each"
    return (
        f"{handler}.iter_batches {yields}, and FlowKit stores one result for each uid: {remedy}, or set "
        "allow_duplicate_uids = True on the handler to keep only one of the results"
    )


@dataclass(frozen=True, kw_only=True)
class Input:
    """The input of one attempt."""

    attempt: AttemptInput
    handler: RoleHandler
    ctx: RunContext
    threads: Threads
    artifacts: ArtifactStore
    tasks: TaskStore
    settings: InputSettings
    ahead: Backpressure | None
    """None if no limit holds the attempt."""
    wait: Wait = field(default_factory=Wait)
    hands_over: Callable[[], bool] = lambda: False
    """Returns whether a shard takes no more batches."""
    _pullers: list[Puller] = field(default_factory=list)

    @property
    def more(self) -> bool:
        """Whether a shard has ended its input although batches may be left."""
        return any(puller.more for puller in self._pullers)

    def fence_of(self, uid: str) -> int:
        """Return the fencing number for a result of a shard; 0 in an attempt that runs alone."""
        return max(
            (each.fence_of(uid) for each in self._pullers if isinstance(each, SharedPuller)), default=0
        )

    async def batches(self, loaded: Any) -> AsyncGenerator[Batch, None]:
        """Yield the batches; `loaded` is the result of `load_input`. Raise AttemptFailed for an invalid input adapter.

        A cancel ends the wait for the next batch at once, unless a plain generator is producing it on a thread.
        """
        with self.wait.interruptible():
            args = _MAPPED if self.attempt.maps else await self._choose_route(loaded)
        if args is None and self.attempt.streams:
            self._require_reader(loaded)
        batches = self._iterate_handler(loaded) if args is None else self._pull(args)
        if args is not None or _is_coroutine(self.handler.iter_batches):
            batches = self.wait.iterate(batches)
        async with aclosing(batches):
            async for batch in batches:
                yield batch
                del batch

    def _require_reader(self, loaded: Any) -> None:
        """Raise AttemptFailed, which is permanent, if a node that starts on batches of its parents reads none of them.

        A handler may read them in its own `iter_batches`.
        """
        proposed = loaded.get("input_adapter") if isinstance(loaded, dict) else None
        chosen = {proposed, (self.attempt.io.input_inline or {}).get("input_adapter")}
        own = getattr(self.handler.iter_batches, "__func__", None) is not RoleHandler.iter_batches
        if own or NOOP in chosen:
            return
        text = (
            "the node starts on the first batch of its parents, but it has no input adapter, and its handler "
            f'{type(self.handler).__name__} has no iter_batches of its own: set "input_adapter": "{PULL}" in '
            "io.input_inline, or let the handler read the batches"
        )
        raise AttemptFailed(failure(reason_codes.BAD_INPUT, text, permanent=True))

    async def _wait_until_allowed(self) -> None:
        """Wait while the attempt is too far ahead of the nodes that pull from it."""
        if self.ahead is not None:
            with self.wait.interruptible():
                await self.ahead.wait()

    async def _iterate_handler(self, loaded: Any) -> AsyncGenerator[Batch, None]:
        hook = self.handler.iter_batches
        async with aclosing(self.threads.iterate(hook, loaded, **context_for(hook, self.ctx))) as given:
            async for batch in given:
                await self._wait_until_allowed()
                yield check_batch(batch)
                del batch

    async def _pull(self, args: PullArgs) -> AsyncGenerator[Batch, None]:
        attempt = await self._with_first_epochs(args)
        items = await self._find_items() if attempt.maps else None
        kind = ItemBatch if items is not None and items.batch_size == 1 else Batch
        puller = self._make_puller(attempt, args, items)
        self._pullers.append(puller)
        try:
            async with aclosing(puller.batches()) as deliveries:
                async for uid, payload in deliveries:
                    with puller.budget_released() if self.ahead is not None else nullcontext():
                        await self._wait_until_allowed()
                    yield kind(batch_uid=uid, payload=payload)
                    del payload
        except SourcesIdle:
            text = "no node that it pulls from is running; it continues when one runs"
            raise AttemptFailed(
                AttemptFailure(kind=FailureKind.YIELDED, code=reason_codes.YIELDED, message=text)
            ) from None

    async def _find_items(self) -> StoredItems:
        attempt, values = self.attempt, self.tasks.values
        return StoredItems(
            values.items, attempt, await retry_while_unavailable(lambda: values.item_set(attempt))
        )

    def _make_puller(self, attempt: AttemptInput, args: PullArgs, items: StoredItems | None) -> Puller:
        given: dict[str, Any] = {
            "artifacts": self.artifacts,
            "tasks": self.tasks,
            "attempt": attempt,
            "args": args,
            "budget": self.settings.budget,
            "items": items,
        }
        if not attempt.shard:
            return Puller(**given)
        return SharedPuller(shards=self.tasks.shards, hands_over=self.hands_over, **given)

    async def _with_first_epochs(self, args: PullArgs) -> AttemptInput:
        """Return the attempt with the generations of sources that its handler names, and the workflow does not know."""
        attempt = self.attempt
        named = {*args.from_nodes} - {*pulled_sources(attempt.io)}
        if attempt.maps or not named:
            return attempt
        found = await retry_while_unavailable(lambda: self.tasks.first_epochs(attempt.task_id, named))
        return replace(attempt, source_first_epochs=attempt.source_first_epochs | found)

    async def _choose_route(self, loaded: Any) -> PullArgs | None:
        configured = self.attempt.io.input_inline or {}
        proposed = loaded if isinstance(loaded, dict) else {}
        adapter, proposed_adapter = configured.get("input_adapter"), proposed.get("input_adapter")
        differs = proposed_adapter != adapter and proposed is not configured
        if adapter and proposed_adapter and differs:
            _log_route("handler_conflict_ignored", proposed, "handler")
        if adapter:
            return await self._parse_route(configured, "cmd")
        return await self._parse_route(proposed, "handler") if proposed_adapter in ADAPTERS else None

    async def _parse_route(self, route: dict[str, Any], source: str) -> PullArgs | None:
        pulls = route["input_adapter"] != NOOP
        by_handler = pulls and source == "handler"
        graph = (
            await retry_while_unavailable(lambda: self.tasks.wiring(self.attempt.task_id))
            if by_handler
            else {}
        )
        parents = parents_of(graph, self.attempt.node_id)
        _log_route("selected", route, source, parents)
        if not pulls:
            return None
        settings = self.settings
        try:
            args = parse_pull(route, parents=parents, defaults=settings.defaults, strict=settings.strict)
            if by_handler:
                _check_sources(graph, self.attempt.node_id, args.from_nodes)
            return args
        except BadInput as error:
            raise AttemptFailed(
                AttemptFailure(
                    kind=FailureKind.FAILURE, code=error.reason_code, message=cut(str(error)), permanent=True
                )
            ) from None


def _is_coroutine(hook: Any) -> bool:
    return is_async_generator_function(hook) or is_coroutine_function(hook)


def _check_sources(graph: dict[str, Any], node_id: str, names: Sequence[str]) -> None:
    """Raise BadInput if a source that a handler names does not exist or can never end before this node.

    The validation of the graph has already checked the sources that the graph names.
    """
    known = {node["node_id"] for node in graph.get("nodes") or []}
    for name in names:
        if name not in known:
            raise BadInput(f"input_args.from_nodes names {name!r}, which is not a node")
        if name == node_id:
            raise BadInput(f"input_args.from_nodes names {name!r}, the node itself")
    if path := dependency_path(graph, node_id, names):
        raise BadInput(
            f"input_args.from_nodes names {path[-2]!r}, which cannot end before this node: {format_path(path)}; "
            "pull from nodes that do not depend on it"
        )


def _log_route(what: str, route: dict[str, Any], source: str, parents: Sequence[str] = ()) -> None:
    args = route.get("input_args")
    given = replace_alias(args if isinstance(args, dict) else None)
    from_nodes = given.pop("from_nodes", list(parents))
    _logger.debug(
        "input adapter %s: %s (%s)",
        what,
        route["input_adapter"],
        source,
        extra={
            "event": f"worker.adapter.{what}",
            "adapter": route["input_adapter"],
            "from_nodes": from_nodes,
            "adapter_kwargs": given,
            "io_source": source,
        },
    )


def check_batch(given: Any) -> Batch:
    """Return `given`, an item that `iter_batches` yielded. Raise TypeError if it is not a Batch."""
    if isinstance(given, Batch):
        return given
    raise TypeError(
        f"iter_batches must yield Batch(batch_uid=..., payload={{...}}), not {type(given).__name__}"
    )
