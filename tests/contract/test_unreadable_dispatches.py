"""Dispatch records that cannot be read are skipped in lists, and named in errors."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from tests.contract.builders import TASK
from tests.contract.test_dispatch_renewals import accepted

from flowkit.adapters.dispatches import DispatchStore
from flowkit.errors import StoreRefused


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"$set": {"state": "paused"}}, "state is (hidden); it must be 'open'"),
        ({"$set": {"attempt": "{"}}, "JSONDecodeError"),
        ({"$set": {"attempt": json.dumps({"task_id": TASK})}}, "attempt.node_id is missing"),
        ({"$unset": {"attempt": ""}}, "KeyError: 'attempt'"),
    ],
)
async def test_unreadable_record_does_not_hide_the_others(
    db: Any, change: dict[str, Any], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = DispatchStore(db)
    broken, whole = await accepted(store, "broken"), await accepted(store, "whole")
    await db.dispatches.update_one({"_id": broken.key}, change)
    with caplog.at_level(logging.WARNING):
        assert {*await store.find_all([broken.key, whole.key])} == {whole.key}
        assert [record.key for record in await store.find_owned("bridge-1", 0.0)] == [whole.key]
    [warning] = caplog.messages
    assert f"node 'broken', attempt 1, of task {TASK!r} cannot be read" in warning
    assert problem in warning
    with pytest.raises(StoreRefused, match="run that release; otherwise delete it"):
        await store.find(TASK, "broken", 1)
