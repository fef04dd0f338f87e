"""The program of docs/flow-builder.md runs, is drawn, and gives the errors that the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.docs.pages import DOCS, blocks

from flowkit.cli.app import run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PAGE = blocks(DOCS / "flow-builder.md")
PROGRAM, TEST = (block.text for block in PAGE if block.language == "python" and block.marks)
PICTURE, ERROR, PRINTED = (block.text for block in PAGE if block.language == "text")


def test_the_program_runs_in_one_process_and_prints_what_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "cities.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "test_cities.py").write_text(TEST, encoding="utf-8")
    command = [sys.executable, "test_cities.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert re.fullmatch(re.escape(PRINTED).replace("…", ".*"), done.stdout), done.stdout


def test_commands_print_the_picture_and_the_error_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in (("cities", PROGRAM), ("wrong", PROGRAM.replace("params.strict", "params.strct"))):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        assert run(["graph", f"{name}:flow"]) == (0 if name == "cities" else 2)
        monkeypatch.delitem(sys.modules, name)
    shown = capsys.readouterr()
    assert shown.out.split() == PICTURE.split()
    assert shown.err.replace("wrong.py", "cities.py") == ERROR
