"""Reading the artifacts of other nodes as batches (spec: input routing; protocol: pull adapters).

A batch whose own result is stored already is not delivered again, so that a new attempt of a pulling node resumes.
The end: every source has ended, and a scan that began after that finds nothing left to deliver.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from typing import TYPE_CHECKING, Any

import bson

from flowkit.adapters.patience import durably
from flowkit.errors import StoreUnavailable
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from flowkit.adapters.artifacts import ArtifactStore, Scan
    from flowkit.adapters.news import ByteBudget, News
    from flowkit.adapters.store import TaskStore
    from flowkit.models import AttemptInput
    from flowkit.workflows.input_args import PullArgs

_logger = logging.getLogger("flowkit.worker")

Delivery = tuple[str, dict[str, Any]]
"""Batch uid and payload."""

_METAS_OF_ONE_PAGE = 20
_SCAN_PAUSE_SEC = 0.5
"""Least time between two scans. With the other looks of a waiting attempt (states of the sources, cancel flag) MongoDB
is read less than 5 times a second."""
_STATES_PAUSE_SEC = 2.0
_IDLE_SEC = 5.0
"""How long no source may run before a pulling attempt gives its slot away."""
_SCAN_SHARE = 4.0
"""A long scan is followed by a pause of this many times its length."""


class SourcesIdle(Exception):
    """Nothing is left to deliver and no source runs; the attempt had better begin again later."""


def stable_hash(value: Any) -> str:
    """BLAKE2b-160 of canonical JSON, as hex (protocol: stable_hash)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


class Puller:
    """Delivers the batches of one attempt's sources, each once."""

    def __init__(
        self,
        *,
        artifacts: ArtifactStore,
        tasks: TaskStore,
        attempt: AttemptInput,
        args: PullArgs,
        budget: ByteBudget | None = None,
    ) -> None:
        self._artifacts = artifacts
        self._attempt = attempt
        self._args = args
        self._budget = budget
        self._sources = _Sources(tasks, attempt, args.from_nodes)
        self._taken: dict[str, set[str]] = {source: set() for source in args.from_nodes}
        self._done: set[str] = set()
        self._largest = 0
        self._warned = False

    async def batches(self) -> AsyncGenerator[Delivery, None]:
        """All batches, waiting for sources that still run. SourcesIdle when none has run for a while."""
        attempt, artifacts, args = self._attempt, self._artifacts, self._args
        self._done = await durably(lambda: artifacts.batch_uids(attempt.task_id, attempt.node_id))
        wait_ms, complete = args.poll_ms, False
        with artifacts.news.listener(attempt.task_id, args.from_nodes) as news:
            while True:
                ended_before, began = complete, time.monotonic()
                scan = await durably(lambda: artifacts.scan(attempt.task_id, args.from_nodes))
                took, found = time.monotonic() - began, False
                complete = await self._sources.complete(scan) and args.eof_on_task_done
                async for delivery in self._deliver(scan):
                    found = True
                    yield delivery
                if ended_before and self._all_taken(scan):
                    return
                wait_ms = args.poll_ms if found else min(wait_ms * 2, args.backoff_max_ms)
                if not complete:
                    await self._pause(news, wait_ms / 1000, took)

    async def _pause(self, news: News, wait_sec: float, scan_took: float) -> None:
        """Wait for news of a source in this process, or until it is time to look again."""
        least = max(_SCAN_PAUSE_SEC, scan_took * _SCAN_SHARE)
        await news.wait(least=least, most=max(wait_sec, least))
        self._sources.check_idle()

    def _all_taken(self, scan: Scan) -> bool:
        return all(self._taken[source].issuperset(uids) for source, uids in scan.uids.items())

    async def _deliver(self, scan: Scan) -> AsyncGenerator[Delivery, None]:
        try:
            for source, uids in scan.uids.items():
                fresh = [uid for uid in uids if uid not in self._taken[source]]
                async for page in self._pages(source, fresh):
                    for partial in page:
                        for delivery in self._deliveries(
                            source, partial["batch_uid"], partial.get("meta") or {}
                        ):
                            if delivery[0] not in self._done:
                                yield delivery
        except StoreUnavailable as error:
            _logger.warning("%s; node %s scans again", error, self._attempt.node_id)

    async def _pages(self, source: str, uids: list[str]) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Claimed batches, as many at once as memory allows."""
        while uids:
            page, uids = self._cut(uids)
            held = len(page) * self._largest
            async with self._room(held):
                found = await self._artifacts.metas(self._attempt.task_id, source, page)
                self._largest = max([self._largest, *(len(bson.encode(partial)) for partial in found)])
                await self._claim(source, page)
                self._warn_of_clashes(source, page)
                self._taken[source].update(page)
                yield found

    def _warn_of_clashes(self, source: str, uids: list[str]) -> None:
        """Results are kept by the batch's uid alone (spec: uids of pulled batches), so a second one replaces the first."""
        if self._args.size is not None or self._warned:
            return
        for other in self._args.from_nodes:
            if other != source and (shared := self._taken[other].intersection(uids)):
                self._warned = True
                _logger.warning(
                    "node %s pulls batch %r from both %s and %s: the later result replaces the earlier one; give the "
                    "batches of all sources uids of their own, or pull with rechunk",
                    *(self._attempt.node_id, min(shared), other, source),
                )
                return

    def _cut(self, uids: list[str]) -> tuple[list[str], list[str]]:
        """The next page: one batch while nothing is known of their size, then as many as fit."""
        fit = 1 if self._largest == 0 else _METAS_OF_ONE_PAGE
        if self._budget is not None and self._largest:
            fit = max(1, min(fit, self._budget.share // self._largest))
        return uids[:fit], uids[fit:]

    def _room(self, size: int) -> Any:
        return _Anything() if self._budget is None else self._budget.hold(size)

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


class _Anything:
    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


class _Sources:
    """Whether the sources of an attempt have ended, and whether one of them runs."""

    def __init__(self, tasks: TaskStore, attempt: AttemptInput, names: tuple[str, ...]) -> None:
        self._tasks = tasks
        self._attempt = attempt
        self._names = names
        self._states: dict[str, tuple[NodeStatus, int]] = {}
        self._looked_at = 0.0
        self._idle_since: float | None = None

    async def complete(self, scan: Scan) -> bool:
        """Whether every source has ended; its batches in `scan` are then all there are."""
        if all(self._ended(name, scan.markers) for name in self._names):
            return True
        await self._look()
        return all(self._ended(name, scan.markers) for name in self._names)

    def _ended(self, name: str, markers: dict[str, int]) -> bool:
        status, epoch = self._states.get(name, (None, self._attempt.sources.get(name)))
        if epoch is None and self._looked_at > 0:
            epoch = 0
        if status is not None and status.ended and status is not NodeStatus.FINISHED:
            return True
        return name in markers and epoch is not None and markers[name] >= epoch

    async def _look(self) -> None:
        now = time.monotonic()
        if self._looked_at and now - self._looked_at < _STATES_PAUSE_SEC:
            return
        self._looked_at = now
        self._states = await durably(lambda: self._tasks.node_states(self._attempt.task_id))
        going = {self._status(name) for name in self._names if not self._status(name).ended}
        idle = going and not going & {NodeStatus.RUNNING, NodeStatus.CANCELLING}
        self._idle_since = (self._idle_since or now) if idle else None

    def _status(self, name: str) -> NodeStatus:
        return self._states.get(name, (NodeStatus.QUEUED, 0))[0]

    def check_idle(self) -> None:
        """SourcesIdle when no source has run for a while."""
        if self._idle_since is not None and time.monotonic() - self._idle_since > _IDLE_SEC:
            raise SourcesIdle


def slices(items: list[Any], size: int) -> Iterator[list[Any]]:
    """`items` in pieces of `size`, in order."""
    return (items[start : start + size] for start in range(0, len(items), size))
