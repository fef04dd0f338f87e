"""Admission in memory: many requests, users and processes against a model, with faults and without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowkit.admission.models import Limits, Override
from tests.admission.simulation import Plan, Simulation

LIMITS = Limits(
    max_pending=300,
    max_per_user=12,
    max_active=10,
    stale_sec=900.0,
    users={
        "u1": Override(max_active=1),
        "u2": Override(max_active=2, max_total=3),
        "u3": Override(max_total=40),
    },
)


CAPPED = replace(
    LIMITS,
    max_pending=200,
    max_per_user=30,
    max_active_per_user=3,
    tenants={"t0": Override(max_active=4, max_total=60), "t1": Override(max_active=2)},
)
"""Limits under which most requests wait for their user or tenant, and not for a slot."""


SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3)))


@pytest.fixture(autouse=True)
def _poll_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a submission that waits for another one of the same id look again at once."""
    monkeypatch.setattr("flowkit.admission.queue._POLL_SEC", 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
async def test_without_faults_caps_order_and_ends_are_exact(seed: int) -> None:
    figures = await Simulation(Plan(seed=seed, requests=1_200, users=40, limits=LIMITS)).run()
    assert figures["started"] > 400
    assert figures["most pending"] >= 299


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("faults", "kills"), [(0.0, 0), pytest.param(0.01, 4, marks=pytest.mark.slow)])
async def test_with_few_users_at_their_limits_the_order_is_exact_and_no_slot_stays_empty(
    seed: int, faults: float, kills: int
) -> None:
    plan = Plan(
        seed=seed, requests=800, users=7, tenants=3, limits=CAPPED, faults=faults, kills=kills, moves=0.03
    )
    figures = await Simulation(plan).run()
    assert figures["started"] > 300


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
async def test_with_killed_processes_and_late_calls_caps_order_and_ends_are_exact(seed: int) -> None:
    plan = Plan(seed=seed, requests=1_800, users=40, faults=0.01, kills=8, limits=LIMITS)
    figures = await Simulation(plan).run()
    assert figures["started"] > 800
    assert figures["kills"] == 8
    assert figures["recovered steps"] > 100


LARGE = replace(LIMITS, max_pending=10_000, max_per_user=100, max_active=100, stale_sec=3_600.0)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize(("faults", "kills"), [(0.0, 0), (0.01, 60)])
async def test_a_hundred_thousand_requests_of_a_thousand_users_are_exact(
    seed: int, faults: float, kills: int
) -> None:
    plan = Plan(seed=seed, requests=100_000, users=1_000, faults=faults, kills=kills, limits=LARGE)
    figures = await Simulation(plan).run()
    assert figures["requests"] > 95_000
    assert figures["started"] > 30_000
    if (
        not faults
    ):  # Outages slow the submitters down more than the dispatchers, so that the queue does not fill.
        assert figures["most pending"] == 10_000
    assert figures["kills"] == kills
