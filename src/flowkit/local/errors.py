"""What can go wrong with local servers.

DevServerError
├── FolderInUse       another running server keeps its data in the same folder
├── InstallFailed     a program could not be found, fetched or built
├── PortInUse         something already listens on the wanted port
└── ServerNotReady    a server ended or stayed silent instead of getting ready
"""

from pathlib import Path

LOG_LINES_SHOWN = 20


class DevServerError(Exception):
    """The root of every error of this package; its text is meant for people and names the remedy."""


class FolderInUse(DevServerError):
    """Another running server keeps its data in the same folder."""

    def __init__(self, *, lock: Path) -> None:
        super().__init__(
            f"{lock.parent} is used by a running {lock.stem}; stop that or choose another folder"
        )


class InstallFailed(DevServerError):
    """A program that a server needs could not be found, fetched or built."""


class PortInUse(DevServerError):
    """Something already listens on the wanted port, so a server would answer in another one's name."""

    def __init__(self, *, name: str, port: int) -> None:
        super().__init__(f"{name}: port {port} is in use; stop what listens there or choose another port")


class ServerNotReady(DevServerError):
    """A server ended or stayed silent instead of getting ready; the text ends with its last log lines."""

    def __init__(self, *, name: str, reason: str, log: Path) -> None:
        super().__init__(f"{name} {reason}; the end of {log}:\n{last_lines(log.read_text(errors='replace'))}")


def last_lines(text: str) -> str:
    """The part of a log that usually explains a failure."""
    return "\n".join(text.splitlines()[-LOG_LINES_SHOWN:])
