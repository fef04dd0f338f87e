"""Helpers for tests of `flowkit init`: names, and commands in the new project."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.integration.harness import EVENT_TIMEOUT_SEC, FLOWKIT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


NAME, PACKAGE = "word-count", "word_count"

FLOW = f"{PACKAGE}.pipeline:flow"

FLOWKIT_ON_PATH = {"PATH": f"{FLOWKIT.parent}{os.pathsep}{os.environ['PATH']}"}


def run_command(
    folder: Path, *command: str, env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a command in the project."""
    environment = {**env, **FLOWKIT_ON_PATH}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=EVENT_TIMEOUT_SEC,
        check=False,
    )


def run_module(
    folder: Path, *arguments: str, env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a Python module in the project."""
    return run_command(folder, sys.executable, "-m", *arguments, env=env)


def files(folder: Path) -> set[str]:
    """Return the paths of all files below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
