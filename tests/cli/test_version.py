"""`flowkit --version`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.cli.app import run
from flowkit.core import version

if TYPE_CHECKING:
    import pytest


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"flowkit {version.__version__}\n"
