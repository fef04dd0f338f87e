"""The log line with which an engine or a worker reports that it is polling.

The command line writes this line to the log, and `flowkit.local` searches the log for it.
"""

from __future__ import annotations

import re

_PREFIX = "running: "
_SUFFIX = "; press Ctrl-C to stop gracefully"
_PATTERN = re.compile(f"^{re.escape(_PREFIX)}(.*){re.escape(_SUFFIX)}$", re.MULTILINE)


def ready_line(summary: str) -> str:
    """Return the line for a process; `summary` says what the process runs."""
    return f"{_PREFIX}{summary}{_SUFFIX}"


def find_summary(log: str) -> str:
    """Return the summary in the first such line of a log, or an empty string if there is none yet."""
    found = _PATTERN.search(log)
    return found[1] if found else ""
