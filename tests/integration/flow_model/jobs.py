"""What supervisors may receive of a flow, and whose results its jobs may show. Written from docs/flows.md."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

from tests.integration.flow_model.records import CANCELLED, COMPLETED, FAILED, wire_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.flow_model.records import (
        Delivery,
        Execution,
        Fields,
        History,
        Result,
        RunKey,
        WireId,
    )
    from tests.integration.flow_model.timeline import Timeline

IN_FLIGHT_SEC: Final = 2.0
"""How long after the end of a run what was sent before may arrive."""


def delivery_problems(history: History, timeline: Timeline) -> Iterator[str]:
    """Yield what is wrong with the jobs that the supervisor has received."""
    for delivery in history.deliveries:
        wire = wire_id(delivery.id)
        found = [*_address_problems(history, delivery, wire)] or [*_time_problems(timeline, delivery, wire)]
        found += [*_content_problems(timeline, delivery, wire)]
        yield from (f"{problem}: {delivery.id} at {delivery.at:.2f}" for problem in found)
    if history.is_calm:
        counts = Counter(delivery.id for delivery in history.deliveries)
        yield from (f"{id} was sent {count} times" for id, count in counts.items() if count > 1)


def _address_problems(history: History, delivery: Delivery, wire: WireId) -> Iterator[str]:
    place = history.place
    if (wire.deployment, wire.context, wire.caller) != (place.deployment, place.context, place.caller):
        yield f"a job of another place than {place}"
    if wire.flow != (None if wire.run == 1 else place.flow):
        yield f"a job of another flow than {place}"
    if delivery.secret != history.secret:
        yield "the job came without the secret of its runner"


def _time_problems(timeline: Timeline, delivery: Delivery, wire: WireId) -> Iterator[str]:
    keys = _keys_at(timeline, wire.run, delivery.at)
    if not keys:
        yield "the run had not started"
        return
    if delivery.at > timeline.ended.get(keys[-1], math.inf) + IN_FLIGHT_SEC:
        yield "the run had ended"
    if wire.generation >= len(keys):
        yield f"the generation is not among those of {keys}"
    nodes = [nodes.get(wire.job) for _, nodes in timeline.definitions_at(delivery.at)]
    found = [[*_order_problems(timeline, node, keys[-1], delivery.at)] for node in nodes]
    yield from min(found, key=len)


def _order_problems(timeline: Timeline, node: Fields | None, key: RunKey, at: float) -> Iterator[str]:
    """Yield what a job had to wait for when its supervisor received it."""
    if node is None:
        yield "the flow does not have the job"
        return
    for name in node.get("prerequisites", ()):
        if timeline.satisfied(key, name)[0] > at:
            yield f"nobody had satisfied {name}"
    for parent in node.get("depends", ()):
        if not _had_completed(timeline.history, parent, key[0], at):
            yield f"the job {parent} was not completed"


def _keys_at(timeline: Timeline, run: int, at: float) -> list[RunKey]:
    """Return a run with its retries that may have begun before this moment."""
    return [key for key in timeline.seen if key[0] == run and timeline.may_begin(key) <= at]


def _had_completed(history: History, job: int, run: int, at: float) -> bool:
    succeeded = {each.id for each in history.deliveries if each.succeeds}
    return any(
        (each.ended or math.inf) <= at and each.id in succeeded and _is_of(each.id, job, run)
        for each in history.executions
    )


def _is_of(id: str, job: int, run: int) -> bool:
    wire = wire_id(id)
    return (wire.job, wire.run) == (job, run)


def _content_problems(timeline: Timeline, delivery: Delivery, wire: WireId) -> Iterator[str]:
    """Yield what differs from every definition of the job that may have been in force."""
    jobs = timeline.jobs_at(wire.job, delivery.at)
    envs = [flow.get("env_vars", {}) for flow, _ in timeline.definitions_at(delivery.at)]
    sent = {name: delivery.job[name] for name in ("payload", "timeout", "executor", "env_vars")}
    wanted = [
        {
            "payload": job["script"],
            "timeout": job["timeout"],
            "executor": job["executor"],
            "env_vars": {**env, **job["env_vars"]},
        }
        for job in jobs
        for env in envs
    ]
    if sent not in wanted:
        yield f"the job is {sent}, but must be one of {wanted}"
    if wire.retry > max((job["retries"] for job in jobs), default=0):
        yield "more attempts than the job has retries"


# --- how the jobs of a run ended


def attempt_problems(history: History, timeline: Timeline) -> Iterator[str]:
    """Yield jobs whose end is not that of their last attempt."""
    for key in timeline.seen:
        view = timeline.last_view(key)
        if view is None:
            continue
        for id, node in view.state["nodes"].items():
            found = _attempt_problems(history, timeline, int(id), key, node["node_status"])
            yield from (
                f"{problem}: the job {id} is {node['node_status']} in the run {key}" for problem in found
            )


def _attempt_problems(
    history: History, timeline: Timeline, job: int, key: RunKey, status: str
) -> Iterator[str]:
    end = timeline.ended[key]
    sent: dict[tuple[int, int], Delivery] = {}
    for each in history.deliveries:
        wire = wire_id(each.id)
        if (wire.job, wire.run) == (job, key[0]) and wire.generation < key[1] and each.at <= end:
            sent[wire.generation, wire.retry] = each
    if status in (COMPLETED, FAILED) and not sent:
        yield "the supervisor has never received the job"
        return
    if not sent or status == CANCELLED:
        return
    (generation, retry), last = max(sent.items())
    if last.succeeds != (status == COMPLETED):
        yield f"the attempt {last.id} {'succeeds' if last.succeeds else 'fails'}"
    if wrong := [
        each.id
        for each_key, each in sent.items()
        if each_key[0] == generation and each_key[1] < retry and each.succeeds
    ]:
        yield f"repeated although {wrong} succeeds"
    retries = [each["retries"] for each in timeline.jobs_at(job, last.at)]
    if status == FAILED and retry not in retries and not timeline.cancels(key):
        yield f"it failed after {retry} of {retries} retries"


# --- results


def result_problems(history: History, timeline: Timeline) -> Iterator[str]:
    """Yield results that are none of the run and the generation that they are shown for."""
    by_token = {each.token: each for each in history.executions}
    for result in history.results:
        found = _result_problems(timeline, by_token, result)
        yield from (f"{problem}: {result.fields} in the run {result.run}" for problem in found)


def _result_problems(timeline: Timeline, by_token: dict[str, Execution], result: Result) -> Iterator[str]:
    fields: Fields = result.fields
    text, job = fields["result"], fields["job_id"]
    if (text is not None) != (fields["node_status"] == COMPLETED):
        yield "a job has a result if, and only if, it is completed"
    if (fields["error"] is not None) != (fields["node_status"] == FAILED):
        yield "a job has an error if, and only if, it has failed"
    if text is None:
        return
    execution = by_token.get(text)
    if execution is None:
        yield "no supervisor of this flow has returned this result"
        return
    if not _is_of(execution.id, job, result.run[0]):
        yield f"it is the result of {execution.id}"
    restarted = timeline.restarted(result.run)
    first = result.run if restarted is not None and job in restarted else (result.run[0], 1)
    if first in timeline.seen and execution.begun < timeline.may_begin(first):
        yield f"it was made before the run {first} began"
    if restarted is not None and job not in restarted and execution.begun > timeline.may_begin(result.run):
        yield "the job was not to run again"


def dispatch_problems(history: History, timeline: Timeline) -> Iterator[str]:
    """Yield dispatches of the last run that are open although it has ended."""
    last = timeline.last_view(max(timeline.seen)) if timeline.seen else None
    if last is None:
        return
    over = {int(id) for id, node in last.state["nodes"].items() if node["node_status"] in (COMPLETED, FAILED)}
    delivered = {each.id for each in history.deliveries}
    for message in history.dispatches:
        id = message["transport_id"]
        if id not in delivered and message["status"] == "Acknowledged":
            yield f"the supervisor has never received what it has acknowledged: {message}"
        if id is not None and wire_id(id).job in over and message["status"] not in ("Acknowledged", "Error"):
            yield f"a dispatch stays open: {message}"
