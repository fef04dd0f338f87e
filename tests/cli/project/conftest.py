"""A new project."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.cli.project.new_project import FLOWKIT_ON_PATH, NAME

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Program


@pytest.fixture
def made(program: Program) -> Path:
    """A new project; `program` runs in its folder."""
    assert program.run("init", NAME, env=FLOWKIT_ON_PATH).code == 0
    program.folder = program.folder / NAME
    return program.folder
