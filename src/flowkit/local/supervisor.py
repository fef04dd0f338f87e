"""Run one server and never outlive the process that asked for it.

Runs as a script: `python supervisor.py '{"command": [...], "cleanup": [...]}'`, with a pipe from its owner as standard
input. The pipe closes when the owner stops the server and also when the owner dies, whatever killed it, because the
kernel closes it; so this needs no cooperation from a dying owner, and unlike a parent-death signal it does not depend
on the owner's threads.

- The pipe closes: the server gets SIGTERM, and SIGKILL if it still runs after the grace.
- A byte arrives: the server gets SIGKILL at once.
- The server ends: what it has left running gets SIGKILL, the command `after` runs, and the guard ends with the
  server's exit code.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

GRACE_SECONDS = 15.0
PR_SET_PDEATHSIG = 1


def supervised(command: Sequence[str], *, cleanup: Sequence[str] = ()) -> list[str]:
    """The command that runs `command` under a guard, and `after` once it has ended, however that was."""
    job = json.dumps({"command": list(command), "cleanup": list(cleanup)})
    return [sys.executable, "-I", "-S", __file__, job]


def main() -> int:
    """Run the command given on the command line to its end."""
    job = json.loads(sys.argv[1])
    preexec = _parent_death_signal() if sys.platform == "linux" else None
    server = subprocess.Popen(
        job["command"],
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=preexec,  # noqa: PLW1509 - unsafe in a process with threads, which this one is not yet
    )
    threading.Thread(target=_watch_owner, args=[server], daemon=True).start()
    code = server.wait()
    _kill_process_group(server.pid)
    if job["cleanup"]:
        _clean_up(job["cleanup"])
    return code if code >= 0 else 128 - code


def _watch_owner(server: subprocess.Popen[bytes]) -> None:
    if os.read(sys.stdin.fileno(), 1):
        server.kill()
        return
    server.terminate()
    threading.Event().wait(GRACE_SECONDS)
    server.kill()


def _kill_process_group(group: int) -> None:
    """End the server's own children, such as the processes of a worker's pool, which may not notice its end."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _clean_up(command: Sequence[str]) -> None:
    with suppress(OSError, subprocess.TimeoutExpired):
        quiet = subprocess.DEVNULL
        subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=GRACE_SECONDS, check=False)


def _parent_death_signal() -> Callable[[], object]:
    """What the server's process calls first, so that it also ends when the guard alone is killed.

    The signal comes when the forking *thread* ends: here that is the guard's main thread, so its end is the guard's.
    """
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
