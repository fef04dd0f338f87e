"""A process that has imported the program, and forks for each command: that takes milliseconds instead of a second."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOADED = ("flowkit.cli", "flowkit.plugin", "flowkit.worker.runner", "flowkit.bridge.service", "uvloop")
_REQUEST_BYTES = 1_000_000


class ForkServer:
    """Starts the process when the first command comes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flowkit-cli-")
        self._address = str(Path(self._folder.name) / "socket")
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self, arguments: tuple[str, ...], folder: Path, env: Mapping[str, str], stdin: str, timeout: float
    ) -> tuple[int, str, str]:
        """Run the program until it exits. Return its exit code, and what it wrote to stdout and stderr."""
        request = json.dumps({"arguments": arguments, "folder": str(folder), "env": dict(env)})
        with ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            files[0].write(stdin.encode())
            files[0].seek(0)
            connection = stack.enter_context(self._connected())
            connection.settimeout(timeout)
            socket.send_fds(connection, [request.encode()], [file.fileno() for file in files])
            code = int(connection.recv(100))
            return code, _text_of(files[1]), _text_of(files[2])

    def _connected(self) -> socket.socket:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, self._address], stdout=subprocess.PIPE
            )
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == b"ready\n"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        return connection

    def close(self) -> None:
        """Stop the process."""
        if self._process:
            with self._process:
                self._process.kill()
        self._folder.cleanup()


def _text_of(file: Any) -> str:
    file.seek(0)
    text: str = file.read().decode()
    return text.replace("\r\n", "\n")


def _serve(address: str) -> None:
    """Import the program, and run each command in a process of its own."""
    import gc
    import importlib
    import signal

    for name in _LOADED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    listener.close()
                    _report_exit(connection)


def _report_exit(connection: socket.socket) -> None:
    """Run one command, send its exit code, and exit."""
    text, files, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
    program = os.fork()
    if program == 0:
        connection.close()
        _run(json.loads(text), files)
    _, status = os.waitpid(program, 0)
    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(request: dict[str, Any], files: list[int]) -> None:
    """Run one command as a new process would."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:] = [*request["env"].get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    sys.path[:] = list(filter(None, sys.path))
    sys.argv = ["flowkit", *request["arguments"]]
    from flowkit.cli import main

    code = 1
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
