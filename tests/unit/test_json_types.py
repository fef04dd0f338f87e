"""Values of users' types as JSON: what is stored for them, how they are read, and how errors describe them."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    RootModel,
    SecretStr,
    ValidationError,
    computed_field,
    field_serializer,
    field_validator,
)
from pydantic_core import to_json
from typing_extensions import TypedDict

from flowkit.activities.json_types import JsonType, type_name
from flowkit.activities.lost_values import LostValue
from flowkit.models.metas import read_meta, row_fields
from flowkit.validation.json_keys import EqualKeys


class Page(BaseModel):
    url: str
    tags: list[str] = []


class Value(BaseModel):
    value: int


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


class Row(TypedDict):
    a: int


@dataclass
class Point:
    x: int


class Numbers(RootModel[list[int]]):
    pass


class Coded(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    data: bytes


class Tree(BaseModel):
    children: list[Tree] = []


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        (Page, Page(url="a"), {"url": "a", "tags": []}),
        (Point, Point(3), {"x": 3}),
        (Row, {"a": 1}, {"a": 1}),
        (dict[str, int], {"value": 1}, {"value": 1}),
        (Value, Value(value=3), {"value": 3}),
        (int, 3, {"value": 3}),
        (list[Page], [Page(url="a")], {"value": [{"url": "a", "tags": []}]}),
        (Numbers, Numbers([1]), {"value": [1]}),
        (type(None), None, {"value": None}),
        (Page | None, Page(url="a"), {"url": "a", "tags": []}),
        (Page | None, None, {"value": None}),
        (Value | int, Value(value=3), {"value": 3}),
        (Value | int, 3, {"value": 3}),
        (Annotated[Cat | Dog, Field(discriminator="kind")], Dog(), {"kind": "dog"}),
        (Literal["a", 1], "a", {"value": "a"}),
        (Decimal, Decimal("1.50"), {"value": "1.50"}),
        (set[date], {date(2026, 1, 31)}, {"value": ["2026-01-31"]}),
        (timedelta, timedelta(seconds=3), {"value": "PT3S"}),
        (Coded, Coded(data=b"\xff"), {"data": base64.urlsafe_b64encode(b"\xff").decode()}),
        (Tree, Tree(children=[Tree()]), {"children": [{"children": []}]}),
    ],
)
def test_value_is_stored_as_an_object_and_read_back(kind: Any, value: Any, stored: dict[str, Any]) -> None:
    found = JsonType(kind, "test")
    assert found.to_meta(value) == stored
    assert found.from_meta(found.to_meta(value)) == value


@pytest.mark.parametrize(
    ("kind", "value", "reader"),
    [
        (Value, Value(value=3), Value | None),
        (Value, Value(value=3), Value | int),
        (Value | int, 3, Value | int),
        (Value | int, 3, int),
        (dict[str, int], {"value": 3}, dict[str, int] | int),
        (dict[str, int], {"value": 3}, Any),
        (int, 3, dict[str, int] | int),
        (int, 3, object),
        (Any, {"value": 3}, dict[str, int] | int),
        (Any, 3, dict[str, int] | int),
        (list[int], [1], Any),
        (Numbers, Numbers([1]), Numbers | dict[str, int]),
    ],
)
def test_wider_type_reads_what_the_row_says_that_the_writer_meant(kind: Any, value: Any, reader: Any) -> None:
    row = row_fields(JsonType(kind, "the writer").to_meta(value))
    assert type(row["meta"]) is dict
    read = JsonType(reader, "the reader").from_meta(read_meta(row))
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("reader", "read"),
    [
        (Value, Value(value=3)),
        (int, 3),
        (int | None, 3),
        (Value | int, 3),
        (dict[str, int] | int, 3),
        (Any, {"value": 3}),
    ],
)
def test_row_that_does_not_say_its_form_is_read_by_the_type_of_the_reader(reader: Any, read: Any) -> None:
    assert JsonType(reader, "the reader").from_meta(read_meta({"meta": {"value": 3}})) == read


@given(
    st.recursive(st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(), st.lists, max_leaves=5)
)
def test_value_of_any_type_but_an_object_is_the_same_after_a_round_trip(value: Any) -> None:
    found = JsonType(list[Any] | str | int | bool | None, "test")
    assert found.from_meta(found.to_meta(value)) == value


class Wide(BaseModel):
    default: bytes | None = None


class Fields(BaseModel):
    fields: int = 1
    type: str = ""


READ_AS_OBJECTS: tuple[Any, ...] = (
    *(Page, Value, Cat, Point, Row, Tree, Numbers, Page | None, Fields, int, float, bool, str, Decimal),
    *(date, datetime, time, UUID, dict[int, float], set[int], frozenset[str], list[Any], Literal["a", 1]),
)
READ_AS_TEXT: tuple[Any, ...] = (Coded, Wide, bytes, timedelta, date | str, tuple[int, str], SecretStr)


def test_types_that_need_json_text_are_read_from_it() -> None:
    assert [each for each in READ_AS_OBJECTS if not JsonType(each, "test")._reads_objects] == []
    assert [each for each in READ_AS_TEXT if JsonType(each, "test")._reads_objects] == []


SCALARS = st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text()
TEXTS = (
    st.dates().map(str) | st.datetimes().map(str) | st.times().map(str) | st.uuids().map(str) | st.just("a")
)
VALUES = st.recursive(
    SCALARS | TEXTS,
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.sampled_from(["url", "tags", "value", "x", "a", "1", "2"]), below, max_size=3)
    ),
    max_leaves=6,
)


@given(VALUES, st.sampled_from(READ_AS_OBJECTS))
def test_objects_are_read_like_their_json_text(value: Any, kind: Any) -> None:
    adapter = JsonType(kind, "test").adapter
    found: list[str] = []
    for as_text in (False, True):
        try:
            read = adapter.validate_json(to_json(value)) if as_text else adapter.validate_python(value)
            found.append(repr(read))
        except ValidationError as error:
            found.append(str([(each["loc"], each["type"]) for each in error.errors()]))
    assert found[0] == found[1]


def test_any_is_stored_by_its_value_and_read_as_it_is_stored() -> None:
    found = JsonType(Any, "test")
    assert found.to_meta(Page(url="a")) == {"url": "a", "tags": []}
    assert found.to_meta(3) == {"value": 3}
    assert found.from_meta({"value": 3}) == {"value": 3}


def test_keys_that_become_one_are_refused() -> None:
    class Counts(BaseModel):
        counts: dict[Any, int]

    for kind, value in ((Counts, Counts(counts={1: 1, "1": 2})), (Any, {"a": {1: 1, "1": 2}})):
        with pytest.raises(EqualKeys) as refused:
            JsonType(kind, "test").to_meta(value)
        assert "'1'" in JsonType(kind, "test").problems(refused.value, str)
    assert JsonType(Counts, "test").to_meta(Counts(counts={1: 1, "2": 2})) == {"counts": {"1": 1, "2": 2}}


class Long(Page):
    text: str = ""


class Copy(Page):
    """Has the fields of Page, and no others."""


class Tom(BaseModel):
    name: str


class Rex(BaseModel):
    name: str


class Rounded(BaseModel):
    x: float

    @field_serializer("x")
    def round(self, x: float) -> float:
        return round(x, 1)


class Counter(BaseModel):
    x: int

    @field_validator("x")
    @classmethod
    def add(cls, x: int) -> int:
        return x + 1


class German(BaseModel):
    day: date

    @field_serializer("day")
    def write(self, day: date) -> str:
        return day.strftime("%d.%m.%Y")


class Pair(Enum):
    FIRST = (1, 2)


class Measured(BaseModel):
    mean: float
    data: Any = None


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")


SAME = "let the validators and serializers of its type keep it"


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        (
            Page,
            Long(url="a", text="b"),
            'text is "b" (text), and would be missing; name the class that has it',
        ),
        (list[Page], [Long(url="a")], '[0].text is "" (text), and would be missing; name the class'),
        (Tom | Rex, Rex(name="a"), "it is of the type Rex, and would be read as Tom; name one type"),
        (dict[str, Tom | Rex], {"a": Rex(name="a")}, "a is of the type Rex, and would be read as Tom"),
        (str | date, date(2026, 1, 31), "it is of the type date, and would be read as str"),
        (UUID | str, str(UUID(int=1)), "it is of the type str, and would be read as UUID"),
        (list[int] | set[int], {1}, "it is of the type set, and would be read as list"),
        (Rounded, Rounded(x=1.26), f"x is 1.26 (number), and would be read as 1.3 (number); {SAME}"),
        (Counter, Counter(x=1), f"x is 2 (number), and would be read as 3 (number); {SAME}"),
        (
            German,
            German(day=date(2026, 1, 31)),
            "it cannot be read from its own JSON: day is '31.01.2026'; it must be a valid date",
        ),
        (
            Pair,
            Pair.FIRST,
            "it cannot be read from its own JSON: it is a list of 2 values; it must be (1, 2)",
        ),
        (dict[tuple[int, int], int], {(1, 2): 3}, "it cannot be read from its own JSON"),
        (float, math.nan, "it is NaN (number), which JSON does not have; return None in its place"),
        (list[float], [1.0, -math.inf], "[1] is -Infinity (number), which JSON does not have"),
        (Measured, Measured(mean=math.inf), "mean is Infinity (number), which JSON does not have"),
        (Measured, Measured(mean=1, data=[math.nan]), "data[0] is NaN (number), which JSON does not have"),
        (float | None, math.nan, "it is NaN (number), which JSON does not have"),
        (Any, {"a": [math.nan]}, "a[0] is NaN (number), which JSON does not have"),
    ],
)
def test_value_that_its_reader_would_get_differently_is_refused(kind: Any, value: Any, problem: str) -> None:
    found = JsonType(kind, "test")
    with pytest.raises(LostValue) as refused:
        found.to_meta(value)
    assert problem in found.problems(refused.value, str)


class Strings(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")
    mean: float


class Total(BaseModel):
    model_config = ConfigDict(extra="forbid")
    count: int

    @computed_field  # type: ignore[prop-decorator]  # a property, as pydantic documents it
    @property
    def double(self) -> int:
        return self.count * 2


class Cached(BaseModel):
    mean: float
    _cache: int = PrivateAttr(0)


def cached() -> Cached:
    found = Cached(mean=1)
    found._cache = 1
    return found


IN_GAP = datetime(2026, 3, 29, 2, 30, tzinfo=ZoneInfo("Europe/Rome"))


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (Strings, Strings(mean=math.inf), Strings(mean=math.inf)),
        (Total, Total(count=2), Total(count=2)),
        (list[Total], [Total(count=2)], [Total(count=2)]),
        (Page, Copy(url="a"), Page(url="a")),
        (Measured, Measured(mean=1, data={date(2026, 1, 31)}), Measured(mean=1, data=["2026-01-31"])),
        (dict[Any, int], {1: 2}, {"1": 2}),
        (Loose, Loose(a=1), Loose(a=1)),  # type: ignore[call-arg]  # it allows any field
        (Cached, cached(), Cached(mean=1)),
        (list[datetime], [IN_GAP], [IN_GAP.replace(tzinfo=timezone(timedelta(hours=1)))]),
        (Tom | Cat, Cat(), Cat()),
    ],
)
def test_value_that_its_reader_gets_as_it_is_is_stored(kind: Any, value: Any, read: Any) -> None:
    found = JsonType(kind, "test")
    assert found.from_meta(found.to_meta(value)) == read


def test_not_a_number_reaches_a_reader_whose_type_has_a_form_for_it() -> None:
    found = JsonType(Strings, "test")
    assert found.to_meta(Strings(mean=math.nan)) == {"mean": "NaN"}
    assert math.isnan(found.from_meta({"mean": "NaN"}).mean)


class Plain(BaseModel):
    number: int = 1
    texts: list[str] = Field(default_factory=list)
    more: dict[str, float] | None = None


class Short(BaseModel):
    text: str = Field(max_length=3)


PROVEN: tuple[Any, ...] = (
    Plain,
    Page,
    list[Page],
    Tree,
    int,
    str,
    bool,
    float,
    list[dict[str, float]],
    Row,
    type(None),
)
NOT_PROVEN: tuple[Any, ...] = (
    *(Short, Cat | Dog, Coded, Rounded, Counter, German, Pair, Loose, Total, Strings),
    *(date, datetime, time, timedelta, Decimal, bytes, dict[int, int], set[int], tuple[int, str], Point),
)


def test_schema_proves_only_what_json_keeps() -> None:
    assert [each for each in PROVEN if not JsonType(each, "test")._is_lossless] == []
    assert [each for each in NOT_PROVEN if JsonType(each, "test")._is_lossless] == []


def describe(kind: Any, value: Any, **hidden: str) -> str:
    """Return how an error describes a value that does not fit."""

    def hide(text: str) -> str:
        for each in hidden.values():
            text = text.replace(each, "(hidden)")
        return text

    found = JsonType(kind, "test")
    with pytest.raises(ValidationError) as refused:
        found.from_json(value)
    return found.problems(refused.value, hide)


def test_problem_names_field_value_and_what_is_expected() -> None:
    assert describe(Page, {"url": 3, "tags": ["a", None]}) == (
        "url is 3; it must be a text; tags[1] is None; it must be a text"
    )
    assert describe(list[Page], [{"url": "a"}, 3]) == "[1] is 3; it must be an object"
    assert describe(int, "x") == "it is 'x'; it must be a whole number"


def test_long_values_are_cut_and_many_problems_counted() -> None:
    text = describe(list[int], ["x" * 1000] * 7)
    assert text.count("…") == 5 and len(text) < 700
    assert text.endswith("; 2 more problems")
    assert describe(list[int], ["x"] * 6).endswith("; 1 more problem")


def test_very_many_problems_are_only_counted() -> None:
    assert describe(list[int], ["x"] * 10_001) == "10,001 values do not fit"


def test_value_is_hidden_before_it_is_cut() -> None:
    secret = "s3cret " * 30
    assert "s3cret" not in describe(list[int], [secret], secret=secret)


def test_validators_of_the_model_are_shown_without_noise() -> None:
    class Even(BaseModel):
        number: Annotated[int, Field(multiple_of=2)]

    assert describe(Even, {"number": 3}) == "number is 3; it must be a multiple of 2"
    with pytest.raises(ValidationError) as refused:
        Even(number=3)
    assert "https://" not in JsonType(Even, "test").problems(refused.value, str)


class Login(BaseModel):
    model_config = ConfigDict(extra="forbid")
    user: int
    password: SecretStr = Field(min_length=50)
    old: list[SecretStr] | None = None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"user": "bob", "password": "x" * 50}, "user is 'bob'; it must be a whole number"),
        ({"user": 1, "password": "tell"}, "password is (hidden); "),
        ({"user": 1, "password": ["tell"]}, "password is (hidden); "),
        ({"user": 1, "password": "x" * 50, "old": [{"a": "tell"}]}, "is (hidden); "),
        ({"user": 1, "password": "x" * 50, "old": "tell"}, "old is (hidden); "),
        (["tell"], "it is (hidden); "),
        ({"user": 1, "password": "x" * 50, "pasword": "tell"}, "pasword: there is no such field"),
    ],
)
def test_secrets_are_hidden(given: Any, problem: str) -> None:
    text = describe(Login, given)
    assert problem in text and "tell" not in text


def test_model_that_hides_its_input_hides_all_values() -> None:
    class Quiet(BaseModel):
        model_config = ConfigDict(hide_input_in_errors=True)
        number: int

    assert describe(Quiet, {"number": "tell"}).startswith("number is (hidden); it must be a whole number")


def test_names_of_types_are_as_users_write_them() -> None:
    names = [type_name(each) for each in (Page, list[Page], dict[str, int] | None, Literal["a"], Any)]
    assert names == ["Page", "list[Page]", "dict[str, int] | None", "Literal['a']", "Any"]


class Member(BaseModel):
    """An item of a sequence."""

    at: date


class SpecialMember(Member):
    """An item that its type as an item does not have whole."""

    more: int = 1


class Members(BaseModel):
    """A model with sequences."""

    found: Sequence[Member]
    pairs: Sequence[tuple[int, float]] = ()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Sequence[int], (1, 2)),
        (Sequence[float], (math.inf,)[:0]),
        (Members, Members(found=(Member(at=date(2026, 1, 2)),), pairs=((1, 2.5),))),
        (dict[str, Sequence[Sequence[int]]], {"a": ((1,), [2])}),
    ],
)
def test_a_tuple_is_a_sequence_as_the_list_that_its_reader_gets(kind: Any, value: Any) -> None:
    type_ = JsonType(kind, "role")
    assert type_.to_meta(type_.from_meta(type_.to_meta(value))) == type_.to_meta(value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Members, Members(found=(SpecialMember(at=date(2026, 1, 2)),))),
        (list[int] | tuple[int, ...], (1, 2)),
    ],
    ids=["a subclass in a sequence", "a union"],
)
def test_a_sequence_excuses_nothing_else(kind: Any, value: Any) -> None:
    with pytest.raises(LostValue):
        JsonType(kind, "role").to_meta(value)
