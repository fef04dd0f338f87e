"""Which layer the profile of the benchmark finds in the stacks of a process."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2])
    stacks = importlib.import_module("benchmarks.stacks")

LOOP_FRAME = "_run (asyncio/events.py:84)"
OWN_FRAME = "run (flowkit/attempt/supervision.py:165)"


@pytest.mark.parametrize(
    ("innermost", "layer"),
    [
        ("begin (flowkit/adapters/tasks/attempts.py:278)", stacks.OWN),
        ("node (benchmarks/baseline.py:90)", stacks.OWN),
        ("submit (concurrent/futures/thread.py:160)", stacks.LOOP),
        ("run_on_executor (motor/frameworks/asyncio/__init__.py:90)", stacks.MONGO),
        ("to_payload (temporalio/contrib/pydantic.py:100)", stacks.CONVERSION),
        ("_run_once (temporalio/worker/_workflow_instance.py:2791)", stacks.SDK),
        ("deepcopy (copy.py:128)", stacks.OWN),
        ("_worker (concurrent/futures/thread.py:81)", None),
        ("recv_into (pymongo/network_layer.py:500)", None),
    ],
)
def test_innermost_frame_with_a_layer_decides(innermost: str, layer: str | None) -> None:
    assert stacks.layer_of((LOOP_FRAME, OWN_FRAME, innermost)) == layer


def test_time_of_a_thread_is_divided_as_the_samples_of_all_threads_with_its_name() -> None:
    lines = [
        f"thread (11): MainThread;{LOOP_FRAME};{OWN_FRAME} 3",
        f"thread (11): MainThread;{LOOP_FRAME} 1",
        "thread (21): ThreadPoolExecutor-0_0;_worker (concurrent/futures/thread.py:81) 90",
        "thread (21): ThreadPoolExecutor-0_0;update_one (pymongo/synchronous/collection.py:1) 5",
        "thread (22): ThreadPoolExecutor-0_1;_worker (concurrent/futures/thread.py:81) 90",
    ]
    used = stacks.by_layer({11: 4.0, 21: 1.0, 22: 2.0, 99: 0.5}, stacks.parse("\n".join(lines)))
    assert {layer: spent for layer, spent in used.items() if spent} == {
        stacks.OWN: 3.0,
        stacks.LOOP: 1.0,
        stacks.MONGO: 3.0,
        stacks.CORE: 0.5,
    }
