"""Run one server, and stop it when the process that started it exits.

Runs as a script, `python process_guard.py '{"command": [...], "cleanup": [...]}'`, with a pipe from its
owner as standard input. The pipe closes when the owner stops the server. The kernel also closes it when
the owner dies for any reason, so a dying owner need not cooperate. Unlike a parent-death signal, the
pipe does not depend on the owner's threads.

- If the pipe closes, the guard sends SIGTERM, and SIGKILL if the server is still running after the
  grace period.
- If a byte arrives, the guard sends SIGKILL at once.
- When the server exits, the guard kills the processes that it left behind, runs the command
  `cleanup`, and exits with the server's exit code.
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


def guarded(command: Sequence[str], *, cleanup: Sequence[str] = ()) -> list[str]:
    """Return the command that runs `command` under a guard, and `cleanup` after it has exited."""
    job = json.dumps({"command": list(command), "cleanup": list(cleanup)})
    return [sys.executable, "-I", "-S", __file__, job]


def main() -> int:
    """Run the job from the command line and return its exit code."""
    job = json.loads(sys.argv[1])
    preexec = _parent_death_signal() if sys.platform == "linux" else None
    server = subprocess.Popen(
        job["command"],
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=preexec,  # noqa: PLW1509 - unsafe in a process with threads, and this one has none yet
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
    """Kill the server's children, such as a worker's pool processes, which may not notice that it exited."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _clean_up(command: Sequence[str]) -> None:
    with suppress(OSError, subprocess.TimeoutExpired):
        quiet = subprocess.DEVNULL
        subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=GRACE_SECONDS, check=False)


def _parent_death_signal() -> Callable[[], object]:
    """Return a function for the server's process to call first, so that it stops if the guard is killed.

    The kernel sends the signal when the forking *thread* exits: here the main thread, which exits with
    the guard.
    """
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
