"""Graphs that programs write: their JSON, what they refuse, and the lines that errors name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, computed_field

from flowkit import Flow, cel
from flowkit.errors import ConfigError, GraphError, TaskFailed
from flowkit.models import TaskResult, TaskStatus
from flowkit.testing import run_graph
from flowkit.worker import Batch, RoleHandler, RunContext, role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


class City(BaseModel):
    name: str


class Options(BaseModel):
    strict: bool = False


class Params(BaseModel):
    cities: list[City]
    options: Options | None = None
    limits: dict[str, int] = {}


class Vars(BaseModel):
    low: int = 0


class Page(BaseModel):
    city: str
    words: int


class Report(BaseModel):
    best: str


@role("fetcher")
async def fetch(city: City) -> Page:
    """Return the page of a city."""
    return Page(city=city.name, words=len(city.name))


@role("fetcher-of-many")
async def fetch_many(cities: list[City]) -> Page:
    """Return the page of several cities."""
    return Page(city=cities[0].name, words=len(cities))


class Rank(RoleHandler[Page, Page]):
    role = "ranker"

    async def process(self, item: Page, ctx: RunContext) -> Page:
        """Keep a page."""
        return item

    async def finalize(self, ctx: RunContext) -> Report:
        """Return the city with the longest page."""
        pages = [page async for page in self.results(ctx)]
        return Report(best=max(pages, key=lambda page: page.words).city)


@role("lister", key="name")
async def list_cities(count: int, prefix: str = "c") -> AsyncIterator[City]:
    """Yield cities."""
    for number in range(count):
        yield City(name=f"{prefix}{number}")


@role("scorer")
async def score(page: Page, *, factor: int = 1) -> Page:
    """Return a page with more words."""
    return Page(city=page.city, words=page.words * factor)


class Untyped(RoleHandler):
    role = "untyped"


class Reserved(RoleHandler):
    role = "delay"


@dataclass
class Holder:
    value: Any


async def publish(task_id: str, day: str) -> None:
    """Do nothing."""


def cities() -> Flow[Params]:
    """Return a flow with the kinds of nodes."""
    flow = Flow("cities", params=Params, variables=Vars)
    pages = flow.node("fetch", fetch).maps("params.cities", City, parallel=4)
    scores = flow.node("score", score).pulls(pages, streaming=True).input(factor=2).retry(5, backoff_sec=10)
    ok = flow.approval("ok", "Publish?").after(scores).when("vars.low < 3")
    best = flow.node("rank", Rank).pulls(scores).after(ok).gate("all_done")
    flow.function("publish", publish, day=cel("params.cities[0].name")).after(best)
    return flow


def test_a_flow_gives_the_documented_json() -> None:
    pull = {"input_adapter": "pull.from_artifacts"}
    graph = cities().to_dict()
    assert list(graph) == ["name", "params_schema", "nodes", "edges_ex"]
    assert graph["params_schema"] == Params.model_json_schema()
    assert graph["edges_ex"] == [{"from": "fetch", "to": "score", "mode": "async"}]
    assert graph["nodes"] == [
        {"node_id": "fetch", "type": "fetcher", "map": {"over": "params.cities", "parallel": 4}},
        {
            "node_id": "score",
            "type": "scorer",
            "depends_on": ["fetch"],
            "io": {"input_inline": {**pull, "factor": 2}},
            "retry_policy": {"max": 5, "backoff_sec": 10},
        },
        {
            "node_id": "ok",
            "type": "approval",
            "depends_on": ["score"],
            "when": "vars.low < 3",
            "io": {"input_inline": {"text": "Publish?"}},
        },
        {
            "node_id": "rank",
            "type": "ranker",
            "depends_on": ["score", "ok"],
            "fan_in": "all_done",
            "io": {"input_inline": {**pull, "input_args": {"from_nodes": ["score"]}}},
        },
        {
            "node_id": "publish",
            "type": "coordinator_fn",
            "depends_on": ["rank"],
            "io": {"fn": "publish", "fn_args": {"day": {"$cel": "params.cities[0].name"}}},
        },
    ]


async def test_a_flow_runs_in_this_process_with_its_own_handlers_and_functions() -> None:
    flow = cities()
    flow.nodes["ok"].when("true")
    run = await flow.test(Params(cities=[City(name="Rome"), City(name="Oslo Oslo")]))
    assert (run.status, run.reason) == ("finished", None)
    assert run.nodes["rank"].final == {"best": "Oslo Oslo"}
    assert sorted(each["words"] for each in run.nodes["score"].batches) == [8, 18]


async def test_a_stub_replaces_the_handler_of_its_role() -> None:
    @role("fetcher")
    async def stub(city: City) -> Page:
        return Page(city="stub", words=1)

    flow = cities()
    flow.nodes["ok"].when("true")
    run = await flow.test(Params(cities=[City(name="Rome")]), stub)
    assert run.nodes["rank"].final == {"best": "stub"}


def test_a_typed_node_that_only_follows_others_names_no_data_of_theirs() -> None:
    flow = Flow("f")
    first = flow.node("first", list_cities).input(count=1)
    flow.node("second", list_cities).after(first).input(count=2)
    flow.node("third", Untyped).after(first)
    flow.node("fourth", Untyped).after(first).own_input()
    inputs = [each.get("io", {}).get("input_inline") for each in flow.to_dict()["nodes"]]
    noop = {"input_adapter": "noop"}
    assert inputs == [{"count": 1}, {**noop, "count": 2}, None, noop]


def test_handlers_and_functions_are_those_of_the_program() -> None:
    flow = cities()
    assert flow.handlers["fetcher"] is fetch
    assert isinstance(flow.handlers["ranker"], Rank)
    assert flow.handlers["ranker"] is flow.handlers["ranker"]
    assert flow.functions == {"publish": publish}
    assert list(flow.nodes) == ["fetch", "score", "ok", "rank", "publish"]


# --- params


def test_params_get_their_default_values_and_keep_unknown_keys() -> None:
    flow = cities()
    wanted: dict[str, Any] = {"cities": [{"name": "Rome"}], "options": None, "limits": {}}
    assert flow.dump_params(Params(cities=[City(name="Rome")])) == wanted
    given = {"cities": [{"name": "Rome"}], "priority": 3}
    assert flow.dump_params(given) == {**wanted, "priority": 3}
    assert Flow("free").dump_params({"day": "2026-01-31"}) == {"day": "2026-01-31"}


async def test_a_test_of_a_flow_takes_a_value_of_its_params_and_adds_their_defaults() -> None:
    flow = cities()
    flow.nodes["ok"].when("true")
    run = await run_graph(flow, params=Params(cities=[City(name="Rome")]))
    run.assert_finished()
    assert run.document["params"] == {"cities": [{"name": "Rome"}], "options": None, "limits": {}}


def test_params_that_do_not_fit_name_the_place_and_the_value() -> None:
    with pytest.raises(GraphError, match=r"^params\.cities\[0\]\.name is 7; it must be a text$"):
        cities().dump_params({"cities": [{"name": 7}]})


def test_params_may_be_a_dataclass() -> None:
    @dataclass
    class Day:
        day: str
        count: int = 3

    flow = Flow("f", params=Day)
    flow.node("a", Untyped).when("params.count > 2")
    assert flow.to_dict()["params_schema"]["required"] == ["day"]
    assert flow.dump_params(Day(day="x")) == {"day": "x", "count": 3}


# --- submission


class Starter:
    """Records what it starts, as a Coordinator would."""

    def __init__(self, error: Exception | None = None) -> None:
        self.started: list[dict[str, Any]] = []
        self._error = error

    async def create_task(
        self, *, params: dict[str, Any], graph: dict[str, Any], task_id: str | None = None
    ) -> str:
        """Record a task."""
        self.started.append({"params": params, "graph": graph})
        return task_id or "new"

    def result(self, task_id: str, timeout: float | None = None) -> Awaitable[TaskResult]:
        """Return the result of a task that has finished, or raise its error."""
        return self._end(task_id)

    async def _end(self, task_id: str) -> TaskResult:
        if self._error is not None:
            raise self._error
        return TaskResult(task_id=task_id, status=TaskStatus.FINISHED)


async def test_a_flow_is_submitted_as_its_json() -> None:
    flow, starter = cities(), Starter()
    params = Params(cities=[City(name="Rome")])
    assert await flow.submit(starter, params) == "new"
    assert await flow.submit(starter, params, task_id="mine") == "mine"
    assert starter.started == [{"params": flow.dump_params(params), "graph": flow.to_dict()}] * 2


async def test_a_run_returns_the_result_or_raises_the_failure() -> None:
    flow, params = cities(), Params(cities=[])
    assert (await flow.run(Starter(), params, task_id="t")).status is TaskStatus.FINISHED
    with pytest.raises(TaskFailed):
        await flow.run(Starter(TaskFailed("t", "it failed")), params)


# --- errors


def line() -> int:
    """Return the line that calls this function."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def refusal(flow: Flow[Any]) -> list[str]:
    """Return the problems of a flow, without their places."""
    with pytest.raises(GraphError) as caught:
        flow.to_dict()
    problems = [each.partition(": ") for each in caught.value.problems]
    assert {Path(place.rpartition(":")[0]).name for place, _, _ in problems} == {Path(__file__).name}
    return [text for _, _, text in problems]


def test_an_error_names_the_line_of_the_part_of_the_node() -> None:
    flow = Flow("f", params=Params)
    node = flow.node("a", Untyped)
    node.input(day=cel("params.cities"), city=cel("params.citties"))
    first = line() - 1
    node.when("params.cities &&")
    with pytest.raises(GraphError) as caught:
        flow.to_dict()
    assert f"test_flow.py:{first + 2}: node 'a': when: the expression is incomplete" in str(caught.value)
    node.when("true")
    with pytest.raises(GraphError) as caught:
        flow.to_dict()
    assert f"test_flow.py:{first}: node 'a': io.input_inline.city: params has no 'citties'" in str(
        caught.value
    )


def test_an_error_of_a_node_or_of_the_graph_names_its_line() -> None:
    flow = Flow("f", deadline_sec=-1)
    created = line() - 1
    with pytest.raises(GraphError, match=rf"test_flow\.py:{created}: graph\.nodes must be a list"):
        flow.to_dict()
    flow.approval("a").timeout(3)
    with pytest.raises(GraphError) as caught:
        flow.to_dict()
    assert [each.rpartition("/")[2].split(": ")[0] for each in caught.value.problems] == [
        f"test_flow.py:{created}",
        f"test_flow.py:{created + 4}",
    ]


ACCESSES: list[tuple[str, str]] = [
    ("params.citties", "params has no 'citties'; did you mean 'cities'?"),
    ("params.options.strct", "params.options has no 'strct'; did you mean 'strict'?"),
    ("has(params.nothing)", "params has no 'nothing'; it has cities, limits and options"),
    ("params.cities.exists(c, c.name == params.x)", "params has no 'x'"),
    ("vars.lo > 1", "vars has no 'lo'; did you mean 'low'?"),
]


@pytest.mark.parametrize(("text", "problem"), ACCESSES)
def test_an_expression_reads_only_what_the_types_of_params_and_variables_have(
    text: str, problem: str
) -> None:
    flow = Flow("f", params=Params, variables=Vars)
    first = flow.node("a", Untyped)
    nodes = [first.when(text)]
    assert f"node 'a': when: {problem}" in refusal(flow)[0]
    nodes[0].when("true")
    flow.node("b", Untyped).after(first, when=text)
    assert f"node 'b': the edge from 'a': when: {problem}" in refusal(flow)[0]


@pytest.mark.parametrize(
    "text", ["params.limits.x > 1", "params.priority == 3", "has(params.options.strict)", "vars.low > 1"]
)
def test_an_expression_may_read_what_the_types_have_or_leave_open(text: str) -> None:
    flow = Flow("f", params=Params, variables=Vars)
    flow.node("a", Untyped).when(text)
    assert flow.to_dict()
    free = Flow("free")
    free.node("a", Untyped).when("params.anything == vars.anything")
    assert free.to_dict()


def test_the_items_of_a_map_have_the_type_of_the_list() -> None:
    flow = Flow("f", params=Params)
    node: Any = flow.node("a", Untyped)
    node.maps("params.cities", Page)
    assert refusal(flow) == [
        "node 'a': map.over 'params.cities' has items of the type City, but the node reads Page"
    ]
    node.maps("params.options", Options)
    assert refusal(flow) == ["node 'a': map.over 'params.options' is Options, not a list"]
    for over, kind in (
        ("params.cities", City),
        ("params.cities", dict),
        ("vars.list", Page),
        ("params.cities.filter(c, c.name != '')", Page),
    ):
        assert node.maps(over, kind) and flow.to_dict()


def test_a_map_without_a_type_is_compared_with_the_handler() -> None:
    flow = Flow("f", params=Params)
    flow.node("a", fetch).maps("params.cities")
    flow.node("b", fetch_many).maps("params.cities", batch_size=3)
    assert flow.to_dict()
    flow.node("c", score).maps("params.cities")
    assert refusal(flow) == [
        "node 'c': map.over 'params.cities' has items of the type City, but the node reads Page"
    ]


class Named(BaseModel):
    model_config = ConfigDict(populate_by_name=True, extra="forbid")
    city_name: str = Field(alias="cityName")
    count: int = 1


def test_params_with_aliases_have_their_names_in_json() -> None:
    flow = Flow("f", params=Named)
    flow.node("a", Untyped).when("params.cityName != ''")
    assert flow.to_dict()
    wanted = {"cityName": "Rome", "count": 1}
    assert flow.dump_params({"city_name": "Rome"}) == flow.dump_params({"cityName": "Rome"}) == wanted


class Publisher:
    async def publish(self, task_id: str) -> None:
        """Do nothing."""


def test_a_method_is_one_function_however_often_it_is_read() -> None:
    flow, publisher = Flow("f"), Publisher()
    flow.function("a", publisher.publish)
    flow.function("b", publisher.publish)
    with pytest.raises(GraphError, match="another function of the flow has the name 'publish'"):
        flow.function("c", publish, day="x")


def test_keys_of_a_graph_are_no_keys_of_ones_own() -> None:
    with pytest.raises(GraphError, match=r"test_flow\.py:\d+: extra has 'nodes'"):
        Flow("f", extra={"nodes": []})


INPUTS: list[tuple[Any, dict[str, Any], str]] = [
    (list_cities, {"count": 1, "prefx": "x"}, "reads no input 'prefx'; did you mean 'prefix'?"),
    (list_cities, {"count": "many"}, "input 'count' is 'many': 'many' is not of type 'integer'"),
    (list_cities, {}, "requires the input 'count'; give it with input(count=…)"),
    (fetch, {"nme": "Rome"}, "reads no input 'nme'; did you mean 'name'?"),
]


@pytest.mark.parametrize(("handler", "given", "problem"), INPUTS)
def test_inputs_are_those_that_the_handler_reads(handler: Any, given: dict[str, Any], problem: str) -> None:
    flow = Flow("f")
    flow.node("a", handler).input(**given)
    assert problem in refusal(flow)[0]


class Item(BaseModel):
    name: str


class Prepared(RoleHandler[Item, Item]):
    role = "prepared"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield a batch for each name in the input."""
        for name in loaded["input_inline"]["names"]:
            yield Batch(payload={"name": name})

    async def process(self, item: Item) -> Item:
        return item


class LoadedSource(RoleHandler[Item, Item]):
    role = "loaded"
    key = "name"

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Return the input of `produce`."""
        return {"name": input_inline["names"][0]}

    async def produce(self, given: Item) -> AsyncIterator[Item]:
        yield given


async def test_inputs_of_a_handler_that_prepares_its_items_are_its_own_affair() -> None:
    flow = Flow("f")
    flow.node("a", Prepared).input(names=["Rome", "Oslo"])
    flow.node("b", LoadedSource).input(names=["Rome"])
    run = await flow.test()
    run.assert_finished()
    assert [run.nodes[name].batches for name in "ab"] == [
        [{"name": "Rome"}, {"name": "Oslo"}],
        [{"name": "Rome"}],
    ]


def test_inputs_by_expression_are_checked_by_name_only() -> None:
    flow = Flow("f")
    flow.node("a", list_cities).input(count=cel("size(params.cities)"))
    flow.node("b", fetch).input(name="Rome")
    flow.node("c", Untyped).input(anything=[1, {"deep": cel("params.x")}])
    nodes = flow.to_dict()["nodes"]
    assert nodes[2]["io"]["input_inline"] == {"anything": [1, {"deep": {"$cel": "params.x"}}]}


def test_params_are_inputs_under_their_names() -> None:
    flow = Flow("f", params=Params)
    flow.node("a", Untyped).from_params("cities", "limits").input(day="today")
    inline = flow.to_dict()["nodes"][0]["io"]["input_inline"]
    assert inline == {
        "cities": {"$cel": "params.cities"},
        "limits": {"$cel": "params.limits"},
        "day": "today",
    }
    flow.node("b", Untyped).from_params("citties")
    assert "params has no 'citties'; did you mean 'cities'?" in refusal(flow)[0]


def test_results_fit_the_items_of_those_that_pull_them() -> None:
    flow = Flow("f")
    city: Any = flow.node("city", list_cities).input(count=1)
    flow.node("score", score).pulls(city)
    pulled = line() - 1
    with pytest.raises(
        GraphError, match=rf"test_flow\.py:{pulled}: node 'score' pulls from 'city', but the output"
    ):
        flow.to_dict()


def test_an_input_that_code_converts_may_have_any_form() -> None:
    @role("loader", key="name")
    async def load(day: Annotated[int, BeforeValidator(int)]) -> AsyncIterator[City]:
        yield City(name=str(day))

    flow = Flow("f")
    flow.node("a", load).input(day="31")
    assert flow.to_dict()


def other_node() -> Any:
    """Return a node of another flow."""
    return Flow("other").node("x", Untyped)


WRONG: list[tuple[Callable[[Any, Any], object], str]] = [
    (lambda flow, a: flow.node("b", Rank).pulls("a"), "pulls takes nodes of the flow, not the text 'a'"),
    (lambda flow, a: flow.node("b", Rank).after(Rank), "after takes nodes of the flow, not a type"),
    (lambda flow, a: flow.node("b", Rank).pulls(other_node()), "pulls names 'x' of another flow"),
    (lambda flow, a: a.after(flow.node("b", Rank)), "after names 'b', which is created later"),
    (lambda flow, a: a.after(a), "after names 'a', the node itself"),
    (lambda flow, a: a.pulls(flow.node("b", Rank)), "pulls names 'b', which is created later"),
    (lambda flow, a: flow.node("b", Rank).routes(on_success=[a]), "'a', which is not created later"),
    (lambda flow, a: flow.node("b", Rank).pulls([a]), "not a list; pass them one by one"),
    (lambda flow, a: a.routes(on_failure=flow.node("b", Rank)), "takes a list of nodes, not a FlowNode"),
    (lambda flow, a: a.routes(on_failure=iter([a])), "takes a list of nodes, not a list_iterator"),
    (lambda flow, a: a.routes(on_failure=None), "takes a list of nodes, not a NoneType"),
    (lambda flow, a: flow.delay("b", object()), "delay cannot be written as JSON"),
    (lambda flow, a: flow.approval("b", cast("Any", City)), "approval cannot be written as JSON"),
    (lambda flow, a: a.extra({"x-own": 1}, at="edges"), "the part 'edges'; it must be one of node, io, map"),
    (lambda flow, a: flow.node("b", Rank).gate("most"), "gate is 'most'; it must be 'all', 'any'"),
    (lambda flow, a: flow.node("b", Rank).gate(True), "gate is True"),
    (lambda flow, a: flow.node("b", City), "the class City is no handler"),
    (lambda flow, a: flow.node("b", publish), "the function publish is no handler"),
    (lambda flow, a: flow.node("b", RoleHandler), "handler RoleHandler: has no role"),
    (lambda flow, a: flow.node("b", "ranker"), "a str is no handler"),
    (lambda flow, a: flow.node("b", Reserved), "handler Reserved: role 'delay' cannot be a role's name"),
    (
        lambda flow, a: a.input(given=[{"q": {"$cel": "a"}}]),
        "{'$cel': 'a'} would be an expression, not a value",
    ),
    (lambda flow, a: flow.function("b", "x", q={"$cel": "1"}), "not a value; write cel('1') for one"),
    (lambda flow, a: a.input(given=Holder(value=cel("1"))), "input cannot be written as JSON"),
    (lambda flow, a: flow.node("b", Untyped()), "role 'untyped' already has the handler Untyped, at"),
    (lambda flow, a: flow.node("a", Untyped), "node id 'a' is already used, at"),
    (lambda flow, a: a.input(input_adapter="noop"), "input has 'input_adapter'; call pulls"),
    (lambda flow, a: a.input(given=object()), "input cannot be written as JSON"),
    (
        lambda flow, a: flow.node("b", Rank).after(a).extra({"mode": 1}, at=a),
        "extra has 'mode', which is no key",
    ),
    (lambda flow, a: a.extra({"own": 1}), "extra has the key 'own'; begin your own keys with 'x-'"),
    (lambda flow, a: flow.function("b", lambda task_id: None), "without a name"),
    (lambda flow, a: flow.node("b", Rank).pulls(a).rechunks(a, size=2), "pulls and rechunks exclude"),
]


@pytest.mark.parametrize(("program", "problem"), WRONG)
def test_a_wrong_call_is_refused_at_its_line(program: Callable[[Any, Any], object], problem: str) -> None:
    flow = Flow("f")
    first = flow.node("a", Untyped)
    with pytest.raises(GraphError) as caught:
        program(flow, first)
    (text,) = caught.value.problems
    assert problem in text
    assert f"test_flow.py:{program.__code__.co_firstlineno}: node " in text


def test_a_handler_that_needs_arguments_is_given_as_an_instance() -> None:
    class Slow(RoleHandler):
        role = "slow"

        def __init__(self, url: str) -> None:
            self.url = url

    flow, needs_url = Flow("f"), cast("Any", Slow)
    flow.node("a", needs_url)
    with pytest.raises(ConfigError, match="Slow cannot be created without arguments.*pass an instance"):
        flow.to_dict()
    other = Flow("g")
    other.node("a", Slow("x"))
    assert other.to_dict()


def test_params_that_are_no_object_or_a_secret_are_refused() -> None:
    with pytest.raises(GraphError, match="whose JSON is of type 'array'; use a model"):
        Flow("f", params=list[int])

    class Login(BaseModel):
        password: SecretStr

    class Logins(BaseModel):
        user: str
        passwords: list[SecretStr]

    for kind, name in ((Login, "password"), (Logins, "passwords")):
        with pytest.raises(GraphError, match=rf"test_flow\.py:\d+: params has the secret '{name}'"):
            Flow("f", params=kind)


def test_what_is_no_type_or_no_graph_is_refused() -> None:
    wrong: Any = "Params"
    with pytest.raises(GraphError, match=r"test_flow\.py:\d+: params is 'Params', which pydantic cannot use"):
        Flow("f", params=wrong)
    wrong = [1]
    with pytest.raises(GraphError, match="graph must be an object with 'nodes'"):
        Flow.from_dict(wrong)


class Hidden(BaseModel):
    day: str = Field("monday", exclude=True)


class Sent(BaseModel):
    day: str = Field("monday", serialization_alias="sentDay")


class Received(BaseModel):
    day: str = Field("monday", validation_alias="receivedDay")


class Outer(BaseModel):
    inner: Sent


@pytest.mark.parametrize(
    ("kind", "name"), [(Hidden, "day"), (Sent, "day"), (Received, "day"), (Outer, "day")]
)
def test_params_whose_json_would_lose_a_field_are_refused(kind: Any, name: str) -> None:
    with pytest.raises(GraphError, match=rf"test_flow\.py:\d+: params has the field '{name}'.*use 'alias'"):
        Flow("f", params=kind)


def test_params_without_json_are_refused() -> None:
    class Raw(BaseModel):
        raw: bytes

    with pytest.raises(GraphError, match="params cannot be written as JSON: 'utf-8' codec can't decode"):
        Flow("f", params=Raw).dump_params(Raw(raw=b"\xff"))


def test_the_arguments_of_a_function_are_those_that_it_has() -> None:
    async def repair(task_id: str, failed_nodes: dict[str, Any], day: str) -> None: ...

    flow = Flow("f")
    flow.function("a", publish, dya="x")
    flow.function("b", repair, day=cel("params.day"))
    with pytest.raises(GraphError, match=r"test_flow\.py:\d+: node 'a': io.fn_args.*'day'") as caught:
        flow.to_dict()
    assert len(caught.value.problems) == 1


def test_a_function_that_is_refused_leaves_no_node() -> None:
    flow = Flow("f")
    with pytest.raises(GraphError):
        flow.function("a", lambda task_id: None)
    flow.function("a", publish, day="x")
    assert flow.to_dict()


def test_params_whose_json_cannot_be_read_back_are_refused() -> None:
    with pytest.raises(GraphError, match="their JSON cannot be read back: params.cities is missing"):
        Flow("f", params=Params).dump_params(Params.model_construct(limits={}))


def test_params_with_an_alias_and_computed_fields_have_their_names() -> None:
    class Even(BaseModel):
        model_config = ConfigDict(extra="forbid")
        city_name: str = Field(alias="cityName")

        @computed_field
        def chars(self) -> int:
            return len(self.city_name)

    assert Flow("f", params=Even).dump_params({"cityName": "Rome"}) == {"cityName": "Rome"}


async def test_a_flow_of_json_runs_with_the_handlers_that_it_gets() -> None:
    graph = cities().to_dict()
    graph["nodes"] = graph["nodes"][:2]
    graph["edges_ex"] = []
    params = {"cities": [{"name": "Rome"}]}
    run = await Flow.from_dict(graph).test(params, fetch, score)
    other = await run_graph(graph, fetch, score, params=params)
    assert run.nodes["score"].batches == other.nodes["score"].batches == [{"city": "Rome", "words": 8}]
