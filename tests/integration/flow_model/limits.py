"""Whether the concurrency limit of jobs holds, while it changes, goes and comes back. Written from
docs/concurrency.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.integration.flow_model.records import wire_id
from tests.integration.flow_model.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.integration.flow_model.records import Execution, History, RunKey

SETTLED_SEC: Final = 6.0
"""How long after the start of an engine its limit applies for certain, on a busy machine."""


@dataclass(slots=True, kw_only=True)
class Era:
    """The life of the only engine of a deployment, and its limit of attempts of jobs; None for no limit."""

    limit: int | None
    begun: float
    ended: float = math.inf


def limit_problems(histories: Iterable[History], eras: Sequence[Era]) -> Iterator[str]:
    """Yield executions that began although as many jobs as the limit allows were in flight.

    Runs that an engine without a limit has opened never need a slot, and jobs of cancelled runs may outlive theirs.
    """
    limited = [each for history in histories for each in _limited(Timeline(history), eras)]
    for execution in limited:
        era = _era_at(eras, execution.begun)
        if era is None or era.limit is None or execution.begun < era.begun + SETTLED_SEC:
            continue
        beside = [
            each.id for each in limited if each is not execution and _is_in_flight(each, execution.begun)
        ]
        if len(beside) >= era.limit:
            yield f"{execution.id} began at {execution.begun:.2f} beside {beside}, although the limit is {era.limit}"


def _is_in_flight(execution: Execution, at: float) -> bool:
    return execution.begun <= at < (math.inf if execution.ended is None else execution.ended)


def _era_at(eras: Sequence[Era], at: float) -> Era | None:
    return next((era for era in eras if era.begun <= at < era.ended), None)


def _limited(timeline: Timeline, eras: Sequence[Era]) -> Iterator[Execution]:
    """Yield the executions of runs that certainly need slots and were not cancelled."""
    for execution in timeline.history.executions:
        run = wire_id(execution.id).run
        keys = [key for key in timeline.seen if key[0] == run]
        if keys and all(_needs_slots(timeline, key, eras) for key in keys):
            yield execution


def _needs_slots(timeline: Timeline, key: RunKey, eras: Sequence[Era]) -> bool:
    """Return whether an engine with a limit has opened a run: it had one from the start of the run to its first job."""
    begun = [each.begun for each in timeline.history.executions if wire_id(each.id).run == key[0]]
    eras_of = [_era_at(eras, at) for at in (timeline.may_begin(key), min(begun, default=0.0))]
    first = eras_of[0]
    is_limited = first is not None and first.limit is not None and (eras_of[1] is first or key[1] > 1)
    return is_limited and not timeline.cancels(key)
