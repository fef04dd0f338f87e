"""The log lines with which an engine or a worker reports that it is polling, or that it has loaded its code.

The command line writes these lines to the log, and `flowkit.local` searches the log for them.
"""

from __future__ import annotations

import re

_PREFIX = "running: "
_SUFFIX = "; press Ctrl-C to stop gracefully"
_PATTERN = re.compile(f"^{re.escape(_PREFIX)}(.*){re.escape(_SUFFIX)}$", re.MULTILINE)

LOADED_LINE = "loaded: starting when the process with the old code has exited"
"""The line of a process that `flowkit up --reload` starts beside the one that it replaces."""


def ready_line(summary: str) -> str:
    """Return the line for a process; `summary` says what the process runs."""
    return f"{_PREFIX}{summary}{_SUFFIX}"


def find_summary(log: str) -> str:
    """Return the summary in the first such line of a log, or an empty string if there is none yet."""
    found = _PATTERN.search(log)
    return found[1] if found else ""
