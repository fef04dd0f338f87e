"""Errors of local servers.

DevServerError
├── FolderInUse           another running process keeps its data in the folder
├── FolderNotWritable     the folder for data and logs is not writable
├── DiskFull              no space is left on the disk
├── InstallFailed         a program could not be found, downloaded or built
│   ├── ProgramMissing    a program that the installation needs is not on PATH
│   ├── NoNetwork         the server that provides the program is unreachable
│   └── WrongHash         a downloaded file differs from the expected one
├── PortInUse             another process listens on the port
├── ServerNotReady        a process exited, or did not become ready in time
│   └── ProcessMisused    an engine or a worker cannot use its handlers, functions or settings
└── ServerEnded           a process that was ready exited unexpectedly
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flowkit import reason_codes
from flowkit.errors import FlowKitError
from flowkit.local.ports import listening_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

LOG_LINES_SHOWN = 20


class DevServerError(FlowKitError):
    """A local server is not available. The message says how to fix it, and may end with lines of a log."""

    code = reason_codes.LOCAL_SERVER
    keeps_data: bool = False
    """Whether a temporary folder of `flowkit up` keeps its data after this error: tasks may have run."""

    def __init__(self, message: str, *, log_lines: Sequence[str] = ()) -> None:
        self.headline = message
        """The message without the log lines."""
        self.log_lines = list(log_lines)
        super().__init__("\n".join([message, *log_lines]))


class FolderInUse(DevServerError):
    """Another running process keeps its data in the folder."""

    code = reason_codes.FOLDER_IN_USE

    def __init__(self, *, lock: Path, user: str | None = None) -> None:
        super().__init__(
            f"{lock.parent} is in use by a running {user or lock.stem}; stop it or choose another folder"
        )


class FolderNotWritable(DevServerError):
    """The folder for data and logs is not writable."""

    code = reason_codes.FOLDER_NOT_WRITABLE

    def __init__(self, *, folder: Path, error: OSError) -> None:
        no_folder = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a file is in the way" if no_folder else error.strerror
        super().__init__(f"cannot write to {folder} ({reason}); choose a writable folder")


class DiskFull(DevServerError):
    """No space is left on the disk that holds data, logs or programs."""

    code = reason_codes.DISK_FULL

    def __init__(self, *, what: str, folder: Path, log_lines: Sequence[str] = ()) -> None:
        super().__init__(
            f"{what}: no space left on the disk that holds {folder}; free some space", log_lines=log_lines
        )


class InstallFailed(DevServerError):
    """A program that a server needs could not be found, downloaded or built."""

    code = reason_codes.INSTALL_FAILED


class ProgramMissing(InstallFailed):
    """A program that an installation needs is not on PATH."""

    code = reason_codes.PROGRAM_MISSING

    def __init__(self, name: str, *, remedy: str) -> None:
        super().__init__(f"`{name}` is not on PATH; {remedy}")


class NoNetwork(InstallFailed):
    """The server that provides a program is unreachable."""

    code = reason_codes.NO_NETWORK


class WrongHash(InstallFailed):
    """A downloaded file differs from the expected one, and was deleted."""

    code = reason_codes.WRONG_HASH

    def __init__(self, *, file: str, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"{file} has SHA-256 {found}, expected {expected}; {remedy}")


class PortInUse(DevServerError):
    """Another process listens on the port that a server needs."""

    code = reason_codes.PORT_IN_USE

    def __init__(self, *, name: str, port: int) -> None:
        super().__init__(
            f"{name} cannot start: port {port} is in use by {listening_process(port)}; stop it, or choose "
            "other ports (`flowkit up --port-base N` uses N to N+8)"
        )


class ServerNotReady(DevServerError):
    """A process exited, or did not become ready in time. The message ends with its last log lines."""

    code = reason_codes.SERVER_NOT_READY

    def __init__(self, *, name: str, reason: str, log: Path, lines: Sequence[str]) -> None:
        super().__init__(f"{name} {reason}; last lines of {log}:", log_lines=lines)


class ProcessMisused(ServerNotReady):
    """An engine or a worker cannot use a handler, a function or a setting. Its log says which one."""

    code = reason_codes.PROCESS_MISUSED


class ServerEnded(DevServerError):
    """A process that was ready exited unexpectedly. The message ends with its last log lines."""

    code = reason_codes.SERVER_ENDED
    keeps_data = True

    def __init__(self, *, name: str, code: int | None, log: Path, lines: Sequence[str]) -> None:
        super().__init__(
            f"{name} exited unexpectedly with code {code}; last lines of {log}:", log_lines=lines
        )


def log_tail(text: str) -> list[str]:
    """Return the last lines of a log, which usually explain a failure."""
    return text.splitlines()[-LOG_LINES_SHOWN:]


@contextmanager
def translate_write_errors(folder: Path, *, what: str) -> Iterator[None]:
    """Turn an OSError in the block into FolderNotWritable or DiskFull. `what` says what cannot be done."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(what=what, folder=folder) from error
        raise FolderNotWritable(folder=folder, error=error) from error
