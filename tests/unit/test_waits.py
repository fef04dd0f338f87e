"""What a node waits for: programs decide by the kind, and people read the sentence."""

from __future__ import annotations

from typing import Any

import pytest

from flowkit.models import waits
from flowkit.models.waits import KIND, SINCE, TEXT, NodeWait, WaitKind, read_wait, stored_wait
from flowkit.page.live import row_of
from flowkit.reading.state import read_document, read_query

WAITS = [
    waits.for_decision("failed with bad_input").began(1_800_000_000.25),
    waits.for_decision("approve or reject"),
    waits.for_prerequisites(["legal", "data:eu"]),
    waits.for_resume("node:a"),
    waits.for_slot("page", "2 of 2"),
    waits.for_sources(["a", "b"]),
    waits.for_worker(),
    waits.in_attempt("a free slot"),
]


@pytest.mark.parametrize("wait", WAITS)
def test_a_stored_wait_is_read_as_it_was(wait: NodeWait) -> None:
    assert read_wait(stored_wait(wait)) == wait


@pytest.mark.parametrize("node", [{}, {TEXT: ""}, {TEXT: None, KIND: "decision"}, {TEXT: 5}])
def test_a_node_without_a_sentence_waits_for_nothing(node: dict[str, Any]) -> None:
    assert read_wait(node) is None


@pytest.mark.parametrize("kind", [{}, {KIND: "of a later version"}, {KIND: None}, {KIND: {}}])
def test_a_sentence_without_a_known_kind_is_of_an_unknown_kind(kind: dict[str, Any]) -> None:
    """Neither a decision nor none: no reader may conclude it from the words."""
    node = {TEXT: "a decision: approve or reject", SINCE: "x", **kind}
    assert read_wait(node) == NodeWait(kind=WaitKind.UNKNOWN, text=node[TEXT])


@pytest.mark.parametrize("text", ["a decision: approve or reject", "your word"])
@pytest.mark.parametrize("kind", [*WaitKind])
def test_readers_decide_by_the_kind_and_show_the_sentence(text: str, kind: WaitKind) -> None:
    entry = {"node_id": "a", "type": "r", "status": "deferred", TEXT: text, KIND: kind.value}
    queried = read_query("t", {"status": "running", "nodes": [entry]}, {})
    document = {"id": "t", "status": "running", "graph": {"nodes": [entry]}}
    for view in (queried, read_document(document, {})):
        [node] = view.nodes
        assert (node.waits_for, node.awaits_decision) == (text, kind is WaitKind.DECISION)
        assert row_of(node).get("awaits_decision", False) is (kind is WaitKind.DECISION)
