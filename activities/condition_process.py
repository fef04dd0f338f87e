"""Evaluates conditions in a process of its own: `python -m flowkit.activities.condition_process`.

It reads one line of JSON from stdin, a list of `[expression, values]`, and writes one line with each result. A limit on
its time and on its memory ends the process, because an expression that iterates can take very long, and nothing can
interrupt it.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress

from flowkit.errors import BadCondition
from flowkit.graph.cel import compiled, evaluate
from flowkit.limits import CONDITION_SEC

TOO_LARGE = "the evaluation needs too much memory"

_MEMORY_BYTES = 600_000_000


def main() -> None:
    """Evaluate the expressions of stdin."""
    for text, values in json.loads(sys.stdin.readline()):
        expression = compiled(text)
        _limit()
        try:
            result: bool | str = evaluate(expression, values)
        except BadCondition as error:
            result = str(error)
        except MemoryError:
            result = TOO_LARGE
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def _limit() -> None:
    """Limit the processor time of the next evaluation, and the memory of the process. Windows has no such limits."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime + CONDITION_SEC + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main()
