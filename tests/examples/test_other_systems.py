"""One pipeline in six systems: the page shows the files, and each version passes its tests if its system is installed.

A system is installed in the environment of these tests, or in one of its own, `$OTHER_SYSTEMS/NAME`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, ROOT, blocks

from flowkit.local.temporal import temporal_cli

FOLDER = ROOT / "examples/other_systems"
TEST = (
    "-m",
    "pytest",
    "-c",
    os.devnull,
    "--rootdir",
    ".",
    "-q",
    "-o",
    "asyncio_mode=auto",
    "-p",
    "no:cacheprovider",
)
PACKAGES = {
    "airflow": "airflow",
    "dagster": "dagster",
    "flowkit": "flowkit",
    "hatchet": "hatchet_sdk",
    "prefect": "prefect",
    "temporal": "temporalio",
}


def test_the_page_shows_the_files_as_they_are() -> None:
    page = DOCS / "from-other-systems.md"
    shown = {block.marks["file"]: block.text for block in blocks(page) if "file" in block.marks}
    files = [FOLDER / "steps.py", *sorted(FOLDER.glob("on_*.py"))]
    assert shown == {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


def test_every_version_has_tests() -> None:
    assert {file.stem for file in FOLDER.glob("on_*.py")} == {f"on_{name}" for name in PACKAGES}
    assert all((FOLDER / f"test_on_{name}.py").is_file() for name in PACKAGES)


def program_of(name: str) -> Path | None:
    """Return a Python in which this system is installed, or None."""
    own = Path(os.environ.get("OTHER_SYSTEMS", os.devnull), name, "bin/python")
    if own.is_file():
        return own
    return Path(sys.executable) if importlib.util.find_spec(PACKAGES[name]) else None


@pytest.mark.nightly
@pytest.mark.parametrize("name", PACKAGES)
def test_each_version_passes_its_tests(name: str) -> None:
    program = program_of(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    environment = {**os.environ, "PYTHONPATH": ".", "TEMPORAL_CLI": temporal_cli()}
    command = [str(program), *TEST, f"other_systems/test_on_{name}.py"]
    done = subprocess.run(
        command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
