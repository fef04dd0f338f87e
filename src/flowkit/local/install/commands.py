"""Other programs that installing needs: go, mvn, javac, docker."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowkit.local.errors import (
    DevServerError,
    DiskFull,
    InstallFailed,
    NoNetwork,
    ProgramMissing,
    last_lines,
)
from flowkit.local.install.diagnosis import telling_line, tells_full_disk, tells_no_network
from flowkit.local.supervisor import guarded


def program(name: str, *, remedy: str) -> str:
    """The path of a program on PATH; without it, a ProgramMissing that tells the remedy."""
    found = shutil.which(name)
    if found is None:
        raise ProgramMissing(name, remedy=remedy)
    return found


def run(command: Sequence[str], *, folder: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command in a folder, silently; it ends with this process. If it fails, an InstallFailed tells why."""
    # The open pipe is what keeps the guard, and so the command, going; Ctrl-C reaches them through it.
    with subprocess.Popen(
        guarded(command),
        cwd=folder,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        output = running.stdout.read()
        code = running.wait()
    if code != 0:
        raise _failure(command, code, output, folder)


def _failure(command: Sequence[str], code: int, output: str, folder: Path) -> DevServerError:
    name = Path(command[0]).name
    if tells_full_disk(output):
        return DiskFull(what=f"`{name}`", folder=folder)
    if tells_no_network(output):
        told = telling_line(output)
        return NoNetwork(
            f"`{name}` cannot reach what it needs ({told}); connect to a network, or set its proxy"
        )
    return InstallFailed(f"`{' '.join(command)}` failed with code {code}:", log_lines=last_lines(output))
