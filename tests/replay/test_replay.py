"""Recorded histories replay. These tests fail if a change affects the workflow's commands.

After an intentional change, `make histories` records them again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from flowkit.plugin import FlowKitPlugin
from tests.replay.poison import POISONS
from tests.replay.scrub import payload_texts
from tests.replay.shapes import GRAPHS

HISTORIES = Path(__file__).parent / "histories"
GOOD = sorted(HISTORIES.glob("*.json"))
POISONED = sorted((HISTORIES / "poisoned").glob("*.json"))


def load(path: Path) -> WorkflowHistory:
    """Return a recorded history, whose file has the name of the workflow id."""
    return WorkflowHistory.from_json(path.stem.partition("-")[0], path.read_text(encoding="utf-8"))


async def replay(history: WorkflowHistory) -> None:
    """Replay the workflow. Raises the error with which Temporal would fail its workflow task."""
    await Replayer(workflows=[], plugins=[FlowKitPlugin()]).replay_workflow(history)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
async def test_recorded_history_replays(path: Path) -> None:
    await replay(load(path))


@pytest.mark.parametrize("path", POISONED, ids=lambda path: path.stem)
async def test_poisoned_history_is_detected(path: Path) -> None:
    with pytest.raises(NondeterminismError):
        await replay(load(path))


def test_every_shape_has_a_history_and_one_of_them_has_two_runs() -> None:
    stems = [path.stem for path in GOOD]
    assert {stem.partition("-")[0] for stem in stems} == set(GRAPHS)
    assert {"continue_as_new-1", "continue_as_new-2"} <= set(stems)
    assert [path.stem for path in POISONED] == sorted(POISONS)


def test_history_contains_no_data_of_the_recording_machine() -> None:
    for path in [*GOOD, *POISONED]:
        text = "\n".join([path.read_text(encoding="utf-8"), *payload_texts(load(path).to_json_dict())])
        assert [
            sign for sign in ("/home/", "/root", "/work/", "site-packages", "engine-", "@vm") if sign in text
        ] == []
