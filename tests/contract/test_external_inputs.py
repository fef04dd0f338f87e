"""Which source batches an external node has still to read."""

from __future__ import annotations

from typing import Any

from tests.contract.builders import AT, TASK, attempt

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.dispatches.inputs import ExternalInputs
from flowkit.graph.input_adapters import PullArgs

PULL = PullArgs(from_nodes=("u",))


async def test_claimed_batch_without_a_result_is_unfinished(db: Any) -> None:
    """A worker that runs an outdated attempt may claim a batch; the bridge ignores its result."""
    artifacts, inputs = ArtifactStore(db), ExternalInputs(db)
    sink = attempt("sink")
    for uid in ("b1", "b2"):
        await artifacts.upsert_partial(attempt("u"), uid, {}, "w", AT)
        await db.stream_progress.insert_one(
            {"task_id": TASK, "consumer_node": "sink", "from_node": "u", "batch_uid": uid}
        )
    await artifacts.upsert_partial(sink, "b1", {}, "w", AT)
    assert await inputs.unfinished(sink, PULL) == {"u": {"b2"}}
    await inputs.release_claims(sink, PULL)
    claims = [claim["batch_uid"] async for claim in db.stream_progress.find({})]
    assert claims == ["b1"]
