"""Evaluates expressions and JSON schemas in a process of its own: `python -m flowkit.activities.evaluation_process`.

An expression that iterates, or a regular expression in a schema, can take very long, and nothing can interrupt it, so
limits on its time and on its memory end the process. For each line of JSON on stdin the process writes one
line with the result. A line is a list that begins with the kind of the evaluation:

* `["condition", seconds, expression, values]`: the result is true or false.
* `["value", seconds, expression, values, most_bytes, batch_size]`: the result is an object with the key `value`, which
  has at most `most_bytes`. With a `batch_size`, the result for a list is an object with the key `batches`: the JSON of
  each batch, so that the engine need not hold the items as objects.
* `["params", seconds, schema, params]`: the result is the list of problems.

`seconds` is the most processor time that the evaluation may take. A text is why the result cannot be known.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from threading import Timer
from typing import TYPE_CHECKING, Any

from flowkit.errors import BadCondition
from flowkit.graph.cel import compile_expression, compile_value, evaluate, evaluate_value
from flowkit.graph.expressions import divide
from flowkit.graph.params import PARAMS_SCHEMA, params_problems
from flowkit.limits import CONDITION_SEC, EXPRESSION_VALUE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOO_LARGE = "the evaluation needs too much memory"

_TRIES = 2
"""How often an evaluation runs whose process is killed. The system kills a process that uses too much memory."""

_MEMORY_BYTES = 600_000_000


class EvaluationProcess:
    """Evaluates expressions and schemas, one at a time, in a process that it starts when it needs one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def evaluate(self, text: str, values: dict[str, Any], seconds: float) -> bool | str | None:
        """Return the result of an expression, or why it cannot be evaluated. None if that takes more than `seconds`."""
        found: bool | str | None = self._request(["condition", CONDITION_SEC, text, values], seconds)
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
        request = ["value", CONDITION_SEC, text, values, most_bytes, batch_size]
        found: dict[str, Any] | str | None = self._request(request, seconds)
        return found

    def params_problems(
        self, schema: dict[str, Any], params: dict[str, Any] | None, limit: float, seconds: float
    ) -> list[str] | str | None:
        """Return the problems of params and their schema, as `flowkit.graph.params` does.

        Return a text, which says why, if the check needs more than `limit` seconds of processor time, or too much
        memory. None if it takes more than `seconds`.
        """
        found: list[str] | str | None = self._request(["params", limit, schema, params], seconds)
        return found

    def _request(self, request: list[Any], seconds: float) -> Any:
        end = time.monotonic() + seconds
        line = json.dumps(request).encode() + b"\n"
        for _ in range(_TRIES):
            answer = self._exchange(line, end - time.monotonic())
            if answer.endswith(b"\n"):
                return json.loads(answer)
            code = self._wait()
            if self._stopped or time.monotonic() >= end:
                return None
            if code == _TIME_IS_UP:
                return f"the evaluation takes more than {request[1]:.2g} s"
            if code == -signal.SIGABRT:
                return TOO_LARGE
            if code >= 0:
                raise RuntimeError(f"the process that evaluates expressions exited with {code}")
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
    command = [sys.executable, "-m", "flowkit.activities.evaluation_process"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def main() -> None:
    """Evaluate what the lines of stdin request.

    Ctrl-C, which a terminal sends to this process, too, is for its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGPROF"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may ignore it, and a process inherits that
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(_evaluate_line(line)) + "\n")
        sys.stdout.flush()


def _evaluate_line(line: bytes) -> Any:
    try:
        kind, seconds, *arguments = json.loads(line)
        return _KINDS[kind](seconds, *arguments)
    except BadCondition as error:
        return str(error)
    except MemoryError:
        return TOO_LARGE


def _evaluate_condition(seconds: float, text: str, values: dict[str, Any]) -> bool:
    expression = compile_expression(text)
    with _limits(seconds):
        return evaluate(expression, values)


def _evaluate_value(
    seconds: float, text: str, values: dict[str, Any], most_bytes: int, batch_size: int
) -> dict[str, Any]:
    expression = compile_value(text)
    with _limits(seconds):
        value = evaluate_value(expression, values, most_bytes)
        if batch_size and isinstance(value, list):
            return asdict(divide(value, batch_size))
        return {"value": value}


def _check_params(seconds: float, schema: dict[str, Any], params: dict[str, Any] | None) -> list[str]:
    params_problems({PARAMS_SCHEMA: {}}, {})  # imports the validator, which takes longer than most checks
    with _limits(seconds):
        return params_problems({PARAMS_SCHEMA: schema}, params)


_KINDS: dict[str, Callable[..., Any]] = {
    "condition": _evaluate_condition,
    "value": _evaluate_value,
    "params": _check_params,
}

_TIME_IS_UP = -getattr(signal, "SIGPROF", 0) or None
"""Exit code of a process whose evaluation has used up its processor time; None on Windows, which has no such limit."""


@contextmanager
def _limits(seconds: float) -> Iterator[None]:
    """Limit the processor time of an evaluation, and the memory of the process. Windows has no such limits."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
