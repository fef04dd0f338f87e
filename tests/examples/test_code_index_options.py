"""The command line of the demo: its options, and its messages for invalid ones."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.fork_server import fork_server
from tests.integration.harness import EVENT_TIMEOUT_SEC
from typer.testing import CliRunner

from code_index.__main__ import app
from code_index.errors import DemoError

ROOT = Path(__file__).parents[2]


def test_help_lists_every_option() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120", "TERM": "dumb"})
    assert result.exit_code == 0
    for option in ("--source", "--workers", "--chaos", "--external", "--report", "--keep", "--batch-size"):
        assert option in result.output


@pytest.mark.parametrize("option", ["--workers", "--batch-size"])
def test_value_below_one_is_rejected(option: str) -> None:
    refused = CliRunner().invoke(app, [option, "0"], env={"COLUMNS": "120", "TERM": "dumb"})
    assert refused.exit_code == 2
    assert option in refused.output
    assert re.search(r"x>=1|greater than or equal to 1", refused.output)


def test_missing_source_is_reported_in_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    environment = {"PYTHONPATH": str(ROOT / "examples"), "TERM": "dumb"}
    ended = fork_server().run(
        ["--source", str(missing)], tmp_path, environment, EVENT_TIMEOUT_SEC, module="code_index"
    )
    expected = f"code_index: --source: there is no folder {missing}; name a folder with Python source\n"
    assert ended == (1, "", expected)
    assert [*tmp_path.iterdir()] == []


def test_report_that_is_not_writable_is_reported_before_the_start(tmp_path: Path) -> None:
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
def test_make_passes_its_variables_on(variables: list[str], options: str) -> None:
    would = subprocess.run(
        ["make", "--dry-run", "demo", *variables], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (command,) = [line for line in _joined(would.stdout) if "-m code_index" in line]
    assert command.endswith(options)


def _joined(script: str) -> list[str]:
    """Return the commands, with continued lines joined and whitespace collapsed."""
    return [" ".join(line.split()) for line in script.replace("\\\n", " ").splitlines()]
