"""The checks of this machine."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.cli.doctor.conftest import create_script, unreachable_temporal
from tests.local.processes import isolated_environment

from flowkit.cli.doctor.machine import GB, _check_space, check_program

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("version", "required", "state"),
    [
        ("17.0.15", ["java"], "ok"),
        ("21", ["java"], "ok"),
        ("11.0.2", ["java"], "bad"),
        ("11.0.2", [], "note"),
    ],
)
def test_an_old_java_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, required: list[str], state: str
) -> None:
    create_script(tmp_path / "bin" / "java", f"echo 'openjdk version \"{version}\" 2025-01-01' >&2")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    finding = check_program("java", required)
    assert finding.state == state
    assert version in finding.found


@pytest.mark.parametrize(("free", "state"), [(GB, "ok"), (GB // 2, "note"), (GB // 8, "bad")])
def test_low_disk_space_is_reported(free: int, state: str) -> None:
    assert _check_space("disk", free).state == state


@pytest.mark.slow
def test_a_low_limit_of_open_files_is_reported_with_the_command_that_raises_it(tmp_path: Path) -> None:
    script = f'ulimit -n 256; exec "{sys.executable}" -m flowkit doctor'
    env = {
        **isolated_environment(tmp_path),
        **unreachable_temporal(tmp_path),
        "PATH": str(tmp_path),
        "FLOWKIT_SERVERS": "path",
    }
    completed = subprocess.run(
        ["/bin/sh", "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 1
    line = next(line for line in completed.stdout.splitlines() if line.startswith("open files"))
    assert line.rstrip().split(maxsplit=3)[2:] == ["note", "256 per process; ulimit -n 4096"]
    assert completed.stderr == "not ready to run tasks; each line that is not ok shows how to fix it\n"
