"""Random operations on task variables have the same results in every database as in a model in plain Python.

The model shares no code with FlowKit.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.builders import new_task, stored
from tests.unit.property_examples import examples

from flowkit.coordinator.adapters import AdapterError, CoordinatorAdapters
from flowkit.testing import memory_database

Path = tuple[str, ...]
Tree = dict[str, Any]


class Refused(Exception):
    """The model rejects an operation."""


@dataclass(frozen=True)
class Operation:
    """One call; `given` holds the arguments for its name."""

    name: str
    given: Any

    async def on(self, adapters: CoordinatorAdapters, task_id: str) -> Any:
        """Make the call."""
        if self.name == "set":
            return await adapters.vars_set(task_id, kv=self.given)
        if self.name == "merge":
            return await adapters.vars_merge(task_id, data=self.given)
        if self.name == "incr":
            key, by = self.given
            return await adapters.vars_incr(task_id, key=key, by=by)
        paths, keys = self.given
        return await adapters.vars_unset(task_id, *paths, keys=keys)


@dataclass
class Model:
    """The variables of a task as a dict; `present` is whether the document has any."""

    tree: Tree = field(default_factory=dict)
    present: bool = False

    def apply(self, operation: Operation) -> int:
        """Apply an operation to the tree completely, or raise Refused. Return the number of paths it touched."""
        tree = copy.deepcopy(self.tree)
        touched: int = getattr(self, operation.name)(tree, operation.given)
        self.tree = tree
        self.present = self.present or (touched > 0 and operation.name != "unset")
        return touched

    def set(self, tree: Tree, given: Tree) -> int:
        """Set values: dotted keys are paths, other keys are flattened."""
        found: list[tuple[Path, Any]] = []
        for key, value in given.items():
            path = tuple(key.split("."))
            found += leaves(value, path) if len(path) == 1 else [(path, value)]
        return place(tree, found)

    def merge(self, tree: Tree, given: Tree) -> int:
        """Flatten everything and set it."""
        return place(tree, leaves(given, ()))

    def incr(self, tree: Tree, given: tuple[str, float]) -> int:
        """Add to a number, or create it."""
        *above, last = given[0].split(".")
        holder = descend(tree, tuple(above))
        old = holder.get(last, 0)
        if type(old) not in (int, float):
            raise Refused
        holder[last] = old + given[1]
        return 1

    def unset(self, tree: Tree, given: tuple[list[str], list[str]]) -> int:
        """Remove the given paths, then everything empty, if any path was given."""
        paths = {tuple(path.split(".")) for path in itertools.chain(*given)}
        check_apart(list(paths))
        for path in paths:
            remove(tree, path)
        if paths:
            prune(tree)
        return sum(map(len, given))


def leaves(value: Any, path: Path) -> list[tuple[Path, Any]]:
    """Yield all values in a tree that are not dicts."""
    if not isinstance(value, dict):
        return [(path, value)]
    return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]


def check_apart(paths: list[Path]) -> None:
    """Raise Refused if two paths are equal or one is below the other."""
    for one, other in itertools.permutations(paths, 2):
        if one[: len(other)] == other:
            raise Refused


def place(tree: Tree, found: list[tuple[Path, Any]]) -> int:
    """Put values at their paths."""
    check_apart([path for path, _ in found])
    for path, value in found:
        descend(tree, path[:-1])[path[-1]] = copy.deepcopy(value)
    return len(found)


def descend(tree: Tree, path: Path) -> Tree:
    """Return the dict at a path; create it if it does not exist."""
    for segment in path:
        tree = tree.setdefault(segment, {})
        if not isinstance(tree, dict):
            raise Refused
    return tree


def remove(tree: Tree, path: Path) -> None:
    """Remove the value at a path; lists are not entered."""
    for segment in path[:-1]:
        found = tree.get(segment)
        if isinstance(found, list):
            raise Refused
        if not isinstance(found, dict):
            return
        tree = found
    tree.pop(path[-1], None)


def prune(tree: Tree) -> None:
    """Remove every dict that is empty or becomes empty."""
    for key, value in list(tree.items()):
        if isinstance(value, dict):
            prune(value)
            if not value:
                del tree[key]


# --- sequences --------------------------------------------------------------------------------------------------

SEGMENTS = st.sampled_from(["a", "b", "0"])
PATHS = st.lists(SEGMENTS, min_size=1, max_size=3).map(".".join)
VALUES = st.sampled_from([None, True, False, 0, 7, -2, 0.5, "", "text", [], [1], [{"a": {"b": 1}}]])
TREES = st.recursive(VALUES, lambda inner: st.dictionaries(SEGMENTS, inner, max_size=3), max_leaves=4)
OBJECTS = st.dictionaries(SEGMENTS, TREES, min_size=1, max_size=3)
OPERATIONS = st.one_of(
    st.dictionaries(PATHS, TREES, min_size=1, max_size=3).map(lambda given: Operation("set", given)),
    OBJECTS.map(lambda given: Operation("merge", given)),
    st.tuples(PATHS, st.sampled_from([1, -3, 0, 0.25, -1.5])).map(lambda given: Operation("incr", given)),
    st.tuples(st.lists(PATHS, max_size=2), st.lists(PATHS, max_size=2)).map(
        lambda given: Operation("unset", given)
    ),
)
SEQUENCES = st.lists(OPERATIONS, min_size=1, max_size=10)
NAMES = (f"task-{number}" for number in itertools.count())


def beyond_mongomock(tree: Tree, operation: Operation) -> bool:
    """Return whether a removal goes two steps below a value: mongomock never matches that with `$not`; MongoDB does."""
    paths = (
        [path.split(".") for path in itertools.chain(*operation.given)] if operation.name == "unset" else []
    )
    for path in paths:
        found: Any = tree
        for segment in path[:-2]:
            found = found.get(segment, {}) if isinstance(found, dict) else found
        if not isinstance(found, (dict, list)):
            return True
    return False


async def follow(db: Any, sequence: list[Operation], *, in_memory: bool = False) -> None:
    """Make the calls and compare the task with the model after each."""
    task_id, model, adapters = next(NAMES), Model(), CoordinatorAdapters(db=db)
    await db.tasks.insert_one(new_task("a", task_id=task_id))
    for operation in sequence:
        if in_memory and beyond_mongomock(model.tree, operation):
            continue
        before = await stored(db, task_id)
        try:
            touched: int | None = model.apply(operation)
        except Refused:
            touched = None
        assert await touch(adapters, operation, task_id) == touched, operation
        after = await stored(db, task_id)
        if touched is None:
            assert after == before, operation
        found = after["coordinator"].get("vars")
        assert exact(found) == exact(model.tree if model.present else None), operation


async def touch(adapters: CoordinatorAdapters, operation: Operation, task_id: str) -> int | None:
    """Return how many paths the call touched; None if it was rejected."""
    try:
        response = await operation.on(adapters, task_id)
    except AdapterError:
        return None
    return int(response.get("touched", 1))


def exact(value: Any) -> Any:
    """Return a value that equals another one only if their types are the same at every place."""
    if isinstance(value, dict):
        return {key: exact(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [exact(inner) for inner in value]
    return type(value).__name__, value


@pytest.mark.slow
@settings(max_examples=examples(80))
@given(sequence=SEQUENCES)
async def test_memory_database_matches_the_model(sequence: list[Operation]) -> None:
    await follow(memory_database(), sequence, in_memory=True)


@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(sequence=SEQUENCES)
async def test_server_matches_the_model(server_db: Any, sequence: list[Operation]) -> None:
    await follow(server_db, sequence)
