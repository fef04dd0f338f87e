"""Evaluates conditions in a process of its own: `python -m flowkit.activities.condition_process`.

An expression that iterates can take very long, and nothing can interrupt it, so limits on its time and on its memory end
the process. For each line of JSON on stdin, `[expression, values, most_bytes, batch_size]`, the process writes
one line with the result. `most_bytes` is the largest size of a value, whose result is an object with the key `value`; null
for a condition. With a `batch_size`, the result for a list is an object with the key `batches`: the JSON of each batch, so
that the engine need not hold the items as objects.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from threading import Timer
from typing import Any

from flowkit.errors import BadCondition
from flowkit.graph.cel import compile_expression, compile_value, evaluate, evaluate_value
from flowkit.graph.expressions import divide
from flowkit.limits import CONDITION_SEC, EXPRESSION_VALUE_BYTES

TOO_LARGE = "the evaluation needs too much memory"
TOO_LONG = f"the evaluation takes more than {CONDITION_SEC:g} s"

_ENDS = {-signal.SIGABRT: TOO_LARGE, **({-signal.SIGXCPU: TOO_LONG} if hasattr(signal, "SIGXCPU") else {})}
"""Why a process ended that a condition has ended, by exit code."""

_TRIES = 2
"""How often a condition is evaluated whose process is killed. The system kills a process that uses too much memory."""

_MEMORY_BYTES = 600_000_000


class ConditionProcess:
    """Evaluates expressions, one at a time, in a process that it starts when it needs one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def evaluate(self, text: str, values: dict[str, Any], seconds: float) -> bool | str | None:
        """Return the result of an expression, or why it cannot be evaluated. None if that takes more than `seconds`."""
        found: bool | str | None = self._request(text, values, seconds, None)
        return found

    def evaluate_value(
        self,
        text: str,
        values: dict[str, Any],
        seconds: float,
        *,
        most_bytes: int = EXPRESSION_VALUE_BYTES,
        batch_size: int = 0,
    ) -> dict[str, Any] | str | None:
        """Return the value of an expression, with at most `most_bytes`, as `{"value": …}`. Otherwise, as `evaluate`.

        With a `batch_size`, return a list as `{"items": number, "batches": […]}`, as `divide` does.
        """
        found: dict[str, Any] | str | None = self._request(text, values, seconds, most_bytes, batch_size)
        return found

    def _request(
        self,
        text: str,
        values: dict[str, Any],
        seconds: float,
        most_bytes: int | None,
        batch_size: int = 0,
    ) -> Any:
        end = time.monotonic() + seconds
        line = json.dumps([text, values, most_bytes, batch_size]).encode() + b"\n"
        for _ in range(_TRIES):
            answer = self._exchange(line, end - time.monotonic())
            if answer.endswith(b"\n"):
                return json.loads(answer)
            code = self._wait()
            if self._stopped or time.monotonic() >= end:
                return None
            if code in _ENDS:
                return _ENDS[code]
            if code >= 0:
                raise RuntimeError(f"the process that evaluates conditions exited with {code}")
        return TOO_LARGE

    def _exchange(self, line: bytes, seconds: float) -> bytes:
        """Return the line that the process writes. Kill the process after `seconds`; the line is then not complete."""
        process = self._process = self._process or _start()
        assert process.stdin is not None
        assert process.stdout is not None
        if self._stopped:
            process.kill()
        timer = Timer(max(0.0, seconds), process.kill)
        timer.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return process.stdout.readline()
        except OSError:
            return b""
        finally:
            timer.cancel()

    def _wait(self) -> int:
        """Return the exit code of the process, which has closed its output."""
        process, self._process = self._process, None
        assert process is not None
        with suppress(BrokenPipeError), process:
            pass
        return process.wait()

    def stop(self) -> None:
        """End the process. An evaluation in progress on another thread returns None, and so do later ones."""
        self._stopped = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process and wait until it has ended."""
        self.stop()
        if self._process is not None:
            self._wait()


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "flowkit.activities.condition_process"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def main() -> None:
    """Evaluate the expressions of stdin."""
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(_evaluate_line(line)) + "\n")
        sys.stdout.flush()


def _evaluate_line(line: bytes) -> bool | str | dict[str, Any]:
    try:
        text, values, most_bytes, batch_size = json.loads(line)
        expression = compile_expression(text) if most_bytes is None else compile_value(text)
        _limit()
        if most_bytes is None:
            return evaluate(expression, values)
        value = evaluate_value(expression, values, most_bytes)
        if batch_size and isinstance(value, list):
            return asdict(divide(value, batch_size))
        return {"value": value}
    except BadCondition as error:
        return str(error)
    except MemoryError:
        return TOO_LARGE


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
