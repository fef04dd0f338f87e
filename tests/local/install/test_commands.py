"""Commands that install programs."""

import sys
from pathlib import Path

import pytest

from flowkit.local.errors import InstallFailed
from flowkit.local.install import run_command


def test_a_failed_command_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(InstallFailed) as caught:
        run_command(
            [sys.executable, "-c", "print('what', 'went wrong'); raise SystemExit(4)"], folder=tmp_path
        )
    assert caught.value.headline.endswith("failed with code 4:")
    assert caught.value.log_lines == ["what went wrong"]
