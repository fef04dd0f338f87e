"""Random flows through a gateway compared with a model: supervisors misbehave, and processes are killed.

Each flow must end as the model allows, each job must run once under each id, and no event may be missing.
`make fuzz MINUTES=10` runs longer, and `SEED=n` repeats the flows and the kills of a run.
"""

from __future__ import annotations

import random
import secrets
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from tests.fuzz.budget import FLOWS_SHARE, MINUTES, chosen_seed, only_in_fuzz, show
from tests.fuzz.flow_model import (
    CALLER,
    CONTEXT,
    DEPLOYMENT,
    SYNC_TIMEOUT_SEC,
    FlowPlan,
    JobPlan,
    event_problems,
    first_generations,
    run_problems,
    wire_problems,
)
from tests.fuzz.flow_play import FlowsPlay, Part, Processes
from tests.integration.harness import Harness, eventually

from flowkit.gateway.client import GatewayClient, GatewayUnavailable
from flowkit.testing.supervisor import Misbehavior, Supervisor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from flowkit.local import Stack

server = pytest.mark.server

SEED = 1
FLOWS, KILLS = 6, 3
LEASE_SEC = 2
"""Time after which the attempts of a killed handler count as lost."""


@pytest.fixture
async def processes(stack: Stack) -> AsyncIterator[Processes]:
    """Gateways with a context, a handler of jobs and an engine."""
    harness = Harness(temporal=stack.temporal_address, mongo=stack.mongo_url)
    harness.settings["lease_ttl_sec"] = LEASE_SEC
    harness.deployment = DEPLOYMENT
    await harness.name_deployment()
    made = Processes(harness)
    for part in Part:
        made.start(part)
    for url in made.urls:
        await eventually(partial(create_context, url))
    yield made
    await harness.close()


async def create_context(url: str) -> bool:
    """Create the context of the flows at a gateway, and return whether it responds."""
    async with GatewayClient(url) as client:
        try:
            await client.call("context.create", {"context": {"id": CONTEXT}})
        except GatewayUnavailable:
            return False
    return True


async def flows_play(processes: Processes, seed: int) -> Counter[str]:
    """Run one play, and return what has happened how often. Raise AssertionError for all problems of its flows.

    The ids are new ones: Temporal knows the runs of the flows in databases that other plays have used.
    """
    play = FlowsPlay(random.Random(seed), secrets.randbelow(40_000_000), FLOWS, KILLS)
    async with Supervisor(honours_ids=True) as supervisor:
        problems = await play.run(processes, supervisor)
    assert not problems, f"FLOWKIT_SEED={seed} repeats the play\n" + "\n".join(problems)
    return play.counts


@server
async def test_flows_end_as_the_model_allows_while_processes_are_killed(processes: Processes) -> None:
    figures = await flows_play(processes, SEED)
    assert {f"killed {part}" for part in Part} <= figures.keys()
    assert {"Completed job", "Failed job", "Cancelled job"} <= figures.keys()
    assert {"Finished run", "Error run", "dropped connection"} <= figures.keys()


@server
@only_in_fuzz
@pytest.mark.timeout(MINUTES * 60 * 8 + 240)
async def test_flows_end_as_the_model_allows_in_new_plays_each_time(
    processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    seed, figures = chosen_seed(), Counter[str]()
    show(capsys, f"flows, seed {seed}; `make fuzz SEED={seed}` repeats the plays")
    end = time.monotonic() + 60 * MINUTES * FLOWS_SHARE / 2
    while time.monotonic() < end or not figures:
        figures.update(await flows_play(processes, seed + figures["play"]))
        figures["play"] += 1
    show(capsys, f"flows, seed {seed}: {dict(figures)}")


# --- the model --------------------------------------------------------------------------------------------------

BROKEN = JobPlan(id=1, script="fail:no", retries=1, timeout=SYNC_TIMEOUT_SEC)
AFTER = JobPlan(id=2, script="x", retries=0, timeout=SYNC_TIMEOUT_SEC, depends=(1,))
BESIDE = JobPlan(
    id=3, script="x", retries=1, timeout=SYNC_TIMEOUT_SEC, misbehavior={(0, 0): [Misbehavior.ERROR]}
)
FLOW = FlowPlan(
    id=40,
    jobs=(BROKEN, AFTER, BESIDE),
    on_failure="continue",
    start_after=0.0,
    satisfy_after={},
    cancel_after=None,
    is_retried=False,
    drops=(),
)
STATES = {1: ("Failed", None), 2: ("Cancelled", "upstream_failed"), 3: ("Completed", None)}
OWN = f"{DEPLOYMENT}:{CONTEXT}:{CALLER}"
WIRES = {f"{OWN}:1", f"{OWN}:1/0.1", f"{OWN}:3", f"{OWN}:3/0.1"}
CHANGES = [
    (None, "Created", "Started", 0),
    *((1, *step, 1) for step in pairwise(["Pending", "Ready", "Dispatched", "Running", "Failed"])),
    *((1, *step, 2) for step in pairwise(["Failed", "Ready", "Dispatched", "Running", "Failed"])),
    (2, "Pending", "Cancelled", 1),
    *((3, *step, 1) for step in pairwise(["Pending", "Ready", "Dispatched", "Running", "Failed"])),
    *((3, *step, 2) for step in pairwise(["Failed", "Ready", "Dispatched", "Running", "Completed"])),
    (None, "Started", "Error", 0),
]
GENERATIONS = first_generations(FLOW)


def view_of(states: Mapping[int, tuple[str, str | None]], status: str = "Error") -> dict[str, Any]:
    """Return a result of `flow.status`."""
    nodes = {str(id): {"node_status": found, "cause": cause} for id, (found, cause) in states.items()}
    failed = next((id for id, (found, _) in states.items() if found == "Failed"), None)
    return {"status": status, "cause": None, "failed_job": failed, "nodes": nodes}


def event_list(changes: Sequence[tuple[int | None, str, str, int]]) -> list[dict[str, Any]]:
    """Return events of the first run with these changes."""
    return [
        {"seq": seq, "run_id": FLOW.run_id(1), "node": node, "from": before, "to": to, "attempt": attempt}
        for seq, (node, before, to, attempt) in enumerate(changes, 1)
    ]


def test_model_accepts_what_is_right() -> None:
    view = view_of(STATES)
    assert [*run_problems(FLOW, view, GENERATIONS, 1)] == []
    assert [*wire_problems(FLOW, view, GENERATIONS, WIRES, Counter(WIRES))] == []
    assert [*event_problems(FLOW, event_list(CHANGES), [view], [GENERATIONS])] == []


@pytest.mark.parametrize(
    "view",
    [
        view_of(STATES, "Finished"),
        view_of(STATES | {1: ("Completed", None)}),
        view_of(STATES | {2: ("Completed", None)}),
        view_of(STATES | {3: ("Failed", None)}),
        view_of(STATES | {3: ("Running", None)}),
        view_of(STATES | {3: ("Cancelled", "flow_failed")}),
        view_of(STATES) | {"failed_job": 3},
        view_of(STATES) | {"cause": "cancelled"},
    ],
)
def test_model_finds_wrong_ends(view: dict[str, Any]) -> None:
    assert [*run_problems(FLOW, view, GENERATIONS, 1)] != []


@pytest.mark.parametrize(
    ("delivered", "executions"),
    [
        (WIRES - {f"{OWN}:1/0.1"}, WIRES),
        (WIRES | {f"{OWN}:2"}, WIRES),
        (WIRES, [*WIRES, f"{OWN}:3"]),
        (WIRES, WIRES - {f"{OWN}:3/0.1"}),
    ],
)
def test_model_finds_wrong_deliveries(delivered: set[str], executions: Collection[str]) -> None:
    assert [*wire_problems(FLOW, view_of(STATES), GENERATIONS, delivered, Counter(executions))] != []


@pytest.mark.parametrize("left_out", range(len(CHANGES)))
def test_model_finds_each_missing_event(left_out: int) -> None:
    changes = CHANGES[:left_out] + CHANGES[left_out + 1 :]
    assert [*event_problems(FLOW, event_list(changes), [view_of(STATES)], [GENERATIONS])] != []


@pytest.mark.parametrize("twice", range(len(CHANGES)))
def test_model_finds_each_repeated_event(twice: int) -> None:
    changes = CHANGES[: twice + 1] + CHANGES[twice:]
    assert [*event_problems(FLOW, event_list(changes), [view_of(STATES)], [GENERATIONS])] != []
