"""Run the command `python -P -m module …` as a fork of the tests' fork server, or as it is where there is none.

Runs as a script before the command, in Python without site packages, which starts in milliseconds. The exit code is
that of the program, and signals pass to it. If this process is killed, the program is killed, too.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

FORK_SERVER = "FORK_SERVER_OF_TESTS"
"""The variable with the path of the socket where the fork server takes requests of other processes."""
FORKED_BY = "FORKED_BY"
"""The same for the server of this program alone, if its own programs have another one."""
HEADER_BYTES = 8

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> NoReturn:
    """Run the program and exit as it does."""
    path, command = os.environ.pop(FORKED_BY, None) or os.environ.get(FORK_SERVER), sys.argv[1:]
    if not path:
        os.execv(command[0], command)
    early: list[int] = []
    for number in _PASSED_ON:
        signal.signal(number, lambda signalled, _: early.append(signalled))
    with _request(path, command[3], command[4:]) as report, report.makefile(encoding="utf-8") as lines:
        program = int(lines.readline())

        def pass_on(number: int, _: FrameType | None) -> None:
            # A terminal sends Ctrl-C to the children of the program, too.
            send = os.killpg if number == signal.SIGINT else os.kill
            with suppress(ProcessLookupError):
                send(program, number)

        for number in _PASSED_ON:
            signal.signal(number, pass_on)
        for received in early:
            pass_on(received, None)
        code = int(lines.readline() or -signal.SIGKILL)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _request(path: str, module: str, arguments: list[str]) -> socket.socket:
    """Ask for the program; return the socket that reports its process id and then its exit code."""
    request = {
        "arguments": arguments,
        "folder": os.getcwd(),
        "env": dict(os.environ),
        "module": module,
        "tied": True,
    }
    text = json.dumps(request).encode()
    ours, theirs = socket.socketpair()
    with theirs, socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [len(text).to_bytes(HEADER_BYTES, "big")], [0, 1, 2, theirs.fileno()])
        server.sendall(text)
    return ours


if __name__ == "__main__":
    main()
