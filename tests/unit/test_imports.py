"""The documented import paths: each name exists where the documentation says, and aliases are the same object."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest

import flowkit
from flowkit.activities.handlers import EchoHandler
from flowkit.errors import FlowKitError
from flowkit.worker.handlers.base import RoleHandler
from flowkit.worker.state import ActiveRun

DOCUMENTED = {
    "flowkit": "Coordinator CoordinatorConfig WorkerConfig __version__",
    "flowkit.coordinator": "Coordinator",
    "flowkit.coordinator.runner": (
        "Coordinator CoordinatorConfig RunState Envelope MsgType Role EventKind EvHeartbeat EvTaskFailed"
    ),
    "flowkit.coordinator.adapters": "CoordinatorAdapters AdapterError SensitiveDetectorProto default_adapters",
    "flowkit.worker": "Worker RoleHandler Batch BatchResult FinalizeResult EchoHandler WorkerConfig",
    "flowkit.worker.runner": "Worker WorkerConfig",
    "flowkit.worker.handlers.base": "RoleHandler Batch BatchResult FinalizeResult Handler RunContext",
    "flowkit.worker.context": "RunContext",
    "flowkit.worker.artifacts": "ArtifactsWriter",
    "flowkit.worker.state": "ActiveRun LocalStateManager",
    "flowkit.worker.input.pull_adapters": "PullAdapters build_input_adapters",
    "flowkit.core.config": "CoordinatorConfig WorkerConfig",
    "flowkit.core.time": "Clock SystemClock ManualClock",
    "flowkit.core.utils": "stable_hash dumps loads jitter_ms",
    "flowkit.core.log": "get_logger bind_context log_context swallow warn_once set_level enable_stdout_logging "
    "disable_stdout_logging configure_from_env",
    "flowkit.protocol.messages": "RunState MsgType Role EventKind CommandKind QueryKind ReplyKind Envelope "
    "CmdTaskStart CmdTaskCancel EvHeartbeat EvTaskFailed RetryPolicy DagNode TaskDoc",
    "flowkit.outbox.dispatcher": "OutboxDispatcher",
    "flowkit.bus.kafka": "KafkaBus",
}
NAMES = [(module, name) for module, names in DOCUMENTED.items() for name in names.split()]


def test_documented_name_can_be_imported_from_its_documented_module() -> None:
    for module, name in NAMES:
        assert getattr(importlib.import_module(module), name) is not None


FORGET = "[sys.modules.pop(name) for name in [*sys.modules] if name.partition('.')[0] == 'flowkit']"
"""Makes the next import of a module of FlowKit the first one."""
FIRST = ["core.log", "core.utils", "protocol.messages", "worker.state", "worker.input.pull_adapters"]


@pytest.mark.slow(2)
def test_documented_module_can_be_imported_first() -> None:
    program = "import sys\n" + "\n".join(
        f"from flowkit.{name} import {', '.join(DOCUMENTED[f'flowkit.{name}'].split())}\n{FORGET}"
        for name in FIRST
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_module_defines_every_name_in_its_all_list() -> None:
    for module in DOCUMENTED:
        loaded = importlib.import_module(module)
        assert [name for name in getattr(loaded, "__all__", []) if not hasattr(loaded, name)] == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("flowkit.Coordinator", "flowkit.coordinator.runner.Coordinator"),
        ("flowkit.CoordinatorConfig", "flowkit.core.config.CoordinatorConfig"),
        ("flowkit.WorkerConfig", "flowkit.worker.runner.WorkerConfig"),
        ("flowkit.worker.WorkerConfig", "flowkit.core.config.WorkerConfig"),
        ("flowkit.worker.handlers.base.Handler", "flowkit.worker.RoleHandler"),
        ("flowkit.worker.handlers.base.RunContext", "flowkit.worker.context.RunContext"),
    ],
)
def test_alias_is_the_same_object(one: str, other: str) -> None:
    def found(path: str) -> object:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    assert found(one) is found(other)


def test_undocumented_name_raises_attribute_error_with_the_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Koordinator'"):
        flowkit.Koordinator  # noqa: B018


def test_echo_handler_serves_the_role_echo() -> None:
    assert isinstance(EchoHandler(), RoleHandler)
    assert EchoHandler().role == "echo"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("flowkit.outbox.dispatcher.OutboxDispatcher", "durably"),
        ("flowkit.bus.kafka.KafkaBus", "through Temporal"),
        ("flowkit.worker.state.LocalStateManager", "Temporal tracks"),
    ],
)
def test_error_of_a_removed_name_contains_its_replacement(name: str, remedy: str) -> None:
    module, _, gone = name.rpartition(".")
    with pytest.raises(FlowKitError, match=remedy):
        getattr(importlib.import_module(module), gone)(db=None, cfg=None)


def test_active_run_can_be_read_from_the_state_of_an_external_worker() -> None:
    stored: dict[str, Any] = {
        "task_id": "t",
        "node_id": "n",
        "step_type": "indexer",
        "attempt_epoch": 2,
        "lease_id": "l",
        "cancel_token": "c",
        "started_at_ms": 5,
        "state": "cancelling",
        "checkpoint": {},
    }
    assert ActiveRun(**stored).state == "cancelling"
