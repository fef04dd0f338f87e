"""The errors of rejected actions name a way, and the reference of actions shows every field of every action."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from flowkit.actions.records import ActionInput
from flowkit.actions.table import ACTIONS
from reference.actions import refusals

PAGE = Path(__file__).parents[2] / "docs" / "actions.md"
COMMON = {each.name for each in fields(ActionInput)}


NO_EFFECT = ("nothing is paused", "paused already", "have ended, or wait for a decision")
"""Parts of the errors of actions whose effect the task has already, so that nothing else is needed."""


def test_each_error_names_an_action_that_the_task_accepts() -> None:
    found = {(words, name): text for words, name, text in refusals()}
    without_way = {
        (words, name): text
        for (words, name), text in found.items()
        if not any(part in text for part in (*NO_EFFECT, "try again when"))
        and not any(each in text for each in ACTIONS if (words, each) not in found)
    }
    assert without_way == {}


def test_page_lists_what_all_actions_take() -> None:
    (line,) = [each for each in PAGE.read_text().splitlines() if each.startswith("All updates take")]
    assert {each for each in COMMON if f"`{each}`" not in line} == set()


@pytest.mark.parametrize("name", ACTIONS)
def test_page_lists_the_fields_of_an_action(name: str) -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |"))
    own = {each.name for each in fields(ACTIONS[name].record)} - COMMON
    assert {each for each in own if f"`{each}`" not in row} == set()
