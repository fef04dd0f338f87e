"""Reading the artifacts of other nodes as batches (spec: input routing; protocol: pull adapters).

A batch whose own result is stored already is not delivered again, so that a new attempt of a pulling node resumes.
The end: every source has a complete marker of its current epoch, and nothing is left to deliver.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from typing import TYPE_CHECKING, Any

from flowkit.adapters.patience import durably
from flowkit.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.store import TaskStore
    from flowkit.models import AttemptInput
    from flowkit.workflows.input_args import PullArgs

_logger = logging.getLogger("flowkit.worker")

Delivery = tuple[str, dict[str, Any]]
"""Batch uid and payload."""


def stable_hash(value: Any) -> str:
    """BLAKE2b-160 of canonical JSON, as hex (protocol: stable_hash)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


class Puller:
    """Delivers the batches of one attempt's sources, each once."""

    def __init__(
        self, *, artifacts: ArtifactStore, tasks: TaskStore, attempt: AttemptInput, args: PullArgs
    ) -> None:
        self._artifacts = artifacts
        self._tasks = tasks
        self._attempt = attempt
        self._args = args
        self._taken: dict[str, set[str]] = {source: set() for source in args.from_nodes}
        self._done: set[str] = set()

    async def batches(self) -> AsyncIterator[Delivery]:
        """All batches, waiting for sources that still run."""
        attempt, artifacts = self._attempt, self._artifacts
        self._done = await durably(lambda: artifacts.batch_uids(attempt.task_id, attempt.node_id))
        wait_ms = self._args.poll_ms
        while True:
            complete = await self._sources_complete()
            found = False
            try:
                async for delivery in self._scan():
                    found = True
                    yield delivery
            except StoreUnavailable as error:
                _logger.warning("%s; node %s scans again", error, self._attempt.node_id)
                complete = False
            if complete and self._args.eof_on_task_done:
                return
            wait_ms = self._args.poll_ms if found else min(wait_ms * 2, self._args.backoff_max_ms)
            await asyncio.sleep(wait_ms / 1000)

    async def _scan(self) -> AsyncIterator[Delivery]:
        for source in self._args.from_nodes:
            taken = self._taken[source]
            async for page in self._artifacts.pages(self._attempt.task_id, source, skip=taken):
                uids = [partial["batch_uid"] for partial in page]
                await self._claim(source, uids)
                taken.update(uids)
                for partial in page:
                    for delivery in self._deliveries(source, partial["batch_uid"], partial.get("meta") or {}):
                        if delivery[0] not in self._done:
                            yield delivery

    async def _claim(self, source: str, uids: list[str]) -> None:
        await durably(lambda: self._artifacts.claim(self._attempt, source, uids, time.time()))

    def _deliveries(self, source: str, uid: str, meta: dict[str, Any]) -> Iterator[Delivery]:
        if self._args.size is None:
            ref = {"task_id": self._attempt.task_id, "node_id": source, "batch_uid": uid}
            yield uid, {"from_node": source, "ref": ref, "meta": meta}
            return
        key = self._args.meta_list_key
        listed = meta.get(key) if key else None
        items = listed if isinstance(listed, list) else [meta]
        parent = {"ref": {"batch_uid": uid}, "meta_list_key": key if isinstance(listed, list) else None}
        for number, chunk in enumerate(slices(items, self._args.size)):
            chunk_uid = stable_hash({"src": source, "parent": uid, "idx": number})
            yield chunk_uid, {"from_node": source, "items": chunk, "parent": parent}

    async def _sources_complete(self) -> bool:
        """Whether every source has ended, asked before the last scan so that nothing slips between."""
        sources, task_id = self._args.from_nodes, self._attempt.task_id
        markers = await durably(lambda: self._artifacts.marker_epochs(task_id, sources))
        if any(source not in markers for source in sources):
            return False
        known = dict(self._attempt.sources)
        if any(source not in known for source in sources):
            known |= await durably(lambda: self._tasks.epochs(task_id))
        return all(markers[source] >= known.get(source, 0) for source in sources)


def slices(items: list[Any], size: int) -> Iterator[list[Any]]:
    """`items` in pieces of `size`, in order."""
    return (items[start : start + size] for start in range(0, len(items), size))
