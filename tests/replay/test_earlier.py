"""Tasks of the first release keep running as they began, although today's workflow would decide otherwise.

Their histories were recorded with the workflow of version 0.1.0 and are never recorded anew: each shows something that
only that version did. `many_retries` has a `retry_policy.max` of a million; `repeated_at_once` retries without a wait in
a long history; `held_back` hangs after its last attempt was handed over, until somebody cancels it; in `empty_sources`
`from_nodes: []` means the parents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from temporalio import workflow
from temporalio.workflow import NondeterminismError

from flowkit.graph.validation import normalized
from flowkit.workflows import opening, reports
from tests.replay.scrub import payload_texts
from tests.replay.test_replay import HISTORIES, load, replay

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.models import Graph

EARLIER = sorted((HISTORIES / "earlier").glob("*.json"))
BROKEN = (NondeterminismError, RuntimeError)
"""What a replay raises that takes another way; the second where a timer is concerned."""

PATCHED = ("many_retries", "repeated_at_once-1", "held_back")


def earlier(name: str) -> Path:
    """The file of a history."""
    return HISTORIES / "earlier" / f"{name}.json"


@pytest.mark.parametrize("path", EARLIER, ids=lambda path: path.stem)
async def test_a_history_of_the_first_release_replays(path: Path) -> None:
    await replay(load(path))


@pytest.mark.parametrize("name", PATCHED)
async def test_without_its_patch_it_would_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow, "patched", lambda patch: True)
    with pytest.raises(BROKEN):
        await replay(load(earlier(name)))


async def test_with_todays_meaning_of_no_sources_it_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def today(graph: dict[str, Any], *, empty_sources: bool = True) -> Graph:
        return normalized(graph)

    monkeypatch.setattr(opening, "normalized", today)
    with pytest.raises(BROKEN):
        await replay(load(earlier("empty_sources")))


async def test_a_large_write_of_the_first_release_stays_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    redrawn = load(HISTORIES / "redrawn.json")
    monkeypatch.setattr(reports, "REPORT_BYTES", 2_000)
    await replay(redrawn)
    monkeypatch.setattr(workflow, "patched", lambda patch: True)
    with pytest.raises(BROKEN):
        await replay(redrawn)


@pytest.mark.parametrize("path", EARLIER, ids=lambda path: path.stem)
def test_a_history_tells_nothing_of_the_machine_that_recorded_it(path: Path) -> None:
    text = "\n".join([path.read_text(encoding="utf-8"), *payload_texts(load(path).to_json_dict())])
    signs = ("/home/", "/root", "/work/", "/tmp/", "site-packages", "engine-", "@vm")
    assert [sign for sign in signs if sign in text] == []
