"""The files of a new project are correct, and its task runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML
from tests.cli.project.new_project import HANDLERS, NAME, PACKAGE, run_command, run_module
from tests.fork_server import fork_server
from tests.integration.harness import EVENT_TIMEOUT_SEC, ROOT

if TYPE_CHECKING:
    from tests.cli.conftest import Program
    from tests.integration.harness import Harness


@pytest.mark.slow
def test_make_test_passes(made: Path) -> None:
    (made / ".setup").touch()  # the packages are installed; pip would need a network
    done = run_command(made, "make", "test", "PYTHON=" + sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "graph.json is valid: 2 nodes" in done.stdout
    assert "2 passed" in done.stdout
    assert "warning" not in (done.stdout + done.stderr).lower()


@pytest.mark.slow
def test_its_test_fails_if_a_handler_is_wrong(made: Path) -> None:
    handlers = made / PACKAGE / "handlers.py"
    handlers.write_text(handlers.read_text(encoding="utf-8").replace(".lower()", ""), encoding="utf-8")
    arguments = ["-q", "-p", "no:cacheprovider"]
    code, out, err = fork_server().run(arguments, made, os.environ, EVENT_TIMEOUT_SEC, module="pytest")
    assert (code, "1 failed" in out) == (1, True), out + err


def test_its_code_passes_linter_and_formatter(made: Path) -> None:
    for command in (["ruff", "check", "."], ["ruff", "format", "--check", "."]):
        done = run_module(made, *command)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_its_code_passes_the_type_checker(made: Path) -> None:
    """With the settings of this project, whose cache holds the types of FlowKit."""
    done = run_module(ROOT, "mypy", "--strict", str(made), env={**os.environ, "MYPYPATH": str(made)})
    assert done.returncode == 0, done.stdout + done.stderr


def loaded(file: Path) -> Any:
    """Return the content of a YAML file."""
    return YAML(typ="safe").load(file.read_text(encoding="utf-8"))


def test_its_compose_file_is_valid_and_mounts_existing_files(made: Path) -> None:
    command = ["check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = run_module(made, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    services = loaded(made / "docker-compose.yml")["services"].values()
    mounted = [volume.split(":")[0] for service in services for volume in service.get("volumes", [])]
    assert all((made / path).is_file() for path in mounted if path.startswith("./"))


def test_its_services_equal_those_of_our_compose_file(made: Path) -> None:
    theirs, ours = (loaded(folder / "docker-compose.yml")["services"] for folder in (made, ROOT))
    own = {"engine", "bridge", "worker", "demo-task"}
    assert {n: s for n, s in theirs.items() if n not in own} == {
        n: s for n, s in ours.items() if n not in own
    }
    image = {"image": NAME}
    assert theirs["engine"] == {**ours["engine"], **image}
    assert theirs["bridge"] == {**ours["bridge"], **image}
    command, check = theirs["worker"]["command"], theirs["worker"]["healthcheck"]
    assert command == ["worker", "--verbose", *HANDLERS]
    assert check["test"][4:] == ["extract", "count"]
    assert theirs["worker"] == {
        **ours["worker"],
        **image,
        "command": command,
        "healthcheck": {**ours["worker"]["healthcheck"], "test": check["test"]},
    }


@pytest.mark.parametrize(
    "name", ["temporal/schema.sh", "temporal/namespace.sh", "temporal/dynamicconfig.yaml", "flowkit.env"]
)
def test_its_server_files_equal_ours(made: Path, name: str) -> None:
    theirs, ours = (folder / "deploy" / name for folder in (made, ROOT))
    read = loaded if name.endswith("yaml") else Path.read_text
    assert read(theirs) == read(ours)


def test_its_image_copies_existing_files(made: Path) -> None:
    lines = (made / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {path for line in lines if line.startswith("COPY ") for path in line.split()[1:-1]}
    allowed = {line[1:] for line in (made / ".dockerignore").read_text().split() if line.startswith("!")}
    assert {path.split("/")[0] for path in copied} == allowed
    assert all((made / path).exists() for path in copied)


@pytest.mark.server
async def test_its_task_runs_on_servers_and_prints_its_result(
    harness: Harness, program: Program, made: Path
) -> None:
    await harness.engine()
    program.start("worker", *HANDLERS, env=harness.environment)
    output = await program.call("run", "graph.json", "--watch", "--json", env=harness.environment)
    view = json.loads(output.out)
    assert (output.code, view["status"]) == (0, "finished"), output.err
    done = await asyncio.to_thread(run_module, made, f"{PACKAGE}.result", env=harness.environment)
    assert f"task {view['task_id']} has counted 57 words" in done.stdout
    assert ["of", "3"] in [line.split() for line in done.stdout.splitlines()]
