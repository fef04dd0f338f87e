"""Values of types in rows of MongoDB: the next node reads what was written, by the same type or a wider one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import AT, TASK, WORKER, attempt, documents_of
from tests.value_pairs import are_same, is_refused, make_pairs

from flowkit.activities.json_types import JsonType
from flowkit.adapters.entries import Entry

if TYPE_CHECKING:
    from flowkit.adapters.artifacts import ArtifactStore


async def test_values_of_200_types_are_read_from_their_rows_as_they_were_written(
    artifacts: ArtifactStore,
) -> None:
    stored = {str(number): each for number, each in enumerate(make_pairs(200)) if not is_refused(each)}
    assert len(stored) > 100

    async def store(uid: str) -> None:
        meta = JsonType(stored[uid].kind, "the writer").to_meta(stored[uid].value)
        await artifacts.store_batch(attempt(epoch=1), uid, meta, WORKER, AT)

    await asyncio.gather(*map(store, stored))
    rows = await artifacts.metas(TASK, "a", [Entry(uid, None) for uid in stored])
    assert len(rows) == len(stored)
    for row in rows:
        pair = stored[row["batch_uid"]]
        read = JsonType(pair.reader, "the reader").from_meta(row["meta"])
        assert are_same(pair.value, read), (pair, read)


@pytest.mark.parametrize("later", [{"value": 3}, {"n": 1}])
async def test_row_that_is_written_again_says_the_form_of_its_last_write_only(
    db: Any, artifacts: ArtifactStore, later: dict[str, Any]
) -> None:
    await artifacts.store_batch(attempt(epoch=1), "b", JsonType(int, "test").to_meta(3), WORKER, AT)
    [row] = await documents_of(db.artifacts)
    assert (row["meta"], row["wrapped"]) == ({"value": 3}, True)
    [metrics] = await documents_of(db.metrics_raw)
    assert metrics["metrics"] == {"value": 3}
    await artifacts.store_batch(attempt(epoch=2), "b", later, WORKER, AT)
    [row] = await documents_of(db.artifacts)
    assert row["meta"] == later and "wrapped" not in row
