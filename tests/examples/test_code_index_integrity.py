"""Files and batches that are lost or counted twice are detected, and the result is rejected."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.examples.runs import documents, event, stored

from code_index.documents import attempts_without_end
from code_index.errors import DemoError
from code_index.flow import ENRICH, GROUP
from code_index.integrity import integrity_errors
from code_index.result import verified_result

if TYPE_CHECKING:
    from code_index.documents import Documents


def without(left: Documents, node: str, uid: str) -> Documents:
    """Return the documents without one batch of a node."""
    return replace(left, batches=[one for one in left.batches if (one.node, one.uid) != (node, uid)])


def test_complete_run_has_no_integrity_errors() -> None:
    assert integrity_errors(documents()) == []
    result = verified_result(documents())
    assert (result.files_found, result.indexed_batches, result.attempts[ENRICH]) == (
        4,
        4,
        {1: 2, 2: 1, 4: 1, 5: 0},
    )
    assert result.workers[ENRICH] == {"worker-1": 2, "worker-2": 2}
    assert [claim.uid for claim in result.taken_over] == ["files-0004"]


def test_empty_tree_has_no_integrity_errors() -> None:
    assert verified_result(documents({})).files_found == 0


CASES: dict[str, tuple[Any, str]] = {
    "missing batch": (
        lambda left: without(left, GROUP, "files-0002"),
        "node group did not store: batch files-0002",
    ),
    "batch stored twice": (
        lambda left: replace(left, batches=[*left.batches, stored(ENRICH, 3, 2, 9, "worker-2")]),
        "node enrich stored twice: batch files-0003",
    ),
    "batch not indexed": (
        lambda left: replace(left, batches=[*left.batches, stored(ENRICH, 9, 2, 9, "worker-2")]),
        "node enrich stored, but not indexed: batch files-0009",
    ),
    "batch stored by an attempt that has lost it": (
        lambda left: replace(
            left, claims=[*left.claims[:2], replace(left.claims[2], epoch=4), left.claims[3]]
        ),
        "node enrich stored without a claim: batch files-0003",
    ),
    "batch claimed, but not stored": (
        lambda left: replace(left, claims=[*left.claims, replace(left.claims[0], uid="files-0009")]),
        "node enrich claimed, but did not store: batch files-0009",
    ),
    "file not analyzed": (
        lambda left: replace(left, paths_analyzed=left.paths_analyzed[1:]),
        "found, but not analyzed: file setup.py",
    ),
    "file analyzed twice": (
        lambda left: replace(left, paths_analyzed=[*left.paths_analyzed, "setup.py"]),
        "analyzed twice: file setup.py",
    ),
    "unknown file analyzed": (
        lambda left: replace(left, paths_analyzed=["other.py", *left.paths_analyzed[1:]]),
        "analyzed, but not found: file other.py",
    ),
    "file missing in the packages": (
        lambda left: replace(left, packages=left.packages[1:]),
        "4 files were found, but the packages contain 3",
    ),
    "file missing in the count of the index": (
        lambda left: replace(left, markers={**left.markers, "index": {"files": 3}}),
        "4 files were found, but node index counted 3",
    ),
    "batch failed permanently": (
        lambda left: replace(left, failed_metrics={ENRICH: 1}),
        "1 batches failed and were not processed again",
    ),
}


@pytest.mark.parametrize(("change", "error"), CASES.values(), ids=CASES)
def test_integrity_error_is_detected(change: Any, error: str) -> None:
    left = change(documents())
    assert error in integrity_errors(left)
    with pytest.raises(DemoError, match=error.split(":")[0]):
        verified_result(left)


def test_long_error_names_three_files_and_counts_the_rest() -> None:
    left = replace(documents(), paths_found=[f"{number}.py" for number in range(9)])
    assert "found, but not analyzed: file 0.py, 1.py, 2.py and 6 more" in integrity_errors(left)


def test_earlier_attempt_has_no_end_until_its_event_is_written_unless_its_worker_was_killed() -> None:
    left = documents()
    assert attempts_without_end(left.task, left.shards, left.events) == {(ENRICH, 2), (ENRICH, 4)}
    written = [event(ENRICH, 2, "BATCH_OK", 2, "worker-2"), event(ENRICH, 4, "TASK_DONE", 8.9, "worker-2")]
    assert attempts_without_end(left.task, left.shards, written) == {(ENRICH, 2)}
    written.append(event(ENRICH, 2, "TASK_FAILED", 3, "worker-2"))
    assert attempts_without_end(left.task, left.shards, written) == set()


def test_every_earlier_attempt_of_a_node_without_shards_has_an_end_event() -> None:
    left = documents()
    left.task["graph"]["nodes"][2]["attempt_epoch"] = 3
    assert attempts_without_end(left.task, [], []) >= {(GROUP, 1), (GROUP, 2)}
