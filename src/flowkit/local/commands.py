"""Other programs that installing needs: go, mvn, javac."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowkit.local.errors import InstallFailed, last_lines


def program(name: str, *, remedy: str) -> str:
    """The path of a program on PATH; without it, an InstallFailed that tells the remedy."""
    found = shutil.which(name)
    if found is None:
        raise InstallFailed(f"`{name}` is not on PATH; {remedy}")
    return found


def run(command: Sequence[str], *, folder: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command in a folder, silently; if it fails, an InstallFailed with the end of its output."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise InstallFailed(
            f"`{' '.join(command)}` failed with code {done.returncode}:\n{last_lines(done.stdout)}"
        )
