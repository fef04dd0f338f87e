"""Default values of params: from the schema of a graph, they are those that the type of a flow gives."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any, Literal

import pytest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_serializer

from flowkit import Flow, cel
from flowkit.cli.json_files import read_flow
from flowkit.errors import GraphError
from flowkit.graph import params
from flowkit.graph.params import complete_params
from flowkit.graph.scheduled import evaluate_params
from flowkit.testing import run_graph, stub

NIGHT = "2026-11-26T03:00:00Z"
DAY = {"$cel": 'date(task.scheduled_at, "UTC")'}


class Window(BaseModel):
    start: date | None = None
    days: int = 7


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    age: int = 1


class Tree(BaseModel):
    size: int = 0
    children: list[Tree] = []


@dataclass
class Point:
    x: int
    marks: list[int] = field(default_factory=list)


class Report(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    window: Window
    other: Window = Window(days=3)
    made: Window = Field(default_factory=Window)
    windows: list[Window] = []
    by_name: dict[str, Window] = {}
    pet: Cat | Dog = Dog()
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = []
    city: str = Field("Rome", alias="cityName")
    shop: str = Field("", validation_alias=AliasChoices("store", "shop"), serialization_alias="shop")
    day: date = date(2026, 1, 31)
    point: Point | None = None
    tree: Tree = Tree()
    pair: tuple[Window, int] | None = None

    @field_serializer("day")
    def write(self, day: date) -> str:
        return f"{day:%Y-%m-%d}"


def flow_of(kind: Any) -> Flow[Any]:
    """Return a flow of one node with params of a type."""
    flow = Flow("report", params=kind)
    flow.external("a", "seen")
    return flow


FLOW = flow_of(Report)
GRAPH = FLOW.to_dict()


@pytest.mark.parametrize(
    "given",
    [
        {"window": {}},
        {"window": {"days": 1}, "windows": [{}, {"days": 2}], "by_name": {"a": {}}},
        {"window": {}, "pet": {"kind": "cat"}, "pets": [{"kind": "dog"}, {"kind": "cat", "lives": 1}]},
        {"window": {}, "city": "Oslo", "store": "a", "priority": 3},
        {"window": {}, "cityName": "Oslo", "shop": "a"},
        {"window": {}, "point": {"x": 1}, "tree": {"children": [{"children": [{}]}]}, "pair": [{}, 1]},
    ],
)
def test_schema_gives_the_default_values_that_the_type_gives(given: dict[str, Any]) -> None:
    before = repr(given)
    assert complete_params(GRAPH, given) == FLOW.dump_params(given)
    assert repr(given) == before
    assert complete_params(GRAPH, FLOW.dump_params(given)) == FLOW.dump_params(given)


def test_params_of_a_schedule_evaluate_to_those_of_any_task() -> None:
    given = {"window": {"start": DAY}}
    of_schedule = read_flow(FLOW, given, scheduled=True).params
    assert of_schedule["window"] == {"start": DAY, "days": 7}
    assert evaluate_params(of_schedule, NIGHT) == FLOW.dump_params({"window": {"start": "2026-11-26"}})


class Made(BaseModel):
    id: str = Field(default_factory=lambda: str(uuid.uuid4()))
    tags: list[str] = Field(default_factory=list)


class Outer(BaseModel):
    made: Made = Field(default_factory=Made)
    several: list[Made] = []


@pytest.mark.parametrize(
    ("kind", "given", "places"),
    [
        (Made, {}, ["params.id"]),
        (Outer, {}, ["params.made"]),
        (Outer, {"made": {}, "several": [{"id": "a"}, {}]}, ["params.made.id", "params.several[1].id"]),
    ],
)
def test_schedule_refuses_a_value_that_a_function_would_make_once(
    kind: Any, given: dict[str, Any], places: list[str]
) -> None:
    flow = flow_of(kind)
    with pytest.raises(GraphError) as refused:
        read_flow(flow, given, scheduled=True)
    assert [each.partition(" ")[0] for each in refused.value.problems] == places
    assert "default_factory" in str(refused.value) and '{"$cel": "task.scheduled_at"}' in str(refused.value)


def test_schedule_takes_such_a_value_as_an_expression_and_an_empty_list_by_default() -> None:
    given = {"id": {"$cel": "task.scheduled_at"}}
    assert read_flow(flow_of(Made), given, scheduled=True).params == {**given, "tags": []}


def test_flow_says_where_params_with_expressions_belong() -> None:
    for given in ({"window": {"start": DAY}}, {"window": {"start": cel("task.scheduled_at")}}):
        with pytest.raises(GraphError, match=r"params\.window\.start is an expression, .*Schedules\.create"):
            FLOW.dump_params(given)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "limit": {"type": "integer", "default": 10},
        "item": {"anyOf": [{"$ref": "#/$defs/item"}, {"type": "null"}]},
        "next": {"$ref": "#"},
        "either": {"oneOf": [{"$ref": "#/$defs/item"}, {"properties": {"b": {"default": 1}}}]},
        "all": {"allOf": [{"$ref": "#/$defs/item"}], "properties": {"b": {"default": 2}}},
    },
    "$defs": {"item": {"type": "object", "properties": {"a": {"default": None}}}},
}


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {}),
        ({"limit": None}, {"limit": None}),
        ({"item": {}}, {"item": {"a": None}}),
        ({"item": None}, {"item": None}),
        ({"next": {"next": {}}}, {"next": {"limit": 10, "next": {"limit": 10}}}),
        ({"either": {}}, {"either": {}}),
        ({"all": {}}, {"all": {"a": None, "b": 2}}),
        ({"item": "x", "next": []}, {"item": "x", "next": []}),
    ],
)
def test_default_values_of_a_hand_written_schema_are_added(
    given: dict[str, Any], added: dict[str, Any]
) -> None:
    assert complete_params({"params_schema": SCHEMA}, given) == {"limit": 10, **added}


@pytest.mark.parametrize(
    "schema",
    [None, True, {"properties": 3, "$defs": []}, {"$ref": "#"}, {"$ref": 3}, {"anyOf": [{"$ref": "#/x"}]}],
)
def test_schema_that_gives_no_default_values_leaves_params_as_they_are(schema: Any) -> None:
    given: dict[str, Any] = {"a": {}}
    assert complete_params({"params_schema": schema}, given) is given


def test_default_values_cannot_multiply_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(params, "_STEPS", 20_000)
    long = {
        "params_schema": {"additionalProperties": {"items": {"properties": {"a": {"default": "x" * 10_000}}}}}
    }
    with pytest.raises(GraphError, match=r"default values of graph\.params_schema add more than"):
        complete_params(long, {"a": [{}] * 10_000})
    many = {str(number): {"type": "string"} for number in range(100)}
    wide = {"params_schema": {"additionalProperties": {"items": {"properties": many}}}}
    with pytest.raises(GraphError, match="too many parts"):
        complete_params(wide, {"a": [{}] * 1_000})


async def test_task_of_a_graph_as_json_has_the_params_of_a_task_of_its_flow() -> None:
    given = {"window": {"days": 1}}
    found = [await run_graph(each, stub("seen"), params=given) for each in (FLOW, GRAPH)]
    assert found[0].document["params"] == found[1].document["params"] == FLOW.dump_params(given)
