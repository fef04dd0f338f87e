"""Typed values have the same meaning with each release of pydantic that users may have installed."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.own_environments import own_environment
from tests.sources import ROOT

if TYPE_CHECKING:
    from pathlib import Path

TESTS = (
    "tests/unit/test_json_types.py",
    "tests/unit/test_typed_definitions.py",
    "tests/unit/test_typed_handlers.py",
    "tests/unit/test_contracts.py",
    "tests/unit/test_params_checks.py",
    "tests/unit/test_uid_rule.py",
)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("release", ["2.13", "2.14"])
def test_the_tests_of_typed_values_pass_with_a_release_of_pydantic(release: str, tmp_path: Path) -> None:
    python = own_environment(tmp_path / "venv", f"pydantic=={release}.*")
    # With the root folder on the import path, Python would load modules a second time.
    run = [
        str(python),
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not server and not nightly",
    ]
    version = "import pydantic; print(pydantic.VERSION)"
    used = subprocess.run([str(python), "-P", "-c", version], capture_output=True, text=True, check=True)
    assert used.stdout.startswith(f"{release}.")
    done = subprocess.run([*run, *TESTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
