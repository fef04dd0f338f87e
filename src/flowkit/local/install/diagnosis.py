"""Finding the cause of a failure in the output of another program."""

from __future__ import annotations

import re

_MAX_CHARS = 200
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_DISK_FULL = re.compile(r"no space left on device|disk is full|disk full|not enough space", re.IGNORECASE)
_NO_NETWORK = re.compile(
    r"no such host|unknown host|unknownhost|name or service not known|name resolution|network is unreachable"
    r"|no route to host|connection refused|connect(?:ion)? timed out|connection reset|i/o timeout|proxyconnect"
    r"|transfer failed for|could not transfer",
    re.IGNORECASE,
)


def mentions_full_disk(output: str) -> bool:
    """Whether the output reports a full disk."""
    return _DISK_FULL.search(output) is not None


def mentions_no_network(output: str) -> bool:
    """Whether the output reports an unreachable host or a lost connection."""
    return _NO_NETWORK.search(output) is not None


def relevant_line(output: str) -> str:
    """Return the line that names the cause, or else the last line; only the end of a long line."""
    plain = _COLORS.sub("", output)
    lines = [
        " ".join(line.split()).removesuffix(" -> [Help 1]") for line in plain.splitlines() if line.strip()
    ]
    relevant = [line for line in lines if mentions_no_network(line) or mentions_full_disk(line)]
    line = relevant[0] if relevant else lines[-1] if lines else "no output"
    return line if len(line) <= _MAX_CHARS else f"…{line[-_MAX_CHARS:]}"
