"""Plays one node with shards, whose workers die, freeze, lose MongoDB and their leases, and checks what it
has stored."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.contract.attempt_executors import role_executor
from tests.contract.builders import AT, RUN, TASK, WORKER, attempt, begun, documents_of, opened, stored_node
from tests.fuzz.play import Difference
from tests.fuzz.shard_world import Process, elapse, virtual_time

from flowkit.activities.handlers import BatchResult, FinalizeResult, RoleHandler
from flowkit.activities.role_attempt import SHARD_SEC
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.mongo import moment
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.supervision import AttemptFailed
from flowkit.core.time import LeaseObserver
from flowkit.errors import EpochTaken, Fenced
from flowkit.graph.expressions import divide
from flowkit.models import AttemptInput, NodeIO, Quarantine
from flowkit.reason_codes import FENCED, TOO_MANY_FAILED_BATCHES
from flowkit.testing import memory_database

if TYPE_CHECKING:
    import random
    from collections.abc import Hashable

    from flowkit.activities.context import RunContext
    from flowkit.activities.handlers import Batch
    from flowkit.activities.role_attempt import RoleExecutor

Group = tuple[int, ...]
"""The values of one batch. No other batch has any of them."""

_MOST_SEC = 100.0
"""The longest time that a node takes, and the lease of an attempt."""
_LOSSES = 3
"""After this number of losses, a batch may be set aside."""
_MOST_FAULTS = 8
_NODE = "w"


_EXPIRED = moment(0.0) + timedelta(days=1)


def _silent_sec(_: LeaseObserver, lease: Hashable, value: Any, read_at: float) -> float:
    """Return for how long a lease has not been renewed: for ever, if the play has let it expire."""
    return inf if value.year == _EXPIRED.year else 0.0


@dataclass(kw_only=True)
class Node:
    """The node with shards: what it reads, and how its batches turn out."""

    sources: dict[str, list[Group]]
    """The batches of the nodes from which it pulls; empty if it has `map`."""
    size: int | None
    """How many values of a batch it receives at once, or of its items; None for whole batches."""
    values: int
    parallel: int
    quarantine: Quarantine | None
    bad: set[Group] = field(default_factory=set)
    """The batches that fail in every try."""
    permanent: bool = False
    """Whether these failures are permanent."""
    flaky: set[Group] = field(default_factory=set)
    """The batches that fail in the first try of all."""
    silent: set[Group] = field(default_factory=set)
    """The batches without metrics. None of them is flaky: they have no row that would reject a late failure."""

    @property
    def groups(self) -> list[Group]:
        """The batches that the node processes."""
        given = [group for groups in self.sources.values() for group in groups]
        if not self.sources:
            given = [tuple(range(self.values))]
        if self.size is None:
            return given
        size = self.size
        return [group[start : start + size] for group in given for start in range(0, len(group), size)]

    @property
    def tries(self) -> int:
        """How often it tries a batch that it then sets aside."""
        return 1 if self.permanent or self.quarantine is None else self.quarantine.attempts

    @property
    def exceeds(self) -> bool:
        """Whether it sets more batches aside than it may."""
        if self.quarantine is None:
            return False
        share = self.quarantine.share
        most = self.quarantine.most or 0 if share is None else int(share * len(self.groups))
        return len(self.bad) > most

    def attempt(self, shard: int, epoch: int) -> AttemptInput:
        """Return an attempt of a shard, or the closing one."""
        args: dict[str, Any] = {"from_nodes": [*self.sources], "poll_ms": 50}
        adapter = "pull.from_artifacts"
        if self.size is not None:
            adapter, args = (
                "pull.from_artifacts.rechunk:size",
                args | {"size": self.size, "meta_list_key": "values"},
            )
        return replace(
            attempt(_NODE, epoch=epoch, index=len(self.sources)),
            io=NodeIO(input_inline={"input_adapter": adapter, "input_args": args} if self.sources else None),
            sources={name: 1 for name in self.sources},
            lease_ttl_sec=_MOST_SEC,
            shard=shard,
            parallel=self.parallel,
            quarantine=self.quarantine,
            maps=not self.sources,
        )


def draw_node(chance: random.Random, most: int) -> Node:
    """Return a node with some batches, of which some fail."""
    numbers = count()
    names = chance.choice([(), ("a",), ("a",), ("a", "b")])
    sources = {
        name: [
            tuple(next(numbers) for _ in range(chance.randint(1, 4))) for _ in range(chance.randint(0, most))
        ]
        for name in names
    }
    limit: dict[str, Any] = chance.choice([{"most": 2}, {"most": 30}, {"most": None, "share": 0.3}])
    node = Node(
        sources=sources,
        size=chance.choice([None, None, 1, 2]) if names else chance.randint(1, 4),
        values=next(numbers) or chance.randint(0, most * 3),
        parallel=chance.randint(2, 4),
        quarantine=Quarantine(attempts=chance.randint(1, 3), **limit) if chance.random() < 0.5 else None,
        permanent=chance.random() < 0.3,
    )
    groups = node.groups
    if node.quarantine is not None:
        node.bad = {group for group in groups if chance.random() < 0.15}
    if node.quarantine is None or node.quarantine.attempts > 1:
        node.flaky = {group for group in groups if chance.random() < 0.1} - node.bad
    node.silent = {group for group in groups if chance.random() < 0.1} - node.flaky
    return node


class Handler(RoleHandler):
    """Returns the values of a batch, and who has processed it."""

    def __init__(self, play: ShardPlay, epoch: int) -> None:
        self._play = play
        self._epoch = epoch
        self.processed: Counter[Group] = Counter()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the result, or fail as drawn."""
        node, found = self._play.node, batch.payload
        group = tuple(found["items"] if "items" in found else found["meta"]["values"])
        self.processed[group] += 1
        self._play.uids[batch.batch_uid or ""].add(group)
        await elapse(self._play.chance.random() * 0.05)
        fails = group in node.bad or (group in node.flaky and group not in self._play.has_failed)
        if fails:
            self._play.has_failed.add(group)
            permanent = node.permanent and group in node.bad
            return BatchResult(success=False, reason_code="drawn", error="as drawn", permanent=permanent)
        metrics = {} if group in node.silent else {"values": [*group], "by": self._epoch}
        return BatchResult(success=True, metrics=metrics)

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        """Say who has ended the node."""
        return FinalizeResult(metrics={"by": self._epoch})


@dataclass(kw_only=True)
class Try:
    """An attempt that runs."""

    given: AttemptInput
    process: Process
    handler: Handler
    executor: RoleExecutor
    running: asyncio.Task[Any]


class ShardPlay:
    """One node with shards."""

    def __init__(self, chance: random.Random, most: int) -> None:
        self.chance = chance
        self.node = draw_node(chance, most)
        self.counts: Counter[str] = Counter()
        self.history: list[str] = [repr(self.node)]
        """What happened."""
        self.longest_leak_sec = 0.0
        self.uids: defaultdict[str, set[Group]] = defaultdict(set)
        """What handlers have received under each uid."""
        self.has_failed: set[Group] = set()
        self._calm = chance.random() < 0.25
        """Whether no process stops and nothing is lost, so that no batch is processed twice."""
        self._faults = 0 if self._calm else chance.randint(1, _MOST_FAULTS)
        """How many processes may stop."""
        self._outages = 0.0 if self._calm else chance.choice([0.0, 0.0, 0.03])
        self._db = memory_database()
        self._tasks = TaskStore(self._db)
        self._artifacts = ArtifactStore(self._db)
        self._epoch = 0
        self._turn = asyncio.Lock()
        """Held by the attempt that has not begun: shards start one after another."""
        self._all: list[Try] = []
        self._left: set[int] = set()
        """The shards whose latest attempt may have left batches."""
        self._continuing: set[int] = set()
        """The shards whose latest attempt has handed over."""
        self._lost: dict[Group, Any] = {}
        """The batches that were set aside because their processes were lost, with what is stored of this."""
        self._exhausted = self._failed = False
        self._fences: dict[tuple[str, str], tuple[int, int]] = {}
        """The fencing number and the epoch of each stored row."""

    def _note(self, kind: str, what: object) -> None:
        self.counts[kind] += 1
        self.history.append(f"{asyncio.get_running_loop().time():.3f} {kind} {what}")

    async def run(self) -> None:
        """Play until the node has ended and all processes that were frozen have returned."""
        with virtual_time(self.chance), patch.object(LeaseObserver, "unchanged_sec", _silent_sec):
            try:
                async with asyncio.timeout(_MOST_SEC):
                    await self._run()
            except TimeoutError:
                raise Difference(f"the node does not end: {[each.given for each in self._all]}") from None
            finally:
                for each in self._all:
                    each.process.kill()
                    each.running.cancel()
                await asyncio.gather(*(each.running for each in self._all), return_exceptions=True)

    async def _run(self) -> None:
        feeding = asyncio.create_task(self._feed(await self._prepare()))
        disturbing = asyncio.create_task(self._disturb())
        shards = range(1, self.node.parallel + 1)
        await asyncio.gather(*(self._run_shard(number) for number in shards), feeding)
        if not self._failed and not self._exhausted:
            raise Difference("the shards have ended, but none has found that nothing is left")
        while not self._failed and await self._end_of(await self._begin(0)) is None:
            pass
        disturbing.cancel()
        await self._note_lost()
        self._note("failed node" if self._failed else "finished node", self.node.exceeds)
        if self._failed != self.node.exceeds:
            raise Difference(f"the node has failed: {self._failed}")
        if not self._failed:
            await self._compare()
            before = await self._stored()
            await self._let_all_return()
            for row, now in zip(before, await self._stored(), strict=True):
                self._equal("after the return of all processes", now, row)

    async def _prepare(self) -> list[tuple[str, int]]:
        """Store the task and its items.

        Return the batches to store, by the name of the source and number; -1 ends it.
        """
        await self._tasks.prepare()
        await self._artifacts.prepare()
        names = [*self.node.sources]
        await opened(self._tasks, *names, _NODE)
        if not names:
            values, key = self._tasks.values, (TASK, _NODE, 0)
            size = self.node.size or 1
            items = await values.items.put(key, "token", divide([*range(self.node.values)], size), size, AT)
            await values.put(key, {}, AT, (AT, 1), items)
        for name in names:
            await begun(self._tasks, self._source(name))
        return [(name, number) for name in names for number in (*range(len(self.node.sources[name])), -1)]

    def _source(self, name: str) -> AttemptInput:
        return attempt(name, index=[*self.node.sources].index(name))

    async def _feed(self, batches: list[tuple[str, int]]) -> None:
        """Store the batches of the sources, before or while the shards run."""
        streams = self.chance.random() < 0.4
        for name, number in batches:
            if streams:
                await elapse(self.chance.random() * 0.1)
            source = self._source(name)
            if number >= 0:
                values = {"values": [*self.node.sources[name][number]]}
                await self._artifacts.store_batch(source, f"{number}", values, WORKER, AT)
            else:
                await self._artifacts.mark_complete(TASK, name, 1, {}, AT)
                await self._tasks.attempts.finish(source, RUN, AT)

    async def _disturb(self) -> None:
        """Let leases expire of attempts that run, extend them again, and let shards hand over."""
        while not self._calm:
            await elapse(self.chance.random() * 0.3)
            running = [each for each in self._all if not each.running.done() and each.given.shard]
            if not running:
                continue
            one, drawn = self.chance.choice(running), self.chance.random()
            if drawn < 0.3:
                await self._expire(one.given)
            elif drawn < 0.5:
                await self._tasks.shards.extend_lease(one.given, RUN, AT + 2 * _MOST_SEC)
            elif drawn < 0.8:
                self._note("handover", one.given.epoch)
                one.executor._begun_at -= SHARD_SEC

    async def _expire(self, given: AttemptInput) -> None:
        self._note("expired lease", given.epoch)
        past = {"lease_until": _EXPIRED}
        await self._db.node_shards.update_one({"attempt_epoch": given.epoch}, {"$set": past})

    def _may_run(self, number: int) -> bool:
        waits = not self._exhausted or number in self._left or number in self._continuing
        return not self._failed and waits

    async def _run_shard(self, number: int) -> None:
        """Run the attempts of a shard, as the workflow does."""
        while self._may_run(number):
            async with self._turn:
                if not self._may_run(number):
                    return
                one = await self._begin(number)
            self._continuing.discard(number)
            ended = await self._end_of(one)
            if ended is None:
                self._left.add(number)
                await elapse(self.chance.random() * 0.5)
            else:
                self._note_end(number, more=ended.more)

    def _note_end(self, number: int, *, more: bool) -> None:
        self._left.discard(number)
        if more:
            self._continuing.add(number)
        else:
            self._exhausted = True
            self._continuing.clear()

    async def _begin(self, number: int) -> Try:
        """Start the next attempt of a shard, and return when it has begun, stopped or ended."""
        one, has_begun = self._start(number)
        await self._wait_for(one, has_begun, one.process.stopped)
        return one

    async def _end_of(self, one: Try) -> Any:
        """Return the result of an attempt; None if it must run again."""
        await self._wait_for(one, one.process.stopped)
        if one.running.done():
            return self._result_of(one)
        await self._lose(one)
        return None

    async def _wait_for(self, one: Try, *events: asyncio.Event) -> None:
        """Wait until an attempt has ended, or one of the events is set."""
        waits = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.wait([*waits, one.running], return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()

    def _start(self, number: int) -> tuple[Try, asyncio.Event]:
        self._epoch += 1
        given, handler, begins = (
            self.node.attempt(number, self._epoch),
            Handler(self, self._epoch),
            asyncio.Event(),
        )
        stops = self._faults > 0 and self.chance.random() < 0.5
        self._faults -= stops
        process = Process(
            self._db,
            self.chance,
            stops_at=self.chance.randint(1, 14) if stops else 0,
            outages=self._outages,
            note=self._note,
            on_write=self._check_rows,
        )
        executor = role_executor(process, given, handler, on_begin=begins.set)
        self._note("closing attempt" if not number else "attempt of a shard", (number, self._epoch))
        running = asyncio.create_task(executor.run())
        one = Try(given=given, process=process, handler=handler, executor=executor, running=running)
        self._all.append(one)
        return one, begins

    async def _lose(self, one: Try) -> None:
        """Let an attempt be lost whose process has stopped, and let some of these return later."""
        self._note("lost attempt", one.given.epoch)
        if self.chance.random() < 0.7:
            await self._expire(one.given)
        if (drawn := self.chance.random()) < 0.4:
            asyncio.get_running_loop().call_later(self.chance.random() * 2, self._thaw, one)
        elif drawn < 0.7:
            self._note("killed process", one.given.epoch)
            one.process.kill()

    def _thaw(self, one: Try) -> None:
        self._note("returned process", one.given.epoch)
        one.process.thaw()

    def _result_of(self, one: Try) -> Any:
        """Return the result of an attempt that has ended; None if it must run again."""
        try:
            result = one.running.result()
        except AttemptFailed as error:
            code = error.failure.code
            self._note("fenced attempt" if code == FENCED else "failed attempt", (one.given.epoch, code))
            if code == TOO_MANY_FAILED_BATCHES:
                self._failed = True
            elif code != FENCED and (code != "drawn" or self.node.quarantine is not None):
                raise Difference(f"attempt {one.given.epoch} has failed: {error.failure}") from error
            return None
        except (Fenced, EpochTaken) as error:
            self._note("fenced attempt", (one.given.epoch, str(error)))
            return None
        self._note("ended attempt", (one.given.epoch, result.batches, result.more))
        return result

    async def _check_rows(self, collection: str) -> None:
        """Check that no row has replaced one with a higher fencing number."""
        if collection not in ("artifacts", "metrics_raw"):
            return
        async for row in self._db[collection].find({"node_id": _NODE, "fence": {"$exists": True}}):
            key, now = (collection, row["batch_uid"]), (row["fence"], row["attempt_epoch"])
            before = self._fences.setdefault(key, now)
            if now[0] < before[0]:
                raise Difference(f"{key} of {now} has replaced that of {before}")
            self._fences[key] = now

    async def _note_lost(self) -> None:
        """Add the batches to the bad ones that were set aside because their processes were lost, three
        times or more.
        """
        _, artifacts, _ = await self._rows()
        for uid, row in artifacts.items():
            aside = row.get("quarantined") or {}
            if not aside.get("error", "").startswith("the process that ran it was lost"):
                continue
            most = self.counts["lost attempt"] + self.counts["expired lease"]
            if not _LOSSES <= aside["tries"] <= most:
                raise Difference(f"batch {uid} was set aside after {aside['tries']} losses")
            if uid not in self.uids:
                received = {group for groups in self.uids.values() for group in groups}
                self.uids[uid].add(next(group for group in self.node.groups if group not in received))
            (group,) = self.uids[uid]
            self._note("set aside after losses", group)
            self.node.bad.add(group)
            self._lost[group] = aside

    async def _compare(self) -> None:
        """Compare what the node has stored with what it must have stored."""
        node, last = self.node, self._all[-1]
        received = Counter(group for groups in self.uids.values() for group in groups)
        self._equal("batches", received, Counter(node.groups))
        rows, artifacts, finals = await self._rows()
        self._equal("artifacts", artifacts.keys(), self.uids.keys())
        for uid, (group,) in self.uids.items():
            self._equal(f"artifact {uid}", _brief(artifacts[uid]), self._expected(group))
            self._equal(f"metrics {uid}", _values(rows.pop(uid, None)), self._expected_values(group))
        self._equal("more metrics", rows, {})
        self._equal("final metrics", finals, [{"by": last.given.epoch}])
        entry = await stored_node(self._db, len(node.sources))
        self._equal("status", (entry["status"], entry["attempt_epoch"]), ("finished", last.given.epoch))
        self._equal("set aside", last.running.result().failed_batches, len(node.bad))
        self.counts["set aside"] += len(node.bad)
        closing = [each.handler.processed for each in self._all if not each.given.shard]
        self._equal("batches of closing attempts", sum(closing, Counter()), Counter())
        claims = await documents_of(self._db.stream_progress)
        claimed = [*node.sources.values()] if node.sources else [node.groups]
        self._equal("claims", len(claims), sum(map(len, claimed)))
        if self._calm:
            tries = {
                group: node.tries if group in node.bad else 1 + (group in node.flaky) for group in node.groups
            }
            self._equal(
                "tries", sum((each.handler.processed for each in self._all), Counter()), Counter(tries)
            )

    def _equal(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise Difference(f"{what}: found {found}, expected {expected}")

    def _expected(self, group: Group) -> object:
        if group in self._lost:
            return "failed", None, self._lost[group]
        if group in self.node.bad:
            return "failed", None, {"error": "as drawn", "tries": self.node.tries}
        return "partial", None if group in self.node.silent else [*group], None

    def _expected_values(self, group: Group) -> object:
        if group in self.node.bad:
            return True, None
        return None if group in self.node.silent else (False, [*group])

    async def _rows(self) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
        """Return the metrics rows and artifacts of batches by uid, and the final metrics."""
        rows = [row for row in await documents_of(self._db.metrics_raw) if row["node_id"] == _NODE]
        artifacts = await documents_of(self._db.artifacts)
        return (
            {row["batch_uid"]: row for row in rows if not row.get("final")},
            {row["batch_uid"]: row for row in artifacts if row["node_id"] == _NODE and "batch_uid" in row},
            [row["metrics"] for row in rows if row.get("final")],
        )

    async def _stored(self) -> list[object]:
        rows, artifacts, finals = await self._rows()
        found = [{**row, "fence": None} for row in (*rows.values(), *artifacts.values())]
        return [*found, finals, await stored_node(self._db, len(self.node.sources))]

    async def _let_all_return(self) -> None:
        """Let all processes continue that are frozen, and wait until they have ended."""
        for each in self._all:
            each.process.thaw()
        for each in self._all:
            if not each.process.is_killed:
                with suppress(AttemptFailed, EpochTaken, Fenced):
                    await each.running


def _brief(artifact: dict[str, Any]) -> object:
    return artifact["status"], artifact["meta"].get("values"), artifact.get("quarantined")


def _values(row: dict[str, Any] | None) -> object:
    return None if row is None else (row["failed"], row["metrics"].get("values"))
