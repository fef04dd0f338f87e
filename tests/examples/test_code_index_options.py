"""The demo's command line: what it takes, and what it says when that cannot be."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from code_index.__main__ import app
from code_index.errors import DemoError

ROOT = Path(__file__).parents[2]


def test_the_help_names_every_option() -> None:
    told = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120", "TERM": "dumb"})
    assert told.exit_code == 0
    for option in ("--source", "--workers", "--chaos", "--report", "--keep", "--batch-size", "--folder"):
        assert option in told.output


@pytest.mark.parametrize("option", ["--workers", "--batch-size"])
def test_less_than_one_is_refused(option: str) -> None:
    refused = CliRunner().invoke(app, [option, "0"], env={"COLUMNS": "120", "TERM": "dumb"})
    assert refused.exit_code == 2
    assert option in refused.output
    assert re.search(r"x>=1|greater than or equal to 1", refused.output)


def test_a_source_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    ended = subprocess.run(
        [sys.executable, "-m", "code_index", "--source", str(missing)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "examples"), "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    told = f"code_index: --source: there is no folder {missing}; name one that holds Python source\n"
    assert ended.stderr == told
    assert [*tmp_path.iterdir()] == []


def test_a_report_that_cannot_be_written_is_told_before_anything_is_started(tmp_path: Path) -> None:
    given = ["--source", str(tmp_path), "--folder", str(tmp_path / "data"), "--report", str(tmp_path)]
    refused = CliRunner().invoke(app, given)
    assert isinstance(refused.exception, DemoError)
    assert str(refused.exception).startswith(f"--report: {tmp_path} cannot be written (")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ([], "-m code_index"),
        (["SOURCE=a b", "WORKERS=3", "CHAOS=1"], '-m code_index --source "a b" --workers "3" --chaos'),
        (["CHAOS=0", "KEEP=1", "REPORT=out.html"], '-m code_index --keep --report "out.html"'),
    ],
)
def test_make_hands_its_variables_on(variables: list[str], options: str) -> None:
    would = subprocess.run(
        ["make", "--dry-run", "demo", *variables], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (command,) = [line for line in _joined(would.stdout) if "-m code_index" in line]
    assert command.endswith(options)


def _joined(script: str) -> list[str]:
    """Commands with their continued lines and needless blanks put together."""
    return [" ".join(line.split()) for line in script.replace("\\\n", " ").splitlines()]
