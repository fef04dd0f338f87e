"""A reset of many nodes fits into the payloads that Temporal accepts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from flowkit.limits import ACTION_INPUT_BYTES, REPORT_BYTES
from flowkit.models import NodeOutcome, NodeReset, ResetNodes
from flowkit.workflows.payloads import json_size, split_by_size
from flowkit.workflows.updates import _measure_reset

LONG: dict[str, Any] = {"input_inline": {"x": "\x00" * 1_000}, "input_ref": None}
OUTCOME = NodeOutcome(metrics={"x": "y" * 9_000}, batches=[{"batch_uid": "é" * 500}] * 20)


@pytest.mark.parametrize("more", [{}, {"io": LONG}, {"outcome": OUTCOME}, {"fields": {"timeout_sec": 1.5}}])
def test_measured_size_is_an_upper_bound(more: dict[str, Any]) -> None:
    node = NodeReset(index=19_999, node_id="\x00é" * 100, epoch=2**31 - 1, generation=2**31 - 1, **more)
    assert json_size(TypeAdapter(NodeReset).dump_python(node, mode="json")) <= _measure_reset(node)


def test_parts_of_a_large_reset_fit() -> None:
    nodes = [NodeReset(index=i, node_id=f"node-{i}", epoch=1, generation=1) for i in range(20_000)]
    parts = list(split_by_size(nodes, _measure_reset, REPORT_BYTES))
    assert [node for part in parts for node in part] == nodes
    record = ResetNodes(task_id="t", run_id="r", run_seq=1, revision=1, at=1.0, nodes=parts[0])
    assert json_size(TypeAdapter(ResetNodes).dump_python(record, mode="json")) < REPORT_BYTES + 1_000
    assert 3 * ACTION_INPUT_BYTES < REPORT_BYTES
