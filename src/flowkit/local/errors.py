"""What can go wrong with local servers.

DevServerError
├── FolderInUse           another running process keeps its data in the same folder
├── FolderNotWritable     data and logs cannot be written where they shall be
├── DiskFull              no space is left
├── InstallFailed         a program could not be found, fetched or built
│   ├── ProgramMissing    another program that is needed for it is not on PATH
│   ├── NoNetwork         nothing answers where it would come from
│   └── WrongHash         what was fetched is not what FlowKit was made with
├── PortInUse             something already listens on the wanted port
├── ServerNotReady        a process ended or stayed silent instead of getting ready
│   └── ProcessMisused    an engine or a worker cannot use what it was given
└── ServerEnded           a process that was ready ended by itself
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flowkit.errors import FlowKitError
from flowkit.local.listeners import listening_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

LOG_LINES_SHOWN = 20


class DevServerError(FlowKitError):
    """A local server cannot be had; the text names the remedy, and may end with the last lines of a log."""

    code = "local_server"

    def __init__(self, message: str, *, log_lines: Sequence[str] = ()) -> None:
        self.headline = message
        """The text without the log."""
        self.log_lines = list(log_lines)
        super().__init__("\n".join([message, *log_lines]))


class FolderInUse(DevServerError):
    """Another running process keeps its data in the same folder."""

    code = "folder_in_use"

    def __init__(self, *, lock: Path, user: str | None = None) -> None:
        super().__init__(
            f"{lock.parent} is used by a running {user or lock.stem}; stop that or choose another folder"
        )


class FolderNotWritable(DevServerError):
    """Data and logs cannot be written where they shall be."""

    code = "folder_not_writable"

    def __init__(self, *, folder: Path, error: OSError) -> None:
        no_folder = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a file is in its place" if no_folder else error.strerror
        super().__init__(f"{folder} cannot be written ({reason}); choose a folder that you may write")


class DiskFull(DevServerError):
    """No space is left where data, logs or programs are kept."""

    code = "disk_full"

    def __init__(self, *, what: str, folder: Path, log_lines: Sequence[str] = ()) -> None:
        super().__init__(f"{what}: the disk of {folder} is full; make room there", log_lines=log_lines)


class InstallFailed(DevServerError):
    """A program that a server needs could not be found, fetched or built."""

    code = "install_failed"


class ProgramMissing(InstallFailed):
    """Another program is needed for a server, and it is not on PATH."""

    code = "program_missing"

    def __init__(self, name: str, *, remedy: str) -> None:
        super().__init__(f"`{name}` is not on PATH; {remedy}")


class NoNetwork(InstallFailed):
    """Nothing answers where a program would come from."""

    code = "no_network"


class WrongHash(InstallFailed):
    """A fetched file is not the one that FlowKit was made with; it was not kept."""

    code = "wrong_hash"

    def __init__(self, *, file: str, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"{file} has the SHA-256 {found} instead of {expected}; {remedy}")


class PortInUse(DevServerError):
    """Something already listens on the wanted port, so a server would answer in another one's name."""

    code = "port_in_use"

    def __init__(self, *, name: str, port: int) -> None:
        super().__init__(
            f"{name}: port {port} is in use by {listening_process(port)}; stop that, or choose another port "
            "(`flowkit up --port-base N` takes N to N+3)"
        )


class ServerNotReady(DevServerError):
    """A process ended or stayed silent instead of getting ready; the text ends with its last log lines."""

    code = "server_not_ready"

    def __init__(self, *, name: str, reason: str, log: Path, lines: Sequence[str]) -> None:
        super().__init__(f"{name} {reason}; the end of {log}:", log_lines=lines)


class ProcessMisused(ServerNotReady):
    """An engine or a worker cannot use what it was given: a handler, a function, a setting; its log tells which."""

    code = "process_misused"


class ServerEnded(DevServerError):
    """A process that was ready ended by itself; the text ends with its last log lines."""

    code = "server_ended"

    def __init__(self, *, name: str, code: int | None, log: Path, lines: Sequence[str]) -> None:
        super().__init__(f"{name} ended by itself with code {code}; the end of {log}:", log_lines=lines)


def log_tail(text: str) -> list[str]:
    """The part of a log that usually explains a failure."""
    return text.splitlines()[-LOG_LINES_SHOWN:]


@contextmanager
def translate_write_errors(folder: Path, *, what: str) -> Iterator[None]:
    """Around writes to a folder: the system's errors become FolderNotWritable or DiskFull."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(what=what, folder=folder) from error
        raise FolderNotWritable(folder=folder, error=error) from error
