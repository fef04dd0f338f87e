"""What errors say of values that are not valid, and what they hide."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import pytest
from pydantic import BaseModel, ValidationError, field_validator
from pydantic_core import PydanticCustomError
from tests.processor_time import at_most

from flowkit import CoordinatorConfig, WorkerConfig
from flowkit.actions.table import parse_action
from flowkit.errors import ActionRejected, ConfigError
from flowkit.validation.invalid import SHOWN_PROBLEMS, describe, show

if TYPE_CHECKING:
    from decimal import Decimal

SECRET = "Sup3rS3cretTokenValue0123456789"


class Rows(BaseModel):
    """A model whose values can have many problems."""

    rows: dict[str, int]


def refusal(model: type[BaseModel], value: object) -> ValidationError:
    """Return the error about a value that a model refuses."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(value)
    return caught.value


def mask(text: str) -> str:
    """Hide the secret in a text."""
    return text.replace(SECRET, "(hidden)")


def test_only_the_problems_that_are_shown_are_looked_at() -> None:
    looked = []

    def look(path: Any, value: object) -> bool:
        looked.append(path)
        return False

    error = refusal(Rows, {"rows": {str(number): "x" for number in range(1_000)}})
    text = describe(error, hides=look)
    assert len(looked) == SHOWN_PROBLEMS
    assert text.endswith(f"; {1_000 - SHOWN_PROBLEMS} more problems")


def test_secrets_are_masked_in_keys_and_before_a_value_is_cut() -> None:
    for rows in ({SECRET: "no"}, {"a": b"a" * 60 + SECRET.encode()}, {"a": "a" * 60 + SECRET}):
        text = describe(refusal(Rows, {"rows": rows}), hide=mask)
        assert "Sup3r" not in text
        assert "(hidden)" in text or "…" in text


@pytest.mark.parametrize("value", [{SECRET}, {"a": SECRET}, [SECRET], Rows(rows={SECRET: 1})])
def test_of_a_value_with_parts_only_the_size_or_the_type_is_shown(value: object) -> None:
    assert SECRET not in show(value)


def test_a_text_with_a_url_shows_no_part_of_a_password() -> None:
    chance = random.Random(1)
    for _ in range(2_000):
        password = "".join(chance.choice(" \t\n\u00a0@:/?#%&[]'aB1") for _ in range(8)) + SECRET
        for text in (
            f"mongodb://user:{password}@host/db",
            f"see https://h/?token={password}",
            f"://u:{password}@h",
        ):
            assert SECRET not in show(text)


def test_a_long_text_is_shown_at_once() -> None:
    with at_most(10):
        assert len(show("a" * 4_000_000 + " ://")) < 100


@pytest.mark.parametrize(
    "kind", ["greater_than", "literal_error", "enum", "too_long", "string_pattern_mismatch", "int_type"]
)
def test_a_validator_may_use_the_names_of_errors_of_pydantic(kind: Any) -> None:
    class Checked(BaseModel):
        count: int

        @field_validator("count")
        @classmethod
        def check(cls, count: int) -> int:
            raise PydanticCustomError(kind, "{count} is out of stock", {"count": count})

    error = refusal(Checked, {"count": 7})
    assert describe(error) == "count is 7; 7 is out of stock"
    assert describe(error, hides=lambda path, value: True) == "count is (hidden); it is not valid"
    assert "stock" in describe(error, hides=lambda path, value: True, quotes=False)


def test_a_subclass_of_the_settings_keeps_their_rules_and_has_fields_of_any_type() -> None:
    @dataclass
    class Mine(WorkerConfig):
        extra: Decimal | None = None
        queue: str = "mine"

    assert Mine().queue == "mine"
    with pytest.raises(ConfigError, match=r"Mine\.queue is ''; it must be a string"):
        Mine(queue="")


def test_values_that_python_cannot_write_are_refused_like_others() -> None:
    unwritten: list[Any] = [json.loads("[" * 900 + "]" * 900), 10**5000]
    for value in unwritten:
        with pytest.raises(ActionRejected, match="it must be a text"):
            parse_action("pause", {"reason": value})
        with pytest.raises(ConfigError, match=r"kafka_sasl_password is \(hidden\)"):
            CoordinatorConfig(kafka_sasl_password=value)


def test_a_word_must_be_a_text() -> None:
    with pytest.raises(ConfigError, match="executor"):
        WorkerConfig(executor=ANY)
