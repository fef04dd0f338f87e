"""The files of a new project are correct, and its task runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML
from tests.cli.project.new_project import FLOW, NAME, PACKAGE, run_command, run_module
from tests.fork_server import fork_server
from tests.integration.harness import EVENT_TIMEOUT_SEC, ROOT
from tests.type_checker import fills_a_cache, run_mypy

from flowkit.cli.project.scaffold import TEMPLATES, new_project

if TYPE_CHECKING:
    from tests.cli.conftest import Program
    from tests.integration.harness import Harness


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of a project of each template, and their tests under different names."""
    folder = tmp_path_factory.mktemp("projects")
    for template in TEMPLATES:
        for path, text in new_project(f"own-{template}", template).files().items():
            target = folder / path
            if path.parent.name == "tests":
                target = target.with_stem(f"{path.stem}_{template}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    return folder


def run_pytest(folder: Path) -> tuple[int, str]:
    """Run the tests of a project, with the plugins that it requires.

    In a fork, FlowKit is imported before pytest could rewrite the assertions in its plugin.
    """
    imported = "ignore::pytest.PytestAssertRewriteWarning"
    options = ["-q", "-p", "no:cacheprovider", "-W", "error", "-W", imported]
    code, out, err = fork_server().run(options, folder, os.environ, EVENT_TIMEOUT_SEC, module="pytest")
    return code, out + err


@pytest.mark.slow
def test_the_tests_of_all_templates_pass(projects: Path) -> None:
    code, output = run_pytest(projects)
    assert code == 0, output


@fills_a_cache
@pytest.mark.slow
def test_the_code_of_all_templates_passes_the_type_checker(projects: Path) -> None:
    done = run_mypy("--strict", str(projects), env={**os.environ, "MYPYPATH": str(projects)})
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_code_of_all_templates_passes_linter_and_formatter(projects: Path) -> None:
    for command in (["ruff", "check", "."], ["ruff", "format", "--check", "."]):
        done = run_module(projects, *command)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_flow_of_each_template_is_valid_and_has_three_nodes(
    template: str, projects: Path, program: Program
) -> None:
    program.folder = projects
    flow = f"own_{template}.pipeline:flow"
    output = program.run("validate", flow, "--json")
    view = json.loads(output.out)
    assert (output.code, view["valid"], view["warnings"]) == (0, True, []), output.out
    known = TEMPLATES[template]
    roles = {node["role"] for node in view["nodes"]}
    assert len(view["nodes"]) == 3
    assert roles - {"approval", None} == {*known.roles, *known.external}


def test_each_target_of_make_runs_a_command_of_the_project(made: Path) -> None:
    (made / ".setup").touch()
    done = run_command(
        made,
        "make",
        "-n",
        "--no-print-directory",
        "PYTHON=python",
        "test",
        "types",
        "graph",
        "up",
        "run",
        "worker",
    )
    assert done.stdout.splitlines() == [
        f"flowkit validate {FLOW}",
        "python -m pytest -q",
        f"python -m mypy {PACKAGE} tests",
        f"flowkit graph {FLOW}",
        f"flowkit up {FLOW}",
        f"flowkit run {FLOW} --watch",
        f"flowkit worker {FLOW}",
    ]


@pytest.mark.nightly
@pytest.mark.slow
def test_make_test_passes(made: Path) -> None:
    (made / ".setup").touch()  # the packages are installed; pip would need a network
    done = run_command(made, "make", "test", "PYTHON=" + sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{FLOW} is valid: 3 nodes" in done.stdout
    assert "3 passed" in done.stdout
    assert "warning" not in (done.stdout + done.stderr).lower()


@pytest.mark.slow
def test_its_test_fails_if_a_handler_is_wrong(made: Path) -> None:
    pipeline = made / PACKAGE / "pipeline.py"
    pipeline.write_text(pipeline.read_text(encoding="utf-8").replace(".lower()", ""), encoding="utf-8")
    code, output = run_pytest(made)
    assert (code, "1 failed" in output) == (1, True), output


def loaded(file: Path) -> Any:
    """Return the content of a YAML file."""
    return YAML(typ="safe").load(file.read_text(encoding="utf-8"))


def check_compose_files(folder: Path, *names: str) -> None:
    """Fail if a Compose file is not valid."""
    done = run_module(folder, "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *names)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_compose_file_is_valid_and_mounts_existing_files(made: Path) -> None:
    external = new_project(NAME, "external").files()[PurePosixPath("docker-compose.yml")]
    (made / "external.yml").write_text(external, encoding="utf-8")
    check_compose_files(made, "docker-compose.yml", "external.yml")
    worker = loaded(made / "external.yml")["services"]["external-worker"]
    assert (worker["profiles"], worker["image"]) == (["external"], NAME)
    services = loaded(made / "docker-compose.yml")["services"].values()
    mounted = [volume.split(":")[0] for service in services for volume in service.get("volumes", [])]
    assert all((made / path).is_file() for path in mounted if path.startswith("./"))


def test_its_services_equal_those_of_our_compose_file(made: Path) -> None:
    theirs, ours = (loaded(folder / "docker-compose.yml")["services"] for folder in (made, ROOT))
    own = {"engine", "bridge", "worker", "demo-task"}
    assert {n: s for n, s in theirs.items() if n not in own} == {
        n: s for n, s in ours.items() if n not in own and s.get("profiles") != ["observability"]
    }
    image = {"image": NAME}
    assert theirs["engine"] == {**ours["engine"], **image, "command": ["engine", "--verbose", FLOW]}
    assert theirs["bridge"] == {**ours["bridge"], **image}
    command, check = theirs["worker"]["command"], theirs["worker"]["healthcheck"]
    assert command == ["worker", "--verbose", FLOW]
    assert check["test"][4:] == ["pages", "words", "count"]
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
async def test_the_schedule_of_the_template_with_one_can_be_applied(
    harness: Harness, program: Program, projects: Path
) -> None:
    program.folder = projects
    output = await program.call("schedule", "apply", "schedules.yaml", "--dry-run", env=harness.environment)
    assert (output.code, output.out) == (0, "would create  own-schedule-nightly\n"), output.err


@pytest.mark.server
async def test_its_task_runs_on_servers_and_prints_its_result(
    harness: Harness, program: Program, made: Path
) -> None:
    await harness.engine()
    program.start("worker", FLOW, env=harness.environment)
    output = await program.call("run", FLOW, "--watch", "--json", env=harness.environment)
    view = json.loads(output.out)
    assert (output.code, view["status"]) == (0, "finished"), output.err
    result = await program.call("result", view["task_id"], "count", env=harness.environment)
    assert ["metrics.words", "48"] in [line.split() for line in result.out.splitlines()]
