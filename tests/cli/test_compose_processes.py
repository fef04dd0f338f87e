"""The commands and health checks of the services that run FlowKit, on the test servers instead of in containers."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from flowkit.local.ports import free_port
from flowkit.local.temporal import temporal_cli
from flowkit.models.temporal_names import SEARCH_ATTRIBUTES
from tests.fork_server import fork_server, forked
from tests.integration.harness import EVENT_TIMEOUT_SEC, ROOT, eventually
from tests.servers import KAFKA

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Program
    from tests.integration.harness import Harness
    from tests.servers import Start

pytestmark = pytest.mark.server

SERVICES: dict[str, dict[str, Any]] = YAML(typ="safe").load((ROOT / "docker-compose.yml").read_text())[
    "services"
]
RUNNING = ("engine", "worker", "bridge")


class Containers:
    """Runs the commands of services, each with the environment of its service and with the addresses of the tests."""

    def __init__(self, harness: Harness, brokers: str, folder: Path) -> None:
        self._folder = folder
        self._addresses = {
            **{
                name: harness.environment[name]
                for name in ("TEMPORAL_ADDRESS", "MONGO_URL", "MONGO_DATABASE")
            },
            "FLOWKIT_QUEUE": harness.queue,
            "KAFKA_BOOTSTRAP_SERVERS": brokers,
            "WORKER_TYPES": f"indexer-{harness.queue}",
        }

    def environment(self, service: str) -> dict[str, str]:
        """Return the environment of a service; its health file is in a folder of the test."""
        given = variables(SERVICES[service])
        ours = {name: self._addresses.get(name, value) for name, value in given.items()}
        ours["FLOWKIT_HEALTH_FILE"] = (
            str(self._folder / Path(given["FLOWKIT_HEALTH_FILE"]).name) + f"-{service}"
        )
        ours |= {"FLOWKIT_HEALTH_PORT": str(free_port()), "FLOWKIT_HEALTH_HOST": "127.0.0.1"}
        [python_path] = re.findall(r"PYTHONPATH=(\S+)", (ROOT / "Dockerfile").read_text())
        return {**os.environ, **ours, "PYTHONPATH": in_checkout(python_path)}

    async def health(self, service: str) -> tuple[int, str]:
        """Return exit code and output of the health check of a service."""
        kind, *command = SERVICES[service]["healthcheck"]["test"]
        assert kind == "CMD"
        return await run(*command, env=self.environment(service))


def variables(service: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a service: those of its file, and its own."""
    lines = (ROOT / service["env_file"]).read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    own: dict[str, str] = service.get("environment", {})
    return {name: value for name, _, value in pairs} | own


def in_checkout(path: str) -> str:
    """Return the path in this checkout of a path in the image."""
    return str(ROOT / Path(path).relative_to("/app")) if path.startswith("/app/") else path


async def run(program: str, *arguments: str, env: dict[str, str]) -> tuple[int, str]:
    """Run a program of the image until it exits, and return its exit code and its output."""
    here = {"flowkit": forked(), "python": [sys.executable]}
    process = await asyncio.create_subprocess_exec(
        *here.get(program, [program]),
        *map(in_checkout, arguments),
        env={**env, **fork_server().variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await asyncio.wait_for(process.communicate(), EVENT_TIMEOUT_SEC)
    assert process.returncode is not None
    return process.returncode, printed.decode()


@pytest.fixture
def containers(harness: Harness, start_servers: Start, tmp_path: Path) -> Containers:
    """The services of the Compose file, on the servers of the tests."""
    return Containers(harness, start_servers("kafka")[KAFKA], tmp_path)


@pytest.mark.slow(40)
async def test_every_service_becomes_healthy_and_then_the_demo_runs(
    containers: Containers, program: Program
) -> None:
    for service in RUNNING:
        assert await containers.health(service) == (1, unreadable(containers, service))
    for service in RUNNING:
        program.start(*SERVICES[service]["command"], env=containers.environment(service))
    for service in RUNNING:
        await eventually(is_healthy(containers, service))
    for process, queue in (("engine", "other"), ("worker", "other.indexer")):
        env = containers.environment("engine")
        options = ["indexer"] if process == "worker" else []
        found = await run("flowkit", "health", process, *options, "--queue", "other", env=env)
        assert found == (1, f"not polled: {queue}\n")

    demo = SERVICES["demo-task"]
    small = str(ROOT / "examples/code_index")
    code, printed = await run(
        *demo["entrypoint"], *demo["command"], small, env=containers.environment("demo-task")
    )
    assert code == 0, printed
    assert "none lost, none duplicated" in printed


def unreadable(containers: Containers, service: str) -> str:
    """Return what a health check prints before its process runs."""
    file = containers.environment(service)["FLOWKIT_HEALTH_FILE"]
    return f"the health file {file} cannot be read: [Errno 2] No such file or directory: '{file}'\n"


def is_healthy(containers: Containers, service: str) -> Callable[[], Any]:
    """Return a check whether a service is healthy."""

    async def look() -> bool:
        return (await containers.health(service))[0] == 0

    return look


async def test_the_namespace_service_prepares_a_server(harness: Harness) -> None:
    service = SERVICES["temporal-namespace"]
    mounted = {
        target: str(ROOT / source) for source, target, _ in (each.split(":") for each in service["volumes"])
    }
    env = {
        **os.environ,
        **service["environment"],
        "TEMPORAL_ADDRESS": harness.environment["TEMPORAL_ADDRESS"],
        "TEMPORAL_NAMESPACE": f"compose-{uuid.uuid4().hex[:8]}",
        "PATH": f"{Path(temporal_cli()).parent}:{os.environ['PATH']}",
    }
    code, printed = await run(*(mounted.get(part, part) for part in service["entrypoint"]), env=env)
    assert code == 0, printed
    code, listed = await run(
        "temporal", "operator", "search-attribute", "list", "--namespace", env["TEMPORAL_NAMESPACE"], env=env
    )
    assert code == 0 and all(name in listed for name in SEARCH_ATTRIBUTES), listed
