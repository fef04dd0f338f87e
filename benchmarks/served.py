"""Programs that take samples on request: a line of JSON on stdin for each, and its seconds on stdout.

A hand-written program that needs no server of its own runs in such a process, so that its processor time can be
told from that of the benchmark.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Awaitable, Callable, Mapping


async def serve(run: Callable[[dict[str, Any]], Awaitable[float]]) -> None:
    """Take one sample for each line of stdin, until it ends. `run` returns the seconds of a sample."""
    _say("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        _say(f"seconds {await run(json.loads(line))}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Served:
    """The process of such a program."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer("ready")

    async def ask(self, request: Mapping[str, Any], most_sec: float | None = None) -> float:
        """Take a sample, and return its seconds. The process ends, with a TimeoutError, if it takes too long."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = asyncio.ensure_future(asyncio.to_thread(self._answer, "seconds"))
        done, _ = await asyncio.wait({answer}, timeout=most_sec)
        if not done:
            self._process.kill()
            await asyncio.wait({answer})
            answer.exception()
            raise TimeoutError
        return float(answer.result())

    def _answer(self, word: str) -> str:
        """Return the text after `word` in the next line that starts with it. Libraries may print other lines."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise RuntimeError(f"{self._process.args!r} ended; its error is above")
