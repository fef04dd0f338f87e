"""Random rounds of requests at two deployments of one namespace, of which each must end as the reference allows.

`make fuzz MINUTES=10` plays more of them, and `SEED=n` repeats the choices of a run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.fuzz.admission_reference import (
    RUNS,
    WAITS,
    Cancel,
    Caps,
    Crowd,
    Entry,
    Event,
    Exact,
    Expire,
    Hidden,
    Limit,
    Move,
    Operation,
    Outcome,
    Own,
    Queue,
    Report,
    Run,
    Seen,
    Submit,
    Way,
    arrow_problem,
    cap_problems,
    event_problems,
    outcomes,
    rejection_problem,
    way_after,
)
from tests.fuzz.admission_rounds import Done, Rounds
from tests.fuzz.admission_site import Site
from tests.fuzz.budget import ADMISSION_SHARE, MINUTES, chosen_seed, only_in_fuzz, show
from tests.integration.chaos.cluster import frozen, pid_of
from tests.integration.harness import Harness, wait_seconds
from tests.servers import copy_logs, stoppable_mongo

from flowkit.local import Kafka, MongoServer, TemporalServer
from flowkit.local.process import start_all, stop_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.kafka_server import Broker

    from flowkit.admission.kafka import Style
    from flowkit.local import Stack

server = pytest.mark.server

SEED: Final = 1
SESSION_SEC: Final = 5.0
SHORT: Final = ("fill", "limits", "release", "crowd", "kill", "release", "freeze", "key")
KINDS: Final = {
    "fill": 2,
    "limits": 2,
    "release": 3,
    "mixed": 6,
    "kill": 2,
    "freeze": 1,
    "engine": 1,
    "servers": 1,
}


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers of a play, whose MongoDB it can freeze."""

    temporal: str
    mongo: MongoServer
    kafka: str
    own: tuple[TemporalServer | Kafka, ...] = ()
    """Those that it can kill."""


@pytest.fixture
def mongo(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MongoServer]:
    """A MongoDB that only this test uses."""
    with stoppable_mongo(tmp_path) as server:
        yield server
    if request.session.testsfailed:
        copy_logs(tmp_path)


@pytest.fixture
def servers(mongo: MongoServer, stack: Stack, kafka: Broker) -> Servers:
    """Temporal and Kafka of the run."""
    return Servers(temporal=stack.temporal_address, mongo=mongo, kafka=kafka.bootstrap_servers)


@pytest.fixture
def own_servers(mongo: MongoServer, tmp_path: Path) -> Iterator[Servers]:
    """Servers that only this test uses."""
    temporal, kafka = TemporalServer(tmp_path), Kafka(tmp_path)
    start_all([temporal, kafka])
    yield Servers(
        temporal=temporal.address, mongo=mongo, kafka=kafka.bootstrap_servers, own=(temporal, kafka)
    )
    stop_all([temporal, kafka])


@dataclass
class Play:
    """Rounds at two deployments at the same time, with faults."""

    servers: Servers
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    async def run(self, seed: int, kinds: Sequence[str]) -> dict[str, int]:
        """Play rounds of these kinds. Return what has happened how often. Raise AssertionError if anything is wrong."""
        temporal, mongo = self.servers.temporal, self.servers.mongo.url
        self.monkeypatch.setenv("TEMPORAL_ADDRESS", temporal)
        self.monkeypatch.setenv("MONGO_URL", mongo)
        harnesses = [Harness(temporal=temporal, mongo=mongo) for _ in range(2)]
        names = f"a{seed}", f"b{seed}"
        styles: tuple[Style, ...] = ("per_type", "shared")
        sites = [
            Site(name, harness, self.folder, self.servers.kafka, style=style, session_sec=SESSION_SEC)
            for name, harness, style in zip(names, harnesses, styles, strict=True)
        ]
        try:
            await self._play(sites, random.Random(seed), f"e{seed}", kinds)
        finally:
            for site, harness in zip(sites, harnesses, strict=True):
                site.close()
                await harness.close()
        return dict(sum((site.journal.counts for site in sites), start=type(sites[0].journal.counts)()))

    async def _play(
        self, sites: Sequence[Site], chance: random.Random, name: str, kinds: Sequence[str]
    ) -> None:
        rounds = [Rounds(site, random.Random(chance.random()), name) for site in sites]
        rounds[0].others, rounds[1].others = rounds[1], rounds[0]
        async with AsyncExitStack() as stack:
            for site in sites:
                await stack.enter_async_context(site.running())
            await asyncio.gather(*(each.begin() for each in rounds))
            for kind in kinds:
                await self._round(rounds, kind, chance)
            await asyncio.gather(*(each.drain() for each in rounds))
            problems = [problem for each in rounds for problem in await each.problems()]
            assert not problems, "\n".join(problems)

    async def _round(self, rounds: Sequence[Rounds], kind: str, chance: random.Random) -> None:
        fault = self._fault(kind, [each.site for each in rounds], chance)
        played = [
            each.play(
                chance.choice(["fill", "release", "mixed", "crowd"]) if fault else kind,
                faulty=fault is not None,
            )
            for each in rounds
        ]
        async with asyncio.TaskGroup() as group:
            if fault is not None:
                group.create_task(fault())
            for each in played:
                group.create_task(each)

    def _fault(self, kind: str, sites: Sequence[Site], chance: random.Random) -> Callable[[], Any] | None:
        """Return what injects a fault; None for a round without faults."""
        pause, away = chance.uniform(0, 0.2), chance.uniform(0.5, 3.0)
        match kind:
            case "kill":
                return partial(self._kill, [chance.choice(site.dispatchers) for site in sites], pause)
            case "engine":
                return partial(self._kill, [site.engine for site in sites], pause)
            case "freeze":
                return partial(frozen, away, partial(os.kill, pid_of(self.servers.mongo.port)))
            case "pause":
                victims = [chance.choice(site.dispatchers) for site in sites]
                return partial(self._freeze, victims, SESSION_SEC + away)
            case "servers":
                return partial(self._restart, chance.choice(self.servers.own), away)
        return None

    async def _kill(self, processes: Sequence[Any], pause: float) -> None:
        await wait_seconds(pause)
        for each in processes:
            each.end(signal.SIGKILL, 0.0)

    async def _freeze(self, processes: Sequence[Any], away: float) -> None:
        await asyncio.gather(*(frozen(away, each.signal) for each in processes))

    async def _restart(self, victim: TemporalServer | Kafka, away: float) -> None:
        await asyncio.to_thread(victim.kill)
        await wait_seconds(away)
        await asyncio.to_thread(victim.start)


@pytest.fixture
def play(servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Plays rounds without restarts of Temporal and Kafka."""
    return Play(servers, tmp_path, monkeypatch)


@pytest.fixture
def any_play(own_servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Plays all rounds."""
    return Play(own_servers, tmp_path, monkeypatch)


@pytest.mark.slow(40)
@server
async def test_each_round_ends_as_documented_while_processes_are_killed_and_mongodb_is_frozen(
    play: Play,
) -> None:
    figures = await play.run(int(os.environ.get("FLOWKIT_SEED") or SEED), SHORT)
    doors = {f"Submit {door}" for door in ("http", "kafka", "python")}
    assert doors | {"Limit http", "Report executor", "answer accepted"} <= figures.keys()


@server
@only_in_fuzz
@pytest.mark.timeout(MINUTES * 60 * 8 + 600)
async def test_new_rounds_end_as_documented_each_time(
    any_play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    seed, played = chosen_seed(), 0
    show(capsys, f"admission against its reference, seed {seed}; `make fuzz SEED={seed}` repeats the choices")
    end = time.monotonic() + 60 * MINUTES * ADMISSION_SHARE
    while time.monotonic() < end or not played:
        kinds = random.Random(seed + played).choices([*KINDS], [*KINDS.values()], k=30)
        figures = await any_play.run(seed + played, ["fill", *kinds])
        played += 1
        show(capsys, f"admission, seed {seed + played - 1}: {figures}")


@pytest.mark.parametrize(
    ("answer", "tries", "may"), [("accepted", 3, False), (None, 3, True), (None, 1, False)]
)
def test_only_a_submission_that_was_not_surely_accepted_may_be_accepted_by_a_late_try(
    answer: str | None, tries: int, may: bool
) -> None:
    assert Done(answer=answer, tries=tries).may_repeat is may


# --- the reference ----------------------------------------------------------------------------------------------

DORA, EMIL = ("http", "default", "dora"), ("python", "shop", "emil")
NORMAL: Final = 2


def queue_of(*entries: Entry, **caps: Any) -> Queue:
    """Return a queue with these limits."""
    return Queue(Caps(**{"active": 2, **caps}), frozenset(entries))


def runs(id: str, owner: Any = DORA) -> Entry:
    """Return a request with a slot."""
    return Entry(id=id, owner=owner, band=NORMAL, state=RUNS)


def waits(id: str, arrival: int, owner: Any = DORA, band: int = NORMAL, **given: Any) -> Entry:
    """Return a request that waits."""
    return Entry(id=id, owner=owner, band=band, state=WAITS, arrival=arrival, **given)


def submit(id: str, owner: Any = DORA, band: int = NORMAL, **given: Any) -> Submit:
    """Return a submission."""
    return Submit(id=id, owner=owner, band=band, **given)


def states(outcome: Outcome) -> dict[str, str]:
    """Return the states of the requests."""
    return {each.id: each.state for each in outcome.queue.entries}


def only(queue: Queue, *chains: Sequence[Operation]) -> Outcome:
    """Return the only outcome that operations may have."""
    [found] = outcomes(queue, chains)
    return found


def who_runs(queue: Queue, *chains: Sequence[Operation]) -> set[frozenset[str]]:
    """Return which requests may have slots after these operations."""
    return {frozenset(each.id for each in found.queue.of(RUNS)) for found in outcomes(queue, chains)}


END = Report(id="r", state="completed")


def test_reference_starts_the_most_urgent_band_first_and_then_the_earliest() -> None:
    others = waits("late", 3), waits("early", 2), waits("low", 1, band=3)
    assert who_runs(queue_of(runs("r"), *others, active=1), [END]) == {frozenset({"early"})}
    moved = [Move(id="low", band=0), END]
    assert who_runs(queue_of(runs("r"), *others, active=1), moved) == {frozenset({"low"})}
    both = who_runs(queue_of(runs("r"), *others, active=1), [moved[0]], [moved[1]])
    assert both == {frozenset({"low"}), frozenset({"early"})}


def test_reference_passes_over_users_and_tenants_at_their_limits_and_leaves_no_slot_empty() -> None:
    entries = runs("r"), runs("s"), waits("second", 1), waits("other", 2, EMIL), waits("third", 3)
    assert who_runs(queue_of(*entries, active_per_user=1), [END]) == {frozenset({"s", "other"})}
    own = {"emil": Own(active=0), "default/dora": Own(active=2), "dora": Own(active=1)}
    assert who_runs(queue_of(*entries, users=own), [END]) == {frozenset({"s", "second"})}
    none = {"default": Own(active=1), "shop": Own(active=0)}
    assert who_runs(queue_of(*entries, tenants=none), [END]) == {frozenset({"s"})}


def test_reference_gives_all_slots_of_a_user_that_become_free_to_its_earliest_requests() -> None:
    entries = [runs("r"), runs("s"), waits("a", 1), waits("b", 2), waits("other", 3, EMIL)]
    ended = [END], [Report(id="s", state="failed")]
    assert who_runs(queue_of(*entries, active_per_user=2), *ended) == {frozenset({"a", "b"})}


def test_reference_counts_what_is_there_when_a_limit_comes_and_starts_all_when_it_goes() -> None:
    entries = [runs("r"), runs("s"), *(waits(f"w{number}", number) for number in range(4))]
    limited = only(
        queue_of(*entries, active=4, active_per_user=2), [Limit(caps=Caps(active=4, active_per_user=1))]
    )
    assert who_runs(limited.queue, [END]) == {frozenset({"s"})}
    free = [Limit(caps=Caps(active=4))]
    assert who_runs(limited.queue, free) == {frozenset({"r", "s", "w0", "w1"})}


@pytest.mark.parametrize(
    ("caps", "answer"),
    [
        ({"pending": 1}, "queue_full"),
        ({"per_user": 2}, "user_limit"),
        ({"users": {"dora": Own(total=2)}}, "user_limit"),
        ({"tenants": {"default": Own(total=2)}}, "tenant_limit"),
        ({"users": {"shop/dora": Own(total=1)}}, "accepted"),
    ],
)
def test_reference_rejects_requests_beyond_each_limit(caps: dict[str, Any], answer: str) -> None:
    found = only(queue_of(runs("r"), waits("w", 1), active=1, **caps), [submit("new")])
    assert found.answers == {(0, answer)}
    assert states(found)["new"] == ("queued" if answer == "accepted" else "rejected")


def test_reference_stores_each_id_once_for_its_first_user() -> None:
    queue = queue_of(runs("r"), waits("w", 1), active=1)
    found = only(queue, [submit("r"), submit("w"), submit("r", EMIL), Hidden(id="r")])
    assert found.answers == {(0, "accepted"), (1, "accepted"), (2, "taken"), (3, "unknown")}
    assert found.queue.entries == queue.entries
    gone = replace(waits("w", 1), state="expired")
    assert states(only(queue_of(gone), [submit("w")])) == {"w": RUNS}


def test_reference_ends_what_waits_at_once_and_what_runs_when_its_executor_confirms_it() -> None:
    queue = queue_of(runs("r"), runs("deaf"), waits("w", 1), waits("next", 2))
    cancels = [Cancel(id="w"), Cancel(id="deaf", confirmed=False), Cancel(id="r"), Cancel(id="r")]
    found = only(queue, cancels)
    assert states(found) == {"w": "cancelled", "deaf": RUNS, "r": "cancelled", "next": RUNS}
    assert (3, "already_cancelled") in found.answers
    assert states(
        only(found.queue, [Report(id="w", state="completed"), Report(id="deaf", state="timeout")])
    ) == {
        **states(found),
        "deaf": "timeout",
    }


def test_reference_fails_what_cannot_start_without_losing_the_slot() -> None:
    entries = runs("r"), waits("refused", 1, start_fails="start_failed"), waits("next", 2)
    found = only(queue_of(*entries, active=1), [END])
    assert states(found) == {"r": "completed", "refused": "failed", "next": RUNS}


def test_reference_lets_a_request_expire_or_start() -> None:
    queue = queue_of(runs("r"), active=1)
    ends = {states(each)["w"] for each in outcomes(queue, [[submit("w"), Expire(id="w")], [END]])}
    assert ends == {"expired", RUNS}


# --- planted errors ---------------------------------------------------------------------------------------------

PLANTED = queue_of(runs("r"), waits("a", 1), waits("b", 2), waits("c", 3, EMIL), active=1, active_per_user=1)
RIGHT: Final = {
    "r": Seen(state="completed", band=NORMAL),
    "a": Seen(state=RUNS, band=NORMAL),
    "b": Seen(state=WAITS, band=NORMAL, position=1),
    "c": Seen(state=WAITS, band=NORMAL, position=2),
    "new": Seen(state=WAITS, band=3, position=3),
}
ACCEPTED: Final = {1: "accepted"}


def planted(seen: dict[str, Seen], answers: dict[int, str]) -> bool:
    """Return whether the end of a run and a new request may look so."""
    allowed = outcomes(PLANTED, [[END, submit("new", band=3)]])
    judge = Exact(allowed, answers)
    found = judge.agreeing(seen)
    assert bool(found) is not bool(judge.differences(seen)[1:])
    return bool(found)


def test_model_accepts_what_is_documented() -> None:
    assert planted(RIGHT, ACCEPTED)


WRONG: Final = {
    "a later request started": {
        "a": Seen(state=WAITS, band=NORMAL, position=1),
        "b": Seen(state=RUNS, band=NORMAL),
    },
    "another band started": {
        "a": Seen(state=WAITS, band=NORMAL, position=1),
        "new": Seen(state=RUNS, band=3),
    },
    "the slot is empty": {"a": Seen(state=WAITS, band=NORMAL, position=1)},
    "two have one slot": {"c": Seen(state=RUNS, band=NORMAL)},
    "the end has no effect": {"r": Seen(state=RUNS, band=NORMAL)},
    "another end": {"r": Seen(state="failed", band=NORMAL)},
    "the order changed": {
        "b": Seen(state=WAITS, band=NORMAL, position=2),
        "c": Seen(state=WAITS, band=NORMAL, position=1),
    },
    "another band": {"new": Seen(state=WAITS, band=2, position=3)},
    "a rejection without a reason": {"new": Seen(state="rejected", band=3)},
    "a request ended by itself": {"b": Seen(state="expired", band=NORMAL, reason="stale")},
}


@pytest.mark.parametrize("name", WRONG)
def test_model_finds_wrong_queues(name: str) -> None:
    assert not planted({**RIGHT, **WRONG[name]}, ACCEPTED)


@pytest.mark.parametrize("lost", RIGHT)
def test_model_finds_each_lost_request(lost: str) -> None:
    assert not planted({id: seen for id, seen in RIGHT.items() if id != lost}, ACCEPTED)


@pytest.mark.parametrize("answer", ["taken", "queue_full", "user_limit", "tenant_limit"])
def test_model_finds_wrong_answers(answer: str) -> None:
    assert not planted(RIGHT, {1: answer})


CROWD: Final = Crowd(
    queue_of(runs("r"), runs("s", EMIL), waits("a", 1), waits("b", 2), waits("c", 3, EMIL), pending=4),
    [END, submit("new", band=1), submit("other", EMIL), Cancel(id="c")],
    {1: "accepted"},
)
CROWDED: Final = {
    "r": Seen(state="completed", band=NORMAL),
    "s": Seen(state=RUNS, band=NORMAL),
    "a": Seen(state=RUNS, band=NORMAL),
    "new": Seen(state=WAITS, band=1, position=1),
    "b": Seen(state=WAITS, band=NORMAL, position=2),
    "other": Seen(state=WAITS, band=NORMAL, position=3),
    "c": Seen(state="cancelled", band=NORMAL),
}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {
            "new": Seen(state=RUNS, band=1),
            "a": Seen(state=WAITS, band=NORMAL, position=1),
        },
        {"other": Seen(state="rejected", band=NORMAL, reason="queue_full")},
    ],
)
def test_model_accepts_what_may_come_of_a_crowd(changed: dict[str, Seen]) -> None:
    assert CROWD.agreeing({**CROWDED, **changed}) != set()
    assert CROWD.differences({**CROWDED, **changed}) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"a": Seen(state=WAITS, band=NORMAL, position=2), "b": Seen(state=RUNS, band=NORMAL)},
        {"b": Seen(state=RUNS, band=NORMAL)},
        {"a": Seen(state=WAITS, band=NORMAL, position=2), "b": Seen(state=WAITS, band=NORMAL, position=3)},
        {"c": Seen(state=WAITS, band=NORMAL, position=4)},
        {"s": Seen(state="completed", band=NORMAL)},
        {"s": Seen(state="cancelled", band=NORMAL)},
        {"r": Seen(state="failed", band=NORMAL)},
        {"b": Seen(state="expired", band=NORMAL)},
        {
            "b": Seen(state=WAITS, band=NORMAL, position=3),
            "other": Seen(state=WAITS, band=NORMAL, position=2),
        },
        {"new": Seen(state=WAITS, band=2, position=1)},
        {"new": Seen(state="rejected", band=1, reason="queue_full")},
        {"other": Seen(state="rejected", band=NORMAL, reason="user_limit")},
        {"other": Seen(state="completed", band=NORMAL)},
    ],
)
def test_model_finds_what_cannot_come_of_a_crowd(changed: dict[str, Seen]) -> None:
    assert CROWD.agreeing({**CROWDED, **changed}) == set()
    assert CROWD.differences({**CROWDED, **changed}) != []


@pytest.mark.parametrize("lost", CROWDED)
def test_model_finds_each_lost_request_of_a_crowd(lost: str) -> None:
    assert CROWD.agreeing({id: seen for id, seen in CROWDED.items() if id != lost}) == set()


@pytest.mark.parametrize(
    "few",
    [
        {"pending": 2},
        {"active": 1},
        {"active_per_user": 0},
        {"per_user": 1},
        {"tenants": {"default": Own(total=1)}},
    ],
)
def test_model_finds_limits_that_a_crowd_exceeds(few: dict[str, Any]) -> None:
    limited = replace(CROWD, before=Queue(Caps(**{"active": 2, "pending": 4, **few}), CROWD.before.entries))
    assert limited.agreeing(CROWDED) == set()


@pytest.mark.parametrize(
    ("before", "after", "again", "wrong"),
    [
        ("", "queued", False, False),
        ("queued", "completed", False, False),
        ("starting", "failed", False, False),
        ("rejected", "active", True, False),
        ("expired", "active", False, True),
        ("active", "queued", False, True),
        ("active", "starting", False, True),
        ("starting", "queued", False, True),
        ("active", "expired", False, True),
        ("active", "rejected", True, True),
        ("completed", "failed", True, True),
        ("cancelled", "completed", True, True),
        ("failed", "active", True, True),
    ],
)
def test_model_finds_states_that_no_arrow_joins(before: str, after: str, again: bool, wrong: bool) -> None:
    assert (arrow_problem("e", before, after, again) is not None) is wrong


def run_of(id: str, begin: float, round: int, owner: Any = DORA) -> Run:
    """Return a time in which a request had a slot."""
    return Run(id=id, owner=owner, begin=begin, end=begin + 10, round=round)


def test_model_finds_slots_beyond_each_limit_and_none_that_were_there_before() -> None:
    three = [run_of("a", 1, 1), run_of("b", 2, 1), run_of("c", 3, 2)]
    for few in ({"active": 2}, {"active_per_user": 2}, {"tenants": {"default": Own(active=2)}}):
        assert [*cap_problems(three, {1: [Caps()], 2: [Caps(**few)]})] != []
        assert [*cap_problems(three, {1: [Caps(**few)], 2: [Caps()]})] == []
        assert [*cap_problems(three, {1: [Caps()], 2: [Caps(), Caps(**few)]})] == []
        assert [*cap_problems([*three[:2], run_of("c", 12.5, 2)], {1: [Caps()], 2: [Caps(**few)]})] == []


ENDED_WAY = Way(is_task=False, state="completed", accepted=1, ran=True, stopped=False)
ORDERLY = (
    "rejected",
    "execution_accepted",
    "execution_queued",
    "create_pod_command",
    "execution_started",
    "execution_running",
)


def sent(*kinds: str) -> list[Event]:
    """Return events, one after the other."""
    return [Event(kind=kind, id="e", at=at) for at, kind in enumerate(kinds)]


def test_model_accepts_the_documented_events() -> None:
    assert [*event_problems(ENDED_WAY, sent(*ORDERLY))] == []
    task = replace(ENDED_WAY, is_task=True)
    assert [*event_problems(task, sent(*ORDERLY[1:3], *ORDERLY[4:], "execution_completed"))] == []


@pytest.mark.parametrize("place", range(1, len(ORDERLY)))
def test_model_finds_each_missing_doubled_and_early_event(place: int) -> None:
    rest = [*ORDERLY[:place], *ORDERLY[place + 1 :]]
    assert [*event_problems(ENDED_WAY, sent(*rest))] != []
    assert [*event_problems(ENDED_WAY, sent(*ORDERLY, ORDERLY[place]))] != []
    assert [*event_problems(ENDED_WAY, sent(rest[0], *rest[1:], ORDERLY[place]))] != [] or place == len(
        ORDERLY
    ) - 1


@pytest.mark.parametrize(
    ("message", "stderr", "right"),
    [
        ("Queue is full", "Queue full: Queue is full. Queue size: 40", True),
        (
            "User execution limit exceeded (3)",
            "Queue full: User execution limit exceeded (3). Queue size: 0",
            True,
        ),
        ("Queue full", "Queue full: Queue full. Queue size: 40", False),
        ("Queue is full", "Queue is full", False),
        ("Queue is full", "Queue full: User execution limit exceeded (3). Queue size: 40", False),
    ],
)
def test_model_finds_wrong_texts_of_rejections(message: str, stderr: str, right: bool) -> None:
    assert (rejection_problem(message, stderr) is None) is right


def test_model_finds_rejections_without_an_event() -> None:
    way = Way(is_task=False, state="rejected", accepted=0, ran=False, stopped=False)
    assert [*event_problems(way, sent("rejected"))] == []
    assert [*event_problems(way, [])] != []


@pytest.mark.parametrize("kind", ["delete_pod_command", "execution_cancelled", "execution_completed"])
def test_model_finds_events_that_nothing_has_caused(kind: str) -> None:
    assert [*event_problems(ENDED_WAY, sent(*ORDERLY, kind))] != []


def test_model_knows_what_is_certain_about_a_request() -> None:
    first = way_after(None, runs("r"), [submit("r")])
    assert first == Way(is_task=False, state=RUNS, accepted=1, ran=True, stopped=False)
    stopped = way_after(first, replace(runs("r"), state="cancelled"), [Cancel(id="r")])
    assert stopped == replace(first, state="cancelled", stopped=True)
    unclear = way_after(None, replace(runs("r"), state="cancelled"), [submit("r"), Cancel(id="r")])
    assert unclear == Way(is_task=False, state="cancelled", accepted=1, ran=None, stopped=None)
    waited = way_after(None, waits("r", 1), [submit("r")])
    assert way_after(waited, replace(waits("r", 1), state="cancelled"), [Cancel(id="r")]).ran is False
    rejected = way_after(None, replace(runs("r"), state="rejected"), [submit("r")])
    assert rejected == Way(is_task=False, state="rejected", accepted=0, ran=False, stopped=False)
