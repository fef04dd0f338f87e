"""`flowkit init`: the new project is whole, right, and runs."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
import sys
import tomllib
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML
from tests.integration.world import CEILING, FLOWKIT, ROOT

from flowkit.cli.project.scaffold import new_project

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.cli.conftest import Program
    from tests.integration.world import World

NAME, PACKAGE = "word-count", "word_count"
HANDLERS = (f"{PACKAGE}.handlers:Extract", f"{PACKAGE}.handlers:Count")
READABLE = {"PATH": f"{FLOWKIT.parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def made(program: Program) -> Path:
    """A new project; the program goes on in its folder."""
    assert program.run("init", NAME, env=READABLE).code == 0
    program.folder = program.folder / NAME
    return program.folder


def ended(
    folder: Path, *command: str, env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """A command of another program, run in the project."""
    environment = {**env, **READABLE}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=CEILING, check=False
    )


def tool(
    folder: Path, *arguments: str, env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """A Python module, run in the project."""
    return ended(folder, sys.executable, "-m", *arguments, env=env)


# --- what is made ---------------------------------------------------------------------------------------------------


def test_its_own_command_runs_its_test(made: Path) -> None:
    (made / ".setup").touch()  # what the tests need is installed; asking pip would need a network
    done = ended(made, "make", "test", "PYTHON=" + sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "graph.json is valid: 2 nodes" in done.stdout
    assert "2 passed" in done.stdout


def test_its_test_fails_when_its_handler_is_wrong(made: Path) -> None:
    handlers = made / PACKAGE / "handlers.py"
    handlers.write_text(handlers.read_text(encoding="utf-8").replace(".lower()", ""), encoding="utf-8")
    assert tool(made, "pytest", "-q", "-p", "no:cacheprovider").returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy", "--strict", f"--cache-dir={ROOT / '.mypy_cache/new-project'}", "."],
    ],
    ids=["check", "format", "types"],
)
def test_its_code_is_clean(made: Path, command: list[str]) -> None:
    done = tool(made, *command)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_says_what_was_made_and_the_next_three_commands(program: Program) -> None:
    said = program.run("init", NAME, env=READABLE)
    head, *lines = said.out.splitlines()
    listed, following = lines[: lines.index("next steps")], lines[lines.index("next steps") + 1 :]
    assert head == f"made {NAME} in {NAME}: {len(files(program.folder / NAME))} files, including"
    assert all((program.folder / NAME / line.split()[0]).is_file() for line in listed)
    commands = [line.split("#")[0].strip() for line in following]
    assert commands == [f"cd {NAME} && make test", "make up", "make run"]
    targets = ended(program.folder / NAME, "make").stdout
    assert all(f"make {name} " in targets for name in ("test", "up", "run", "result", "worker"))


def test_where_flowkit_is_not_on_path_it_says_how_to_put_it_there(program: Program) -> None:
    said = program.run("init", NAME, env={"PATH": os.defpath})
    assert f"export PATH={FLOWKIT.parent}:$PATH" in said.out


def test_an_empty_folder_is_filled(program: Program) -> None:
    said = program.run("init", "Words", "--dir", ".", env=READABLE)
    assert (said.code, said.err) == (0, "")
    assert {"graph.json", "Words/handlers.py", ".gitignore"} <= files(program.folder)
    assert [line.split("#")[0].strip() for line in said.out.splitlines()[-3:]] == [
        "make test",
        "make up",
        "make run",
    ]


def files(folder: Path) -> set[str]:
    """All files below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_name_is_a_package_with_underscores_and_an_image_in_lower_case() -> None:
    project = new_project("Big_-_Name-2")
    assert (project.package, project.image) == ("Big___Name_2", "big-name-2")


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "it is empty"),
        ("my shop", "it contains ' '"),
        ("bücher/1", "it contains 'ü', '/'"),
        ("1shop", "it starts with '1'"),
        ("shop-", "it ends with '-'"),
        ("class", "a Python keyword"),
        ("json", "a module of the standard library"),
        ("tests", "another folder of the project"),
        ("flowkit", "an installed package"),
    ],
)
def test_a_bad_name_is_refused_and_nothing_is_written(program: Program, name: str, told: str) -> None:
    said = program.run("init", name)
    assert (said.code, said.out) == (2, "")
    assert f"NAME {name!r}" in said.err
    assert told in said.err
    assert list(program.folder.iterdir()) == []


def test_a_name_that_looks_like_an_option_is_refused(program: Program) -> None:
    assert "starts with '-'" in program.run("init", "--", "-shop").err


def test_a_folder_with_anything_in_it_is_left_alone(program: Program) -> None:
    (program.folder / NAME).mkdir()
    program.write(f"{NAME}/graph.json", "mine")
    said = program.run("init", NAME)
    assert (said.code, files(program.folder)) == (2, {f"{NAME}/graph.json"})
    assert (
        "is not empty, so nothing was written; choose another name, or another folder with --dir" in said.err
    )


def test_a_file_in_the_way_is_named(program: Program) -> None:
    program.write(NAME, "mine")
    assert "is a file; choose a folder with --dir" in program.run("init", NAME).err
    below = program.run("init", NAME, "--dir", f"{NAME}/below")
    assert (below.code, files(program.folder)) == (2, {NAME})
    assert "cannot write to folder" in below.err


def test_a_folder_without_the_right_to_write_is_named(program: Program) -> None:
    folder = program.folder / "closed"
    folder.mkdir(mode=0o555)
    nobody = (
        Path("/sys") if os.geteuid() == 0 else folder
    )  # the rights of files do not keep root from anything
    said = program.run("init", NAME, "--dir", str(nobody / NAME))
    assert said.code == 2
    assert f"cannot write to folder '{nobody / NAME}'" in said.err
    assert list(folder.iterdir()) == []


def test_what_breaks_off_in_the_middle_leaves_nothing(program: Program, tmp_path: Path) -> None:
    full = "import sys; from flowkit.cli import app; from flowkit.cli.project import scaffold; own = scaffold.Project.files\n"
    full += (
        "scaffold.Project.files = lambda self: {**own(self), scaffold.PurePosixPath('graph.json/x'): ''}\n"
    )
    full += f"sys.exit(app.run(['init', {NAME!r}]))"
    done = ended(program.folder, sys.executable, "-c", full)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "cannot write to folder" in done.stderr


# --- what it shares with this project -------------------------------------------------------------------------------


def loaded(file: Path) -> Any:
    """What a YAML file holds."""
    return YAML(typ="safe").load(file.read_text(encoding="utf-8"))


def test_its_compose_file_fits_the_schema_and_mounts_what_is_there(made: Path) -> None:
    command = ["check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = tool(made, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    services = loaded(made / "docker-compose.yml")["services"].values()
    mounted = [volume.split(":")[0] for service in services for volume in service.get("volumes", [])]
    assert all((made / path).is_file() for path in mounted if path.startswith("./"))


def test_its_servers_are_those_of_our_own_compose_file(made: Path) -> None:
    theirs, ours = (loaded(folder / "docker-compose.yml")["services"] for folder in (made, ROOT))
    own = {"engine", "worker", "demo-task"}
    assert {n: s for n, s in theirs.items() if n not in own} == {
        n: s for n, s in ours.items() if n not in own
    }
    image = {"image": NAME}
    assert theirs["engine"] == {**ours["engine"], **image}
    command, check = theirs["worker"]["command"], theirs["worker"]["healthcheck"]
    assert command == ["worker", "--verbose", *HANDLERS]
    assert check["test"][4:] == ["flowkit.extract", "flowkit.count"]
    assert theirs["worker"] == {
        **ours["worker"],
        **image,
        "command": command,
        "healthcheck": {**ours["worker"]["healthcheck"], "test": check["test"]},
    }


@pytest.mark.parametrize("name", ["schema.sh", "namespace.sh", "dynamicconfig.yaml"])
def test_its_files_for_the_server_are_ours(made: Path, name: str) -> None:
    theirs, ours = (folder / "deploy/temporal" / name for folder in (made, ROOT))
    read = loaded if name.endswith("yaml") else Path.read_text
    assert read(theirs) == read(ours)


def test_its_health_check_is_ours_but_for_the_order_of_imports(made: Path) -> None:
    theirs, ours = (statements(folder / "deploy/healthcheck.py") for folder in (made, ROOT))
    assert sorted(theirs) == sorted(ours)


def statements(file: Path) -> list[str]:
    """Top-level statements of a program."""
    return [ast.dump(each) for each in ast.parse(file.read_text(encoding="utf-8")).body]


def test_its_image_gets_files_that_are_there(made: Path) -> None:
    lines = (made / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {path for line in lines if line.startswith("COPY ") for path in line.split()[1:-1]}
    allowed = {line[1:] for line in (made / ".dockerignore").read_text().split() if line.startswith("!")}
    assert {path.split("/")[0] for path in copied} == allowed
    assert all((made / path).exists() for path in copied)


def test_the_wheel_gets_every_template() -> None:
    """What setuptools does with these patterns; `make wheel` tries the wheel itself."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-data"
    ]
    package, folder = ROOT / "src/flowkit", "cli/project/templates"
    packed = {path for pattern in data["flowkit"] for path in glob(pattern, root_dir=package, recursive=True)}
    assert {f"{folder}/{path}" for path in files(package / folder)} <= packed


# --- on real servers ------------------------------------------------------------------------------------------------


@pytest.mark.server
async def test_its_task_runs_on_servers_and_its_result_is_printed(
    world: World, program: Program, made: Path
) -> None:
    await world.engine()
    program.start("worker", *HANDLERS, env=world.environment)
    said = await program.call("run", "graph.json", "--watch", "--json", env=world.environment)
    view = json.loads(said.out)
    assert (said.code, view["status"]) == (0, "finished"), said.err
    done = await asyncio.to_thread(tool, made, f"{PACKAGE}.result", env=world.environment)
    assert f"task {view['task_id']} has counted 57 words" in done.stdout
    assert ["of", "3"] in [line.split() for line in done.stdout.splitlines()]
