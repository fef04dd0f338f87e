"""How many updates of a task document a node needs: concurrent attempts in a large one share more of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from benchmarks.document_model import Modelled

MB = 1_000_000

with (
    pytest.MonkeyPatch.context() as patch
):  # the folder of the benchmarks is not on the import path of the tests
    patch.syspath_prepend(Path(__file__).parents[2])
    benchmark = importlib.import_module("benchmarks.document_model")


def modelled(width: int, nodes: int, document_bytes: int, *, waits: bool = True) -> Modelled:
    """Return what the attempts of so many nodes cost, in layers of this width."""
    found: Modelled = benchmark.model(
        layers=nodes // width, width=width, document_bytes=document_bytes, waits=waits
    )
    return found


@pytest.mark.parametrize(("document_bytes", "updates"), [(int(2.3 * MB), 0.2), (int(9.2 * MB), 0.1)])
def test_large_document_is_updated_less_than_half_as_often_for_each_node(
    document_bytes: int, updates: float
) -> None:
    at_once, waited = (modelled(100, 600, document_bytes, waits=waits) for waits in (False, True))
    assert waited.updates / waited.nodes <= updates
    assert waited.updates <= at_once.updates / 2
    assert waited.seconds <= at_once.seconds * 1.1


def test_thousand_nodes_of_usual_size_take_no_longer() -> None:
    size = 1_000 * benchmark.BYTES_OF_A_NODE
    at_once, waited = (modelled(100, 1_000, size, waits=waits) for waits in (False, True))
    assert waited.updates <= min(at_once.updates, 1_600)
    assert waited.seconds <= at_once.seconds * 1.02


@pytest.mark.parametrize("width", [1, 2, 4])
def test_few_concurrent_attempts_do_not_wait_for_each_other(width: int) -> None:
    at_once, waited = (modelled(width, 80, 9 * MB, waits=waits) for waits in (False, True))
    assert waited == at_once
    assert waited.updates == 2 * waited.nodes


def test_leases_of_all_attempts_of_a_process_are_renewed_together() -> None:
    alone, together = (
        benchmark.model_renewals(attempts=100, minutes=5, together=together) for together in (False, True)
    )
    assert alone >= 100 * 15
    assert together <= 4 * 16, "two moments in 20 s, with one write and one group each"


def test_attempts_of_small_tasks_do_not_wait() -> None:
    assert modelled(100, 200, 0) == modelled(100, 200, 0, waits=False)
