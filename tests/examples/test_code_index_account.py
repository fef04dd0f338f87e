"""What is lost or counted twice is found out, and the outcome refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.examples.runs import documents, event, stored

from code_index.account import complaints
from code_index.documents import untold_ends
from code_index.errors import DemoError
from code_index.graph import ENRICH, GROUP
from code_index.outcome import checked_outcome

if TYPE_CHECKING:
    from code_index.documents import Documents


def without(left: Documents, node: str, uid: str) -> Documents:
    """The same without one batch of a node."""
    return replace(left, batches=[one for one in left.batches if (one.node, one.uid) != (node, uid)])


def test_a_run_in_which_everything_is_there_once_has_nothing_to_complain_of() -> None:
    assert complaints(documents()) == []
    outcome = checked_outcome(documents())
    assert (outcome.files_found, outcome.listed_batches, outcome.attempts[ENRICH]) == (4, 4, [2, 2])


def test_an_empty_tree_has_nothing_to_complain_of() -> None:
    assert checked_outcome(documents({})).files_found == 0


CASES: dict[str, tuple[Any, str]] = {
    "a batch that a node has not stored": (
        lambda left: without(left, GROUP, "files-0002"),
        "node group has not stored: batch files-0002",
    ),
    "a batch that was stored twice": (
        lambda left: replace(left, batches=[*left.batches, stored(ENRICH, 3, 2, 9, "worker-2")]),
        "node enrich has stored twice: batch files-0003",
    ),
    "a batch that nobody listed": (
        lambda left: replace(left, batches=[*left.batches, stored(ENRICH, 9, 2, 9, "worker-2")]),
        "node enrich has stored, unlisted: batch files-0009",
    ),
    "a file that was not analysed": (
        lambda left: replace(left, paths_analysed=left.paths_analysed[1:]),
        "found, but not analysed: file setup.py",
    ),
    "a file that was analysed twice": (
        lambda left: replace(left, paths_analysed=[*left.paths_analysed, "setup.py"]),
        "analysed twice: file setup.py",
    ),
    "a file that was analysed in place of another": (
        lambda left: replace(left, paths_analysed=["other.py", *left.paths_analysed[1:]]),
        "analysed, but not found: file other.py",
    ),
    "a package that holds too little": (
        lambda left: replace(left, packages=left.packages[1:]),
        "4 files were found, but the packages hold 3",
    ),
    "a listing that tells too little": (
        lambda left: replace(left, markers={**left.markers, "index": {"files": 3}}),
        "4 files were found, but the listing told of 3",
    ),
    "a batch that failed for good": (
        lambda left: replace(left, failed_metrics={ENRICH: 1}),
        "1 batches have failed and were not done again",
    ),
}


@pytest.mark.parametrize(("change", "complaint"), CASES.values(), ids=CASES)
def test_the_account_finds(change: Any, complaint: str) -> None:
    left = change(documents())
    assert complaint in complaints(left)
    with pytest.raises(DemoError, match=complaint.split(":")[0]):
        checked_outcome(left)


def test_a_long_complaint_names_some_and_counts_the_others() -> None:
    left = replace(documents(), paths_found=[f"{number}.py" for number in range(9)])
    assert "found, but not analysed: file 0.py, 1.py, 2.py and 6 more" in complaints(left)


def test_the_end_of_an_earlier_attempt_is_untold_until_its_event_is_there() -> None:
    left = documents()
    assert untold_ends(left.task, left.events) == {(ENRICH, 1)}
    assert untold_ends(left.task, [*left.events, event(ENRICH, 1, "BATCH_OK", 2, "worker-1")]) == {
        (ENRICH, 1)
    }
    assert untold_ends(left.task, [*left.events, event(ENRICH, 1, "TASK_FAILED", 2, "worker-1")]) == set()
