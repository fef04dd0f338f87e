"""What the plugin does before it connects: settings, errors, replay."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowHistory
from temporalio.converter import CompositePayloadConverter as Composite
from temporalio.converter import DataConverter, JSONPlainPayloadConverter
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Replayer, Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner
from temporalio.workflow import NondeterminismError

from flowkit import CoordinatorConfig, WorkerConfig
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.engine.component import EngineComponent, WorkerComponent
from flowkit.engine.worker import (
    EngineParts,
    make_settings,
    read_activity_name,
)
from flowkit.errors import ConfigError
from flowkit.models import AttemptInput, FailureKind
from flowkit.models.temporal_names import INLINE_ATTEMPT
from flowkit.plugin import _PASSED_THROUGH, FlowKitPlugin
from flowkit.testing import memory_database
from flowkit.worker import RoleHandler
from flowkit.workflows.task import Task

HISTORIES = Path(__file__).parents[1] / "replay/histories"


class Paced(RoleHandler):
    """A handler that is never called."""

    role = "paced"


@activity.defn
async def greet(name: str) -> str:
    """An activity of the user."""
    return name


async def offline(*plugins: FlowKitPlugin, **options: Any) -> Client:
    """A client that never connects."""
    return await Client.connect("127.0.0.1:1", lazy=True, plugins=plugins, **options)


async def test_payload_converter_that_cannot_encode_flowkit_records_is_rejected() -> None:
    class Plain(Composite):
        def __init__(self) -> None:
            super().__init__(JSONPlainPayloadConverter())

    converter = DataConverter(payload_converter_class=Plain)
    with pytest.raises(ConfigError, match="payload converter Plain cannot serialize FlowKit's records"):
        await offline(FlowKitPlugin(), data_converter=converter)


async def test_engine_component_registers_each_activity_of_an_engine() -> None:
    db = memory_database()
    inline: Any = object()
    component = EngineComponent(db, CoordinatorConfig(), {"sum": greet}, inline)
    tasks, artifacts, config = TaskStore(db), ArtifactStore(db), CoordinatorConfig()
    settings = make_settings(config, deployment="d", search_attributes=(), functions={})
    grants: Any = object()
    parts = EngineParts(
        config=config,
        tasks=tasks,
        artifacts=artifacts,
        functions={"sum": greet},
        identity="e",
        grants=grants,
    )
    of_engine = parts.activities(settings, by_name=True)
    assert {*map(read_activity_name, component.activities)} == {
        *map(read_activity_name, of_engine),
        INLINE_ATTEMPT,
    }


async def test_sandbox_passes_flowkit_records_through_and_keeps_user_modules() -> None:
    client = await offline(FlowKitPlugin())
    seen: list[Any] = []

    class Spy(FlowKitPlugin):
        def configure_worker(self, config: Any) -> Any:
            config = super().configure_worker(config)
            seen.append(config["workflow_runner"])
            return config

    runner = SandboxedWorkflowRunner()
    mine = replace(runner, restrictions=runner.restrictions.with_passthrough_modules("mine"))
    with pytest.raises(RuntimeError, match="Lazy"):
        Worker(
            client,
            task_queue="flowkit",
            workflows=[Task],
            workflow_runner=mine,
            plugins=[Spy(db=memory_database())],
        )
    assert {"mine", "flowkit.models", "_pytest"} <= seen[0].inner.restrictions.passthrough_modules


async def test_poisoned_history_is_detected() -> None:
    poisoned = recorded(min((HISTORIES / "poisoned").glob("*.json")))
    with pytest.raises(NondeterminismError):
        await Replayer(workflows=[Task], plugins=[FlowKitPlugin()]).replay_workflow(poisoned)


async def test_attempt_on_a_worker_that_could_not_start_is_handed_over() -> None:
    run_attempt = WorkerComponent([]).attempt("quick")
    attempt = AttemptInput.__new__(AttemptInput)
    with pytest.raises(ApplicationError) as caught:
        await ActivityEnvironment().run(run_attempt, attempt)
    assert (caught.value.type, caught.value.non_retryable) == ("worker_shutdown", True)
    assert caught.value.details[0]["kind"] == FailureKind.HANDOVER


def recorded(path: Path) -> WorkflowHistory:
    """Return a recorded history; its file is named after the workflow id."""
    return WorkflowHistory.from_json(path.stem.partition("-")[0], path.read_text(encoding="utf-8"))


async def refused(client: Client, **options: Any) -> str:
    """Return the one-line error with which a worker is rejected."""
    with pytest.raises(ConfigError) as caught:
        Worker(client, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_unknown_queue_is_rejected_with_the_list_of_known_ones() -> None:
    plugin = FlowKitPlugin(
        db=memory_database(), config=CoordinatorConfig(queue="jobs"), handlers={"paced": Paced()}
    )
    message = (
        "FlowKitPlugin has nothing to do on task queue 'elsewhere': it runs tasks on 'jobs' and handlers on "
        "'jobs.paced' (set by config=, worker_config= and handlers=)"
    )
    asked = {"task_queue": "elsewhere", "activities": [greet], "plugins": [plugin]}
    assert await refused(await offline(), **asked) == message
    assert await refused(await offline(plugin), task_queue="elsewhere") == message


async def test_role_without_a_handler_is_rejected() -> None:
    client = await offline(FlowKitPlugin(db=memory_database(), handlers={"paced": Paced()}))
    message = await refused(client, task_queue="flowkit.packed", activities=[greet])
    assert message.startswith("FlowKitPlugin on task queue 'flowkit.packed': no handler for role 'packed'")


async def test_worker_without_a_database_is_rejected() -> None:
    message = await refused(await offline(FlowKitPlugin()), task_queue="flowkit")
    assert message.startswith("FlowKitPlugin has no database for task queue 'flowkit': pass db=")


async def test_client_without_the_data_converter_of_the_plugin_is_rejected() -> None:
    message = await refused(
        await offline(), task_queue="flowkit", plugins=[FlowKitPlugin(db=memory_database())]
    )
    assert message.endswith(
        "pass the plugin to the client, too: Client.connect(..., plugins=[FlowKitPlugin(...)])"
    )


def test_different_queues_of_engine_and_worker_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"config.queue 'a' and worker_config.queue 'b'"):
        FlowKitPlugin(config=CoordinatorConfig(queue="a"), worker_config=WorkerConfig(queue="b"))


@pytest.mark.parametrize("module", _PASSED_THROUGH)
def test_module_that_the_sandbox_passes_through_exists(module: str) -> None:
    assert find_spec(module) is not None
