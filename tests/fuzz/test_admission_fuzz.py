"""Random requests for an admission queue on real servers, while its processes and the servers are killed or frozen.

Callers, an executor and readers of the topics compare what they see with a model. `make fuzz MINUTES=10` plays more often,
and `SEED=n` repeats the requests and the faults of a run.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from tests.fuzz.admission_model import (
    Door,
    Journal,
    Wanted,
    both,
    cap_problems,
    order_problems,
    request_problems,
    sequence_problems,
)
from tests.fuzz.admission_play import (
    FREEZE,
    FREEZE_MONGO,
    KILL,
    KILL_ENGINE,
    KILL_KAFKA,
    KILL_TEMPORAL,
    Plant,
    Play,
    Size,
)
from tests.fuzz.budget import ADMISSION_SHARE, MINUTES, chosen_seed, only_in_fuzz, show
from tests.integration.harness import Harness
from tests.servers import copy_logs

from flowkit.admission.kafka import AdmissionTopics
from flowkit.local import Kafka, MongoServer, TemporalServer
from flowkit.local.process import start_all, stop_all
from flowkit.models.admission import Priority, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

server = pytest.mark.server
Servers = tuple[TemporalServer, MongoServer, Kafka]

SEED = 1

SHORT = Size(
    requests=126,
    faults=(KILL, KILL, FREEZE_MONGO),
    pause=(0.0, 0.2),
    away=(1.0, 1.5),
    dispatchers=2,
    clients=16,
    rest=0.05,
    session_sec=5.0,
)
ROUND = (KILL, KILL_KAFKA, KILL, FREEZE_MONGO, FREEZE, KILL_TEMPORAL, KILL, KILL_ENGINE)
LONG = Size(
    requests=2_000,
    faults=ROUND * 3,
    pause=(1.0, 4.0),
    away=(1.0, 5.0),
    dispatchers=3,
    clients=24,
    rest=0.8,
    session_sec=3.0,
)
MEDIUM = Size(
    requests=500,
    faults=ROUND,
    pause=(1.0, 3.0),
    away=(1.0, 5.0),
    dispatchers=3,
    clients=16,
    rest=0.6,
    session_sec=3.0,
)


@pytest.fixture
def servers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Servers]:
    """Servers that only this test uses, so that it can kill them."""
    made = TemporalServer(tmp_path), MongoServer(tmp_path), Kafka(tmp_path)
    start_all([*made])
    yield made
    stop_all([*made])
    if request.session.testsfailed:
        copy_logs(tmp_path)


@pytest.fixture
def play(servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that plays once, and returns what has happened how often."""
    temporal, mongo, _ = servers
    monkeypatch.setenv("TEMPORAL_ADDRESS", temporal.address)
    monkeypatch.setenv("MONGO_URL", mongo.url)

    async def run(size: Size, seed: int) -> Counter[str]:
        monkeypatch.setattr("flowkit.admission.queue.SESSION_SEC", size.session_sec)
        harness = Harness(temporal=temporal.address, mongo=mongo.url)
        monkeypatch.setenv("MONGO_DATABASE", harness.database)
        topics = AdmissionTopics(style="shared" if seed % 2 else "per_type", prefix=f"{harness.database}.")
        plant = Plant(harness, servers, tmp_path, size, topics)
        playing = Play(plant, size, random.Random(seed), f"e{seed}")
        try:
            problems = await playing.run()
        finally:
            plant.close()
            await harness.close()
        assert not problems, f"FLOWKIT_SEED={seed} repeats the play\n" + "\n".join(problems)
        return playing.journal.counts + plant.injected

    return run


@server
async def test_requests_are_exact_while_processes_are_killed_and_mongodb_is_frozen(
    play: Callable[..., Any],
) -> None:
    figures = await play(SHORT, SEED)
    assert {kind for kind in SHORT.faults} <= figures.keys()
    assert {"accepted", "rejected", "duplicate", "HTTP 200", "HTTP 429"} <= figures.keys()
    assert {"completed", "failed", "cancelled"} <= figures.keys()


@server
@pytest.mark.nightly
@pytest.mark.timeout(1_200)
async def test_two_thousand_requests_are_exact_while_everything_is_killed_and_frozen(
    play: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    seed, begun = chosen_seed(), time.monotonic()
    show(capsys, f"admission, seed {seed}; `FLOWKIT_SEED={seed}` repeats the play")
    figures = await play(LONG, seed)
    show(capsys, f"admission, seed {seed}, {time.monotonic() - begun:.0f} s: {dict(figures)}")
    assert {*LONG.faults} <= figures.keys()


@server
@only_in_fuzz
@pytest.mark.timeout(MINUTES * 60 * 8 + 600)
async def test_requests_are_exact_in_new_plays_each_time(
    play: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    seed, figures = chosen_seed(), Counter[str]()
    show(capsys, f"admission, seed {seed}; `make fuzz SEED={seed}` repeats the plays")
    end = time.monotonic() + 60 * MINUTES * ADMISSION_SHARE
    while time.monotonic() < end or not figures:
        figures.update(await play(MEDIUM, seed + figures["play"]))
        figures["play"] += 1
    show(capsys, f"admission, seed {seed}: {dict(figures)}")


# --- the model --------------------------------------------------------------------------------------------------

WANTED = Wanted(id="e", user_id="u9", priority=Priority.NORMAL, is_task=False, doors=[Door.QUEUE])
ITEM = {"_id": "e", "state": "completed", "owes": None, "popped_at": 5.0}
KINDS = (
    *("execution_failed", "execution_accepted", "execution_queued"),
    *("create_pod_command", "execution_started", "execution_running"),
)
REFUSED = {
    "error_type": "resource_limit",
    "error_message": "Queue is full",
    "stderr": "Queue full: Queue is full. Queue size: 40",
}


def journal(kinds: Sequence[str] = KINDS, **changed: Any) -> Journal:
    """Return what is known of a request that was rejected first, then ran."""
    made = Journal(reports={"e": State.COMPLETED})
    made.answers["e"].update({"rejected": 1, "accepted": 1})
    for at, kind in enumerate(kinds):
        refused = {**REFUSED, **changed} if kind == "execution_failed" else {}
        made.see(kind, at, {"execution_id": "e", "event_id": f"{at}", **refused})
    return made


def test_model_accepts_the_way_of_a_request() -> None:
    assert request_problems(WANTED, ITEM, journal()) == []


@pytest.mark.parametrize("left_out", range(len(KINDS)))
def test_model_finds_each_missing_event(left_out: int) -> None:
    known = journal(KINDS[:left_out] + KINDS[left_out + 1 :])
    assert request_problems(WANTED, ITEM, known) != []


@pytest.mark.parametrize("twice", range(1, len(KINDS)))
def test_model_finds_each_event_that_has_two_ids(twice: int) -> None:
    assert request_problems(WANTED, ITEM, journal([*KINDS, KINDS[twice]])) != []


@pytest.mark.parametrize("first", range(len(KINDS) - 1))
def test_model_finds_events_out_of_order(first: int) -> None:
    kinds = [*KINDS]
    kinds[first], kinds[first + 1] = kinds[first + 1], kinds[first]
    assert request_problems(WANTED, ITEM, journal(kinds)) != []


@pytest.mark.parametrize(
    "item",
    [
        None,
        ITEM | {"state": "active"},
        ITEM | {"owes": "slot"},
        ITEM | {"state": "failed"},
        ITEM | {"state": "rejected"},
        ITEM | {"popped_at": None},
    ],
)
def test_model_finds_wrong_ends(item: dict[str, Any] | None) -> None:
    assert request_problems(WANTED, item, journal()) != []


@pytest.mark.parametrize(
    "changed",
    [
        {"error_message": "Queue full"},
        {"stderr": "Queue full: Queue is full. Queue size: 41"},
        {"stderr": "Queue is full"},
    ],
)
def test_model_finds_wrong_texts_of_rejections(changed: dict[str, str]) -> None:
    assert request_problems(WANTED, ITEM, journal(**changed)) != []


def active(count: int, user_id: str = "u{}") -> list[dict[str, Any]]:
    """Return active requests."""
    return [
        {"_id": f"e{number}", "place": "s-1", "state": "active", "user_id": user_id.format(number + 3)}
        for number in range(count)
    ]


def test_model_finds_exceeded_limits_of_requests_that_were_there_at_once() -> None:
    assert [*cap_problems(active(12))] == [*cap_problems(active(1, "u0"))] == []
    assert len([*cap_problems(active(13))]) == len([*cap_problems(active(2, "u0"))]) == 1
    assert len([*cap_problems(active(7, "u9"))]) == 1
    assert both(active(3), active(2)) == active(2)
    assert both(active(1), [active(1)[0] | {"state": "queued"}]) == []


def popped(id: str, at: float, seq: int, slot: str) -> dict[str, Any]:
    """Return a request that got a slot."""
    return {"_id": id, "popped_at": at, "rank": 3, "seq": seq, "slot": f"{slot}-1"}


@pytest.mark.parametrize(
    ("at", "since", "problems"), [(9.0, 1.0, 1), (6.5, 1.0, 0), (9.0, 5.5, 0), (9.0, None, 0)]
)
def test_model_finds_requests_that_were_left_out(at: float, since: float | None, problems: int) -> None:
    others = [popped("a", 5.0, 1, "s"), popped("b", 6.0, 4, "s"), popped("c", 7.0, 2, "s")]
    items = [*others, popped("left", at, 3, "t")]
    assert len([*order_problems(items, {} if since is None else {"left": since})]) == problems
    assert [*sequence_problems(items)] != []
    assert [*sequence_problems(others[:2])] == []
