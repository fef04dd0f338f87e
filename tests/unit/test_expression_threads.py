"""Threads compile and evaluate expressions at the same time, while garbage is collected."""

from __future__ import annotations

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.message import Message

from flowkit.graph import cel_tree
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


def reachable(message: Any) -> dict[str, Any]:
    """Return the descriptors of all messages that one of this type can contain, and its own, by their names."""
    found: dict[str, Any] = {}
    waiting = [message]
    while waiting:
        each = waiting.pop()
        if each.full_name not in found:
            found[each.full_name] = each
            waiting += [field.message_type for field in each.fields if field.message_type is not None]
    return found


def test_the_module_holds_the_class_of_every_message_that_a_tree_can_contain() -> None:
    held = cel_tree._CLASSES
    trees = reachable(held["flowkit.cel.CheckedExpr"].DESCRIPTOR)
    assert {"flowkit.cel.Expr", "flowkit.cel.Select", "flowkit.cel.Position"} <= trees.keys()
    assert {name: each._concrete_class for name, each in trees.items()} == held


def message_classes() -> set[int]:
    """Return the ids of the message classes of the syntax tree that exist."""
    return {id(each) for each in Message.__subclasses__() if each.DESCRIPTOR.full_name.startswith("flowkit.")}


def test_the_classes_of_the_syntax_tree_outlive_a_collection() -> None:
    for text in EXPRESSIONS:
        compile_value(text.format(0))
    held = {id(each) for each in cel_tree._CLASSES.values()}
    gc.collect()
    assert message_classes() == held


@pytest.mark.parametrize(
    ("threads", "seconds"),
    [(3, 1.0), pytest.param(16, 60.0, marks=pytest.mark.nightly)],
)
@pytest.mark.usefixtures("frequent_collections")
def test_threads_compile_and_evaluate_while_garbage_is_collected(threads: int, seconds: float) -> None:
    end = time.monotonic() + seconds

    def evaluate(first: int) -> None:
        for number in count(first, threads):
            text = EXPRESSIONS[number % len(EXPRESSIONS)].format(number)
            assert evaluate_value(compile_value(text), VALUES) is not None
            if time.monotonic() > end:
                return

    with ThreadPoolExecutor(threads) as pool:
        runs = [pool.submit(evaluate, first) for first in range(1, threads + 1)]
        older: list[Older] = []
        while wait(runs, timeout=0.001).not_done:
            if not older:
                older = [Older() for _ in range(1_000)]
                gc.collect()
            for _ in range(10):
                Garbage(older.pop())
        for run in runs:
            run.result()
