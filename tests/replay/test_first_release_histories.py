"""Tasks of the first release continue by its rules, although the current workflow would decide otherwise.

Their histories were recorded with the workflow of version 0.1.0 and are never recorded again: each shows behavior that
only that version has. `many_retries` has a `retry_policy.max` of a million; `repeated_at_once` retries without a wait in
a long history; `held_back` hangs after its last attempt was handed over, until a client cancels it; in `empty_sources`
`from_nodes: []` means the parents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from temporalio import workflow
from temporalio.workflow import NondeterminismError

from flowkit.graph.validation import normalized
from flowkit.workflows import opening
from flowkit.workflows.display import reports
from tests.replay.scrub import payload_texts
from tests.replay.test_replay import HISTORIES, load, replay

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.models import Graph

EARLIER = sorted((HISTORIES / "earlier").glob("*.json"))
BROKEN = (NondeterminismError, RuntimeError)
"""Errors of a replay that differs from its history; the second is for timers."""

PATCHED = ("many_retries", "repeated_at_once-1", "held_back")


def earlier(name: str) -> Path:
    """Return the path of a history."""
    return HISTORIES / "earlier" / f"{name}.json"


@pytest.mark.parametrize("path", EARLIER, ids=lambda path: path.stem)
async def test_history_of_the_first_release_replays(path: Path) -> None:
    await replay(load(path))


@pytest.mark.parametrize("name", PATCHED)
async def test_history_of_the_first_release_does_not_replay_as_patched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow, "patched", lambda patch: True)
    with pytest.raises(BROKEN):
        await replay(load(earlier(name)))


async def test_history_with_empty_sources_does_not_replay_with_the_current_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def today(graph: dict[str, Any], **settings: bool) -> Graph:
        return normalized(graph)

    monkeypatch.setattr(opening, "normalized", today)
    with pytest.raises(BROKEN):
        await replay(load(earlier("empty_sources")))


async def test_large_write_of_the_first_release_remains_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    redrawn = load(HISTORIES / "redrawn.json")
    monkeypatch.setattr(reports, "REPORT_BYTES", 2_000)
    await replay(redrawn)
    monkeypatch.setattr(workflow, "patched", lambda patch: True)
    with pytest.raises(BROKEN):
        await replay(redrawn)


@pytest.mark.parametrize("path", EARLIER, ids=lambda path: path.stem)
def test_history_contains_no_data_of_the_recording_machine(path: Path) -> None:
    text = "\n".join([path.read_text(encoding="utf-8"), *payload_texts(load(path).to_json_dict())])
    signs = ("/home/", "/root", "/work/", "/tmp/", "site-packages", "engine-", "@vm")
    assert [sign for sign in signs if sign in text] == []
