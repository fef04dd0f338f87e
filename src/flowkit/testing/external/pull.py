"""Input adapters: batches that a worker pulls from the artifacts of other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.testing.external.handlers import Batch
from flowkit.testing.external.protocol import stable_hash

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from flowkit.testing.external.runs import Run
    from flowkit.testing.external.settings import Clock, ExternalSettings
    from flowkit.testing.external.store import Store

PULL = "pull.from_artifacts"
RECHUNK = "pull.from_artifacts.rechunk:size"
KNOWN = frozenset({PULL, RECHUNK})

Args = dict[str, Any]
Document = dict[str, Any]


def normalized(args: Any, settings: ExternalSettings) -> Args:
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


def invalid(adapter: str, args: Args, *, strict: bool) -> str | None:
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
