"""A process that has imported FlowKit, and forks for each program: that takes milliseconds instead of a second.

A program is a process of its own, which a test can kill, stop and wait for. It differs from one that a shell starts
only in what was imported before it began. The engines, workers and other processes of FlowKit that a program starts are
forks as well, behind a small process that stands for each of them (`forked_program.py`).

The test processes of a run share one. They are forks themselves, of another one that has collected the tests: each
then finds them imported, and collects in less than half the time.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from code import InteractiveInterpreter
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LOADED = (
    *("flowkit.cli", "flowkit.plugin", "flowkit.worker.runner", "flowkit.bridge.service"),
    *("uvloop", "motor.motor_asyncio"),
)
_LOADED_FOR = {"gateway": "flowkit.gateway.process"}
"""What is imported, too, before the first program with this command starts: many tests start none."""
FORK_SERVER = "FORK_SERVER_OF_TESTS"
"""The variable with the path of the socket where other processes ask for programs, as in `forked_program.py`."""
FORKED_BY = "FORKED_BY"
"""The variable with this path for one command alone."""
TEST_PROCESS = "test process"
"""Stands for the module of a program that is a test process of pytest-xdist."""
_FORKED_PROGRAM = Path(__file__).with_name("forked_program.py")
_HEADER_BYTES = 8
_FILES = 4
"""File descriptors of a request: stdin, stdout, stderr, and where the process id and the exit code go."""


class ForkedProcess:
    """A running program, with the part of the interface of `subprocess.Popen` that tests use."""

    def __init__(self, report: socket.socket, stdout: IO[str] | None, stderr: IO[str] | None) -> None:
        self.stdout, self.stderr = stdout, stderr
        self.returncode: int | None = None
        self._report = report
        self._changing = threading.Lock()
        self.pid = int(self._line(None))

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs. A negative code is that of a signal."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raise TimeoutExpired after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        if not self._changing.acquire(timeout=-1 if timeout is None else timeout):
            raise subprocess.TimeoutExpired("flowkit", timeout or 0)
        try:
            if self.returncode is None:
                left = None if until is None else max(until - time.monotonic(), 0)
                self.returncode = int(self._line(left))
                self._report.close()
        finally:
            self._changing.release()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the process to stop, if it still runs."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process, if it still runs."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read the rest of the output, wait for the end, and close the streams."""
        texts = ["", ""]

        def read(number: int, stream: IO[str]) -> None:
            with stream:
                texts[number] = stream.read()

        streams = enumerate((self.stdout, self.stderr))
        readers = [
            threading.Thread(target=read, args=(number, stream))
            for number, stream in streams
            if stream is not None and not stream.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return texts[0], texts[1]

    def _line(self, timeout: float | None) -> str:
        self._report.settimeout(timeout)
        line = b""
        try:
            while not line.endswith(b"\n"):
                part = self._report.recv(1)
                assert part, "the fork server has ended"
                line += part
        except (TimeoutError, BlockingIOError):
            raise subprocess.TimeoutExpired("flowkit", timeout or 0) from None
        return line.decode()


class ForkServer:
    """Starts the process when the first program is needed. It ends with this process.

    With `path`, use the one that another process has started there. With `tests`, it has collected these instead of
    importing FlowKit's programs.
    """

    def __init__(self, path: str | None = None, tests: Sequence[str] = ()) -> None:
        self._path = path
        self._tests = tests
        self._starting = threading.Lock()

    @property
    def variables(self) -> dict[str, str]:
        """What processes need in their environment for `forked_program.py` to find this server."""
        return {FORK_SERVER: self._running()}

    def command(self, *module: str) -> str:
        """Return the command line of a shell for `python -m module`, which accepts further arguments.

        Programs that it starts are forks of the server in its environment.
        """
        variable = shlex.quote(f"{FORKED_BY}={self._running()}")
        return f"env {variable} {shlex.join(_as_fork([sys.executable, '-P', '-m', *module]))}"

    def start(
        self,
        arguments: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        *,
        module: str = "flowkit",
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> ForkedProcess:
        """Start `python -m module` with these arguments.

        `stdout` and `stderr` are inherited if they are None; otherwise they are a file, or `subprocess.PIPE`.
        """
        with ExitStack() as stack:
            streams: list[IO[str] | None] = [None, None]
            files = [stack.enter_context(open(os.devnull, encoding="utf-8")).fileno(), 1, 2]
            for number, target in enumerate((stdout, stderr)):
                if target == subprocess.PIPE:
                    reading, files[number + 1] = os.pipe()
                    stack.callback(os.close, files[number + 1])
                    streams[number] = os.fdopen(reading, encoding="utf-8")
                elif target is not None:
                    files[number + 1] = target
            return ForkedProcess(self._request(arguments, folder, env, files, module), *streams)

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        timeout: float,
        *,
        stdin: str = "",
        module: str = "flowkit",
    ) -> tuple[int, str, str]:
        """Run `python -m module` until it exits. Return its exit code, and what it wrote to stdout and stderr."""
        with ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            files[0].write(stdin.encode())
            files[0].seek(0)
            numbers = [file.fileno() for file in files]
            process = ForkedProcess(self._request(arguments, folder, env, numbers, module), None, None)
            code = process.wait(timeout)
            return code, _text_of(files[1]), _text_of(files[2])

    def _request(
        self,
        arguments: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        files: Sequence[int],
        module: str,
    ) -> socket.socket:
        path = self._running()
        given = {FORK_SERVER: path, **env}
        request = {"arguments": list(arguments), "folder": str(folder), "env": given, "module": module}
        text = json.dumps(request).encode()
        ours, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX) as server:
            server.connect(path)
            socket.send_fds(server, [len(text).to_bytes(_HEADER_BYTES)], [*files, theirs.fileno()])
            server.sendall(text)
        return ours

    def _running(self) -> str:
        """Return the path of its socket, which accepts requests while it still imports."""
        with self._starting:
            if self._path is None:
                folder = tempfile.TemporaryDirectory(prefix="flowkit-fork-")
                self._path = str(Path(folder.name, "socket"))
                ours, theirs = socket.socketpair()
                with theirs, socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(self._path)
                    listener.listen()
                    files = [theirs.fileno(), listener.fileno()]
                    command = [sys.executable, "-P", __file__, *map(str, files), *self._tests]
                    # In a session of its own, Ctrl-C reaches only the tests, which then end their programs.
                    from tests import clocks  # not in the server, whose script has no package

                    env = os.environ if self._tests else {**os.environ, **clocks.preloaded()}
                    started = subprocess.Popen(command, env=env, pass_fds=files, start_new_session=True)
                atexit.register(_end, ours, started, folder)
            return self._path


def _end(
    owner: socket.socket, server: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]
) -> None:
    owner.close()
    server.wait()
    folder.cleanup()


@cache
def fork_server() -> ForkServer:
    """Return the fork server of this run."""
    return ForkServer(os.environ.get(FORK_SERVER))


def _text_of(file: Any) -> str:
    file.seek(0)
    text: str = file.read().decode()
    return text.replace("\r\n", "\n")


def forked(*arguments: str) -> list[str]:
    """Return the command that runs `flowkit` as a fork, for processes with `ForkServer.variables`."""
    return _as_fork([sys.executable, "-P", "-m", "flowkit", *arguments])


def _as_fork(command: list[str]) -> list[str]:
    return [sys.executable, "-I", "-S", str(_FORKED_PROGRAM), *command]


def _serve(owner: socket.socket, listener: socket.socket, tests: list[str]) -> None:
    """Import what the programs need, and run each of them in a process of its own, until the owner has ended."""
    import gc

    if tests:
        _import_tests(tests)
    else:
        _import_programs()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([owner, listener], [], [])
        if owner in ready:
            return
        asking, _ = listener.accept()
        with asking, suppress(EOFError):
            header, files, _, _ = socket.recv_fds(asking, _HEADER_BYTES, _FILES)
            if header:
                _start(asking, header, files, (owner, listener, asking))


def _import_programs() -> None:
    import importlib

    for name in _LOADED:
        importlib.import_module(name)
    _collect_mongo_commands()
    _fork_processes_of_programs()


def _import_tests(tests: list[str]) -> None:
    """Import the tests as pytest does, or begin anew with pytest alone if one cannot be imported.

    The test processes then report it: a module whose import has failed would look to them as one without tests.
    """
    from contextlib import redirect_stdout

    import pytest

    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        code = pytest.main(["--collect-only", "-qq", "-p", "no:xdist", "-p", "no:cacheprovider", *tests])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        os.execv(sys.executable, [sys.executable, "-P", *sys.argv[:3], "--version"])


def _start(asking: socket.socket, header: bytes, files: list[int], ours: Sequence[socket.socket]) -> None:
    """Read a request that begins with `header`, and start its program, which gets none of our sockets."""
    import importlib

    header += _received(asking, _HEADER_BYTES - len(header))
    request = json.loads(_received(asking, int.from_bytes(header)))
    for name in _LOADED_FOR.keys() & set(request["arguments"][:1]):
        importlib.import_module(_LOADED_FOR[name])
    if os.fork() == 0:
        for each in ours:
            each.close()
        _watch(request, files)
    for file in files:
        os.close(file)


def _fork_processes_of_programs() -> None:
    """Let the programs start their own processes of FlowKit as forks."""
    from unittest.mock import patch

    from flowkit.local.process import FlowkitProcess

    real = FlowkitProcess.command

    def command(process: FlowkitProcess) -> list[str]:
        return _as_fork(real(process))

    patch.object(FlowkitProcess, "command", command).start()


def _collect_mongo_commands() -> None:
    """Let all programs note what they send to MongoDB, as the tests do."""
    from importlib.util import module_from_spec, spec_from_file_location

    path = Path(__file__).with_name("mongo_commands.py")
    spec = spec_from_file_location("flowkit_tests_mongo_commands", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if folder := os.environ.get(module.FOLDER):
        module.collect_into(Path(folder))


def _received(requests: socket.socket, count: int) -> bytes:
    text = b""
    while len(text) < count:
        part = requests.recv(count - len(text))
        if not part:
            raise EOFError
        text += part
    return text


def _watch(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Run one program; report its process id, and its exit code as soon as it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, number = files
    tied = request.get("tied", False)
    program = os.fork()
    if program == 0:
        os.close(number)
        _run(request, streams)
    if tied:
        os.setpgid(program, program)
    for file in (*streams, *range(3)):
        os.close(file)
    with socket.socket(fileno=number) as report, suppress(BrokenPipeError):
        if tied:
            threading.Thread(target=_kill_without_owner, args=[report, program], daemon=True).start()
        report.sendall(f"{program}\n".encode())
        _, status = os.waitpid(program, 0)
        if tied:
            _kill_group(program)
        report.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _kill_without_owner(report: socket.socket, program: int) -> None:
    """Kill the program, and the children in its group, when the process that stands for it has been killed."""
    if not report.recv(1):
        _kill_group(program)


def _kill_group(program: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(program, signal.SIGKILL)


def _run(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Run one program as a new process would."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["env"].get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell lets its background jobs ignore it.
    sys.path[:] = list(filter(None, [*request["env"].get("PYTHONPATH", "").split(os.pathsep), *sys.path]))
    module = request["module"]
    sys.argv = [module, *request["arguments"]]
    code = 1
    try:
        if module == "flowkit":
            from flowkit.cli import main

            main()
        elif module == TEST_PROCESS:
            # The code after `-c`, which reads what to do as the first line of stdin.
            InteractiveInterpreter({"__name__": "__main__"}).runsource(request["arguments"][-1])
        else:
            import runpy

            sys.path.insert(0, request["folder"])
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
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
    _serve(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
