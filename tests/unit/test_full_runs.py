"""A run rejects actions before Temporal would terminate it, and says what continues it."""

from __future__ import annotations

import pytest

from flowkit.workflows.updates import MOST_BYTES, MOST_EVENTS, MOST_UPDATES, describe_exhaustion


@pytest.mark.parametrize(
    ("updates", "events", "size", "found"),
    [
        (MOST_UPDATES, 0, 0, "accepted 1,900 updates"),
        (0, MOST_EVENTS, 0, "40,000 events"),
        (0, 0, MOST_BYTES, "35 MB"),
    ],
)
def test_a_full_run_says_why_and_what_continues_it(updates: int, events: int, size: int, found: str) -> None:
    text = describe_exhaustion(updates, events, size)
    assert text is not None
    assert found in text
    assert "interrupt=true" in text


def test_any_other_run_accepts_actions() -> None:
    assert describe_exhaustion(MOST_UPDATES - 1, MOST_EVENTS - 1, MOST_BYTES - 1) is None
