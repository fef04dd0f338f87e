"""Starts `flowkit up` in an empty folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.cli.up.up_process import (
    UpProcess,
    environment_without_servers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., UpProcess]]:
    """Starts `flowkit up` in an empty folder; kills it after the test."""
    started: list[UpProcess] = []

    def start(*arguments: str, env: Mapping[str, str] | None = None) -> UpProcess:
        started.append(UpProcess(tmp_path, *arguments, env=env or environment_without_servers(tmp_path)))
        return started[-1]

    yield start
    for each in started:
        each.close()
