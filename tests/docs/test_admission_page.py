"""The pages about admission name all topics, events, fields and reasons that the code has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.docs.pages import DOCS

from flowkit.admission import kafka, rules
from flowkit.admission.fields import MAX_TIMEOUT_SEC, SCRIPT_BYTES
from flowkit.admission.kafka import AdmissionTopics

if TYPE_CHECKING:
    from flowkit.core.utils import Fields

PAGE = (DOCS / "admission-kafka.md").read_text(encoding="utf-8")
NAMES = set(re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE)))

ITEM = {"_id": "e", "v": 1, "place": "s-1", "user_id": "u", "rank": 3, "kind": "execution", "body": {}}
EVENTS = [
    *rules.accepted(ITEM, 0.0, 1, None),
    *rules.popped(ITEM, 0.0),
    rules.rejected(ITEM, 0.0, "Queue is full", 1),
    rules.cancelled(ITEM, 0.0, "r", "u"),
    rules.delete_pod(ITEM, 0.0, "r"),
    rules.timed_out(ITEM, 0.0, 1.0, "t"),
]


def row(event: str) -> set[str]:
    """Return the names in the row of an event, in the first table that has one."""
    found = next(line for line in PAGE.splitlines() if line.startswith(f"| `{event}` |"))
    return set(re.findall(r"`([^`]+)`", found))


@pytest.mark.parametrize("style", ["per_type", "shared"])
def test_the_page_names_all_topics(style: kafka.Style) -> None:
    topics = AdmissionTopics(style=style)
    assert {*topics.consumed(), *topics.produced(), topics.group_of("flowkit")} <= NAMES


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event["type"])
def test_the_row_of_an_event_that_is_sent_names_its_fields_and_its_topic(event: Fields) -> None:
    assert event["fields"].keys() | {AdmissionTopics(style="shared").topic(event["type"])} <= row(
        event["type"]
    )
    assert rules.envelope(ITEM, event).keys() <= row(event["type"]) | NAMES


@pytest.mark.parametrize("event", kafka.CONSUMED)
def test_the_row_of_an_event_that_is_read_names_its_fields(event: str) -> None:
    read = kafka.MODELS[event].model_fields.keys() - {"event_id", "metadata"}
    optional = {"resource_usage"} if event == rules.CANCELLED else set()
    assert read - optional <= row(event)
    assert kafka.Metadata.model_fields.keys() <= {name.removeprefix("metadata.") for name in NAMES}


def test_the_page_describes_all_reasons_of_dead_letters() -> None:
    source = Path(kafka.__file__).read_text(encoding="utf-8")
    reasons = set(re.findall(r'BadRecord\(\s*"(\w+)"', source))
    assert len(reasons) == 10
    assert {f"| `{reason}` |" for reason in reasons} <= set(re.findall(r"^\| `\w+` \|", PAGE, re.MULTILINE))


def test_the_page_has_the_numbers_of_the_older_priorities() -> None:
    text = " ".join(PAGE.split())
    for number, priority in kafka.NUMBERED.items():
        assert f"{number} for `{priority}`" in text


def test_the_page_says_the_limits_of_an_execution_once() -> None:
    text = " ".join(PAGE.split())
    assert text.count("`timeout_seconds` is a whole number from ") == 1
    assert f"`timeout_seconds` is a whole number from 1 to {MAX_TIMEOUT_SEC:,}" in text
    assert f"a script has up to {SCRIPT_BYTES:,} bytes" in text
    assert "year" not in text
