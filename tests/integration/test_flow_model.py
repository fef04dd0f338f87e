"""Random histories of flows on real servers, compared with a model of the documents.

Clients create, start, cancel, retry, change and replace flows and jobs; an operator deletes ended runs;
supervisors misbehave; gateways and engines are killed. `make fuzz MINUTES=10` runs longer, and `SEED=n`
repeats the choices of a run.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.fuzz.budget import FLOWS_SHARE, MINUTES, chosen_seed, only_in_fuzz, show
from tests.integration.flow_model.play import SECRETS, Play

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

SEED = 1
SHORT_SEC, LONG_SEC = 6.0, 60.0
"""Duration of the play in the suite, and of each play in the fuzz."""


@pytest.fixture(autouse=True)
def secrets_of_supervisors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gateway of this process find the secrets of the runners, as those of other processes do."""
    for name, value in SECRETS.values():
        monkeypatch.setenv(name, value)


async def played(harness: Harness, other: Harness, seed: int, seconds: float, folder: Path) -> Counter[str]:
    """Return what has happened how often.

    For problems, write the histories into the folder and raise AssertionError.
    """
    async with Play(harness, other, seed) as play:
        await play.run(seconds)
    if play.problems:
        play.write(folder)
        where = f"FLOWKIT_SEED={seed} repeats the choices; the histories are in {folder}"
        raise AssertionError("\n".join([where, *play.problems]))
    return play.counts


@pytest.mark.slow(40)
async def test_random_histories_of_flows_are_those_of_the_documents(
    harness: Harness, other_harness: Harness, tmp_path: Path
) -> None:
    figures = await played(harness, other_harness, SEED, SHORT_SEC, tmp_path)
    assert {"killed engine", "killed gateway", "killed gateway that dispatches jobs"} <= figures.keys()


@only_in_fuzz
@pytest.mark.timeout(MINUTES * 60 * 8 + 240)
async def test_random_histories_of_flows_are_those_of_the_documents_each_time(
    harness: Harness, other_harness: Harness, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed, figures = chosen_seed(), Counter[str]()
    show(capsys, f"histories of flows, seed {seed}; `make fuzz SEED={seed}` repeats the plays")
    end = time.monotonic() + 60 * MINUTES * FLOWS_SHARE / 2
    while time.monotonic() < end or not figures:
        figures.update(await played(harness, other_harness, seed + figures["play"], LONG_SEC, tmp_path))
        figures["play"] += 1
    show(capsys, f"histories of flows, seed {seed}: {dict(figures)}")
