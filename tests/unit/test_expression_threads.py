"""Threads compile and evaluate expressions at the same time, while garbage is collected."""

from __future__ import annotations

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import count
from typing import TYPE_CHECKING

import pytest
from google.protobuf.message import Message

from flowkit.graph.cel import compile_value, evaluate_value

if TYPE_CHECKING:
    from collections.abc import Iterator

EXPRESSIONS = [
    "params.all.n / {} == 1 ? [1] : [2]",
    "params.list.map(x, x + {})",
    "vars['a'] in ['x', 'y{}'] ? {{'a': 1}} : {{'b': nodes[\"a\"].status}}",
    "has(vars.s) || params.list.exists(each, each == {})",
]
VALUES = {
    "params": {"all": {"n": 3}, "list": [1, 2]},
    "vars": {"a": "x"},
    "nodes": {"a": {"status": "failed"}},
}
SECONDS = 1.0


class Garbage:
    """A cycle of objects. Code of Python runs when the collector breaks it."""

    def __init__(self, older: Older) -> None:
        self.itself = self
        self.older = older


class Older:
    """An object of an older generation, which runs code when its last owner is collected."""

    def __del__(self) -> None:
        sum(range(200))


@pytest.fixture
def frequent_collections() -> Iterator[None]:
    """Switch threads and collect garbage far more often than usual."""
    compile_value("1")  # Loads the CEL package.
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-5)
    gc.set_threshold(50, 3, 3)
    gc.freeze()  # A collection then visits only the objects of the test.
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)


def message_classes() -> set[str]:
    """Return the names of the message classes of the syntax tree that exist."""
    names = {each.DESCRIPTOR.full_name for each in Message.__subclasses__()}
    return {name for name in names if name.startswith("flowkit.")}


def test_the_classes_of_the_syntax_tree_outlive_a_collection() -> None:
    for text in EXPRESSIONS:
        compile_value(text.format(0))
    before = message_classes()
    gc.collect()
    assert (
        message_classes() == before >= {"flowkit.cel.CheckedExpr", "flowkit.cel.Expr", "flowkit.cel.Select"}
    )


@pytest.mark.usefixtures("frequent_collections")
def test_threads_compile_and_evaluate_while_garbage_is_collected() -> None:
    end = time.monotonic() + SECONDS

    def evaluate(first: int) -> None:
        for number in count(first, 3):
            text = EXPRESSIONS[number % len(EXPRESSIONS)].format(number)
            assert evaluate_value(compile_value(text), VALUES) is not None
            if time.monotonic() > end:
                return

    with ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(evaluate, first) for first in (1, 2, 3)]
        older: list[Older] = []
        while wait(runs, timeout=0.001).not_done:
            if not older:
                older = [Older() for _ in range(1_000)]
                gc.collect()
            for _ in range(10):
                Garbage(older.pop())
        for run in runs:
            run.result()
