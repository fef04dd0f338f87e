"""How the tests judge processor time."""

from __future__ import annotations

import itertools
import time

import pytest
from tests import processor_time
from tests.processor_time import SAMPLE_SEC, growth_problem


@pytest.mark.parametrize(("power", "is_found"), [(1, False), (1.2, False), (2, True)])
def test_what_grows_faster_than_its_size_is_found(power: float, is_found: bool) -> None:
    assert (growth_problem(lambda size: size**power / 1_000, 400) is not None) == is_found


def test_short_times_that_grow_too_fast_are_judged_by_long_samples() -> None:
    measured: list[float] = []
    disturbed = itertools.chain([0.001, 0.06] * processor_time.TRIES, itertools.cycle([0.015] * 4 + [0.06]))

    def measure(size: int) -> float:
        measured.append(next(disturbed))
        return measured[-1]

    assert growth_problem(measure, 400) is None
    assert sum(measured) > 2 * SAMPLE_SEC


def test_a_block_that_takes_longer_than_it_may_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with processor_time.at_most(SAMPLE_SEC):
        pass
    seconds = iter([0.0, 1.5])
    monkeypatch.setattr(time, "process_time", lambda: next(seconds))
    with pytest.raises(AssertionError, match=r"1\.5 s of processor time"), processor_time.at_most(SAMPLE_SEC):
        pass
