"""Checks params against the JSON schema in a graph, without letting a schema occupy the process that checks."""

from __future__ import annotations

import asyncio
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from flowkit.activities.evaluation_process import EvaluationProcess
from flowkit.errors import ChecksBusy
from flowkit.graph.params import PARAMS_SCHEMA, check_sec, needs_process, params_problems
from flowkit.graph.validation import raise_if

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROCESSES = 2
"""How many checks of one ParamsChecks run in processes at the same time. Later ones wait."""

_WAIT_SEC = 10.0
"""How long a check may wait for a process, for its start, and for a processor, besides its own time."""

_STARVED = 4
"""How many times its processor time a check may take on a busy machine."""

ENGINE_SLACK = 1.5
"""How many times the processor time of a client an engine allows, so that it does not reject what a client
has accepted."""


class ParamsChecks:
    """Checks of params. Schemas whose check could take long are checked in up to two processes, which stay
    for the next.

    The processes start when they are needed, and end with this object or with this process.
    """

    def __init__(self, *, slack: float = 1.0) -> None:
        self._slack = slack
        self._threads = ThreadPoolExecutor(_PROCESSES, thread_name_prefix="flowkit-params")
        self._idle: list[EvaluationProcess] = []
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        weakref.finalize(self, _close_all, self._idle)

    async def check(
        self, graph: dict[str, Any], params: dict[str, Any] | None, *, whose: str | None = None
    ) -> None:
        """Raise GraphError if `params`, or the schema in the valid graph, is invalid or takes too long to check.

        With `params` None, check only the schema. Raise ChecksBusy if the check does not get a processor in time.
        Those of one user, `whose`, use one process at a time, so that they leave another to other users.
        """
        if graph.get(PARAMS_SCHEMA) is None:
            return
        if not await asyncio.to_thread(needs_process, graph, params):
            raise_if(await asyncio.to_thread(params_problems, graph, params))
            return
        seconds = check_sec(graph, params) * self._slack
        turn = asyncio.Lock() if whose is None else self._turns.setdefault(whose, asyncio.Lock())
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_WAIT_SEC + _STARVED * seconds), turn:
                problems = await loop.run_in_executor(
                    self._threads, self._check_apart, graph, params, seconds
                )
        except TimeoutError:
            raise ChecksBusy from None
        raise_if(problems)

    def _check_apart(
        self, graph: Mapping[str, Any], params: dict[str, Any] | None, seconds: float
    ) -> list[str]:
        """Return the problems that a process finds.

        Runs on one of the threads, of which there are as many as processes.
        """
        process = self._idle.pop() if self._idle else EvaluationProcess()
        try:
            problems = process.params_problems(
                graph[PARAMS_SCHEMA], params, seconds, _WAIT_SEC + _STARVED * seconds
            )
        finally:
            self._idle.append(process)
        if problems is None:
            raise ChecksBusy
        return [_explain(problems)] if isinstance(problems, str) else problems


def _explain(problem: str) -> str:
    return (
        f"graph.{PARAMS_SCHEMA} cannot be applied to params: {problem}; "
        "simplify its patterns, references and combinators, or pass less data in params"
    )


def _close_all(idle: list[EvaluationProcess]) -> None:
    for process in idle:
        process.close()
