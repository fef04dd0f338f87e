"""Reads the artifacts of other nodes as batches (spec: input routing; protocol: pull adapters).

A new attempt of a pulling node resumes: it skips each batch for which the node has already stored a result. The input
ends when every source has ended and a complete scan that began afterwards finds nothing left to deliver.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from heapq import nlargest
from typing import TYPE_CHECKING, Any

import bson

from flowkit.adapters.batch_uids import qualified, uid_text
from flowkit.adapters.claims import first_fence
from flowkit.adapters.entries import MAX_META_BYTES, PAGE_BYTES, Entry, Mark, Scan, fitting
from flowkit.adapters.outages import retry_while_unavailable
from flowkit.core.utils import stable_hash
from flowkit.errors import StoreUnavailable
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Collection,
        Iterator,
        Sequence,
    )
    from contextlib import AbstractContextManager

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.claims import Claim
    from flowkit.adapters.map_items import ItemSet, MapItems
    from flowkit.adapters.notifier import Listener
    from flowkit.adapters.shards import ShardStore
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.graph.input_adapters import PullArgs
    from flowkit.models import AttemptInput

_logger = logging.getLogger("flowkit.worker")

Delivery = tuple[str, dict[str, Any]]
"""The uid and the payload of a batch."""

_Partial = dict[str, Any]
"""`batch_uid` and `meta` of a stored batch."""


class Puller:
    """Delivers each batch of an attempt's sources once."""

    def __init__(
        self,
        *,
        artifacts: ArtifactStore,
        tasks: TaskStore,
        attempt: AttemptInput,
        args: PullArgs,
        budget: ByteBudget | None = None,
        items: StoredItems | None = None,
    ) -> None:
        """With `items`, deliver these in place of batches of other nodes."""
        self._artifacts = artifacts
        self._attempt = attempt
        self._args = args
        self._budget = budget or ByteBudget(PAGE_BYTES, 1)
        self._names = tuple(dict.fromkeys(args.from_nodes))
        self._qualifies = len(self._names) > 1
        self._sources = items or Sources(tasks, attempt, self._names)
        self._scanner = items or Scanner(artifacts, attempt, self._names)
        self._delivers_items = items is not None
        self._taken: dict[str, set[str]] = {source: set() for source in self._names}
        self._done: set[str] = set()
        self._schedule = ScanSchedule(args.poll_ms / 1000, args.backoff_max_ms / 1000)
        self._held: HeldBytes | None = None
        self.more = False
        """Whether the input has ended although batches may be left."""

    def budget_released(self) -> AbstractContextManager[None]:
        """Let other readers use the bytes that this attempt holds in the memory budget during the block.

        Use it while the attempt waits for one of these readers.
        """
        return self._held.released() if self._held is not None else nullcontext()

    async def batches(self) -> AsyncGenerator[Delivery, None]:
        """Yield all batches and wait for sources that still run. Raise SourcesIdle if none has run for five seconds."""
        if not self._names:
            return
        attempt, artifacts = self._attempt, self._artifacts
        self._done = await self._find_done()
        with artifacts.notifier.listener(attempt.task_id, self._names) as subscription:
            async with aclosing(self._deliver_until_ended(subscription)) as deliveries:
                async for delivery in deliveries:
                    yield delivery
                    del delivery
            async with aclosing(self._deliver_left()) as deliveries:
                async for delivery in deliveries:
                    yield delivery
                    del delivery

    async def _find_done(self) -> set[str]:
        """Return the uids of the batches whose results are stored, or that are set aside."""
        attempt, artifacts = self._attempt, self._artifacts
        done = await retry_while_unavailable(
            lambda: artifacts.batch_uids(attempt.task_id, attempt.node_id, attempt.first_epoch)
        )
        if attempt.quarantine is not None:
            done |= await retry_while_unavailable(lambda: artifacts.quarantined(attempt))
        return done

    async def _deliver_until_ended(self, subscription: Listener[Entry]) -> AsyncGenerator[Delivery, None]:
        """Scan again and again, and yield the new batches, until no source can store more of them."""
        ended: EndedSources | None = None
        while not self.more:
            began = time.monotonic()
            scan, still_ended = await asyncio.gather(
                self._scanner.scan(complete=ended is not None), self._sources.are_still_ended(ended)
            )
            took, has_new = time.monotonic() - began, False
            async with aclosing(self._deliver(scan.batches)) as deliveries:
                async for delivery in deliveries:
                    has_new = True
                    yield delivery
                    del delivery
            if still_ended and self._all_taken(scan):
                return
            self._schedule.note_scan(began, took, found=has_new)
            ended = await self._find_end(scan)
            if ended is None or (still_ended and not has_new):
                async with aclosing(self._deliver_until_next_scan(subscription)) as deliveries:
                    async for delivery in deliveries:
                        yield delivery
                        del delivery

    async def _find_end(self, scan: Scan) -> EndedSources | None:
        if not self._args.eof_on_task_done:
            return None
        return await self._sources.find_end(scan.markers, scan.unconfirmed)

    async def _deliver_left(self) -> AsyncGenerator[Delivery, None]:
        """Yield the batches that others have left, when all others have been taken: none in an attempt that
        runs alone.
        """
        return
        yield

    async def _deliver_until_next_scan(self, subscription: Listener[Entry]) -> AsyncGenerator[Delivery, None]:
        """Yield the batches that sources in this process store, without a scan, until the next scan is due."""
        while (left := self._schedule.get_seconds_left(time.monotonic())) > 0:
            await subscription.wait(left)
            stored, must_scan = subscription.take()
            if must_scan:
                self._schedule.hasten()
            async with aclosing(self._deliver(_group_by_source(stored))) as deliveries:
                async for delivery in deliveries:
                    yield delivery
                    del delivery
            if self.more:
                return
        await self._sources.check_idle()

    def _all_taken(self, scan: Scan) -> bool:
        return all(self._taken[source].issuperset(stored) for source, stored in scan.batches.items())

    async def _deliver(self, batches: Mapping[str, Mapping[str, Entry]]) -> AsyncGenerator[Delivery, None]:
        """Claim and yield those of the batches, by source and uid, that this attempt has not yielded yet."""
        try:
            for source, stored in batches.items():
                async with aclosing(self._claim(source, self._select_fresh(source, stored))) as partials:
                    async for partial in partials:
                        deliveries = self._split_into_deliveries(source, partial)
                        del partial
                        for delivery in deliveries:
                            if delivery[0] not in self._done:
                                yield delivery
                            del delivery
        except StoreUnavailable as error:
            _logger.warning("%s; node %s scans again", error, self._attempt.node_id)
            self._scanner.restart()
            self._schedule.hasten()

    def _select_fresh(self, source: str, stored: Mapping[str, Entry]) -> list[Entry]:
        """Return the batches that are neither taken nor done.

        Forget the items of earlier scans, which are not repeated.

        For a node that splits batches into chunks, only the uids of the chunks show whether a batch is done.
        """
        taken = self._taken[source]
        if self._delivers_items:
            taken.intersection_update(stored)
        if self._args.size is None and self._done:
            done = (uid for uid in stored if uid not in taken and self._own_uid(source, uid) in self._done)
            taken.update([*done])
        return [entry for uid, entry in stored.items() if uid not in taken]

    def _own_uid(self, source: str, uid: str) -> str:
        """Return the uid under which this node receives a batch and stores its result.

        With several sources, it names the source, because results are stored by uid alone (hazard H22).
        """
        return qualified(uid, source, first=self._names[0]) if self._qualifies else uid

    async def _claim(self, source: str, fresh: Sequence[Entry]) -> AsyncGenerator[_Partial, None]:
        """Claim batches and yield them. Each one counts toward the byte budget until the next one is requested.

        Do not keep a batch in a variable beyond that. Otherwise, memory would hold more than the budget counts.
        """
        while fresh:
            page, fresh = self._cut(fresh)
            async with aclosing(self._read(source, page)) as partials:
                async for partial in partials:
                    yield partial
                    del partial

    async def _read(self, source: str, page: Sequence[Entry]) -> AsyncGenerator[_Partial, None]:
        """Read batches of one source, take them, and yield them."""
        async with self._budget.hold(sum(_room(entry) for entry in page)) as held:
            self._held = held
            found = deque(await self._scanner.read(source, page))
            sizes = _sizes(page, found)
            held.keep(sum(sizes))
            await self._take(source, [partial["batch_uid"] for partial in found])
            while found:
                yield found.popleft()
                sizes.popleft()
                held.keep(sum(sizes))

    def _cut(self, fresh: Sequence[Entry]) -> tuple[Sequence[Entry], Sequence[Entry]]:
        count = fitting(fresh, self._budget.share)
        return fresh[:count], fresh[count:]

    async def _take(self, source: str, stored: Sequence[Any]) -> None:
        await retry_while_unavailable(
            lambda: self._artifacts.claims.make(self._attempt, source, stored, time.time())
        )
        self._taken[source].update(uid_text(uid) for uid in stored)

    def _split_into_deliveries(self, source: str, partial: _Partial) -> Iterator[Delivery]:
        stored, meta = partial["batch_uid"], partial.get("meta") or {}
        if self._delivers_items:
            yield stored, meta
            return
        if self._args.size is None:
            ref = {"task_id": self._attempt.task_id, "node_id": source, "batch_uid": stored}
            own_uid = self._own_uid(source, uid_text(stored))
            yield own_uid, {"from_node": source, "ref": ref, "meta": meta}
            return
        key = self._args.meta_list_key
        listed = meta.get(key) if key and isinstance(meta, dict) else None
        items = listed if isinstance(listed, list) else [meta]
        parent = {"ref": {"batch_uid": stored}, "meta_list_key": key if isinstance(listed, list) else None}
        for number, chunk in enumerate(split(items, self._args.size)):
            chunk_uid = stable_hash({"src": source, "parent": uid_text(stored), "idx": number})
            yield chunk_uid, {"from_node": source, "items": chunk, "parent": parent}


_MOST_CLAIMED = 20
"""How many batches a shard claims at once, at most."""
_CLAIMS_PER_SHARE = 4
"""A shard claims this part of its share of the batches that are left, so that all shards end at about the same time."""


class SharedPuller(Puller):
    """Delivers the batches that one shard claims from the pool of its node.

    Each batch has a fencing number. The shard stores the results with it, so that a shard from which another one has
    taken over a batch cannot replace the result of that one.
    """

    def __init__(self, *, shards: ShardStore, hands_over: Callable[[], bool], **given: Any) -> None:
        """`hands_over` returns whether to take no more batches, although some may be left."""
        super().__init__(**given)
        self._shards = shards
        self._hands_over = hands_over
        self._fences: dict[tuple[str, str], int] = {}
        """The fencing numbers of the batches of sources that the shard has claimed and not delivered."""
        self._delivered: dict[str, int] = {}
        """The fencing numbers of the delivered batches, by the uid of the result."""
        self._uncertain: set[tuple[str, str]] = set()
        """The batches of sources that the shard may have claimed and has not read, because MongoDB did not respond."""
        self._is_resumed = False
        self._has_tried = False
        """Whether the shard has tried to claim a batch. Before that it does not hand over: one whose handler takes long
        to load its input would otherwise hand over for ever."""

    def fence_of(self, uid: str) -> int:
        """Return the fencing number for a result: that of the delivered batch, or the lowest for another uid."""
        return self._delivered.get(uid) or first_fence(self._attempt)

    async def _deliver(self, batches: Mapping[str, Mapping[str, Entry]]) -> AsyncGenerator[Delivery, None]:
        if not self._is_resumed:
            self._is_resumed = True
            async with aclosing(self._deliver_left()) as deliveries:
                async for delivery in deliveries:
                    yield delivery
                    del delivery
        async with aclosing(super()._deliver(batches)) as deliveries:
            async for delivery in deliveries:
                yield delivery
                del delivery

    async def _deliver_left(self) -> AsyncGenerator[Delivery, None]:
        """Take over, and yield, the batches that lost shards have claimed and not stored, or whose claims
        were released.

        A shard that hands over delivers those that it has claimed itself: no other one takes over what a
        finished attempt has.
        """
        while claims := await self._find_left():
            for claim in claims:
                if claim.epoch != self._attempt.epoch and self._stop_if_due():
                    break
                fence = await self._take_over(claim)
                if fence is not None:
                    self._fences[claim.from_node, uid_text(claim.batch_uid)] = fence
                    async with aclosing(self._deliver_claimed(claim)) as deliveries:
                        async for delivery in deliveries:
                            yield delivery
                            del delivery

    async def _deliver_claimed(self, claim: Claim) -> AsyncGenerator[Delivery, None]:
        source, uid = claim.from_node, uid_text(claim.batch_uid)
        try:
            async with aclosing(self._read(source, [Entry(claim.batch_uid, None)])) as partials:
                async for partial in partials:
                    for delivery in self._split_into_deliveries(source, partial):
                        if delivery[0] not in self._done:
                            yield delivery
                        del delivery
            self._taken[source].add(uid)
            self._uncertain.discard((source, uid))
        except StoreUnavailable as error:
            _logger.warning("%s; node %s reads batch %s again", error, self._attempt.node_id, uid)

    async def _take_over(self, claim: Claim) -> int | None:
        self._has_tried = True
        return await retry_while_unavailable(
            lambda: self._artifacts.claims.take_over(self._attempt, claim, time.time())
        )

    async def _find_left(self) -> list[Claim]:
        attempt = self._attempt
        states = await retry_while_unavailable(lambda: self._shards.states(attempt))
        lost = [] if self.more else states.list_lost(attempt)
        lost += [attempt.epoch] if self._uncertain else []
        released = attempt.kept and not self.more
        if not lost and not released:
            return []
        claims = await retry_while_unavailable(
            lambda: self._artifacts.claims.of_attempts(attempt, lost, released=released)
        )
        if not claims:
            return []
        self._done |= await self._find_done()
        return [claim for claim in claims if claim.from_node in self._taken and not self._is_settled(claim)]

    def _is_settled(self, claim: Claim) -> bool:
        """Return whether the result of a claimed batch is stored, or this attempt has read the batch."""
        source, uid = claim.from_node, uid_text(claim.batch_uid)
        is_own = claim.epoch == self._attempt.epoch and (source, uid) not in self._uncertain
        return is_own or (self._args.size is None and self._own_uid(source, uid) in self._done)

    async def _claim(self, source: str, fresh: Sequence[Entry]) -> AsyncGenerator[_Partial, None]:
        """Claim some of the batches at a time, and yield them.

        Each shard begins at another place. When it meets batches that others have claimed, it skips all these, and
        begins at another place among the rest.
        """
        stored, fresh = fresh, self._spread(fresh)
        while fresh and not self._stop_if_due():
            share = len(fresh) // (self._attempt.parallel * _CLAIMS_PER_SHARE)
            page = fresh[: max(1, min(share, _MOST_CLAIMED))]
            page = page[: fitting(page, self._budget.share)]
            fresh = fresh[len(page) :]
            won = await self._make_claims(source, page)
            async with aclosing(self._read(source, won)) as partials:
                async for partial in partials:
                    yield partial
                    del partial
            if len(won) < len(page):
                fresh = self._spread(await self._skip_claimed(source, stored))

    def _spread(self, batches: Sequence[Entry]) -> Sequence[Entry]:
        """Return the batches in an order that begins at another place in each shard."""
        first = len(batches) * (self._attempt.shard - 1) // self._attempt.parallel
        return [*batches[first:], *batches[:first]]

    async def _skip_claimed(self, source: str, batches: Sequence[Entry]) -> Sequence[Entry]:
        """Return those of the batches that neither this nor another attempt has claimed."""
        between = (batches[0].uid, batches[-1].uid) if self._delivers_items else None
        claimed = await retry_while_unavailable(
            lambda: self._artifacts.claims.of_others(self._attempt, source, between)
        )
        taken = self._taken[source]
        taken.update(uid for entry in batches if (uid := uid_text(entry.uid)) in claimed)
        return [entry for entry in batches if uid_text(entry.uid) not in taken]

    def _stop_if_due(self) -> bool:
        self.more = self.more or (self._has_tried and self._hands_over())
        return self.more

    async def _make_claims(self, source: str, page: Sequence[Entry]) -> list[Entry]:
        """Claim batches, and return those that no other shard has claimed."""
        self._has_tried = True

        async def make() -> set[int]:
            try:
                uids = [entry.uid for entry in page]
                return await self._artifacts.claims.make_new(self._attempt, source, uids, time.time())
            except StoreUnavailable:
                self._note_uncertain(source, page)
                raise

        won, fence = await retry_while_unavailable(make), first_fence(self._attempt)
        self._fences |= {(source, uid_text(page[place].uid)): fence for place in won}
        others = (entry for place, entry in enumerate(page) if place not in won)
        self._taken[source].update(uid_text(entry.uid) for entry in others)
        return [page[place] for place in sorted(won)]

    async def _read(self, source: str, page: Sequence[Entry]) -> AsyncGenerator[_Partial, None]:
        try:
            async with aclosing(super()._read(source, page)) as partials:
                async for partial in partials:
                    yield partial
                    del partial
        except StoreUnavailable:
            self._note_uncertain(source, page)
            raise

    def _note_uncertain(self, source: str, page: Sequence[Entry]) -> None:
        self._uncertain.update((source, uid_text(entry.uid)) for entry in page)

    async def _take(self, source: str, stored: Sequence[Any]) -> None:
        """Note batches that the shard has claimed before, and has read now."""
        uids = [uid_text(uid) for uid in stored]
        self._taken[source].update(uids)
        self._uncertain.difference_update((source, uid) for uid in uids)

    def _split_into_deliveries(self, source: str, partial: _Partial) -> Iterator[Delivery]:
        fence = self._fences.pop((source, uid_text(partial["batch_uid"])), 0)
        for uid, payload in super()._split_into_deliveries(source, partial):
            self._delivered[uid] = fence
            yield uid, payload
            del payload


def _group_by_source(stored: Sequence[tuple[str, Entry]]) -> dict[str, dict[str, Entry]]:
    found: dict[str, dict[str, Entry]] = {}
    for source, entry in stored:
        found.setdefault(source, {})[uid_text(entry.uid)] = entry
    return found


def _room(entry: Entry) -> int:
    """Return the bytes to reserve in the budget before reading a batch."""
    return MAX_META_BYTES if entry.size is None else entry.size


def _sizes(page: Sequence[Entry], found: Sequence[_Partial]) -> deque[int]:
    """Return the sizes of the batches that were read, in bytes. Measure those whose size is not stored."""
    known = {uid_text(entry.uid): entry.size for entry in page}
    return deque(_size(partial, known[uid_text(partial["batch_uid"])]) for partial in found)


def _size(partial: _Partial, known: int | None) -> int:
    return len(bson.encode({"": partial.get("meta")})) if known is None else known


def split(items: list[Any], size: int) -> Iterator[list[Any]]:
    """Split `items` into consecutive lists of at most `size` items."""
    return (items[start : start + size] for start in range(0, len(items), size))


MANY = 1_000
"""Sources that have fewer batches together are always read completely, which takes a few milliseconds."""
MOST_MARKS = 10
"""The largest number of sources of which a scan reads the new batches only; each one makes the scan's filter slower."""
OVERLAP = timedelta(seconds=5)
"""How much of the time before the newest batch each scan reads again.

The time of a batch is taken before the batch is written, so batches can appear in another order than that
of their times.
"""
_FULL_SEC = 10.0
"""The shortest time between two complete scans."""
_FULL_SHARE = 20.0
"""The time between two complete scans is at least this many times as long as a complete scan."""


class Scanner:
    """Scans the sources of one attempt, completely or for new batches.

    A scan for new batches can miss some: those that a process wrote very late, for example after an outage,
    or after its clock was set back, and those of an outdated attempt. A complete scan finds them. It runs
    about every ten seconds, and always to decide that there are no more batches.
    """

    def __init__(self, artifacts: ArtifactStore, attempt: AttemptInput, sources: Sequence[str]) -> None:
        self._artifacts = artifacts
        self._task_id = attempt.task_id
        self._first_epochs = attempt.source_first_epochs
        self._sources = sources
        self._marks: dict[str, Mark] = {}
        """The marks of the sources with the most batches."""
        self._full_due = 0.0

    async def scan(self, *, complete: bool) -> Scan:
        """Return all batches of the sources if `complete` is set or a complete scan is due, otherwise at
        least the new ones.
        """
        began = time.monotonic()
        if complete or began >= self._full_due:
            self.restart()
        marks = {source: Mark(epoch, at - OVERLAP) for source, (epoch, at) in self._marks.items()}
        snapshot = await retry_while_unavailable(
            lambda: self._artifacts.scan(self._task_id, self._sources, marks, self._first_epochs)
        )
        if not marks:
            ended = time.monotonic()
            self._full_due = ended + max(_FULL_SEC, (ended - began) * _FULL_SHARE)
        self._advance(snapshot)
        return snapshot

    def restart(self) -> None:
        """Make the next scan complete, because batches of an earlier scan have not been delivered."""
        self._marks = {}

    async def read(self, source: str, page: Sequence[Entry]) -> list[_Partial]:
        """Return these batches of a source, with their metas. Omit those that were removed."""
        first_epoch = self._first_epochs.get(source, 0)
        return await self._artifacts.metas(self._task_id, source, page, first_epoch)

    def _advance(self, found: Scan) -> None:
        """Move the marks to the newest batches, and add marks if the sources without one have many batches."""
        self._marks = {
            source: max(mark, found.newest.get(source, mark)) for source, mark in self._marks.items()
        }
        read = {source: len(found.batches[source]) for source in found.newest if source not in self._marks}
        if sum(read.values()) >= MANY:
            largest = nlargest(MOST_MARKS - len(self._marks), read, key=lambda source: read[source])
            self._marks |= {source: found.newest[source] for source in largest}


_SCANNED_ITEMS = 2_000
"""How many batches of items a scan returns, which limits the memory of an attempt."""

ITEMS = "$map"
"""What claims name as the source of items. No node has this id."""


class StoredItems:
    """The items of a node with `map`, in the place of a Scanner and of Sources: one source that has ended."""

    def __init__(self, stored: MapItems, attempt: AttemptInput, items: ItemSet) -> None:
        self._stored = stored
        self._attempt = attempt
        self._set = items
        self.batch_size = items.batch_size
        """The largest number of items in a batch."""
        starts = range(0, items.batches, _SCANNED_ITEMS)
        own = len(starts) * max(0, attempt.shard - 1) // attempt.parallel
        self._starts = deque([*starts[own:], *starts[:own]])
        """The numbers of the first batches of the scans that follow. Each shard begins at another place."""
        self._start = 0
        self._repeats = False

    async def scan(self, *, complete: bool) -> Scan:
        """Return the next batches, or the last ones again."""
        if self._starts and not self._repeats:
            self._start = self._starts.popleft()
        self._repeats = False
        numbers = range(self._start, min(self._start + _SCANNED_ITEMS, self._set.batches))
        return Scan(batches={ITEMS: _NumberedBatches(numbers, self._set.largest)}, markers={})

    def restart(self) -> None:
        """Return the same batches in the next scan, because some of them have not been delivered."""
        self._repeats = True

    async def read(self, source: str, page: Sequence[Entry]) -> list[_Partial]:
        """Return these batches: their items, and the index of the first one."""
        numbers = [int(entry.uid) for entry in page]
        progress = await self._stored.read(self._attempt, self._set.token, numbers)
        return [
            {
                "batch_uid": _uid_of(number),
                "meta": {"items": progress[number], "first": number * self._set.batch_size},
            }
            for number in numbers
            if number in progress
        ]

    async def find_end(
        self, markers: Mapping[str, int], unconfirmed: Collection[str] = ()
    ) -> EndedSources | None:
        """Return that the source has ended."""
        return EndedSources(epochs={}, unfinished=frozenset())

    async def are_still_ended(self, ended: EndedSources | None) -> bool:
        """Return whether the end has been noted, and no batches follow."""
        return ended is not None and not self._starts

    async def check_idle(self) -> None:
        """Do nothing: the attempt never waits for its items."""


class _NumberedBatches(Mapping[str, Entry]):
    """The batches of a list by their uids, which needs no memory for them."""

    def __init__(self, numbers: range, size: int) -> None:
        self._numbers = numbers
        self._size = size

    def __getitem__(self, uid: str) -> Entry:
        return Entry(uid, self._size)

    def __iter__(self) -> Iterator[str]:
        return map(_uid_of, self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def _uid_of(number: int) -> str:
    return f"{number:07}"


_BUSY_SEC = 0.05
"""The shortest time between two scans."""
_EMPTY_SCAN_SEC = 0.5
"""The shortest time between two scans that find nothing. Together with its reads of source states and cancel flags, a
waiting attempt reads MongoDB less than 5 times a second, whatever `poll_ms` and `backoff_max_ms` say."""
_SHARE = 4.0
"""The pause after a scan is at least this many times as long as the scan, which limits the load of long scans."""
_MOST_DOUBLINGS = 30


class ScanSchedule:
    """The time of the next scan, in seconds of a monotonic clock that the caller reads.

    `poll_sec` is the time from one scan to the next while scans find batches, and also after the first one that finds
    none. Each further scan without a batch doubles it, up to `most_sec`.
    """

    def __init__(self, poll_sec: float, most_sec: float) -> None:
        self._poll_sec = poll_sec
        self._most_sec = max(poll_sec, most_sec)
        self._empty = 0
        self._earliest = self._due = 0.0

    def note_scan(self, began: float, took: float, *, found: bool) -> None:
        """Note a scan, the seconds that it took, and whether it found batches to deliver."""
        self._empty = 0 if found else self._empty + 1
        doublings = min(max(0, self._empty - 1), _MOST_DOUBLINGS)
        pause = self._poll_sec if not doublings else min(self._poll_sec * 2**doublings, self._most_sec)
        least = _EMPTY_SCAN_SEC if doublings else _BUSY_SEC
        self._earliest = began + took + max(_BUSY_SEC, took * _SHARE)
        self._due = max(began + max(pause, least), self._earliest)

    def hasten(self) -> None:
        """Make the next scan due as early as its load on the database allows."""
        self._due = min(self._due, self._earliest)

    def get_seconds_left(self, now: float) -> float:
        """Return the seconds until the next scan is due; 0 or less if it is."""
        return self._due - now


_STATES_PAUSE_SEC = 2.0
"""The shortest time between two reads of the states of the sources."""
_YIELD_AFTER_SEC = 5.0
"""How long all sources may be idle before a pulling attempt yields and frees its slot."""


_BEGUN = {NodeStatus.RUNNING, NodeStatus.CANCELLING}


class SourcesIdle(Exception):
    """Raised when nothing is left to deliver and no source is running, so the attempt should start again later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedSources:
    """A snapshot in which all sources had ended."""

    epochs: Mapping[str, int]
    """The epoch at which each source ended."""
    unfinished: frozenset[str]
    """Sources that ended without finishing. They can run again with the same epoch."""


class Sources:
    """The state of the sources of one attempt, according to the task document and their complete markers."""

    def __init__(self, tasks: TaskStore, attempt: AttemptInput, names: Sequence[str]) -> None:
        self._tasks = tasks
        self._attempt = attempt
        self._names = names
        self._states: dict[str, tuple[NodeStatus, int]] = {}
        self._read_at: float | None = None
        self._restarted = False
        """Whether a source has started again since its state was read."""
        self._idle_since: float | None = None
        self._native: dict[str, int] = {}
        """The epochs of attempts of sources that no bridge has dispatched."""

    async def find_end(
        self, markers: Mapping[str, int], unconfirmed: Collection[str] = ()
    ) -> EndedSources | None:
        """Return a snapshot if every source appears to have ended, otherwise None.

        An external worker writes its marker before the bridge has stored its last batches (protocol: hazard H19). Such
        a marker of one of the nodes in `unconfirmed` counts only once the node has ended.

        States can be two seconds old. Confirm the snapshot with `are_still_ended`, during or after the scan
        that finds no more batches.
        """
        if self._restarted:
            await self._read_states()
        if unconfirmed:
            await self._read_states(now=True)
            markers = {
                name: epoch for name, epoch in markers.items() if self._is_valid_marker(name, unconfirmed)
            }
        if (ended := self._find_end(markers)) is None:
            await self._read_states()
            ended = self._find_end(markers)
        return ended

    def _is_valid_marker(self, name: str, unconfirmed: Collection[str]) -> bool:
        return name not in unconfirmed or name not in self._states or self._get_status(name).ended

    async def are_still_ended(self, ended: EndedSources | None) -> bool:
        """Return whether `ended` still holds, that is, no source has started again since. Return False for None."""
        if ended is None:
            return False
        restarted = await retry_while_unavailable(
            lambda: self._tasks.have_restarted(self._attempt.task_id, ended.epochs, ended.unfinished)
        )
        self._restarted |= restarted
        return not restarted

    def _find_end(self, markers: Mapping[str, int]) -> EndedSources | None:
        epochs = {name: self._end_of(name, markers.get(name)) for name in self._names}
        known = {name: epoch for name, epoch in epochs.items() if epoch is not None}
        if len(known) < len(epochs):
            return None
        unfinished = frozenset(name for name in self._names if self._is_unfinished(name))
        return EndedSources(epochs=known, unfinished=unfinished)

    def _end_of(self, name: str, marker: int | None) -> int | None:
        """Return the epoch at which a source ended, or None if it has not, or its marker is from an earlier attempt."""
        status, epoch = self._states.get(name, (None, self._attempt.sources.get(name)))
        if epoch is None and self._read_at is not None:
            epoch = 0
        if self._is_unfinished(name):
            return epoch
        if marker is None or epoch is None or marker < epoch:
            return None
        never_begun = marker == 0 and status is not None and not status.ended
        return None if never_begun else marker

    def _is_unfinished(self, name: str) -> bool:
        status = self._states[name][0] if name in self._states else None
        return status is not None and status.ended and status is not NodeStatus.FINISHED

    async def _read_states(self, *, now: bool = False) -> None:
        """Read the states of the sources, at most every two seconds unless `now` is set."""
        at = time.monotonic()
        recent = self._read_at is not None and at - self._read_at < _STATES_PAUSE_SEC
        if recent and not (self._restarted or now):
            return
        self._read_at, self._restarted = at, False
        self._states = await retry_while_unavailable(lambda: self._tasks.node_states(self._attempt.task_id))
        active = {self._get_status(name) for name in self._names if not self._get_status(name).ended}
        idle = active and not (active & _BEGUN and await self._any_running())
        self._idle_since = (self._idle_since or at) if idle else None

    async def _any_running(self) -> bool:
        """Return whether a worker runs a source. The command of an external one may still wait for its worker.

        Whether an attempt is native does not change, so that is looked for once. A bridge may have begun an
        external one that has no dispatch record yet.
        """
        begun = {name: self._states[name][1] for name in self._names if self._get_status(name) in _BEGUN}
        if any(self._native.get(name) == epoch for name, epoch in begun.items()):
            return True
        task_id = self._attempt.task_id
        external = await retry_while_unavailable(lambda: self._tasks.external_runs(task_id, [*begun]))
        others = [name for name in begun if name not in external]
        native = await retry_while_unavailable(lambda: self._tasks.native(task_id, others))
        self._native |= {name: begun[name] for name in native}
        return bool(native) or any(external.values())

    def _get_status(self, name: str) -> NodeStatus:
        return self._states.get(name, (NodeStatus.QUEUED, 0))[0]

    async def check_idle(self) -> None:
        """Raise SourcesIdle if no source has been running for five seconds, according to a fresh read."""
        if self._is_idle():
            await self._read_states(now=True)
            if self._is_idle():
                raise SourcesIdle

    def _is_idle(self) -> bool:
        return self._idle_since is not None and time.monotonic() - self._idle_since > _YIELD_AFTER_SEC


class HeldBytes:
    """The bytes of a ByteBudget that one reader holds."""

    def __init__(self, size: int, release: Callable[[int], None]) -> None:
        self._size = size
        self._release = release

    def keep(self, size: int) -> None:
        """Release all but `size` bytes. Do nothing if the reader holds no more than that."""
        if size < self._size:
            self._release(self._size - size)
            self._size = size

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the bytes during the block, and hold them again after it, even beyond the limit of the budget."""
        size, self._size = self._size, 0
        self._release(size)
        try:
            yield
        finally:
            self._size = size
            self._release(-size)


class ByteBudget:
    """Limits how many bytes of batches a process holds in memory at once.

    A batch that is larger than the limit uses the whole budget while a reader holds it.
    """

    def __init__(self, limit: int, readers: int) -> None:
        self._limit = limit
        self._used = 0
        self._freed = asyncio.Event()
        self.share = max(1, limit // max(1, readers))
        """The bytes that one reader may request at once, so that all readers make progress."""

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[HeldBytes]:
        """Wait until `size` bytes are free, then hold them until the end of the block or until `keep` releases them."""
        size = min(size, self._limit)
        while self._used + size > self._limit:
            self._freed.clear()
            await self._freed.wait()
        self._used += size
        held = HeldBytes(size, self._release)
        try:
            yield held
        finally:
            held.keep(0)

    def _release(self, size: int) -> None:
        self._used -= size
        self._freed.set()
