"""The uids of the items of a source."""

from __future__ import annotations

from datetime import UTC, date, datetime
from enum import Enum, StrEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AnyUrl, BaseModel, SecretStr
from typing_extensions import TypedDict

from flowkit.activities.json_types import JsonType
from flowkit.activities.uid_rule import UidRule
from flowkit.errors import ConfigError
from flowkit.worker import BatchFailure


class Number(Enum):
    ONE = 1


class Text(StrEnum):
    A = "a"


class Pair(BaseModel):
    left: str
    right: str


def uid(value: Any, kind: Any = None) -> str:
    """Return the uid of an item whose key is a field with this value."""
    item = type("Item", (BaseModel,), {"__annotations__": {"key": kind or type(value)}})
    return UidRule("key", JsonType(item, "Source"), "Source").uid_of(item(key=value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("http://a/b?c", "http://a/b?c"),
        (7, "7"),
        (True, "true"),
        (date(2026, 1, 31), "2026-01-31"),
        (datetime(2026, 1, 31, 12, tzinfo=UTC), "2026-01-31T12:00:00Z"),
        (UUID(int=3), "00000000-0000-0000-0000-000000000003"),
        (Number.ONE, "1"),
        (Text.A, "a"),
        (AnyUrl("https://a.example/b"), "https://a.example/b"),
    ],
)
def test_key_of_each_type_is_its_text(value: Any, text: str) -> None:
    assert uid(value) == text


@pytest.mark.parametrize("value", ["", None, 1.5, [1], {"a": 1}, SecretStr("hidden"), b"x"])
def test_value_that_identifies_nothing_is_refused(value: Any) -> None:
    with pytest.raises(BatchFailure, match=r"Source: the key key of an item is") as refused:
        uid(value, Any if value is None else None)
    assert (refused.value.reason_code, refused.value.permanent) == ("bad_batch_uid", True)
    assert "hidden" not in str(refused.value)


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_keys_of_several_fields_are_equal_only_if_all_fields_are(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    rule = UidRule(("left", "right"), JsonType(Pair, "Source"), "Source")
    texts = [rule._join(list(each)) for each in (first, second)]
    assert (texts[0] == texts[1]) == (first == second)


def test_slash_in_one_field_is_no_border_between_two() -> None:
    rule = UidRule(("left", "right"), JsonType(Pair, "Source"), "Source")
    assert rule.uid_of(Pair(left="a/b", right="c")) == "a%2Fb/c"
    assert rule.uid_of(Pair(left="a", right="b/c")) == "a/b%2Fc"
    assert rule.uid_of(Pair(left="100%", right="")) == "100%25/"


def test_key_may_be_a_function_that_returns_one_or_several_values() -> None:
    of_text = UidRule(lambda item: item.upper(), JsonType(str, "Source"), "Source")
    assert of_text.uid_of("a/b") == "A/B"
    of_pair = UidRule(lambda item: (item.left, 3), JsonType(Pair, "Source"), "Source")
    assert of_pair.uid_of(Pair(left="a/b", right="c")) == "a%2Fb/3"


def test_key_may_be_a_field_of_a_dict() -> None:
    class Row(TypedDict):
        id: int

    assert UidRule("id", JsonType(Row, "Source"), "Source").uid_of({"id": 3}) == "3"
    rule = UidRule("id", JsonType(dict[str, Any], "Source"), "Source")
    assert rule.uid_of({"id": 3}) == "3"
    with pytest.raises(BatchFailure, match="the key id of an item is of type NoneType"):
        rule.uid_of({"ID": 3})


@pytest.mark.parametrize("key", [None, (), "", ("",), 3, ("url", 3)])
def test_key_that_is_no_name_is_refused(key: Any) -> None:
    with pytest.raises(ConfigError, match="Source"):
        UidRule(key, JsonType(Pair, "Source"), "Source")


def test_key_that_depends_on_the_object_is_unstable() -> None:
    rule = UidRule(id, JsonType(Pair, "Source"), "Source")
    with pytest.raises(BatchFailure, match="for the same item read from its JSON"):
        rule.uid_of(Pair(left="a", right="b"))


def test_error_of_an_unstable_key_hides_values_before_it_cuts_them() -> None:
    secret, numbers = "s3cret " * 30, iter(range(9))
    rule = UidRule(lambda item: f"{item.left}{next(numbers)}", JsonType(Pair, "Source"), "Source")
    with pytest.raises(BatchFailure) as failed:
        rule.uid_of(Pair(left=secret, right="b"), lambda text: text.replace(secret, "(hidden)"))
    assert "(hidden)0" in str(failed.value) and "s3cret" not in str(failed.value)


def test_item_that_cannot_be_read_from_its_json_is_a_schema_mismatch() -> None:
    class OneWay(BaseModel):
        left: str
        right: int

        @classmethod
        def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
            return handler(schema)

    rule = UidRule("left", JsonType(OneWay, "Source"), "Source")
    with pytest.raises(BatchFailure, match="cannot be read from its own JSON: right is missing") as refused:
        rule.uid_of(OneWay.model_construct(left="a"))
    assert refused.value.reason_code == "schema_mismatch"
