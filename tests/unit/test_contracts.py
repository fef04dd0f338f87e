"""Whether the output of a role fits the input of another: what is reported, and that a report is no false alarm."""

from __future__ import annotations

import datetime as dt
import enum
import ipaddress
import json
import uuid
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from pathlib import Path
from types import GenericAlias
from typing import Any, Literal, NamedTuple, Union

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    create_model,
    field_serializer,
    field_validator,
    model_validator,
)
from tests.processor_time import at_most
from tests.unit.graphs import PULL, RECHUNK, pulling
from tests.unit.property_examples import examples

from flowkit.activities import contracts
from flowkit.activities.contracts import announce, check_contracts
from flowkit.activities.json_schemas import ContractSchema
from flowkit.activities.json_types import JsonType
from flowkit.core.user_code import shorten_path
from flowkit.graph.contracts import (
    Contract,
    DataEdge,
    data_edges,
    edge_mismatches,
    find_unfit,
    mismatches,
    type_name,
    unknown_fields,
)
from flowkit.graph.validation import parse_graph
from flowkit.worker import RoleHandler, RunContext, role


def taken(kind: Any) -> dict[str, Any]:
    """Return the schema of an input."""
    return TypeAdapter(kind).json_schema(mode="validation", schema_generator=ContractSchema)


def returned(kind: Any) -> dict[str, Any]:
    """Return the schema of an output."""
    return TypeAdapter(kind).json_schema(mode="serialization", schema_generator=ContractSchema)


class Page(BaseModel):
    url: str
    text: str


class Words(BaseModel):
    url: str
    words: int


class Report(BaseModel):
    page: Page
    price: Decimal


class Invoice(BaseModel):
    page: Words
    price: float


class Tree(BaseModel):
    children: list[Tree] = []
    left: Tree | None
    name: str


class Numbered(BaseModel):
    children: list[Numbered] = []
    left: Numbered | None
    name: int


class ByAlias(BaseModel):
    url: str = Field(alias="pageUrl")


class ByName(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    url: str = Field(alias="pageUrl")


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    url: str


class Text(BaseModel):
    url: str
    words: str


class Counted(BaseModel):
    words: int

    @field_validator("words", mode="before")
    @classmethod
    def count(cls, given: Any) -> Any:
        """Count the words of a text."""
        return len(given.split()) if isinstance(given, str) else given


class Renamed(BaseModel):
    words: int

    @model_validator(mode="before")
    @classmethod
    def rename(cls, given: Any) -> Any:
        """Accept any object."""
        return {"words": len(given)}


class Written(BaseModel):
    words: int

    @field_serializer("words")
    def write(self, words: int):  # type: ignore[no-untyped-def]
        """Write a number as text, without saying so."""
        return str(words)


class Point(NamedTuple):
    x: int
    y: int


class Valued(BaseModel):
    value: int


class Lists(BaseModel):
    pages: list[Page]


@pytest.mark.parametrize(
    ("output", "input_type", "problems"),
    [
        (Page, Page, []),
        (Page, Words, ["'words' (integer) is missing"]),
        (Text, Words, ["'words' is string, not integer"]),
        (Report, Invoice, ["'page.words' (integer) is missing"]),
        (Tree, Tree, []),
        (Tree, Numbered, ["'name' is string, not integer"]),
        (Page, ByAlias, ["'pageUrl' (string) is missing"]),
        (Page, ByName, []),
        (ByName, Page, ["'url' (string) is missing", "'text' (string) is missing"]),
        (Open, Words, []),
        (dict[str, Any], Words, []),
        (Text, Counted, []),
        (Text, Renamed, []),
        (Written, Text, ["'url' (string) is missing"]),
        (Page | None, Words, ["'words' (integer) is missing"]),
        (Page | Words, Words, []),
        (Page, Words | None, ["'words' (integer) is missing"]),
        (Text, Page | Words, ["'text' (string) is missing"]),
        (Any, Words, []),
        (Page, Any, []),
        (int, str, ["it is integer, not string"]),
        (int, Page, ["it is integer, not object"]),
        (int, Valued, []),
        (str, Valued, ["'value' is string, not integer"]),
        (Valued, int, []),
        (Valued, str, ["'value' is integer, not string"]),
        (Page, int, ["it is object, not integer"]),
        (list[Page], list[Words], []),
        (list[Page], dict[str, Page], []),
        (str, list[str], ["it is string, not array"]),
        (float, int, []),
        (bool, float, []),
        (int, dt.datetime, []),
        (Decimal, float, []),
        (Page, Point, []),
    ],
)
def test_only_missing_and_mistyped_required_fields_are_reported(
    output: Any, input_type: Any, problems: list[str]
) -> None:
    assert mismatches(returned(output), taken(input_type)) == problems


@pytest.mark.parametrize(
    ("output", "list_key", "input_type", "problems"),
    [
        (Lists, "pages", list[Page], []),
        (Lists, "pages", list[Words], ["'[].words' (integer) is missing"]),
        (Lists, "pages", Page, ["it is array, not object"]),
        (Lists, "items", list[Lists], []),
        (Lists, None, list[Page], ["'[].url' (string) is missing", "'[].text' (string) is missing"]),
        (list[Page], "value", list[Words], ["'[].words' (integer) is missing"]),
        (list[Page], None, list[Words], ["'[].url' (string) is missing", "'[].words' (integer) is missing"]),
        (list[Page], None, list[dict[str, Any]], []),
        (int, "value", list[Valued], []),
        (Open, "pages", list[Words], []),
        (Page | Lists, "pages", list[Words], []),
    ],
)
def test_chunks_are_lists_of_the_items_of_each_batch(
    output: Any, list_key: str | None, input_type: Any, problems: list[str]
) -> None:
    edge = DataEdge(source="a", node="b", source_role="a", role="b", chunks=True, list_key=list_key)
    found = edge_mismatches(edge, returned(output), taken(input_type))
    assert [str(each) for each in found] == problems


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Page, "Page"),
        (list[Page], "list[Page]"),
        (Tree, "Tree"),
        (Page | None, "Page | null"),
        (int, "integer"),
        (Any, "any value"),
        (list[Page | int], "list[Page | integer]"),
        (dict[str, int], "object"),
    ],
)
def test_type_has_a_short_name(kind: Any, name: str) -> None:
    assert type_name(taken(kind)) == name


def test_title_of_a_type_cannot_move_the_cursor_of_a_terminal() -> None:
    assert type_name({"title": "\x1b[31mPage"}) == r"\x1b[31mPage"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]}}},
        {"$ref": "#/$defs/missing"},
        {"type": "object", "required": "url", "properties": ["url"]},
        {"allOf": [{"type": "object"}, {"type": "string"}]},
        {"anyOf": [], "oneOf": "x", "type": 3, "enum": {}},
        {"anyOf": [{"enum": [number]} for number in range(1_000)]},
        {"type": "object", "required": [["url"], {"url": 1}, None]},
        {"type": ["text"]},
        {"type": "text"},
    ],
)
def test_unusual_schema_fits_whatever_it_leaves_open(schema: dict[str, Any]) -> None:
    assert mismatches(schema, taken(Words)) == mismatches(returned(Words), schema) == []


def _branching(group: str) -> dict[str, Any]:
    """Return a schema of a few lines that refer to each other in 10**30 ways."""
    either = {f"a{level}": {group: [{"$ref": f"#/$defs/a{level + 1}"}] * 10} for level in range(30)}
    return {"$defs": {**either, "a30": {"type": "integer"}}, "$ref": "#/$defs/a0"}


_NAMES = [f"name{index}" for index in range(10_000)]
_WIDE: dict[str, Any] = {
    "$defs": {"part": {"type": "object", "properties": {}, "required": _NAMES}},
    "type": "object",
    "properties": {name: {"$ref": "#/$defs/part"} for name in _NAMES},
    "required": _NAMES,
}


@pytest.mark.parametrize(
    ("output", "input_schema"),
    [
        pytest.param(_branching("anyOf"), {"type": "string"}, id="references"),
        pytest.param({"type": "string"}, _branching("allOf"), id="references of all"),
        pytest.param({"type": ["integer"] * 100_000}, {"type": ["string"] * 100_000}, id="types"),
        pytest.param({**_WIDE, "required": []}, _WIDE, id="fields"),
    ],
)
def test_schema_that_would_take_for_ever_ends(output: dict[str, Any], input_schema: dict[str, Any]) -> None:
    with at_most(10):
        mismatches(output, input_schema)
    assert len(type_name(output)) + len(type_name(input_schema)) < 200


def test_deeply_nested_schema_ends() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    assert mismatches(deep, deep) == []
    lists: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        lists = {"type": "array", "items": lists}
    assert type_name(lists).startswith("list[list[")


# --- no false alarms ----------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"
    FIVE = 5


texts = st.from_regex(r"x[a-z ]{0,3}", fullmatch=True)
"""Texts that are no numbers, dates or the like: pydantic converts those."""
numbers = st.integers(2, 99)
LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, numbers),
    (float, numbers.map(lambda number: number + 0.5)),
    (str, texts),
    (bool, st.booleans()),
    (Decimal, numbers.map(Decimal)),
    (dt.datetime, st.datetimes(dt.datetime(2000, 1, 1))),
    (dt.date, st.dates(dt.date(2000, 1, 1))),
    (dt.timedelta, st.timedeltas(dt.timedelta(0), dt.timedelta(9))),
    (uuid.UUID, st.uuids()),
    (ipaddress.IPv4Address, st.just(ipaddress.IPv4Address("10.0.0.1"))),
    (bytes, st.just(b"abc")),
    (Literal["a", "b"], st.sampled_from(["a", "b"])),
    (Literal[1, "2"], st.sampled_from([1, "2"])),
    (Color, st.sampled_from(Color)),
    (Point, st.builds(Point, numbers, numbers)),
    (None, st.none()),
    (Any, st.one_of(numbers, texts)),
]
Typed = tuple[Any, st.SearchStrategy[Any]]
"""A type, and its values."""


@st.composite
def models(draw: st.DrawFn, inner: st.SearchStrategy[Typed]) -> Typed:
    """Return a model with some of few field names, so that two models often share fields."""
    fields = draw(st.dictionaries(st.sampled_from(["a", "b", "value"]), inner, max_size=3))
    definitions: dict[str, Any] = {}
    for name, (kind, _) in fields.items():
        how = draw(st.sampled_from(["plain", "plain", "default", "alias"]))
        alias = "b" if how == "alias" and "b" not in fields and not definitions else None
        definitions[name] = (kind, Field(None, alias=alias) if how == "default" else Field(alias=alias))
    config = ConfigDict(
        extra=draw(st.sampled_from(["ignore", "allow", "forbid"])), populate_by_name=draw(st.booleans())
    )
    model: Any = create_model("Model", __config__=config, **definitions)
    values = st.fixed_dictionaries({name: each for name, (_, each) in fields.items()})
    return model, values.map(lambda given: model.model_construct(**given))


def nested(inner: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    """Return types that contain others."""
    union: Any = Union
    return st.one_of(
        models(inner),
        inner.map(lambda each: (GenericAlias(list, (each[0],)), st.lists(each[1], max_size=2))),
        inner.map(
            lambda each: (GenericAlias(dict, (str, each[0])), st.dictionaries(texts, each[1], max_size=2))
        ),
        st.tuples(inner, inner).map(
            lambda both: (union[both[0][0], both[1][0]], st.one_of(both[0][1], both[1][1]))
        ),
    )


types = st.recursive(st.sampled_from(LEAVES), nested, max_leaves=5)


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.one_of(types, models(types)), st.one_of(types, models(types)))
def test_reported_output_is_always_refused(data: st.DataObject, output: Typed, input_type: Typed) -> None:
    if not mismatches(returned(output[0]), taken(input_type[0])):
        return
    meta = JsonType(output[0], "the output").to_meta(data.draw(output[1]))
    with pytest.raises(ValidationError):
        JsonType(input_type[0], "the input").from_meta(meta)


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.one_of(types, models(types)), types, st.sampled_from(["a", "b", "value", None]))
def test_reported_chunk_is_always_refused(
    data: st.DataObject, output: Typed, item: Typed, list_key: str | None
) -> None:
    edge = DataEdge(source="a", node="b", source_role="a", role="b", chunks=True, list_key=list_key)
    kind = data.draw(st.sampled_from([item[0], GenericAlias(list, (item[0],))]))
    if not edge_mismatches(edge, returned(output[0]), taken(kind)):
        return
    meta = JsonType(output[0], "the output").to_meta(data.draw(output[1]))
    listed = meta.get(list_key or "")
    for each in listed if isinstance(listed, list) else [meta]:
        with pytest.raises(ValidationError):
            JsonType(kind, "the input").from_json([each])


# --- graphs -------------------------------------------------------------------------------------------------


class Crawl(RoleHandler[Words, Page]):
    role = "crawler"
    key = "url"

    async def produce(self, given: Words, ctx: RunContext) -> AsyncIterator[Page]:
        """Yield one page."""
        yield Page(url="u", text="x")


def handler(input_type: Any, output_type: Any) -> RoleHandler:
    """Return a handler with these types; None for no type."""

    class Made(RoleHandler):
        def input_schema(self) -> dict[str, Any] | None:
            return None if input_type is None else taken(input_type)

        def output_schema(self) -> dict[str, Any] | None:
            return None if output_type is None else returned(output_type)

        @property
        def input_type(self) -> Any:
            return input_type

        @property
        def output_type(self) -> Any:
            return output_type

    return Made()


def pull(node_id: str, role: str, *sources: str, **args: Any) -> dict[str, Any]:
    """Return a node that pulls from its parents."""
    adapter = RECHUNK if "size" in args else PULL
    return {"node_id": node_id, "type": role, "depends_on": [*sources], "io": pulling(adapter, **args)}


def chain(*more: dict[str, Any]) -> Any:
    """Return a graph in which `count` pulls from `crawl`."""
    return parse_graph(
        {"nodes": [{"node_id": "crawl", "type": "crawler"}, pull("count", "counter", "crawl"), *more]}
    )


def test_edges_are_those_over_which_roles_pull() -> None:
    graph = chain(
        {"node_id": "after", "type": "counter", "depends_on": ["crawl"]},
        {"node_id": "report", "type": "coordinator_fn", "depends_on": ["count"]},
        pull("named", "counter", "count", from_nodes=["crawl", "count"]),
        pull("chunk", "counter", "crawl", size=3, meta_list_key="pages"),
        pull("chosen", "counter", "crawl", size=3, meta_list_key={"$cel": "params.key"}),
    )
    found = [(each.source, each.node, each.chunks, each.list_key) for each in data_edges(graph)]
    assert found == [
        ("crawl", "count", False, None),
        ("crawl", "named", False, None),
        ("count", "named", False, None),
        ("crawl", "chunk", True, "pages"),
    ]


def test_problem_names_the_edge_the_fields_both_types_and_the_lines_to_change() -> None:
    handlers = {"crawler": handler(None, Text), "counter": handler(Words, Words)}
    [problem] = check_contracts(chain(pull("again", "counter", "crawl")), handlers)
    text, words = line_of("class Text(BaseModel):", 2), line_of("class Words(BaseModel):", 2)
    assert problem == (
        "node 'count' pulls from 'crawl' (and 1 more edge of these roles), but the output of role 'crawler', Text, "
        "does not fit the input of role 'counter', Words: 'words' is string, not integer; use one type for it in the "
        f"output ({text}) and the input ({words})"
    )


def line_of(text: str, below: int) -> str:
    """Return the place of a line of this file."""
    lines = Path(__file__).read_text().splitlines()
    return f"{shorten_path(__file__)}:{lines.index(text) + 1 + below}"


@pytest.mark.parametrize(
    "handlers",
    [
        {"crawler": handler(None, Words), "counter": handler(Words, None)},
        {"crawler": handler(None, None), "counter": handler(Words, None)},
        {"crawler": handler(None, Page)},
        {"crawler": handler(None, Page), "counter": Crawl()},
        {"counter": handler(Words, None)},
        {},
    ],
)
def test_untyped_and_unknown_roles_fit(handlers: dict[str, RoleHandler]) -> None:
    assert check_contracts(chain(), handlers) == []


@pytest.mark.parametrize(
    ("outputs", "inputs", "unfit"),
    [
        ((Page,), (Words,), 1),
        ((Page, Text), (Words,), 1),
        ((Page, Words), (Words,), 0),
        ((Page,), (Words, Page), 0),
        ((Page, None), (Words,), 0),
        ((), (Words,), 0),
    ],
)
def test_versions_of_a_role_are_reported_if_none_fits(
    outputs: tuple[Any, ...], inputs: tuple[Any, ...], unfit: int
) -> None:
    contracts = {
        "crawler": [Contract(output=each and returned(each)) for each in outputs],
        "counter": [Contract(input=each and taken(each)) for each in inputs],
    }
    assert len(find_unfit(data_edges(chain()), contracts)) == unfit


def with_fields(count: int) -> Any:
    """Return a model with so many numbers."""
    fields: dict[str, Any] = {f"f{number}": (int, ...) for number in range(count)}
    return create_model("Wide", **fields)


def test_problem_shows_three_fields_and_the_number_of_the_others() -> None:
    wide = with_fields(5)
    [problem] = check_contracts(chain(), {"crawler": handler(None, Page), "counter": handler(wide, None)})
    assert (
        "'f0' (integer) is missing, 'f1' (integer) is missing, 'f2' (integer) is missing and 2 more; "
        in problem
    )


# --- announcements ------------------------------------------------------------------------------------------


def test_typed_roles_are_announced_with_a_digest_of_both_schemas() -> None:
    found = announce({"a": handler(Page, Words), "b": handler(Page, Words), "c": handler(None, Words)})
    assert found["a"] == found["b"]
    assert json.loads(found["a"].input) == taken(Page)
    assert found["a"].digest != found["c"].digest
    assert (found["c"].input, json.loads(found["c"].output)) == ("", returned(Words))
    assert announce({"d": handler(None, None)}) == {}


def test_schema_that_cannot_be_announced_is_logged_once_and_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    large = with_fields(2_000)
    found = announce({"a": handler(Callable[[], None], Words), "b": handler(large, None)})
    assert [(role, each.input) for role, each in found.items()] == [("a", "")]
    texts = [each.getMessage() for each in caplog.records]
    assert [text.partition(":")[0] for text in texts] == [
        f"role {role} announces no schema of its input, so no edge is checked against it at submission"
        for role in "ab"
    ]
    assert texts[0].endswith("Cannot generate a JsonSchema for core_schema.CallableSchema")
    assert "bytes of JSON, more than 65,536" in texts[1]


def test_schemas_of_a_process_have_a_limit_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(contracts, "PROCESS_BYTES", len(json.dumps(taken(Page))) + 100)
    assert [*announce({"a": handler(Page, None), "b": handler(Words, None)})] == ["a"]
    assert "role b announces no schemas" in caplog.text


# --- typed handlers -----------------------------------------------------------------------------------------


@role("counter")
def count(pages: list[Words]) -> int:
    """Return the number of pages."""
    return len(pages)


@role("counter")
def count_text(text: str) -> int:
    """Return the number of characters."""
    return len(text)


def test_place_is_that_of_the_field_of_a_model_or_else_of_the_function() -> None:
    chunks = parse_graph(
        {"nodes": [{"node_id": "crawl", "type": "crawler"}, pull("count", "counter", "crawl", size=3)]}
    )
    url, words = line_of("class Page(BaseModel):", 0), line_of("class Words(BaseModel):", 2)
    [problem] = check_contracts(chunks, {"crawler": Crawl(), "counter": count})
    assert problem.endswith(
        f"'[].words' (integer) is missing; add it to the output ({url}), or make it optional in the input ({words})"
    )
    [problem] = check_contracts(chain(), {"crawler": Crawl(), "counter": count_text})
    place = line_of("def count_text(text: str) -> int:", -1)
    assert problem.endswith(
        f"it is object, not string; use one type for it in the output ({url}) and the input ({place})"
    )


class Day(BaseModel):
    day: str


class Coordinates(NamedTuple):
    x: int
    y: int


OWN_INPUT: dict[str, dict[str, Any]] = {
    "input": {"io": {"input_inline": {"day": "2026-11-26"}}},
    "nothing": {},
    "noop": {"io": {"input_inline": {"input_adapter": "noop", "day": {"$cel": "params.day"}}}},
}


@pytest.mark.parametrize("node", OWN_INPUT.values(), ids=OWN_INPUT)
@pytest.mark.parametrize("kind", [int, str | None, list[str], list[Day]], ids=str)
def test_a_node_whose_item_is_its_own_input_must_read_an_object(kind: Any, node: dict[str, Any]) -> None:
    graph = parse_graph({"nodes": [{"node_id": "publish", "type": "publisher", **node}]})
    [problem] = check_contracts(graph, {"publisher": handler(kind, None)})
    assert problem.startswith(
        f"node 'publish': role 'publisher' reads {type_name(taken(kind))}, but the node"
    )
    assert ("the fields of the input, day" in problem) == ("io" in node)


@pytest.mark.parametrize("node", OWN_INPUT.values(), ids=OWN_INPUT)
@pytest.mark.parametrize("kind", [Day, Day | None, int | dict[str, Any], Coordinates, Any, None], ids=str)
def test_a_node_may_read_its_own_input_as_an_object(kind: Any, node: dict[str, Any]) -> None:
    graph = parse_graph({"nodes": [{"node_id": "publish", "type": "publisher", **node}]})
    assert check_contracts(graph, {"publisher": handler(kind, None)}) == []


def test_a_node_that_gets_batches_may_read_items_that_are_no_objects() -> None:
    graph = parse_graph(
        {
            "nodes": [
                {"node_id": "mapped", "type": "publisher", "map": {"over": "params.days"}},
                pull("pulls", "publisher", "mapped"),
            ]
        }
    )
    assert check_contracts(graph, {"publisher": handler(str, str)}) == []


class Address(BaseModel):
    street: str


class Person(BaseModel):
    name: str
    address: Address | None = None


class Extensible(BaseModel):
    model_config = ConfigDict(extra="allow")


UNKNOWN_FIELDS: dict[str, tuple[Any, Any, list[str]]] = {
    "none": (Person, {"name": "a", "address": {"street": "b"}}, []),
    "renamed": (Person, {"full_name": "a"}, ["full_name"]),
    "below": (Person, {"name": "a", "address": {"street": "b", "zip": 1}}, ["address.zip"]),
    "best form": (Person | Day, {"day": "a", "hour": 1}, ["hour"]),
    "open": (Extensible, {"anything": 1}, []),
    "dict": (dict[str, int], {"anything": 1}, []),
    "no object": (int, {"value": 1}, []),
    "any": (Any, {"anything": 1}, []),
}


@pytest.mark.parametrize(("kind", "value", "unknown"), UNKNOWN_FIELDS.values(), ids=UNKNOWN_FIELDS)
def test_unknown_fields_are_those_that_a_type_surely_lacks(kind: Any, value: Any, unknown: list[str]) -> None:
    assert unknown_fields(value, returned(kind)) == unknown
