"""The command `flowkit init`: its output and its errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.project.new_project import FLOWKIT_ON_PATH, NAME, files, run_command
from tests.integration.harness import FLOWKIT

from flowkit.cli.project.scaffold import TEMPLATES

if TYPE_CHECKING:
    from tests.cli.conftest import Program


def test_it_prints_the_created_files_and_the_next_commands(program: Program) -> None:
    output = program.run("init", NAME, env=FLOWKIT_ON_PATH)
    head, *lines = output.out.splitlines()
    listed, following = lines[: lines.index("next steps")], lines[lines.index("next steps") + 1 :]
    assert head == f"created {NAME} in {NAME}: {len(files(program.folder / NAME))} files, including"
    assert all((program.folder / NAME / line.split()[0]).is_file() for line in listed)
    commands = [line.split("#")[0].strip() for line in following]
    assert commands == [f"cd {NAME} && make test", "make up", "make run"]
    targets = run_command(program.folder / NAME, "make").stdout
    assert all(f"make {name} " in targets for name in ("test", "types", "graph", "up", "run", "worker"))


def test_it_prints_an_export_line_if_flowkit_is_not_on_path(program: Program) -> None:
    output = program.run("init", NAME, env={"PATH": os.defpath})
    assert f"export PATH={FLOWKIT.parent}:$PATH" in output.out


def test_it_accepts_an_empty_folder(program: Program) -> None:
    output = program.run("init", "Words", "--dir", ".", env=FLOWKIT_ON_PATH)
    assert (output.code, output.err) == (0, "")
    assert {"Words/pipeline.py", "tests/test_pipeline.py", ".gitignore"} <= files(program.folder)
    assert [line.split("#")[0].strip() for line in output.out.splitlines()[-3:]] == [
        "make test",
        "make up",
        "make run",
    ]


def test_a_wrong_template_is_an_error_that_lists_the_templates(program: Program) -> None:
    output = program.run("init", NAME, "--template", "stream")
    assert (output.code, output.out, files(program.folder)) == (2, "", set())
    first, *lines = output.err.splitlines()
    assert "there is no template 'stream'; did you mean 'streaming'?" in first
    assert [line.split()[0] for line in lines] == list(TEMPLATES)


def test_the_help_describes_each_template(program: Program) -> None:
    text = " ".join(program.run("init", "--help", env={"COLUMNS": "200"}).out.replace("│", "").split())
    assert [name for name, each in TEMPLATES.items() if f"{name} {each.summary}" not in text] == []


@pytest.mark.parametrize(
    ("name", "problem"),
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
def test_an_invalid_name_is_an_error_and_nothing_is_written(
    program: Program, name: str, problem: str
) -> None:
    output = program.run("init", name)
    assert (output.code, output.out) == (2, "")
    assert f"NAME {name!r}" in output.err
    assert problem in output.err
    assert list(program.folder.iterdir()) == []


def test_a_name_that_looks_like_an_option_is_an_error(program: Program) -> None:
    assert "starts with '-'" in program.run("init", "--", "-shop").err


def test_a_folder_with_files_is_an_error_and_remains_unchanged(program: Program) -> None:
    (program.folder / NAME).mkdir()
    program.write(f"{NAME}/notes.md", "mine")
    output = program.run("init", NAME)
    assert (output.code, files(program.folder)) == (2, {f"{NAME}/notes.md"})
    assert (
        "is not empty, so nothing was written; choose another name, or another folder with --dir"
        in output.err
    )


def test_a_file_instead_of_the_folder_is_an_error(program: Program) -> None:
    program.write(NAME, "mine")
    assert "is a file; choose a folder with --dir" in program.run("init", NAME).err
    below_file = program.run("init", NAME, "--dir", f"{NAME}/below")
    assert (below_file.code, files(program.folder)) == (2, {NAME})
    assert "cannot write to folder" in below_file.err


def test_an_unwritable_folder_is_an_error(program: Program) -> None:
    folder = program.folder / "closed"
    folder.mkdir(mode=0o555)
    unwritable = Path("/sys") if os.geteuid() == 0 else folder  # root can write to any other folder
    output = program.run("init", NAME, "--dir", str(unwritable / NAME))
    assert output.code == 2
    assert f"cannot write to folder '{unwritable / NAME}'" in output.err
    assert list(folder.iterdir()) == []


@pytest.mark.slow(1)
def test_a_failed_write_leaves_nothing_behind(program: Program, tmp_path: Path) -> None:
    script = (
        "import sys; from flowkit.cli import app; from flowkit.cli.project import scaffold; own "
        "= scaffold.Project.files\n"
    )
    script += (
        "scaffold.Project.files = lambda self: {**own(self), scaffold.PurePosixPath('Makefile/x'): ''}\n"
    )
    script += f"sys.exit(app.run(['init', {NAME!r}]))"
    completed = run_command(program.folder, sys.executable, "-c", script)
    assert (completed.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "cannot write to folder" in completed.stderr
