"""Signals that repeat what a task knows, or that are wrong: none may change how the task ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.models import FirstBatch, temporal_names

if TYPE_CHECKING:
    import random

    from temporalio.client import WorkflowHandle

NOWHERE = "no such node"


def stray_batches(chance: random.Random, stored: list[tuple[str, int]]) -> list[FirstBatch]:
    """Return signals about first batches: repeated ones, and some of a later epoch, an earlier one or an unknown node.

    `stored` contains node and epoch of batches that the task has stored.
    """
    chosen = chance.sample(stored, min(2, len(stored)))
    repeated = [FirstBatch(node_id=node_id, run_id="", epoch=epoch) for node_id, epoch in chosen]
    wrong = [
        FirstBatch(node_id=node_id, run_id="", epoch=epoch + chance.choice([-1, 1, 7]))
        for node_id, epoch in chosen
    ]
    return [*repeated, *repeated, *wrong, FirstBatch(node_id=NOWHERE, run_id="", epoch=1)]


async def send(handle: WorkflowHandle[Any, Any], batches: list[FirstBatch]) -> None:
    """Send the signals."""
    for batch in batches:
        await handle.signal(temporal_names.FIRST_BATCH, batch)
