"""All that a history of a flow must fulfil."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integration.flow_model.effects import call_problems
from tests.integration.flow_model.jobs import (
    attempt_problems,
    delivery_problems,
    dispatch_problems,
    result_problems,
)
from tests.integration.flow_model.records import run_key, wire_id
from tests.integration.flow_model.statuses import end_problems, event_problems, view_problems
from tests.integration.flow_model.timeline import BEGINS, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.integration.flow_model.records import History


def problems_of(history: History) -> list[str]:
    """Return all that contradicts the documents in the history of a flow."""
    found: Iterable[str] = [*_strange_ids(history)] or _contradictions(history)
    return [f"flow {history.place.flow} of context {history.place.context}: {each}" for each in found]


def _strange_ids(history: History) -> Iterator[str]:
    """Yield ids that are none of this flow."""
    answers = [call.result for call in history.calls if call.method in BEGINS and call.accepted]
    fields = [*answers, *(view.state for view in history.views), *(event.fields for event in history.events)]
    for run in {each["run_id"] for each in fields} - {None}:
        try:
            run_key(history.place, run)
        except ValueError as error:
            yield str(error)
    for each in history.deliveries:
        try:
            wire_id(each.id)
        except ValueError as error:
            yield str(error)


def _contradictions(history: History) -> Iterator[str]:
    timeline = Timeline(history)
    checks = (
        call_problems,
        event_problems,
        delivery_problems,
        attempt_problems,
        result_problems,
        dispatch_problems,
    )
    yield from view_problems(timeline)
    yield from end_problems(timeline)
    for check in checks:
        yield from check(history, timeline)


def written(history: History) -> str:
    """Return a history as text, in the order of time, for the reader of a problem."""
    lines = [
        *((each.sent, f"{each.answered:.2f} {each}") for each in history.calls),
        *((each.answered, str(each)) for each in history.views),
        *((each.at, str(each)) for each in history.events),
        *((each.answered, str(each)) for each in history.results),
        *((each.at, str(each)) for each in history.deliveries),
        *((each.begun, str(each)) for each in history.executions),
        *((begun, f"purge until {end:.2f}") for begun, end in history.purges),
    ]
    return "\n".join(f"{at:.2f} {text}" for at, text in sorted(lines))
