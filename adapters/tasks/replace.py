"""What the document of an ended task becomes when a new run replaces its graph. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.adapters.tasks.fields import (
    COUNTED,
    INPUT_DIGEST,
    SATISFIED,
    SCHEDULED_AT,
    new_task,
    nodes_of,
    params_fields,
)

if TYPE_CHECKING:
    from flowkit.core.utils import Fields
    from flowkit.models import OpenTask

REPLACED: Fields = {
    "_id": 0,
    **{f"graph.nodes.{name}": 1 for name in ("attempt_epoch", "generation")},
}
"""The fields of the ended task that `replacing` reads."""

_EARLIER_RUNS = dict.fromkeys(
    ("coordinator.vars", "coordinator.vars_bytes", "coordinator.vars_measured", SATISFIED, COUNTED), ""
)


def replacing(stored: Fields, opening: OpenTask) -> tuple[Fields, Fields]:
    """Return what to set and to unset in the document of an ended task, whose graph a new run replaces.

    Each node begins after the latest epoch and generation of all earlier nodes, whatever its name was used for.
    So nothing that attempts of earlier runs still write counts.
    """
    nodes = nodes_of(stored)
    epoch = max((node.get("attempt_epoch") or 0 for node in nodes), default=0)
    generation = max((node.get("generation") or 0 for node in nodes), default=0)
    fresh = new_task(opening.task_id, opening.params, opening.graph, opening.at)
    begun = {"attempt_epoch": epoch, "first_epoch": epoch, "generation": generation}
    graph = {**fresh["graph"], "nodes": [{**node, **begun} for node in fresh["graph"]["nodes"]]}
    sets = {**params_fields(opening.params, opening.graph), "graph": graph, INPUT_DIGEST: fresh[INPUT_DIGEST]}
    nominal = {} if opening.scheduled_at is None else {SCHEDULED_AT: opening.scheduled_at}
    return {**sets, **nominal}, _EARLIER_RUNS
