"""Explain where the time of a task went: its critical path, the parts of its time, and which nodes to speed up. Pure.

The input is a `TaskTimeline`: when each attempt was scheduled, started and ended, and which waits are known. Times are
in seconds since the epoch. They come from several clocks, so they may contradict each other; every time is clipped to
its neighbours, and no part is ever negative.

**Critical path.** It leads back from the end of the task, or from now. Each leg belongs to one node and begins when the
last thing happened that the node had to wait for: the end or first batch of a parent, the end of a source, the start of
a new generation. The legs cover the whole time of the task without overlap. Each moment of a leg counts towards
exactly one part, so that the parts sum to the whole.

**Gain.** A model of the run sets the time of a node's attempts to 0 and computes the schedule again. All queues and
waits keep their length. A node that reads from others while they run needs, after the last of their ends, as long as it
did. The result is the most that the task can gain, and never more than the work of the node.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SKEW_SEC = 1.0
"""How much later than the start of a node, by another clock, the end of a parent may be that the node has awaited."""

_MOST_SPEED_UPS = 3
_MOST_TRIES, _MOST_STEPS = 100, 200_000
"""Largest number of nodes for which the schedule is computed again, those with the most work first; in large tasks, the
computed nodes of all these schedules limit it, too."""
_LEAST_GAIN_SEC = 0.001


class TimePart(StrEnum):
    """What a task spends its time on."""

    WORK = "work"
    """Attempts that have finished, were handed over, or run."""
    FAILED_WORK = "failed_work"
    """Attempts that have failed or were lost or cancelled."""
    QUEUE = "queue"
    """Attempts that no worker has started yet."""
    RETRY_WAITS = "retry_waits"
    """Between two attempts of a node: backoffs, and waits after yields."""
    SLOTS = "slots"
    """Slots of the limits of the task, and of the concurrency limits."""
    PEOPLE = "people"
    """Approvals, held failures and pauses."""
    SCHEDULED = "scheduled"
    """Delays, and prerequisites."""
    OTHER = "database_and_temporal"
    """What remains: the engine, MongoDB and Temporal."""


_WORK = (TimePart.WORK, TimePart.FAILED_WORK)
_PRECEDENCE = (
    *_WORK,
    TimePart.QUEUE,
    TimePart.PEOPLE,
    TimePart.RETRY_WAITS,
    TimePart.SCHEDULED,
    TimePart.SLOTS,
    TimePart.OTHER,
)
"""Which part counts if several apply at once. Slots come last: that all of a role are taken concerns all its nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSpan:
    """When an attempt was scheduled, started and ended."""

    scheduled_at: float
    started_at: float | None = None
    """None while no worker has started it."""
    ended_at: float | None = None
    """None while it runs or waits."""
    part: TimePart = TimePart.WORK
    """`WORK` or `FAILED_WORK`."""
    resets: bool = False
    """Whether it is the first attempt of a new generation, which an action has started."""
    yields: bool = False
    """Whether it has yielded, so that its node waits for its sources until the next attempt."""
    first_batch_at: float | None = None
    """When it has stored its first batch, if nodes that stream from this one have waited for that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitSpan:
    """A wait of a node. While an attempt is scheduled or runs, it does not count."""

    part: TimePart
    since: float
    until: float = math.inf
    """Infinite if the wait has not ended."""
    keeps_open: bool = False
    """Whether the node has not ended meanwhile: a wait for a retry, or for a decision about a failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTimeline:
    """What is known of one node."""

    node_id: str
    parents: tuple[int, ...] = ()
    routers: tuple[int, ...] = ()
    """Nodes whose routes lead to this one."""
    streams_from: frozenset[int] = frozenset()
    """Parents whose first batch is enough."""
    sources: tuple[int, ...] = ()
    """Nodes whose batches this one reads, so that it ends after them."""
    needed: int | None = None
    """How many parents must end before it starts; None for all."""
    spans: tuple[AttemptSpan, ...] = ()
    """Its attempts, in their order."""
    waits: tuple[WaitSpan, ...] = ()
    limits: tuple[WaitSpan, ...] = ()
    """When all slots of its role or of the task were taken, in order and without overlaps; nodes share the list."""
    is_open: bool = False
    """Whether it has not ended."""
    is_finished: bool = True
    """Whether its end satisfies a gate that needs only some parents, once it has ended."""
    ended_at: float | None = None
    """When it ended. None if that is the end of its last attempt, or if it has none."""
    waits_as: TimePart | None = None
    """What the whole time of a node without attempts is: an approval or a delay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskTimeline:
    """What is known of one run of a task."""

    began_at: float
    ended_at: float
    """When the task ended, or now."""
    nodes: tuple[NodeTimeline, ...]
    resets: tuple[float, ...] = ()
    """When actions have started new generations of nodes."""
    gains: bool = True
    """Whether less work would end the task earlier: not if it was cancelled or has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSlice:
    """A piece of a leg that belongs to one part."""

    part: TimePart
    since: float
    until: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PathLeg:
    """A piece of the critical path: one node, from what held it to its end or to what it held."""

    node_id: str | None
    """None before the first node, after the last one, and while no node had anything to do."""
    since: float
    until: float
    slices: tuple[TimeSlice, ...]

    @property
    def seconds(self) -> float:
        """How long the leg is."""
        return self.until - self.since

    def parts(self) -> dict[TimePart, float]:
        """Return the seconds of each part that the leg has."""
        found: dict[TimePart, float] = {}
        for piece in self.slices:
            found[piece.part] = found.get(piece.part, 0.0) + piece.until - piece.since
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedUp:
    """What the task would gain at most if a node needed no time."""

    node_id: str
    gain: float
    """In seconds; at most `work`."""
    work: float
    """How long the attempts of the node took, in seconds; of several shards, while at least one ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeReport:
    """Where the time of a task went."""

    began_at: float
    seconds: float
    parts: dict[TimePart, float]
    """Seconds of each part along the critical path. They sum to `seconds`."""
    path: tuple[PathLeg, ...]
    """From the begin of the task to its end, or to now."""
    speed_ups: tuple[SpeedUp, ...]
    """The nodes to speed up first, the largest gain first; at most three."""


def explain_timeline(task: TaskTimeline) -> TimeReport:
    """Return where the time of a task went."""
    runs = _Runs(task)
    path = tuple(_walk(runs))
    parts = dict.fromkeys(TimePart, 0.0)
    for leg in path:
        for piece in leg.slices:
            parts[piece.part] += piece.until - piece.since
    ups = _find_speed_ups(runs, {leg.node_id for leg in path}) if task.gains else ()
    seconds = runs.end - runs.begin
    return TimeReport(began_at=runs.begin, seconds=seconds, parts=parts, path=path, speed_ups=tuple(ups))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWaited:
    """When a node waited, and for what."""

    node_id: str
    part: TimePart
    since: float
    until: float | None
    """None while the wait lasts."""


def list_waits(task: TaskTimeline) -> Iterator[NodeWaited]:
    """Yield the waits of each node, in the order of the graph, as the explanation divides its time.

    They lie between the opening of its gate and its end, and without what counts as database and Temporal.
    """
    runs = _Runs(task)
    for index, node in enumerate(runs.nodes):
        for episode in runs.episodes[index]:
            lasts = node.is_open and episode is runs.latest(index)
            for piece in _slice(
                _intervals(runs, index, episode.gate, episode.end), episode.gate, episode.end
            ):
                if piece.part not in (*_WORK, TimePart.OTHER):
                    until = None if lasts and piece.until == runs.end else piece.until
                    yield NodeWaited(node_id=node.node_id, part=piece.part, since=piece.since, until=until)


# --- the generations of nodes -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Episode:
    """One generation of a node, or the time of a node without attempts."""

    node: int
    first: float
    """When its first attempt was scheduled; of a node without attempts, when it ended."""
    end: float
    resets: bool = False
    batch: float = math.inf
    """When one of its attempts has stored the first batch; infinite if that is unknown."""
    gate: float = 0.0
    """When the last thing happened for which it had to wait before it could start."""
    holder: int | None = None
    """The node that opened the gate; None if the task or an action did."""
    by_reset: bool = False
    """Whether an action opened the gate."""
    opened_by: tuple[float, ...] = ()
    """When the parents and routers satisfied the gate; infinite for those that did not."""
    read_until: float | None = None
    """When the last source ended that ran while it waited or ran."""
    last_source: int | None = None


class _Runs:
    """The generations of all nodes of a task, with times that lie between its begin and its end."""

    def __init__(self, task: TaskTimeline) -> None:
        self.begin = task.began_at
        self.end = max(task.began_at, task.ended_at)
        self.nodes = task.nodes
        self.resets = sorted(map(self.clip, task.resets))
        self.spans = [[*self._order(node)] for node in task.nodes]
        self.episodes: list[list[_Episode]] = [self._split(index) for index in range(len(task.nodes))]
        for index in self._by_dependency():
            for episode in self.episodes[index]:
                self._find_gate(episode)
            self.episodes[index] = [each for each in self.episodes[index] if math.isfinite(each.gate)]
        self._find_sources()

    def clip(self, at: float) -> float:
        """Return a time within the run."""
        return min(max(at, self.begin), self.end)

    def _order(self, node: NodeTimeline) -> Iterator[tuple[AttemptSpan, float, float, float]]:
        """Yield each attempt with when it was scheduled, started and ended, clipped and in this order."""
        for span in node.spans:
            end = self.clip(self.end if span.ended_at is None else span.ended_at)
            start = end if span.started_at is None else min(self.clip(span.started_at), end)
            yield span, min(self.clip(span.scheduled_at), start), start, end

    def _split(self, index: int) -> list[_Episode]:
        node, found = self.nodes[index], list[_Episode]()
        for span, scheduled, _, end in self.spans[index]:
            if not found or span.resets:
                found.append(_Episode(index, scheduled, end, resets=span.resets))
            found[-1].first, found[-1].end = min(found[-1].first, scheduled), max(found[-1].end, end)
            if span.first_batch_at is not None:
                found[-1].batch = min(found[-1].batch, self.clip(span.first_batch_at))
        lasts = [each.first for each in found[1:]] + [self.end] * bool(found)
        for episode, last in zip(found, lasts, strict=True):
            waits = [each for each in node.waits if each.keeps_open and episode.first <= each.since <= last]
            episode.end = max([episode.end, *(min(self.clip(each.until), last) for each in waits)])
        ended = self.end if node.is_open else node.ended_at
        if found and ended is not None:
            found[-1].end = max(found[-1].end, self.clip(ended))
        elif not found and ended is not None:
            found.append(_Episode(index, self.clip(ended), self.clip(ended)))
        return found

    def _by_dependency(self) -> list[int]:
        """Return the nodes, each after those for which it waits. Of an invalid graph, return them as they come."""
        graph = {index: (*node.parents, *node.routers) for index, node in enumerate(self.nodes)}
        try:
            return [*TopologicalSorter(graph).static_order()]
        except CycleError:
            return [*graph]

    def _satisfied(self, child: _Episode, parent: int) -> float:
        """Return when `parent` satisfied the gate of `child`; infinite if it did not before the child's first attempt.

        An end that is later by less than SKEW_SEC comes from another clock.
        """
        before = [each for each in self.episodes[parent] if each.gate <= child.first]
        counts = self.nodes[parent].is_finished or self.nodes[child.node].needed is None
        if not before or not counts:
            return math.inf
        episode, at = before[-1], before[-1].end
        if self.nodes[parent].is_open and episode is self.episodes[parent][-1]:
            at = math.inf
        if parent in self.nodes[child.node].streams_from:
            at = min(at, episode.batch)
        return at if at <= child.first + SKEW_SEC else math.inf

    def _find_gate(self, episode: _Episode) -> None:
        """Find when the gate of an episode opened, and what opened it. Infinite if it has not."""
        node = self.nodes[episode.node]
        before = (*node.parents, *node.routers)
        episode.opened_by = tuple(self._satisfied(episode, each) for each in before)
        has_begun = not node.is_open or bool(self.spans[episode.node])
        rule = _find_opening if has_begun else _open_gate
        opened = rule(node, episode.opened_by, self.begin)
        reset = next((at for at in reversed(self.resets) if at <= episode.first), None)
        episode.gate = max(self.begin, min(opened, episode.first)) if opened < math.inf else opened
        openers = (each for at, each in zip(episode.opened_by, before, strict=True) if at == opened)
        episode.holder = next(openers, None)
        if episode.resets and reset is not None and reset >= episode.gate:
            episode.gate, episode.holder, episode.by_reset = reset, None, True
        if not (self.spans[episode.node] or node.is_open or node.waits_as):
            # It was skipped, as late as the close of the task has written it.
            waited = (min(each.until, episode.end) for each in node.waits if each.since < episode.end)
            episode.end = max([episode.gate, *waited])

    def _find_sources(self) -> None:
        """Find the source of each episode that ended last while an attempt could read from it."""
        for episode in (each for every in self.episodes for each in every):
            for source in self.nodes[episode.node].sources:
                for end in self._find_reads(episode, source):
                    if episode.read_until is None or end > episode.read_until:
                        episode.read_until, episode.last_source = end, source

    def _find_reads(self, episode: _Episode, source: int) -> Iterator[float]:
        """Yield the ends of a source that an attempt has awaited: while it ran, or after it had yielded."""
        if self.nodes[source].is_open or source == episode.node:
            return
        own = [
            each for each in self.spans[episode.node] if episode.gate <= each[2] and each[3] <= episode.end
        ]
        for (span, _, start, end), following in zip(own, [*own[1:], None], strict=False):
            until = following[1] if span.yields and following is not None else end
            if span.part is TimePart.WORK:
                ends = (each.end for each in self.episodes[source])
                yield from (min(each, until) for each in ends if start < each <= until + SKEW_SEC)

    def latest(self, index: int) -> _Episode | None:
        """Return the latest episode of a node; None if it has none."""
        return self.episodes[index][-1] if self.episodes[index] else None

    def active_before(self, at: float) -> _Episode | None:
        """Return the episode that was last active before a moment; of several that were active then, the longest."""
        begun = [each for every in self.episodes for each in every if each.gate < at]
        return max(begun, key=lambda each: (min(each.end, at), -each.gate), default=None)

    def episode_before(self, index: int, at: float) -> _Episode | None:
        """Return the last episode of a node whose gate had opened by then."""
        return next((each for each in reversed(self.episodes[index]) if each.gate <= at), None)


def _open_gate(node: NodeTimeline, opened_by: Sequence[float], otherwise: float) -> float:
    """Return when the gate of a node opens; `otherwise` without parents; infinite if too few parents satisfy it."""
    parents, routers = sorted(opened_by[: len(node.parents)]), opened_by[len(node.parents) :]
    by_parents = by_routers = -math.inf
    if parents:
        by_parents = parents[-1] if node.needed is None else parents[min(node.needed, len(parents)) - 1]
    if routers:
        by_routers = max((at for at in routers if at < math.inf), default=math.inf)
    return max(by_parents, by_routers) if opened_by else otherwise


def _find_opening(node: NodeTimeline, opened_by: Sequence[float], otherwise: float) -> float:
    """Return when the gate of a node opened that has begun or ended.

    If its parents do not say, for example because some were skipped, the latest known end counts, or `otherwise`.
    """
    opened = _open_gate(node, opened_by, otherwise)
    return opened if opened < math.inf else max((at for at in opened_by if at < math.inf), default=otherwise)


# --- the critical path ------------------------------------------------------------------------------------------------


def _walk(runs: _Runs) -> list[PathLeg]:
    """Return the critical path, from the begin of the task to its end."""
    legs: list[PathLeg] = []
    at, episode = runs.end, runs.active_before(runs.end)
    if episode is None:
        episode = runs.active_before(math.inf)
    if episode is not None and episode.end < at:
        legs += _make_leg(runs, None, episode.end, at)
        at = episode.end
    seen: set[int] = set()
    while episode is not None and id(episode) not in seen:
        seen.add(id(episode))
        since, before = _find_held(runs, episode, at)
        legs += _make_leg(runs, episode, since, at)
        at = since
        if before is not None and before.end < at and episode.by_reset:
            legs += _make_leg(runs, before, before.end, at)
            at = before.end
        episode = before
    legs += _make_leg(runs, None, runs.begin, at)
    return [*_join(legs[::-1])]


def _join(legs: Sequence[PathLeg]) -> Iterator[PathLeg]:
    """Join legs of the same node that follow each other, such as those of its generations."""
    for _, group in groupby(legs, key=lambda leg: leg.node_id):
        first, *more = group
        slices = tuple(piece for leg in (first, *more) for piece in leg.slices)
        yield replace(first, until=slices[-1].until, slices=slices)


def _find_held(runs: _Runs, episode: _Episode, at: float) -> tuple[float, _Episode | None]:
    """Return since when nothing else has held an episode before `at`, and the episode that held it until then."""
    read_until, source = episode.read_until, episode.last_source
    if source is not None and read_until is not None and read_until < at:
        return read_until, runs.episode_before(source, read_until)
    since = min(episode.gate, at)
    if episode.by_reset:
        return since, runs.active_before(since)
    if episode.holder is None:
        return since, None
    return since, runs.episode_before(episode.holder, since)


def _make_leg(runs: _Runs, episode: _Episode | None, since: float, until: float) -> list[PathLeg]:
    """Return the leg of an episode; `[]` if it has no length. None is no node."""
    if until <= since:
        return []
    if episode is None:
        pieces = [TimeSlice(part=TimePart.OTHER, since=since, until=until)]
        return [PathLeg(node_id=None, since=since, until=until, slices=tuple(pieces))]
    pieces = [*_slice(_intervals(runs, episode.node, since, until), since, until)]
    node_id = runs.nodes[episode.node].node_id
    return [PathLeg(node_id=node_id, since=since, until=until, slices=tuple(pieces))]


_Interval = tuple[TimePart, float, float]


def _intervals(runs: _Runs, index: int, since: float, until: float) -> Iterator[_Interval]:
    """Yield what a node did, and what it waited for. Intervals may overlap: `_PRECEDENCE` decides.

    Of its limits, yield those from `since` to `until`: a leg must not read the whole list, which may be long.
    """
    node = runs.nodes[index]
    for span, scheduled, start, end in runs.spans[index]:
        yield TimePart.QUEUE, scheduled, start
        yield span.part, start, end
    first = bisect_left(node.limits, since, key=lambda limit: limit.until)
    limits = takewhile(
        lambda limit: limit.since < until, (node.limits[at] for at in range(first, len(node.limits)))
    )
    for wait in (*node.waits, *limits):
        yield wait.part, wait.since, wait.until
    if node.waits_as is not None and not node.spans:
        yield node.waits_as, -math.inf, math.inf


_RANK = {part: rank for rank, part in enumerate(_PRECEDENCE)}


def _slice(intervals: Iterable[_Interval], since: float, until: float) -> list[TimeSlice]:
    """Divide the time from `since` to `until`: each moment belongs to exactly one part."""
    changes: list[tuple[float, int, TimePart]] = []
    for part, left, right in intervals:
        begin, end = max(left, since), min(right, until)
        if begin < end:
            changes += [(begin, 1, part), (end, -1, part)]
    changes.sort(key=lambda each: each[0])
    active, pieces, at = Counter[TimePart](), list[TimeSlice](), since
    for moment, change, part in [*changes, (until, 0, TimePart.OTHER)]:
        if moment > at:
            present = min(
                (each for each, count in active.items() if count),
                key=_RANK.__getitem__,
                default=TimePart.OTHER,
            )
            if pieces and pieces[-1].part is present:
                at = pieces.pop().since
            pieces.append(TimeSlice(part=present, since=at, until=moment))
            at = moment
        active[part] += change
    return pieces


# --- what a faster node would gain ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Edge:
    """What a parent contributes to a gate."""

    parent: int
    shift: float = 0.0
    """How much earlier than the parent's time, by the clocks, the gate saw it."""
    fixed: float | None = None
    """The time itself, if it cannot change: the parent has run again since, or never satisfied the gate."""


@dataclass(slots=True)
class _Step:
    """The latest generation of a node in the model of the schedule."""

    node: int
    gate: float
    end: float
    floor: float
    """Its gate opens no earlier: the begin of the task, or the action that started the generation."""
    skew: float
    """By how much its first attempt precedes the opening of its gate, by another clock: 0 or negative."""
    edges: list[_Edge]
    work: float
    late_work: float
    """The part of its work that follows the end of its last source; all of it without a source."""
    batch_after: float = math.inf
    """Seconds from its gate to its first batch, and how much of that is work."""
    batch_work: float = 0.0
    sources: dict[int, float] = field(default_factory=dict)
    """For each source, how long after its end the node ends at the earliest, in seconds."""

    def end_after(self, gate: float, ends: dict[int, float], saved: float) -> float:
        """Return when the node ends if its gate opens at `gate`, its sources have ended so, and its work is shorter."""
        rigid = self.end - self.gate - (self.work - self.late_work)
        return max([gate + rigid, *(ends[each] + tail for each, tail in self.sources.items())]) - saved


class _Schedule:
    """A model of a run: when each node would start and end if the attempts of a node took no time."""

    def __init__(self, runs: _Runs) -> None:
        self._runs = runs
        self.steps: dict[int, _Step] = {}
        latest = {index: each for index in range(len(runs.nodes)) if (each := runs.latest(index)) is not None}
        for index in self._order(latest):
            self.steps[index] = self._make_step(latest[index])
        self._tail = runs.end - max((each.end for each in self.steps.values()), default=runs.end)

    def _order(self, latest: dict[int, _Episode]) -> list[int]:
        nodes = self._runs.nodes
        graph = {each: (*nodes[each].parents, *nodes[each].routers, *nodes[each].sources) for each in latest}
        try:
            order = TopologicalSorter(graph).static_order()
            return [each for each in order if each in latest]
        except CycleError:
            return []

    def _make_step(self, episode: _Episode) -> _Step:
        runs, node = self._runs, self._runs.nodes[episode.node]
        read_until = episode.gate if episode.read_until is None else episode.read_until
        step = _Step(
            node=episode.node,
            gate=episode.gate,
            end=episode.end,
            floor=episode.gate if episode.by_reset else runs.begin,
            skew=min(0.0, episode.first - _find_opening(node, episode.opened_by, episode.first)),
            edges=[],
            work=self._measure_work(episode.node, episode.gate, episode.end),
            late_work=self._measure_work(episode.node, read_until, episode.end),
        )
        if episode.read_until is not None:
            ends = {each: self.steps[each].end for each in node.sources if each in self.steps}
            step.sources = {
                each: episode.end - max(end, read_until)
                for each, end in ends.items()
                if end <= read_until + SKEW_SEC and each != episode.node
            }
        if episode.batch < math.inf:
            step.batch_after = max(0.0, episode.batch - episode.gate)
            step.batch_work = self._measure_work(episode.node, episode.gate, episode.batch)
        before = (*node.parents, *node.routers)
        step.edges = [self._make_edge(episode, *pair) for pair in zip(before, episode.opened_by, strict=True)]
        return step

    def _measure_work(self, index: int, since: float, until: float) -> float:
        attempts = ((TimePart.WORK, start, end) for _, _, start, end in self._runs.spans[index])
        return sum(
            each.until - each.since for each in _slice(attempts, since, until) if each.part is TimePart.WORK
        )

    def _make_edge(self, child: _Episode, parent: int, at: float) -> _Edge:
        known = self.steps.get(parent)
        node, before = self._runs.nodes[child.node], None if known is None else self._runs.nodes[parent]
        came_late = at == math.inf and node.needed is not None and before is not None and before.is_finished
        if known is not None and came_late:
            return _Edge(parent)
        if known is None or at == math.inf or at < known.gate:
            return _Edge(parent, fixed=at)
        seen = known.end
        if parent in self._runs.nodes[child.node].streams_from:
            seen = min(seen, known.gate + known.batch_after)
        return _Edge(parent, shift=at - seen)

    def finish(self, cut: int | None = None) -> float:
        """Return when the task would end if the attempts of node `cut` took no time."""
        gates, ends = dict[int, float](), dict[int, float]()
        for index, step in self.steps.items():
            node = self._runs.nodes[index]
            times = [self._time_of(each, node, gates, ends, cut) for each in step.edges]
            opened = _find_opening(node, times, step.floor)
            gates[index] = max(step.floor, opened + step.skew)
            ends[index] = step.end_after(gates[index], ends, step.late_work if index == cut else 0.0)
        return max(ends.values(), default=self._runs.end) + self._tail

    def _time_of(
        self,
        edge: _Edge,
        child: NodeTimeline,
        gates: dict[int, float],
        ends: dict[int, float],
        cut: int | None,
    ) -> float:
        """Return when a parent satisfies the gate of `child`."""
        if edge.fixed is not None:
            return edge.fixed
        at, parent = ends[edge.parent], self.steps[edge.parent]
        if edge.parent in child.streams_from:
            saved = parent.batch_work if edge.parent == cut else 0.0
            at = min(at, gates[edge.parent] + parent.batch_after - saved)
        return at + edge.shift


def _find_speed_ups(runs: _Runs, on_path: set[str | None]) -> list[SpeedUp]:
    """Return the nodes whose work delays the end of the task most.

    A node outside the critical path delays it only if a gate on the path needs just some of its parents.
    """
    schedule = _Schedule(runs)
    decided = any(node.needed is not None for node in runs.nodes if node.node_id in on_path)
    steps = [each for each in schedule.steps.values() if decided or runs.nodes[each.node].node_id in on_path]
    tries = min(_MOST_TRIES, max(_MOST_SPEED_UPS, _MOST_STEPS // max(1, len(schedule.steps))))
    found: list[SpeedUp] = []
    for step in sorted(steps, key=lambda each: -each.work)[:tries]:
        if len(found) == _MOST_SPEED_UPS and step.work <= found[-1].gain:
            break
        gain = min(runs.end - schedule.finish(step.node), step.work)
        if gain >= _LEAST_GAIN_SEC:
            found.append(SpeedUp(node_id=runs.nodes[step.node].node_id, gain=gain, work=step.work))
            found = sorted(found, key=lambda each: -each.gain)[:_MOST_SPEED_UPS]
    return found
