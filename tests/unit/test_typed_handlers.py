"""Typed handlers in nodes: where items come from, what is stored for results, sources, failures, shards, processes."""

from __future__ import annotations

import datetime
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, SecretStr, computed_field, field_serializer
from tests.unit.handler_runs import artifacts, finished, node, rows

from flowkit.activities.process_pool import ProcessPool
from flowkit.errors import ConfigError
from flowkit.testing import memory_database, run_graph
from flowkit.testing.context import handler_context
from flowkit.worker import (
    Batch,
    BatchFailure,
    BatchResult,
    FinalizeResult,
    RoleHandler,
    RunContext,
    Worker,
    WorkerConfig,
    role,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from flowkit.testing import GraphRun

PULLS = {"input_adapter": "pull.from_artifacts"}
NEVER_AGAIN: dict[str, Any] = {"retry_policy": {"max": 0}}
SOON: dict[str, Any] = {"retry_policy": {"max": 2, "backoff_sec": 0.1}}


class Page(BaseModel):
    url: str
    text: str = ""


class Words(BaseModel):
    url: str
    words: int


class Total(BaseModel):
    words: int


class Count(RoleHandler[Page, Words]):
    role = "count"

    async def process(self, item: Page, ctx: RunContext) -> Words:
        return Words(url=item.url, words=len(item.text.split()))

    async def finalize(self, ctx: RunContext) -> Total:
        return Total(words=sum([each.words async for each in self.results(ctx)]))


@role("crawl", key="url")
async def crawl(pages: dict[str, str]) -> AsyncIterator[Page]:
    for url, text in pages.items():
        yield Page(url=url, text=text)


PAGES = {"a": "one two", "b": "three"}


def crawling(**fields: Any) -> dict[str, Any]:
    """Return a node that yields two pages."""
    return node("crawl", "crawl", inline={"pages": PAGES}, **fields)


def pulling(role: str, parent: str = "crawl", **fields: Any) -> dict[str, Any]:
    """Return a node that pulls from another one."""
    return node(role, role, parent, inline={**PULLS, **fields.pop("inline", {})}, **fields)


async def error_of(run: GraphRun) -> str:
    """Return why the only failed node has failed."""
    [error] = [each.error for each in run.nodes.values() if each.status == "failed"]
    assert error is not None
    return error


async def failed(*handlers: RoleHandler, nodes: list[dict[str, Any]], **options: Any) -> str:
    """Return the error of the node that fails."""
    return await error_of(await run_graph({"nodes": nodes}, *handlers, **options))


# --- items and results --------------------------------------------------------------------------------------------


async def test_items_of_a_source_are_pulled_as_models_and_the_typed_result_of_finalize_is_stored() -> None:
    run = await finished([Count(), crawl], crawling(), pulling("count"))
    assert run.nodes["count"].batches == [{"url": "a", "words": 2}, {"url": "b", "words": 1}]
    assert run.nodes["count"].final == {"words": 3}
    assert sorted(row["batch_uid"] for row in await rows(run, "crawl")) == ["a", "b"]


async def test_typed_handlers_and_those_for_batches_mix_in_one_graph() -> None:
    class Double(RoleHandler):
        role = "double"

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            meta = batch.payload["meta"]
            return BatchResult(success=True, metrics={**meta, "text": f"{meta['text']} {meta['text']}"})

    run = await finished(
        [Count(), Double(), crawl], crawling(), pulling("double"), pulling("count", "double")
    )
    assert run.nodes["count"].final == {"words": 6}


async def test_results_that_are_no_objects_are_stored_as_value_and_read_again() -> None:
    @role("length")
    def length(page: Page) -> int:
        return len(page.text)

    @role("even")
    async def even(number: int) -> Literal["even", "odd"]:
        return "odd" if number % 2 else "even"

    run = await finished([crawl, length, even], crawling(), pulling("length"), pulling("even", "length"))
    assert run.nodes["length"].batches == [{"value": 7}, {"value": 5}]
    assert run.nodes["even"].batches == [{"value": "odd"}, {"value": "odd"}]


async def test_node_that_neither_pulls_nor_maps_processes_its_inline_input() -> None:
    single = node("count", "count", inline={"url": "a", "text": "x y", "input_adapter": "noop"})
    assert (await finished([Count()], single)).nodes["count"].batches == [{"url": "a", "words": 2}]


async def test_remediator_may_name_the_failures_that_started_it_as_a_field() -> None:
    class Failed(BaseModel):
        model_config = ConfigDict(extra="forbid")
        failed_nodes: list[dict[str, Any]]
        text: str = "default"

    @role("rescue")
    async def rescue(given: Failed) -> list[str]:
        return [each["node_id"] for each in given.failed_nodes]

    @role("plain")
    async def plain(page: Page) -> Page:
        return page

    @role("breaks")
    async def breaks(page: Page) -> Page:
        raise ValueError

    routing = {"routing": {"on_failure": ["rescue", "plain"]}}
    nodes = [
        node("breaks", "breaks", inline={"url": "a"}, **routing),
        node("rescue", "rescue", "breaks"),
        node("plain", "plain", "breaks", inline={"url": "b"}),
    ]
    run = await run_graph({"nodes": nodes}, rescue, breaks, plain)
    assert run.nodes["rescue"].batches == [{"value": ["breaks"]}]
    assert run.nodes["plain"].batches == [{"url": "b", "text": ""}]


async def test_map_passes_each_item_or_a_list_of_them() -> None:
    @role("one")
    async def one(numbers: list[int]) -> int:
        return sum(numbers)

    @role("many")
    async def many(numbers: list[list[int]]) -> list[int]:
        return [sum(each) for each in numbers]

    @role("plain")
    async def plain(number: int) -> int:
        return number

    run = await finished(
        [one, many, plain],
        node("one", "one", map={"over": "[[1, 2], [3]]"}),
        node("many", "many", map={"over": "[[1, 2], [3], [4]]", "batch_size": 2}),
        node("plain", "plain", map={"over": "[7, 8]"}),
    )
    assert run.nodes["one"].batches == [{"value": 3}, {"value": 3}]
    assert run.nodes["many"].batches == [{"value": [3, 3]}, {"value": [4]}]
    assert run.nodes["plain"].batches == [{"value": 7}, {"value": 8}]


async def test_map_with_a_batch_size_says_that_the_type_must_be_a_list() -> None:
    @role("one")
    async def one(number: int) -> int:
        return number

    error = await failed(one, nodes=[node("one", "one", map={"over": "[1, 2]", "batch_size": 2})])
    assert "with map.batch_size, a batch is a list, so the type of the item must be list[…]" in error


async def test_chunks_are_lists() -> None:
    class Lines(BaseModel):
        lines: list[str]

    @role("read", key=lambda each: each.lines[0])
    def read(count: int) -> Iterator[Lines]:
        yield Lines(lines=[f"line {number}" for number in range(count)])

    @role("chunk")
    async def chunk(lines: list[str]) -> int:
        return len(lines)

    args = {"size": 2, "meta_list_key": "lines"}
    chunked = {"input_adapter": "pull.from_artifacts.rechunk:size", "input_args": args}
    run = await finished(
        [read, chunk],
        node("read", "read", inline={"count": 3}),
        node("chunk", "chunk", "read", inline=chunked),
    )
    assert run.nodes["chunk"].batches == [{"value": 2}, {"value": 1}]


async def test_dates_sets_and_strict_models_pass_through_their_json() -> None:
    class Strict(BaseModel):
        model_config = ConfigDict(strict=True)
        day: datetime.date
        tags: set[str] = Field(alias="labels")

    @role("make", key="day")
    async def make() -> AsyncIterator[Strict]:
        yield Strict.model_validate({"day": datetime.date(2026, 1, 31), "labels": {"x"}})

    @role("same")
    async def same(given: Strict) -> Strict:
        return given

    run = await finished([make, same], node("make", "make"), pulling("same", "make"))
    assert run.nodes["same"].batches == [{"day": "2026-01-31", "labels": ["x"]}]
    assert [row["batch_uid"] for row in await rows(run, "make")] == ["2026-01-31"]


async def test_dataclasses_and_unions_with_none_are_types_too() -> None:
    @dataclass
    class Value:
        value: int

    @role("maybe", key="value")
    async def maybe() -> AsyncIterator[Value]:
        for number in range(3):
            yield Value(number)

    @role("optional")
    async def optional(given: Value) -> Value | int | None:
        return given if given.value == 0 else given.value if given.value == 1 else None

    @role("last")
    async def last(given: Value | int | None) -> str:
        return repr(given)

    run = await finished(
        [maybe, optional, last],
        node("maybe", "maybe"),
        pulling("optional", "maybe"),
        pulling("last", "optional"),
    )
    values = [each["value"].rpartition(".")[2] for each in run.nodes["last"].batches]
    assert values == ["Value(value=0)", "1", "None"]


async def test_process_may_return_a_batch_result_or_raise_a_batch_failure() -> None:
    @role("choose")
    async def choose(page: Page) -> Page | BatchResult:
        if page.url == "a":
            return BatchResult(success=True, metrics={"kept": True})
        raise BatchFailure("no text", reason_code="no_text", permanent=True)

    nodes = [crawling(), pulling("choose", on_batch_failure={"attempts": 3, "max": 1})]
    run = await run_graph({"nodes": nodes}, crawl, choose)
    assert run.nodes["choose"].batches == [{"kept": True}]
    [quarantined] = await artifacts(run, node_id="choose", status="failed")
    assert (quarantined["error"], quarantined["quarantined"]["error"]) == ("no_text", "no text")


async def test_batch_failure_in_any_hook_has_its_code_and_no_classify_error() -> None:
    class Fails(RoleHandler):
        role = "fails"

        async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
            raise BatchFailure("quota used", reason_code="quota")

        def classify_error(self, exc: BaseException) -> tuple[str, bool]:
            raise AssertionError

    assert (await failed(Fails(), nodes=[node("fails", "fails", **NEVER_AGAIN)])) == "quota: quota used"


# --- the context, parameters --------------------------------------------------------------------------------------


async def test_context_has_the_batch_and_the_params_as_a_model() -> None:
    class Params(BaseModel):
        day: str

    seen: list[Any] = []

    @role("look")
    async def look(page: Page, *, ctx: RunContext, lang: str = "en") -> Page:
        assert ctx.params_as(Params) is ctx.params_as(Params)
        seen.append((ctx.batch.batch_uid, ctx.batch.payload["from_node"], ctx.params_as(Params).day, lang))
        return page

    @role("own")
    async def own(page: Page, ctx: RunContext) -> Page:
        seen.append(len(ctx.batch.batch_uid or ""))
        return page

    nodes = [
        crawling(),
        pulling("look", inline={"lang": "de"}),
        node("own", "own", "look", inline={"url": "x", "input_adapter": "noop"}),
    ]
    run = await run_graph({"nodes": nodes}, crawl, look, own, params={"day": "monday"})
    assert run.status == "finished"
    assert seen == [("a", "crawl", "monday", "de"), ("b", "crawl", "monday", "de"), 40]


async def test_params_that_do_not_fit_are_bad_input() -> None:
    class Params(BaseModel):
        day: int

    @role("look")
    async def look(page: Page, ctx: RunContext) -> Page:
        assert ctx.params_as(Params).day
        return page

    error = await failed(crawl, look, nodes=[crawling(), pulling("look")], params={"day": "x"})
    assert error.startswith("bad_input: the params of the task are not valid Params: day is 'x'; it must be")


@pytest.mark.parametrize(
    ("inline", "problem"),
    [
        ({"limit": 3}, "does not fit the parameters of fetch: folder is missing"),
        ({"folder": "x", "limit": "many"}, "limit is 'many'; it must be a whole number"),
        ({"folder": "x", "limmit": 3}, "fetch has no parameter limmit; its parameters are folder, limit"),
    ],
)
async def test_wrong_parameters_of_a_source_are_named(inline: dict[str, Any], problem: str) -> None:
    @role("fetch", key="url")
    async def fetch(folder: str, limit: int = 10) -> AsyncIterator[Page]:
        for number in range(limit):
            yield Page(url=f"{folder}/{number}")

    error = await failed(fetch, nodes=[node("fetch", "fetch", inline=inline)])
    assert error.startswith("bad_input: io.input_inline of node 'fetch'")
    assert problem in error


async def test_wrong_parameter_of_a_function_is_named() -> None:
    @role("look")
    def look(page: Page, *, depth: int) -> Page:
        return page

    error = await failed(crawl, look, nodes=[crawling(), pulling("look", inline={"depth": "deep"})])
    assert "does not fit the parameters of look: depth is 'deep'; it must be a whole number" in error


# --- values that do not validate ----------------------------------------------------------------------------------


async def test_item_that_does_not_validate_is_bad_input_with_node_batch_field_value_and_what_is_expected() -> (
    None
):
    class Strange(BaseModel):
        url: int
        text: list[str]
        size: int
        kind: str

    @role("strange")
    async def strange(given: Strange) -> Strange:
        return given

    error = await failed(crawl, strange, nodes=[crawling(), pulling("strange", **SOON)])
    assert error == (
        "bad_input: batch 'a' of node 'strange' from node 'crawl' is not a valid Strange: "
        "url is 'a'; it must be a whole number; text is 'one two'; it must be a list; size is missing; kind is missing"
    )


async def test_hidden_values_and_secrets_do_not_appear_in_errors() -> None:
    class Login(BaseModel):
        user: int
        password: SecretStr = Field(min_length=100)
        nested: int

    @role("login")
    async def login(given: Login) -> int:
        return given.user

    secret = "correct horse battery staple" * 20
    inline = {"user": {"$cel": "params.user"}, "password": "pass-me-not", "nested": {"deep": "pass-me-not"}}
    given = node("login", "login", inline=inline)
    run = await run_graph({"nodes": [given]}, login, params={"user": secret})
    error = await error_of(run)
    assert "user is" in error and "password is (hidden)" in error and "nested is (hidden)" in error
    assert "correct horse" not in error and "pass-me" not in error


async def test_result_that_does_not_validate_is_a_schema_mismatch() -> None:
    @role("forgets")
    async def forgets(page: Page) -> Page:
        forgotten: dict[str, Page] = {}
        result: Any = forgotten.get("page")
        found: Page = result
        return found

    @role("invents")
    async def invents(page: Page) -> Words:
        return Words.model_construct(url=3, words="x")

    nodes = [crawling(), pulling("forgets", **SOON)]
    run = await run_graph({"nodes": nodes}, crawl, forgets)
    assert run.nodes["forgets"].attempts == 1
    error = await error_of(run)
    assert error.startswith(
        "schema_mismatch: the result of forgets for batch 'a' of node 'forgets' is not a valid Page"
    )
    assert error.endswith("does the function return its result?")
    error = await failed(crawl, invents, nodes=[crawling(), pulling("invents")])
    assert error == (
        "schema_mismatch: the result of invents for batch 'a' of node 'invents' is not a valid Words: "
        "url is 3; it must be a text; words is 'x'; it must be a whole number"
    )


# --- sources ------------------------------------------------------------------------------------------------------


class Raw(BaseModel):
    raw: bytes


class Failing(BaseModel):
    words: int

    @field_serializer("words")
    def write(self, words: int) -> str:
        raise RuntimeError(f"no {words}")


class Loose(BaseModel):
    value: Any


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (Loose(value={"\ud800": 1}), "not a valid Loose: it has a text with half of a surrogate pair"),
        (Loose(value=range), "not a valid Loose: Unable to serialize unknown type: <class 'type'>"),
        (Raw(raw=b"\xff"), "not a valid Raw: it has bytes that are not UTF-8; set ser_json_bytes"),
        (Failing(words=3), "not a valid Failing: the serializer write raised RuntimeError: no 3"),
    ],
)
async def test_result_without_json_says_why(result: Any, problem: str) -> None:
    async def returns(item: dict[str, int]) -> Any:
        return result

    returns.__annotations__["return"] = type(result)
    assert problem in await failed(
        role("returns")(returns), nodes=[node("returns", "returns", **NEVER_AGAIN)]
    )


class Aliased(BaseModel):
    x: int = Field(0, serialization_alias="theX")


class Received(BaseModel):
    x: int = Field(0, validation_alias="theX")


class Excluded(BaseModel):
    rows: list[Received] = []
    x: int = Field(0, exclude=True)


class Choices(BaseModel):
    x: int = Field(0, validation_alias=AliasChoices("x", "theX"), serialization_alias="x")


@pytest.mark.parametrize("kind", [Aliased, Received, Excluded, list[Aliased]])
@pytest.mark.parametrize("use", ["items", "results"])
def test_type_whose_json_would_lose_a_field_is_refused_where_it_is_defined(kind: Any, use: str) -> None:
    async def count(item: Any) -> Any:
        return item

    count.__annotations__["item" if use == "items" else "return"] = kind
    with pytest.raises(
        ConfigError, match=f"count: .*, the type of the {use}, has the field 'x'.*use 'alias'"
    ):
        role("count")(count)


def test_type_that_reads_a_field_by_several_names_and_writes_one_of_them_is_a_type() -> None:
    async def count(item: Choices) -> Choices:
        return item

    assert role("count")(count).output_type is Choices


class Long(Page):
    lines: int = 0


class Doubled(BaseModel):
    model_config = ConfigDict(extra="forbid")
    words: int

    @computed_field  # type: ignore[prop-decorator]  # a property, as pydantic documents it
    @property
    def double(self) -> int:
        return self.words * 2


async def test_result_of_which_the_next_node_would_get_less_fails_its_own_node() -> None:
    @role("make")
    async def make(item: dict[str, int]) -> list[Page]:
        return [Long(url="a", lines=3)]

    text = await failed(make, nodes=[node("make", "make", **NEVER_AGAIN)])
    assert "schema_mismatch: the result of make for batch" in text
    assert "would reach the next node changed: [0].lines is 3 (number), and would be missing" in text


async def test_type_that_forbids_other_fields_reads_itself_without_its_computed_ones() -> None:
    seen: list[Doubled] = []

    @role("make")
    async def make(item: dict[str, int]) -> Doubled:
        return Doubled(words=2)

    @role("take")
    async def take(item: Doubled) -> None:
        seen.append(item)

    assert "double" not in (make.output_schema() or {})["properties"]
    await finished([make, take], node("make", "make"), pulling("take", "make"))
    assert seen == [Doubled(words=2)]


async def test_retried_source_stores_no_item_twice() -> None:
    attempts: list[int] = []

    class Flaky(RoleHandler[Total, Page]):
        role = "flaky"
        key = "url"

        async def produce(self, given: Total, ctx: RunContext) -> AsyncIterator[Page]:
            attempts.append(ctx.attempt_epoch)
            for number in range(given.words):
                if number == 2 and ctx.attempt_epoch == 1:
                    raise RuntimeError("lost connection")
                yield Page(url=f"u{number}")

    run = await finished([Flaky()], node("flaky", "flaky", inline={"words": 4}, **SOON))
    assert attempts == [1, 2]
    assert sorted(row["batch_uid"] for row in await rows(run, "flaky")) == ["u0", "u1", "u2", "u3"]


@pytest.mark.parametrize("is_coroutine", [False, True])
async def test_plain_function_that_returns_its_items_is_a_source(is_coroutine: bool) -> None:
    async def list_pages() -> list[Page]:
        return [Page(url="a"), Page(url="b")]

    async def yield_pages() -> AsyncIterator[Page]:
        for page in await list_pages():
            yield page

    class Source(RoleHandler[Total, Page]):
        role = "source"
        key = "url"

        def produce(self, given: Total, ctx: RunContext) -> Any:
            return list_pages() if is_coroutine else yield_pages()

    given = {"words": 3}
    run = await finished([Source()], node("source", "source", inline=given))
    assert sorted(row["batch_uid"] for row in await rows(run, "source")) == ["a", "b"]
    assert await Source().try_produce(given) == [Page(url="a"), Page(url="b")]


@pytest.mark.parametrize("is_plain", [True, False])
async def test_produce_that_returns_nothing_says_what_to_return(is_plain: bool) -> None:
    class Plain(RoleHandler[dict[str, int], Page]):
        role = "crawl"
        key = "url"

        def produce(self, given: dict[str, int], ctx: RunContext) -> Any:
            return None

    class Coroutine(RoleHandler[dict[str, int], Page]):
        role = "crawl"
        key = "url"

        async def produce(self, given: dict[str, int], ctx: RunContext) -> Any:
            return None

    error = await failed(Plain() if is_plain else Coroutine(), nodes=[node("crawl", "crawl", **NEVER_AGAIN)])
    assert "produce must yield items or return a list of them, not NoneType" in error


async def test_key_whose_parts_are_all_empty_identifies_nothing() -> None:
    @role("crawl", key=lambda page: (page.text,))
    async def crawl() -> AsyncIterator[Page]:
        yield Page(url="a")

    error = await failed(crawl, nodes=[node("crawl", "crawl", **NEVER_AGAIN)])
    assert "the key <lambda> of an item is an empty text" in error


async def test_inline_input_of_a_class_source_is_validated() -> None:
    class Source(RoleHandler[Total, Page]):
        role = "source"
        key = "url"

        def produce(self, given: Total, ctx: RunContext) -> Iterator[Page]:
            yield Page(url=f"{given.words}")

    error = await failed(Source(), nodes=[node("source", "source", inline={"words": "x"})])
    assert error.startswith(
        "bad_input: io.input_inline of node 'source' is not a valid Total: words is 'x'; it must be a whole number"
    )
    assert (await finished([Source()], node("source", "source", inline={"words": 3}))).status == "finished"


async def test_key_that_would_differ_in_the_next_attempt_fails_the_source() -> None:
    @role("random", key=lambda page: uuid.uuid4())
    async def random() -> AsyncIterator[Page]:
        yield Page(url="a")

    class Dated(BaseModel):
        url: str
        at: str = Field(default_factory=lambda: str(uuid.uuid4()))

    @role("dated", key=lambda each: (each.url, each.at))
    async def dated() -> AsyncIterator[Dated]:
        yield Dated(url="a")

    for source in (random, dated):
        error = await failed(source, nodes=[node("a", source.role)])
        assert error.startswith(f"bad_batch_uid: {source.role}: the key")
        assert "compute the key only from fields of the item that come from the data" in error


async def test_two_items_with_one_key_name_the_key_and_both_items() -> None:
    @role("twice", key="url")
    async def twice() -> AsyncIterator[Page]:
        yield Page(url="a", text="first")
        yield Page(url="a", text="second")

    error = await failed(twice, nodes=[node("twice", "twice")])
    assert error.startswith(
        'duplicate_uid: twice yields two items with the same key url, "a" (text): {"url": "a", "text": "first"} '
        '(object) and {"url": "a", "text": "second"} (object).'
    )


# --- what surrounds a batch ---------------------------------------------------------------------------------------


async def test_plain_functions_run_on_threads_and_coroutines_on_the_loop() -> None:
    @role("plain")
    def plain(page: Page) -> bool:
        return threading.current_thread() is threading.main_thread()

    @role("coroutine")
    async def coroutine(page: Page) -> bool:
        return threading.current_thread() is threading.main_thread()

    run = await finished([crawl, plain, coroutine], crawling(), pulling("plain"), pulling("coroutine"))
    assert run.nodes["plain"].batches[0] == {"value": False}
    assert run.nodes["coroutine"].batches[0] == {"value": True}


async def test_shards_process_typed_items_and_finalize_once() -> None:
    run = await finished([Count(), crawl], crawling(), pulling("count", parallel=3))
    assert sorted(each["words"] for each in run.nodes["count"].batches) == [1, 2]
    assert run.nodes["count"].final == {"words": 3}


async def test_failing_items_are_quarantined_after_their_tries() -> None:
    tries: list[str] = []

    class Picky(RoleHandler[Page, Page]):
        role = "picky"

        async def process(self, item: Page, ctx: RunContext) -> Page:
            tries.append(item.url)
            if item.url == "a":
                raise ValueError("not this one")
            return item

    run = await finished(
        [Picky(), crawl], crawling(), pulling("picky", on_batch_failure={"attempts": 2, "max": 1})
    )
    assert tries == ["a", "b"]
    [quarantined] = await artifacts(run, node_id="picky", status="failed")
    assert quarantined["quarantined"]["error"].startswith("ValueError: not this one, at tests/unit/")


async def test_streaming_node_gets_the_items_of_its_parent() -> None:
    graph = {
        "nodes": [crawling(), pulling("count")],
        "edges_ex": [{"from": "crawl", "to": "count", "mode": "async"}],
    }
    run = await run_graph(graph, Count(), crawl)
    assert run.nodes["count"].final == {"words": 3}


async def test_init_classify_error_and_finalize_of_a_function() -> None:
    calls: list[Any] = []

    def init(info: dict[str, Any]) -> None:
        calls.append(info["node_id"])

    async def finish(results: AsyncIterator[Words], ctx: RunContext) -> Total:
        return Total(words=sum([each.words async for each in results]))

    def finish_plainly(results: list[Words]) -> dict[str, int]:
        return {"words": sum(each.words for each in results)}

    @role("count", init=init, finalize=finish)
    async def count(page: Page) -> Words:
        return Words(url=page.url, words=len(page.text))

    @role("plain", finalize=finish_plainly)
    def plain(page: Page) -> Words:
        return Words(url=page.url, words=len(page.text))

    @role("fails", classify_error=lambda error: ("odd", True))
    def fails(page: Page) -> Words:
        raise RuntimeError("no")

    run = await finished([crawl, count, plain], crawling(), pulling("count"), pulling("plain"))
    assert calls == ["count"]
    assert run.nodes["count"].final == run.nodes["plain"].final == {"words": 12}
    assert (await failed(crawl, fails, nodes=[crawling(), pulling("fails")])).startswith(
        "odd: RuntimeError: no, at "
    )


async def test_finalize_must_not_return_the_result_of_a_batch() -> None:
    class Finishing(Count):
        async def finalize(self, ctx: RunContext) -> Any:
            return BatchResult(success=False, error="no total")

    error = await failed(Finishing(), nodes=[node("count", "count", inline={"url": "a"}, **NEVER_AGAIN)])
    assert "finalize must return a model, a dataclass, a dict" in error and "not BatchResult" in error


@role("longest", collects=True)
async def find_longest(pages: AsyncIterator[Page], ctx: RunContext, *, least: int = 0) -> Total:
    """Return the most words of a page, of more than `least`."""
    counts = [len(page.text.split()) async for page in pages]
    return Total(words=max([count for count in counts if count > least], default=len(ctx.params)))


@role("joined", collects=True, inline=True)
def join(pages: list[Page]) -> dict[str, str]:
    return {"text": " ".join(sorted(page.text for page in pages))}


async def test_function_that_collects_gets_all_items_once_and_later_nodes_pull_them() -> None:
    nodes = [
        crawling(),
        pulling("longest", inline={"least": 2}),
        pulling("joined", "longest"),
        pulling("count", "joined"),
    ]
    run = await finished([crawl, find_longest, join, Count()], *nodes)
    assert run.nodes["longest"].final == {"words": 0}
    assert run.nodes["joined"].final == {"text": "one two three"}
    assert run.nodes["count"].final == {"words": 3}
    [page, _] = [row["meta"] for row in await artifacts(run, node_id="joined", status="partial")]
    assert page == {"url": "a", "text": "one two"}


async def test_function_that_collects_can_be_called_and_resumes_with_the_items_of_earlier_attempts() -> None:
    tries: list[list[str]] = []

    @role("unlucky", collects=True)
    def finish(pages: list[Page]) -> None:
        tries.append([page.url for page in pages])
        if len(tries) == 1:
            raise OSError("full")

    assert join([Page(url="a", text="b")]) == {"text": "b"}
    run = await finished([crawl, finish], crawling(), pulling("unlucky", **SOON))
    assert tries == [["a", "b"], ["a", "b"]] and run.nodes["unlucky"].attempts == 2


async def test_function_that_finishes_a_node_has_parameters_which_are_read_before_its_first_batch() -> None:
    async def finish(results: AsyncIterator[Words], *, title: str, least: int = 0) -> dict[str, Any]:
        return {title: [each.url async for each in results if each.words > least]}

    done: list[str] = []

    @role("titled", finalize=finish)
    async def titled(page: Page, *, least: int = 0) -> Words:
        done.append(page.url)
        return Words(url=page.url, words=len(page.text.split()))

    schema = titled.parameters_schema() or {}
    assert sorted(schema["properties"]) == ["least", "title"] and schema["required"] == ["title"]
    run = await finished([crawl, titled], crawling(), pulling("titled", inline={"title": "long", "least": 1}))
    assert run.nodes["titled"].final == {"long": ["a"]}
    done.clear()
    error = await failed(crawl, titled, nodes=[crawling(), pulling("titled", inline={"least": 1})])
    assert "does not fit the parameters of finalize of titled: title is missing" in error
    error = await failed(crawl, titled, nodes=[crawling(), pulling("titled", inline={"titel": "long"})])
    assert "titled has no parameter titel; its parameters are least, title" in error
    assert done == []


async def test_finalize_of_a_typed_handler_may_return_any_record_but_no_other_value() -> None:
    for given in (Total(words=3), {"words": 3}, FinalizeResult(metrics={"words": 3})):
        assert await final_of(given) == {"words": 3}
    assert await final_of(None) == {}
    with pytest.raises(AssertionError, match="finalize must return a model, a dataclass, a dict"):
        await final_of(3)


async def final_of(given: Any) -> dict[str, Any]:
    """Return what is stored for a result of `finalize`."""

    class Ends(RoleHandler[Page, Page]):
        role = "ends"

        async def process(self, item: Page, ctx: RunContext) -> Page:
            return item

        async def finalize(self, ctx: RunContext) -> Any:
            return given

    return (await finished([Ends()], node("ends", "ends", inline={"url": "a"}))).nodes["ends"].final


async def test_a_method_process_of_a_class_without_types_is_a_helper() -> None:
    class Helper(RoleHandler):
        role = "helper"

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            return BatchResult(success=True, metrics={"n": self.process(1, 2)})

        def process(self, first: int, second: int) -> int:
            return first + second

    assert Helper().input_type is None
    assert (await finished([Helper()], node("helper", "helper"))).nodes["helper"].batches == [{"n": 3}]


# --- separate processes -------------------------------------------------------------------------------------------


class Square(RoleHandler[int, int]):
    """Computes in a process."""

    role = "square"

    def process(self, item: int, ctx: RunContext) -> int:
        ctx.kv["seen"] = ctx.kv.get("seen", 0) + 1
        return item * item if ctx.batch.batch_uid else 0


@role("cube")
def cube(number: int, ctx: RunContext, *, plus: int = 0) -> int:
    """Compute in a process."""
    if number == 3:
        raise BatchFailure("three", reason_code="three", permanent=True)
    return number**3 + plus + len(ctx.params)


@pytest.mark.slow
async def test_plain_typed_handlers_run_in_processes() -> None:
    patched = pytest.MonkeyPatch()
    patched.syspath_prepend(str(Path(__file__).parents[2]))
    pool = ProcessPool({"square": Square(), "cube": cube}, processes=1)
    try:
        ctx = handler_context(input_inline={"plus": 1}, params={"a": 1})
        for name, number, expected in (("square", 3, 9), ("cube", 2, 10)):
            batch = Batch(batch_uid="b", payload={"from_node": "a", "ref": {}, "meta": {"value": number}})
            with ctx.processing(batch):
                assert (await pool.process(name, batch, ctx)).metrics == {"value": expected}
    finally:
        await pool.close()
        patched.undo()


def test_worker_with_processes_needs_plain_process_but_not_of_what_only_stores() -> None:
    config = WorkerConfig(roles=["crawl", "cube", "longest"], executor="process")
    Worker(db=memory_database(), cfg=config, handlers={"crawl": crawl, "cube": cube, "longest": find_longest})
    with pytest.raises(ConfigError, match=r"needs a plain `def process`; that of role 'count' is async"):
        Worker(
            db=memory_database(),
            cfg=WorkerConfig(roles=["count"], executor="process"),
            handlers={"count": Count()},
        )


# --- one handler in a unit test -----------------------------------------------------------------------------------


async def test_try_on_returns_the_result_for_one_item() -> None:
    class Params(BaseModel):
        factor: int

    @role("times")
    async def times(page: Page, ctx: RunContext, *, plus: int = 0) -> Words:
        await ctx.vars.set("seen", page.url)
        words = len(page.text) * ctx.params_as(Params).factor + plus + await ctx.vars.get("start", 0)
        return Words(url=ctx.node_id, words=words)

    @role("plain")
    def plain(number: int) -> int:
        return number + 1

    given = {"params": {"factor": 2}, "input_inline": {"plus": 1}, "vars": {"start": 10}, "node_id": "n"}
    assert await times.try_on(Page(url="a", text="abc"), **given) == Words(url="n", words=17)
    assert await plain.try_on(3) == 4
    assert await Count().try_on(Page(url="a", text="x y")) == Words(url="a", words=2)


async def test_try_on_raises_what_would_fail_the_batch() -> None:
    @role("fails")
    async def fails(page: Page) -> Page | BatchResult:
        if page.text:
            raise BatchFailure("text", reason_code="has_text", permanent=True)
        return BatchResult(success=False, reason_code="empty", error="no text")

    for text, code in (("x", "has_text"), ("", "empty")):
        with pytest.raises(BatchFailure) as failure:
            await fails.try_on(Page(url="a", text=text))
        assert failure.value.reason_code == code
    with pytest.raises(BatchFailure, match="the item is not a valid Page: url is 3"):
        await fails.try_on(Page.model_construct(url=3, text=""))
    with pytest.raises(ConfigError, match="Old names no types"):
        await type("Old", (RoleHandler,), {})().try_on(3)


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (2**70, "number is an integer outside the 64-bit range"),
        (float("nan"), "number is NaN .*, which JSON does not have; return None"),
    ],
)
async def test_try_on_refuses_what_a_node_cannot_store_and_read(number: Any, problem: str) -> None:
    class Measured(BaseModel):
        number: int | float

    class Measure(RoleHandler[Page, Measured]):
        role = "measure"

        async def process(self, item: Page, ctx: RunContext) -> Measured:
            return Measured(number=number)

    with pytest.raises(BatchFailure, match=problem):
        await Measure().try_on(Page(url="a"))


async def test_parameter_ctx_of_any_type_receives_the_context() -> None:
    @role("name")
    async def name(page: Page, ctx: Any) -> str:
        return f"{ctx.node_id} {page.url}"

    assert await name.try_on(Page(url="a")) == "node a"


async def test_secrets_reach_a_handler_in_a_unit_test() -> None:
    class Login(BaseModel):
        user: str
        passwords: list[SecretStr]

    @role("login")
    async def login(given: Login) -> str:
        return given.passwords[0].get_secret_value()

    class Crawl(RoleHandler[Login, Page]):
        role = "crawl"
        key = "url"

        async def produce(self, given: Login, ctx: RunContext) -> AsyncIterator[Page]:
            yield Page(url=given.passwords[0].get_secret_value())

    given = Login(user="ann", passwords=[SecretStr("pass")])
    assert await login.try_on(given) == "pass"
    assert await Crawl().try_produce(given) == [Page(url="pass")]


async def test_try_produce_returns_the_items_of_a_source() -> None:
    assert await crawl.try_produce({"pages": PAGES}) == [
        Page(url="a", text="one two"),
        Page(url="b", text="three"),
    ]
    assert await crawl.try_produce(input_inline={"pages": {}}) == []

    @role("twice", key="url")
    def twice(url: str) -> Iterator[Page]:
        yield from [Page(url=url), Page(url=url)]

    with pytest.raises(BatchFailure, match="yields two items with the same key url"):
        await twice.try_produce({"url": "a"})
    with pytest.raises(ConfigError, match="crawl is a source, which receives no item: use try_produce"):
        source: Any = crawl
        await source.try_on(3)
    with pytest.raises(ConfigError, match="Count is not a source: use try_on"):
        await Count().try_produce()


async def test_members_of_a_class_without_types_may_have_the_names_of_those_of_typed_ones() -> None:
    class Old(RoleHandler):
        role = "old"
        types = _types = ("a", "b")
        is_source = input_type = output_type = True

        async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
            for number in range(2):
                yield Batch(batch_uid=self.key, payload={"number": number})

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            return BatchResult(success=True, metrics={"types": len(self.types)})

        @property
        def key(self) -> str:
            return "same"

    run = await run_graph({"nodes": [node("old", "old")]}, Old())
    assert run.nodes["old"].batches == [{"types": 2}]
    assert (await error_of(run)).startswith(
        "duplicate_uid: Old.iter_batches yields two batches with the uid 'same'"
    )
