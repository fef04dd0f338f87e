"""Runs mypy in tests, one run after the other.

The first run of a checkout stores the types of FlowKit and its libraries in mypy's cache, which takes a minute of the
processor or more. The runs after it take seconds, so that parallel tests wait for the first one and do not repeat it.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

from tests.sources import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

fills_a_cache = pytest.mark.timeout(1_800)
"""The mark of tests that run mypy."""


def run_mypy(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run mypy with the settings of this project, whose cache holds the types of FlowKit."""
    (ROOT / "build").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "mypy", *arguments]
    with FileLock(ROOT / "build" / "mypy.lock"):
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
