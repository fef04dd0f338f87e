"""Every public call checks its arguments before it calls a server. Errors name argument, problem and fix."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temporalio.service import RPCError, RPCStatusCode
from tests.unit.property_examples import examples

from flowkit import Coordinator, CoordinatorConfig
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.adapters.vars.store import Variables
from flowkit.client import TaskCatalog, TaskClient
from flowkit.client.tasks import cancel_reason
from flowkit.coordinator.adapters import CoordinatorAdapters
from flowkit.errors import AdapterError, ConfigError, FlowKitError, GraphError, Removed
from flowkit.models import AttemptInput
from flowkit.plugin import FlowKitPlugin
from flowkit.testing import memory_database
from flowkit.validation import arguments
from flowkit.worker import EchoHandler, Worker
from flowkit.worker.artifacts import ArtifactsWriter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Call = Callable[[Any], Awaitable[object]]


class NoServer:
    """A database and a client in one; any call of it means that FlowKit called a server too early."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return NoServer()

    def __call__(self, *_: object, **__: object) -> Any:
        raise AssertionError("a server was asked")


NONE: Any = NoServer()


class _InvalidArgument:
    def __repr__(self) -> str:
        return "hostile\nobject"


endless: dict[str, Any] = {}
endless["self"] = endless

NO_TEXTS = [
    None,
    7,
    True,
    1.5,
    b"task",
    {"$gt": ""},
    {"$ne": None},
    ["a"],
    {"a"},
    _InvalidArgument(),
    10**5_000,
    endless,
]
NO_TASK_IDS = [*NO_TEXTS, "", "*", "a" * 201, "a\ud800"]
NO_NODE_IDS = [*NO_TASK_IDS, "a\nb", "a\0", "a[0]"]


def refusal_of(error: BaseException, argument: str) -> str:
    """Return the text of an error, and check that it is one short line with the argument and the allowed values."""
    text = str(error)
    assert argument in text
    assert "must be" in text
    assert "\n" not in text
    assert len(text) < 400
    return text


ADAPTERS: dict[str, Call] = {
    "set": lambda value: CoordinatorAdapters(db=NONE).vars_set(value, a=1),
    "set nothing": lambda value: CoordinatorAdapters(db=NONE).vars_set(value),
    "merge": lambda value: CoordinatorAdapters(db=NONE).vars_merge(value, a=1),
    "incr": lambda value: CoordinatorAdapters(db=NONE).vars_incr(value, key="a"),
    "unset": lambda value: CoordinatorAdapters(db=NONE).vars_unset(value, "a"),
    "merge_generic": lambda value: CoordinatorAdapters(db=NONE).merge_generic(value, ["a"], {}),
    "metrics_aggregate": lambda value: CoordinatorAdapters(db=NONE).metrics_aggregate(value, "a"),
    "noop": lambda value: CoordinatorAdapters(db=NONE).noop(value),
    "Variables.read": lambda value: Variables(TaskStore(NONE)).read(value),
    "Coordinator.vars": lambda value: Coordinator(db=NONE, client=NONE).vars(value),
}
CLIENTS: dict[str, Call] = {
    "TaskClient.cancel_task": lambda value: a_client().cancel_task(value),
    "TaskClient.result": lambda value: a_client().result(value),
    "TaskClient.wait": lambda value: a_client().wait(value, 1),
    "Coordinator.cancel_task": lambda value: Coordinator(db=NONE, client=NONE).cancel_task(value),
    "Coordinator.cascade_cancel": lambda value: Coordinator(db=NONE, client=NONE).cascade_cancel(value),
    "Coordinator.result": lambda value: Coordinator(db=NONE, client=NONE).result(value),
    "Coordinator.wait": lambda value: Coordinator(db=NONE, client=NONE).wait(value, 1),
    "TaskCatalog.document": lambda value: TaskCatalog(NONE).document(value),
    "TaskCatalog.batches": lambda value: TaskCatalog(NONE).batches(value),
}


def a_client() -> TaskClient:
    """Return a client without servers."""
    return TaskClient(NONE, TaskStore(NONE), queue="q")


@pytest.mark.parametrize("call", ADAPTERS.values(), ids=ADAPTERS)
async def test_functions_reject_an_invalid_task_id(call: Call) -> None:
    for value in NO_TASK_IDS:
        with pytest.raises(AdapterError) as caught:
            await call(value)
        refusal_of(caught.value, "task_id is ")


@pytest.mark.parametrize("call", CLIENTS.values(), ids=CLIENTS)
async def test_clients_reject_an_invalid_task_id(call: Call) -> None:
    for value in NO_TASK_IDS:
        with pytest.raises(ConfigError) as caught:
            await call(value)
        refusal_of(caught.value, "task_id is ")


async def test_new_task_requires_a_printable_id() -> None:
    value: Any
    for value in [*NO_TASK_IDS[1:], "a\0b", "a\nb", "\x1b[2J", "\x7f", " ", "a ", "\u2003a"]:
        with pytest.raises(GraphError) as caught:
            await a_client().create_task(
                params={}, graph={"nodes": [{"node_id": "a", "type": "t"}]}, task_id=value
            )
        assert "omit it to get a new UUID" in refusal_of(caught.value, "task_id is ")


class UnresponsiveClient:
    """A Temporal client that gets no response in time."""

    async def start_workflow(self, *_: object, **__: object) -> None:
        """Fail."""
        raise RPCError("timeout", RPCStatusCode.DEADLINE_EXCEEDED, b"")


async def test_start_with_an_unknown_outcome_names_the_task() -> None:
    client: Any = UnresponsiveClient()
    with pytest.raises(RPCError) as caught:
        await TaskClient(client, TaskStore(memory_database()), queue="q").create_task(
            params={}, graph={"nodes": [{"node_id": "a", "type": "t"}]}, task_id="mine"
        )
    [note] = caught.value.__notes__
    assert "task 'mine' may have started anyway: call again with task_id='mine'" in note


NODES: dict[str, tuple[str, Call]] = {
    "aggregate": (
        "metrics.aggregate: 'node_id'",
        lambda value: CoordinatorAdapters(db=NONE).metrics_aggregate("t", value),
    ),
    "from_nodes": (
        "merge.generic: an entry of 'from_nodes'",
        lambda value: CoordinatorAdapters(db=NONE).merge_generic("t", ["a", value], {}),
    ),
    "target": (
        "merge.generic: target['node_id']",
        lambda value: CoordinatorAdapters(db=NONE).merge_generic("t", ["a"], {"node_id": value or 7}),
    ),
}


@pytest.mark.parametrize(("argument", "call"), NODES.values(), ids=NODES)
async def test_functions_reject_an_invalid_node_id(argument: str, call: Call) -> None:
    for value in NO_NODE_IDS:
        with pytest.raises(AdapterError) as caught:
            await call(value)
        refusal_of(caught.value, argument)


async def test_invalid_timeout_is_rejected() -> None:
    value: Any
    for value in [math.nan, -1, -0.5, -math.inf, -(10**400), "5", True, [1], 1j]:
        for call in (a_client().result, a_client().wait, Coordinator(db=NONE, client=NONE).result):
            with pytest.raises(ConfigError) as caught:
                await call("t", value)
            assert "0 or more, or None" in refusal_of(caught.value, "timeout is ")


@pytest.mark.parametrize("value", [None, 0, 0.5, 10**400, math.inf, 1e308])
def test_valid_timeout_is_accepted(value: object) -> None:
    assert arguments.timeout_problem(value) is None


async def test_limit_of_a_list_is_between_1_and_10000() -> None:
    value: Any
    for value in [0, -1, True, 1.0, "5", None, math.nan, 10_001, 10**12, {"$gt": 0}]:
        for catalog in (TaskCatalog(NONE), a_client(), Coordinator(db=NONE)):
            with pytest.raises(ConfigError) as caught:
                await catalog.list_tasks(limit=value)
            assert "between 1 and 10,000" in refusal_of(caught.value, "limit is ")


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -1e300, 1e20, 10**400, "5", True, {"$gt": 0}], ids=repr
)
@pytest.mark.parametrize("name", ["since", "ended_since"])
async def test_a_time_of_a_list_is_one_that_mongodb_knows(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        await TaskCatalog(NONE).list_tasks(**{name: value})
    assert "seconds since the Unix epoch, in the years" in refusal_of(caught.value, f"{name} is ")


@pytest.mark.parametrize("value", [-1, 2**31, 10**400, 0.5, None], ids=repr)
async def test_a_number_to_skip_is_one_that_mongodb_knows(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        await TaskCatalog(NONE).list_tasks(skip=value)
    assert "a whole number between 0 and" in refusal_of(caught.value, "skip is ")


@pytest.mark.parametrize(
    "value",
    [datetime.max, datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC), "2026-11-01", 10**400],
    ids=repr,
)
def test_times_that_no_schedule_has_are_refused(value: object) -> None:
    assert "in the years 1900 to 2200" in (arguments.datetime_problem(value, "start") or "")
    assert arguments.datetime_problem(datetime(2026, 11, 1, tzinfo=UTC), "start") is None


@pytest.mark.parametrize("value", ["a\u202eb", "a\x1b[2Jb", " a", "", "a" * 201, 7], ids=repr)
def test_the_name_of_something_new_is_shown_as_it_is(value: object) -> None:
    problem = arguments.new_name_problem(value, "backfill_id", "the id of a backfill", 200)
    assert "backfill_id is " in (problem or "")
    assert "the id of a backfill: a string of 1 to 200 characters, without blanks" in (problem or "")


@pytest.mark.parametrize("value", ["done", "", 7, True, {"$gt": ""}, ["failed"], b"failed"], ids=repr)
async def test_unknown_status_is_rejected(value: Any) -> None:
    with pytest.raises(ConfigError, match="status .* is unknown; known: queued, running"):
        await TaskCatalog(NONE).list_tasks(value)


NO_ARGUMENTS: dict[str, list[Any]] = {
    "db": [None, "mongodb://localhost", 7, {}, dict],
    "cfg": [{"queue": "q"}, "coordinator.json", CoordinatorConfig],
    "worker_types": ["abc", b"abc"],
    "adapters": [["noop"], "noop", 7],
    "adapters['f']": [{"f": None}, {"f": 7}, {"f": "module:function"}],
    "a name in adapters": [{7: print}, {None: print}, {"": print}, {"x" * 201: print}, {"\ud800": print}],
    "client": ["localhost:7233", 7],
    "clock": [7, "utc", datetime],
}


@pytest.mark.parametrize(
    ("argument", "value"),
    [(name, value) for name, values in NO_ARGUMENTS.items() for value in values],
    ids=repr,
)
def test_coordinator_rejects_invalid_arguments(argument: str, value: Any) -> None:
    given = {"db": NONE, "adapters" if "adapters" in argument else argument: value}
    with pytest.raises(ConfigError) as caught:
        Coordinator(**given)
    refusal_of(caught.value, f"{argument} is ")


PLUGINS: list[dict[str, Any]] = [
    {"db": "mongodb://h"},
    {"functions": {"f": 7}},
    {"functions": ["f"]},
    {"config": {"queue": "q"}},
    {"worker_config": "worker.json"},
    {"handlers": [EchoHandler()]},
]


@pytest.mark.parametrize("given", PLUGINS, ids=",".join)
def test_plugin_rejects_invalid_arguments(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        FlowKitPlugin(**given)
    refusal_of(caught.value, next(iter(given)))


WORKERS: list[dict[str, Any]] = [
    {"db": None},
    {"cfg": CoordinatorConfig()},
    {"cfg": {"roles": ["echo"]}},
    {"roles": "echo"},
    {"handlers": [EchoHandler()]},
    {"client": "localhost:7233"},
    {"clock": "utc"},
]


@pytest.mark.parametrize("given", WORKERS, ids=",".join)
def test_worker_rejects_invalid_arguments(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Worker(**{"db": NONE, **given})
    refusal_of(caught.value, f"{next(iter(given))} is ")


@pytest.mark.parametrize("value", [None, "mongodb://h"])
def test_functions_require_a_database(value: object) -> None:
    with pytest.raises(ConfigError, match=r"db is .*; it must be a database of Motor or PyMongo Async"):
        CoordinatorAdapters(db=value)


@pytest.mark.parametrize("name", ["bus", "outbox"])
def test_removed_attribute_of_the_coordinator_raises_removed(name: str) -> None:
    coordinator = Coordinator(db=NONE)
    with pytest.raises(Removed, match=rf"Coordinator\.{name} was removed: .* Omit it") as caught:
        getattr(coordinator, name)
    assert isinstance(caught.value, (FlowKitError, AttributeError))
    assert caught.value.code == "removed"
    assert not hasattr(coordinator, name)
    assert getattr(coordinator, name, None) is None


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        ("wrong day", "wrong day"),
        (None, "user_request"),
        ("", "user_request"),
        ("x" * 1_000, "x" * 1_000),
        ("x" * 1_000_000, "x" * 999 + "…"),
        ("half \ud800", "half \\ud800"),
    ],
)
def test_cancel_reason_is_a_short_text(reason: str | None, kept: str) -> None:
    assert cancel_reason(reason) == kept


@pytest.mark.parametrize("reason", [7, True, b"text", {"$gt": ""}])
async def test_cancel_reason_that_is_not_a_string_is_rejected(reason: Any) -> None:
    with pytest.raises(ConfigError, match="reason is .*; it must be a string"):
        await Coordinator(db=NONE, client=NONE).cancel_task("t", reason=reason)


@pytest.mark.parametrize("uid", [None, "", 7, {"$gt": ""}, b"uid", "\ud800"], ids=repr)
async def test_handler_cannot_store_a_batch_with_an_invalid_uid(uid: Any) -> None:
    attempt = AttemptInput(task_id="t", node_id="a", index=0, role="r", epoch=1)
    writer = ArtifactsWriter(ArtifactStore(NONE), attempt, "w")
    with pytest.raises(ValueError, match="batch_uid must be a non-empty string, not "):
        await writer.upsert_partial(uid, {})


@settings(max_examples=examples(40))
@given(text=st.text(max_size=210))
def test_every_valid_new_id_is_a_valid_id(text: str) -> None:
    if arguments.new_task_id_problem(text) is None:
        assert arguments.task_id_problem(text) is None
        assert text.encode()
        assert "\0" not in text
