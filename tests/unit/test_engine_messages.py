"""Every message that the bridge sends is valid for workers, whatever the graph contains (H1)."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.dispatches import attempt

from flowkit.bridge.rules.messages import cancel_signal, task_discover, task_start
from flowkit.testing.external.protocol import SignalPayload, StartPayload, read

TEXT = st.text(st.characters(codec="utf-8"))
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.none() | st.dictionaries(TEXT, VALUES, max_size=3)


@given(ref=OBJECTS, inline=OBJECTS, batching=OBJECTS, token=TEXT)
def test_task_start_contains_the_input_of_the_node_unchanged(
    ref: Any, inline: Any, batching: Any, token: str
) -> None:
    made = attempt(epoch=3, input_ref=ref, input_inline=inline, batching=batching)
    message = read(task_start(made, token, 1.5).to_json())
    start = StartPayload.model_validate(message.payload)
    assert (start.input_ref, start.input_inline, start.batching) == (ref, inline, batching)
    assert start.cancel_token == token
    assert (message.msg_type, message.role, message.step_type) == ("cmd", "coordinator", "indexer")
    assert (message.attempt_epoch, message.ts_ms, message.target_worker_id) == (3, 1500, None)


@given(reason=TEXT, worker_id=st.none() | TEXT, deadline=st.none() | st.floats(0, 1e10))
def test_cancel_signal_is_valid(reason: str, worker_id: str | None, deadline: float | None) -> None:
    message = read(cancel_signal(attempt(), reason, 1.0, worker_id=worker_id, deadline=deadline).to_json())
    signal = SignalPayload.model_validate(message.payload)
    assert (signal.sig, signal.reason, message.target_worker_id) == ("CANCEL", reason, worker_id)


def test_query_is_valid_and_names_its_epoch() -> None:
    message = read(task_discover(attempt(epoch=2), 1.0).to_json())
    assert (message.msg_type, message.attempt_epoch, message.payload["want_epoch"]) == ("query", 2, 2)


def test_each_epoch_has_a_dedup_id_of_its_own() -> None:
    """H3: a worker remembers the ids of the commands that it has dropped."""
    ids = {task_start(attempt(epoch=epoch), "token", 1.0).dedup_id for epoch in (1, 2, 3)}
    assert len(ids) == 3


def test_null_fields_are_sent_in_the_order_of_the_protocol() -> None:
    sent = json.loads(task_start(attempt(), "token", 1.0).to_json())
    assert [*sent] == [
        *("v", "msg_type", "role", "corr_id", "dedup_id", "task_id", "node_id", "step_type"),
        *("attempt_epoch", "ts_ms", "payload", "target_worker_id"),
    ]
    assert [*sent["payload"]] == ["cmd", "input_ref", "input_inline", "batching", "cancel_token"]
