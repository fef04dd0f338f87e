"""An audit of the code: what the handlers of a task await between accepting an update and changing the state.

While a handler awaits something, the run must neither end nor continue as new. Each place needs a count or
a flag for that, for which `TaskActions.is_idle` or the main loop looks. A new place fails these tests until
it is listed with its guard.
"""

from __future__ import annotations

import ast
import inspect

import pytest
from temporalio import workflow
from temporalio.common import RawValue

from flowkit.actions.table import ACTIONS
from flowkit.workflows.node import RunningNodes
from flowkit.workflows.task import Task, _action
from flowkit.workflows.updates import TaskActions

GUARDS = {
    ("Task._await_open", "workflow.wait_condition"): "_updates_waiting",
    ("TaskActions._change_graph", "in_steps"): "_changes_graph",
    ("TaskActions._call_change", "call_engine"): "_changes_graph",
    ("TaskActions._check_batches", "call_engine"): "_settling",
    ("TaskActions._settle_batches", "call_engine"): "_settling",
}
"""What handlers await, by the method that awaits it, with what keeps the run open meanwhile."""

PREPARATION = {
    "self._cancel_nodes",
    "self._nodes.concurrency.flush",
    "workflow.wait_condition",
    "self._document.flush",
    "self._stop",
}
"""What a run awaits while it prepares the next one; `tests/integration/test_accepted_actions.py` sends
actions there."""

_OWNERS = {"self": None, "self._actions": TaskActions, "self._nodes": RunningNodes}


def _methods(owner: type) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(inspect.getsource(owner)).body[0]
    assert isinstance(tree, ast.ClassDef)
    return {
        each.name: each for each in tree.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


METHODS: dict[type, dict[str, ast.FunctionDef | ast.AsyncFunctionDef]] = {
    owner: _methods(owner) for owner in (Task, TaskActions, RunningNodes)
}


def handlers(kind: str) -> list[str]:
    """Return the methods of a task that handle updates or signals."""
    return [
        name
        for name, method in METHODS[Task].items()
        if any(ast.unparse(each).startswith(f"workflow.{kind}(") for each in method.decorator_list)
    ]


def awaited(owner: type, name: str, seen: set[tuple[type, str]] | None = None) -> set[tuple[str, str]]:
    """Return what a method awaits, and the methods that it calls, each with the method that awaits it.

    What runs as an asyncio task of its own does not count: `TaskActions.is_idle` has the resets.
    """
    seen = set() if seen is None else seen
    if (owner, name) in seen:
        return set()
    seen.add((owner, name))
    found: set[tuple[str, str]] = set()
    body = METHODS[owner][name]
    tasks = [
        each
        for each in ast.walk(body)
        if isinstance(each, ast.Call) and _called(each).endswith("create_task")
    ]
    apart = {id(inner) for each in tasks for inner in ast.walk(each)}
    for each in ast.walk(body):
        if not isinstance(each, ast.Call) or id(each) in apart:
            continue
        prefix, _, method = _called(each).rpartition(".")
        target = owner if prefix == "self" else _OWNERS.get(prefix)
        if target is not None and method in METHODS[target]:
            found |= awaited(target, method, seen)
    awaits = (each.value for each in ast.walk(body) if isinstance(each, ast.Await))
    for value in awaits:
        called = _called(value) if isinstance(value, ast.Call) else ast.unparse(value)
        prefix, _, method = called.rpartition(".")
        target = owner if prefix == "self" else _OWNERS.get(prefix)
        if target is None or method not in METHODS[target]:
            found.add((f"{owner.__name__}.{name}", called))
    return found


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func)


def test_handlers_of_updates_await_only_what_keeps_the_run_open() -> None:
    handler = ast.parse(inspect.getsource(_action))
    awaits = [ast.unparse(each.value) for each in ast.walk(handler) if isinstance(each, ast.Await)]
    assert awaits == ["self._apply(name, action)"], "the handlers of actions"
    found = {place for name in (*handlers("update"), "_apply") for place in awaited(Task, name)}
    assert found == GUARDS.keys()


def test_each_action_has_an_update() -> None:
    updates = workflow._Definition.must_from_class(Task).updates
    assert {name: each.description for name, each in updates.items() if name in ACTIONS} == {
        name: kind.description for name, kind in ACTIONS.items()
    }
    assert [each.arg_types for name, each in updates.items() if name in ACTIONS] == [[RawValue]] * len(
        ACTIONS
    )
    assert all(each.validator is not None for each in updates.values())


@pytest.mark.parametrize("name", handlers("signal"))
def test_handlers_of_signals_await_nothing(name: str) -> None:
    assert awaited(Task, name) == set()


def test_a_run_stays_open_while_an_action_is_in_progress() -> None:
    idle = ast.unparse(METHODS[TaskActions]["is_idle"])
    assert [each for each in ("_resets", "_changes_graph", "_settling") if f"self.{each}" not in idle] == []
    assert "self._is_done" in ast.unparse(METHODS[Task]["_run_task"])
    for name in ("_is_done", "_is_idle", "_stop"):
        assert "self._updates_waiting" in ast.unparse(METHODS[Task][name])
    for name in ("_is_done", "_is_idle", "_prepare_continue_as_new"):
        assert "self._actions.is_idle" in ast.unparse(METHODS[Task][name])


def test_a_run_awaits_only_known_places_while_it_prepares_the_next_one() -> None:
    calls = (
        each.value
        for each in ast.walk(METHODS[Task]["_prepare_continue_as_new"])
        if isinstance(each, ast.Await)
    )
    assert {_called(each) for each in calls if isinstance(each, ast.Call)} == PREPARATION
