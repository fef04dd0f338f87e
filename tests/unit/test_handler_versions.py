"""The version of a handler: how it is computed, checked, and named beside errors and in the details."""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.graphs import one

from flowkit.activities import handlers
from flowkit.activities.handlers import EchoHandler, version_of
from flowkit.adapters.worker_registry import RegisteredWorker
from flowkit.attempt.failures import failed_attempt, from_error
from flowkit.cli.tasks.workers import ProcessKind, ProcessState, ProcessView, format_versions
from flowkit.errors import ConfigError, GraphError, VersionPinned
from flowkit.graph.validation import parse_graph
from flowkit.limits import LAST_ERROR_CHARS
from flowkit.models import AttemptFailure, FailureKind, NodeState, RetryPolicy, TaskStatus
from flowkit.reading.notes import format_note
from flowkit.reading.state import NodeRow, TaskView, add_pins, describe_ran
from flowkit.testing import memory_database
from flowkit.worker import RoleHandler
from flowkit.worker.runner import Worker
from flowkit.workflows.display.details import TaskQueues, render
from flowkit.workflows.local_attempts import fall_back
from flowkit.workflows.payloads import read_runner
from flowkit.workflows.retry import Retry, classify, decide, describe_runner, note_failure
from flowkit.workflows.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from pathlib import Path

BASE = "from flowkit.worker import RoleHandler\nclass Base(RoleHandler): pass\n"
SHOP = "from versioned_base import Base\nclass Shop(Base): pass\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which modules can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def version_with(folder: Path, *, shop: str = SHOP, base: str = BASE) -> str:
    """Return the version of a handler whose modules, and that of its base class, have these sources."""
    for name, source in (("versioned_base", base), ("versioned_shop", shop)):
        sys.modules.pop(name, None)
        (folder / f"{name}.py").write_text(source)
    importlib.invalidate_caches()
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        return version_of(importlib.import_module("versioned_shop").Shop())
    finally:
        sys.dont_write_bytecode = before


def test_version_is_a_hash_of_the_modules_of_the_handler(folder: Path) -> None:
    first = version_with(folder)
    assert len(first) == 12
    assert int(first, 16) > 0
    assert version_with(folder) == first
    changed = {version_with(folder, shop=f"{SHOP}# x\n"), version_with(folder, base=f"{BASE}# x\n")}
    assert len({first, *changed}) == 3


def test_version_begins_with_that_of_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = version_with(folder)
    handlers._package_version.cache_clear()
    monkeypatch.setattr(metadata, "version", lambda name: {"versioned_shop": "1!2.0"}[name])
    assert version_with(folder) == f"1-2.0+{bare}"
    handlers._package_version.cache_clear()


def test_handler_of_an_installed_package_has_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml_shop", SimpleNamespace(__file__="/lib/site-packages/yaml_shop.py"))
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"yaml_shop": ["pytest"]})
    handler: Any = type("Shop", (RoleHandler,), {"__module__": "yaml_shop"})()
    assert version_of(handler).startswith(f"{metadata.version('pytest')}+")


def test_attribute_takes_precedence_over_the_hash() -> None:
    assert version_of(with_version("1.4-rc_2+x")) == "1.4-rc_2+x"


def with_version(version: Any) -> RoleHandler:
    """Return a handler with this attribute."""
    made: Any = type("Shop", (RoleHandler,), {"role": "shop", "handler_version": version})()
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("version", "shown"), [(1.4, "1.4"), (None, "None"), ("a b", "'a b'"), ("-1", "'-1'"), ("v" * 61, None)]
)
def test_invalid_version_fails_when_the_worker_loads_the_handler(version: object, shown: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        Worker(db=memory_database(), handlers={"shop": with_version(version)})
    assert str(caught.value) == (
        f"Shop.handler_version is {shown or repr(version)}: set a text of 1 to 60 letters, digits, '.', '_', '-' and "
        "'+' that begins with a letter or digit, or omit it"
    )


def test_worker_computes_the_version_of_each_handler_once() -> None:
    worker = Worker(db=memory_database(), roles=["echo", "shop"], handlers={"shop": with_version("1.4")})
    assert worker.versions == {"echo": version_of(EchoHandler()), "shop": "1.4"}


def test_error_of_a_node_names_the_worker_and_the_version() -> None:
    report = {"kind": "failure", "code": "flaky", "message": "m" * 3_000, "worker": "w-1", "version": "1.4"}
    failure = classify("flaky", "", [report], permanent=False)
    state = NodeState()
    note_failure(state, failure.code, failure.message, describe_runner(failure))
    assert len(state.last_error or "") == LAST_ERROR_CHARS
    assert (state.last_error or "").endswith("m… (worker w-1, version 1.4)")
    external = AttemptFailure(kind=FailureKind.FAILURE, code="flaky", worker="x-1")
    assert describe_runner(external) == " (worker x-1)"
    assert describe_runner(AttemptFailure(kind=FailureKind.LOSS, code="lease_lost")) == ""


@pytest.mark.parametrize(
    ("result", "runner"),
    [
        ({"worker_id": "w-1", "batches": 1, "version": "1.4"}, ("w-1", "1.4")),
        ({"worker_id": "w-1", "batches": 1}, ("", "")),
        ({"worker_id": 1, "version": ["1.4"]}, ("", "")),
        (["w-1"], ("", "")),
    ],
)
def test_result_of_any_worker_can_be_read(result: object, runner: tuple[str, str]) -> None:
    assert read_runner(SimpleNamespace(payload=SimpleNamespace(data=json.dumps(result).encode()))) == runner


@pytest.mark.parametrize("result", [None, SimpleNamespace(payload=SimpleNamespace(data=b"\xff"))])
def test_result_that_is_no_json_names_nobody(result: object) -> None:
    assert read_runner(result) == ("", "")


def test_details_name_the_versions_that_ran_in_the_task() -> None:
    scheduler = Scheduler(parse_graph(one()), [NodeState()])
    queues, versions = TaskQueues(namespace="default", prefix="q"), {"shop": {"1_4": "w-1", "1.5": "w-2"}}
    text = render(TaskStatus.RUNNING, scheduler, queues, versions={**versions, "mail": {"7": "w-3"}})
    assert text.splitlines()[1] == "Attempts of role shop ran with different versions: 1_4 (w-1), 1.5 (w-2)"
    many = {f"r{number}": {"1": "a", "2": "b"} for number in range(5)}
    assert (
        render(TaskStatus.RUNNING, scheduler, queues, versions=many).splitlines()[4] == "… and 2 more roles"
    )


def test_status_names_the_nodes_that_ran_with_different_versions() -> None:
    nodes = [
        ("a", "shop", "1"),
        ("b", "shop", "2"),
        ("c", "shop", "2"),
        ("d", "mail", "1"),
        ("e", "mail", ""),
    ]
    shown = tuple(
        NodeRow(node_id=name, role=role, status="finished", version=version) for name, role, version in nodes
    )
    view = TaskView(task_id="t", status=TaskStatus.FINISHED, source="document", nodes=shown)
    assert describe_ran(view) == {
        "shop": "nodes of role shop ran with different versions: 1 (a), 2 (b and c)"
    }


@pytest.mark.parametrize("policy", ["latest", None, 1])
def test_unknown_version_policy_is_rejected(policy: object) -> None:
    with pytest.raises(GraphError) as caught:
        parse_graph({**one(), "version_policy": policy})
    assert str(caught.value) == f"graph.version_policy {policy!r} must be 'any' or 'pin'"


def test_status_says_for_which_version_an_attempt_waits_and_who_polls() -> None:
    def worker(worker_id: str, online: bool = True, **handlers: str) -> RegisteredWorker:
        known = {"roles": (*handlers,), "version": "", "slots": 1, "external": False, "in_engine": False}
        fields: Any = {**known, "online": online, "last_seen": None, "announce_interval_sec": 60.0}
        return RegisteredWorker(worker_id=worker_id, handlers=handlers, **fields)

    nodes = [("a", "shop", True), ("b", "shop", False), ("c", "mail", True), ("d", "scan", True)]
    shown = tuple(
        NodeRow(node_id=name, role=role, status="running", attempt=2, waiting=waiting)
        for name, role, waiting in nodes
    )
    view = TaskView(task_id="t", status=TaskStatus.RUNNING, source="workflow", nodes=shown)
    workers = [worker("w-1", shop="1.5"), worker("w-2", shop="1.4", online=False)]
    seen = add_pins(view, {"shop": "1.4", "scan": "7"}, workers).nodes
    assert [format_note(each) for each in seen] == [
        (
            "no worker has started it yet; waits for a worker of role shop with version 1.4 (pinned by this task); "
            "polled by: 1.5 (w-1)"
        ),
        "",
        "no worker has started it yet",
        (
            "no worker has started it yet; waits for a worker of role scan with version 7 (pinned by this task); "
            "polled by: nobody"
        ),
    ]


def test_hand_over_to_the_version_of_the_task_uses_no_retry_and_ends_inline_attempts() -> None:
    failure = from_error(VersionPinned("shop", "1.5", "1.4"))
    assert (failure.kind, failure.code, failure.pinned) == (FailureKind.HANDOVER, "version_pinned", "1.4")
    assert failure.message == (
        "the task has fixed version 1.4 of the handler of role shop, and this worker has version "
        "1.5; a worker with that "
        "version continues"
    )
    error = failed_attempt(failure)
    read = classify(error.type, error.message, error.details, permanent=error.non_retryable)
    assert read == failure
    state = NodeState()
    fall_back(state, error, read)
    assert state.ordinary
    assert decide(RetryPolicy(max=0), read, state, 0.0) == Retry(after_sec=0.0)


def test_list_of_workers_shows_one_version_for_all_roles_or_one_for_each() -> None:
    def shown(**handlers: str) -> str:
        view = ProcessView(
            worker_id="w",
            kind=ProcessKind.WORKER,
            state=ProcessState.ONLINE,
            version="2.0.0",
            handlers=handlers,
        )
        return format_versions(view)

    assert (shown(), shown(a="1"), shown(a="1", b="1")) == ("2.0.0", "1", "1")
    assert shown(a="1", b="2") == "a 1, b 2"
