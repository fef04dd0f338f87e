"""Running the programs that installations need: go, mvn, javac, docker."""

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
    log_tail,
)
from flowkit.local.install.diagnosis import mentions_full_disk, mentions_no_network, relevant_line
from flowkit.local.supervisor import supervised


def require_program(name: str, *, remedy: str) -> str:
    """Return the path of a program on PATH. Raises ProgramMissing with the remedy if it is missing."""
    found = shutil.which(name)
    if found is None:
        raise ProgramMissing(name, remedy=remedy)
    return found


def run_command(command: Sequence[str], *, folder: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command in a folder without output; it stops if this process exits.

    Raises InstallFailed if the command fails, or DiskFull if the disk is full.
    """
    # The supervisor stops the command when this pipe closes, for example on Ctrl-C.
    with subprocess.Popen(
        supervised(command),
        cwd=folder,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        code = process.wait()
    if code != 0:
        raise _failure(command, code, output, folder)


def _failure(command: Sequence[str], code: int, output: str, folder: Path) -> DevServerError:
    name = Path(command[0]).name
    if mentions_full_disk(output):
        return DiskFull(what=f"`{name}` failed", folder=folder)
    if mentions_no_network(output):
        line = relevant_line(output)
        return NoNetwork(
            f"`{name}` cannot reach the network ({line}); check the connection, or configure its proxy"
        )
    return InstallFailed(f"`{' '.join(command)}` failed with code {code}:", log_lines=log_tail(output))
