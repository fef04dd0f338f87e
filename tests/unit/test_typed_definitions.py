"""Definitions of typed handlers: what FlowKit refuses in a class or a function, and what it knows of them."""

from __future__ import annotations

import pickle
import types
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import pytest
from pydantic import BaseModel, Field, SecretStr
from tests.unit.handler_runs import finished, node
from typing_extensions import TypedDict

from flowkit.activities.handlers import misspelled_hook, types_problem, unfit_hook, version_of
from flowkit.cli.loading import load_handlers
from flowkit.errors import ConfigError
from flowkit.testing import memory_database
from flowkit.testing.context import handler_context
from flowkit.worker import Batch, BatchResult, FunctionRole, RoleHandler, RunContext, SourceRole, Worker, role

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence


class Page(BaseModel):
    url: str
    number: int = Field(default=3, alias="n")


class Words(BaseModel):
    words: int


@role("length", handler_version="7")
async def length(page: Page, ctx: RunContext, *, lang: str = "en", least: int) -> Words:
    """Return the length."""
    return Words(words=len(page.url))


@role("crawl", key="url", inline=True)
async def crawl(folder: str, limit: int = 10) -> AsyncIterator[Page]:
    yield Page(url=folder)


# --- refused ------------------------------------------------------------------------------------------------------


def source_without_key() -> Any:
    @role("crawl")
    async def crawl(folder: str) -> AsyncIterator[Page]:
        yield Page(url=folder)


def source_with_unknown_key() -> Any:
    @role("crawl", key=("url", "urn"))
    async def crawl(folder: str) -> AsyncIterator[Page]:
        yield Page(url=folder)


def source_with_random_key() -> Any:
    class Item(BaseModel):
        id: int = Field(default_factory=lambda: 3)

    class Source(RoleHandler[Page, Item]):
        role = "source"
        key = "id"

        async def produce(self, given: Page, ctx: RunContext) -> AsyncIterator[Item]:
            yield Item()


def neither_process_nor_produce() -> Any:
    class Count(RoleHandler[Page, Words]):
        role = "count"

        async def proces(self, item: Page, ctx: RunContext) -> Words:
            return Words(words=1)


def both_process_and_process_batch() -> Any:
    class Count(RoleHandler[Page, Words]):
        role = "count"

        async def process(self, item: Page, ctx: RunContext) -> Words:
            return Words(words=1)

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            return BatchResult(success=True)


def both_process_and_produce() -> Any:
    class Count(RoleHandler[Page, Words]):
        role = "count"
        key = "words"

        async def process(self, item: Page, ctx: RunContext) -> Words:
            return Words(words=1)

        async def produce(self, given: Page, ctx: RunContext) -> AsyncIterator[Words]:
            yield Words(words=1)


def _annotate(function: Any, **annotations: Any) -> Any:
    function.__annotations__.update(annotations)
    return function


def _count_with(process: Any) -> Any:
    """Define a class with a method that a type checker would refuse."""
    members = {"role": "count", "process": process}
    return types.new_class("Count", (RoleHandler[Page, Words],), {}, lambda body: body.update(members))


def item_of_another_type() -> Any:
    async def process(self: Any, item: Words, ctx: RunContext) -> Words:
        return item

    _count_with(process)


def result_of_another_type() -> Any:
    async def process(self: Any, item: Page, ctx: RunContext) -> Page:
        return item

    _count_with(process)


def function_without_item() -> Any:
    async def now(*, lang: str) -> Words:
        return Words(words=1)

    decorate: Any = role("now")
    decorate(now)


def context_before_the_item() -> Any:
    @role("now")
    async def now(ctx: RunContext, page: Page) -> Words:
        return Words(words=1)


def type_that_is_not_known() -> Any:
    async def now(page: Any) -> Any: ...

    role("now")(_annotate(now, page="Missing"))


def type_that_pydantic_cannot_validate() -> Any:
    class Socket: ...

    @role("now")
    async def now(page: Page) -> Socket:
        return Socket()


def parameters_by_star() -> Any:
    async def now(page: Page, **more: int) -> Words:
        return Words(words=1)

    decorate: Any = role("now")
    decorate(now)


def reserved_parameter() -> Any:
    @role("now")
    async def now(page: Page, *, input_args: int) -> Words:
        return Words(words=1)


def third_argument_of_process() -> Any:
    async def process(self: Any, item: Page, ctx: RunContext, lang: str) -> Words:
        return Words(words=1)

    _count_with(process)


def context_before_the_results() -> Any:
    async def finish(ctx: RunContext, results: Any) -> None: ...

    @role("now", finalize=finish)
    async def now(page: Page) -> Words:
        return Words(words=1)


def coroutine_that_collects_a_list() -> Any:
    async def now(pages: list[Page]) -> None: ...

    decorate: Any = role("now", collects=True)
    decorate(now)


def plain_function_that_collects_an_iterator() -> Any:
    def now(pages: AsyncIterator[Page]) -> None: ...

    decorate: Any = role("now", collects=True)
    decorate(now)


def finalize_of_other_results() -> Any:
    async def total(pages: AsyncIterator[Page]) -> None: ...

    @role("now", finalize=total)
    async def now(page: Page) -> Words:
        return Words(words=1)


def finalize_of_no_list() -> Any:
    def total(words: Words) -> None: ...

    @role("now", finalize=total)
    def now(page: Page) -> Words:
        return Words(words=1)


class Linked(Protocol):
    url: str


def protocol_as_an_item() -> Any:
    @role("now")
    async def now(page: Linked) -> Words:
        return Words(words=1)


def protocol_as_an_item_of_a_class() -> Any:
    class Count(RoleHandler[Linked, Words]):
        role = "count"

        def process(self, item: Linked) -> Words:
            return Words(words=1)


def protocol_as_a_parameter() -> Any:
    @role("now")
    async def now(page: Page, *, linked: Linked) -> Words:
        return Words(words=1)


def list_of_other_items() -> Any:
    def process(self: Any, item: list[Words]) -> Words:
        return item[0]

    types.new_class(
        "Count",
        (RoleHandler[list[Page], Words],),
        {},
        lambda space: space.update(role="count", process=process),
    )


def collector_without_items() -> Any:
    async def now(ctx: RunContext) -> None: ...

    decorate: Any = role("now", collects=True)
    decorate(now)


def collector_with_finalize() -> Any:
    given: Any = {"collects": True, "finalize": len}
    role("now", **given)


def class_as_a_role() -> Any:
    decorate: Any = role("now")
    decorate(Page)


def role_without_parentheses() -> Any:
    decorate: Any = role
    decorate(source_without_key)


def role_without_a_name() -> Any:
    role("")


def method_as_a_role() -> Any:
    class Pages:
        @role("now")
        async def now(self, page: Page) -> Words:
            return Words(words=1)


def default_that_is_a_field() -> Any:
    @role("now")
    async def now(page: Page, limit: int = Field(3, gt=0)) -> Words:
        return Words(words=limit)


def process_that_yields() -> Any:
    async def process(self: Any, item: Page, ctx: RunContext) -> Any:
        yield Words(words=1)

    _count_with(process)


def plain_process_that_yields() -> Any:
    def process(self: Any, item: Page, ctx: RunContext) -> Any:
        yield Words(words=1)

    _count_with(process)


def key_that_is_a_coroutine_function() -> Any:
    async def find(page: Page) -> str:
        return page.url

    @role("crawl", key=find)
    async def crawl(folder: str) -> AsyncIterator[Page]:
        yield Page(url=folder)


def result_with_a_secret() -> Any:
    class Login(BaseModel):
        passwords: list[SecretStr]

    @role("now")
    async def now(page: Page) -> Login:
        return Login(passwords=[])


REFUSED: dict[Any, str] = {
    role_without_parentheses: '@role needs the name of the role, such as @role("count"), not <function source_without',
    role_without_a_name: "@role needs the name of the role, such as @role(\"count\"), not ''",
    method_as_a_role: "@role decorates functions, but method_as_a_role.<locals>.Pages.now is a method: define it",
    default_that_is_a_field: "now: the default of the parameter 'limit' is a Field, which a direct call would pass",
    process_that_yields: "Count.process yields, but returns one result for an item",
    plain_process_that_yields: "Count.process yields, but returns one result for an item",
    key_that_is_a_coroutine_function: "crawl: the key find is a coroutine function: write it as a plain `def`",
    result_with_a_secret: "now: Login, the type of the results, has a secret such as SecretStr, of which the next node",
    source_without_key: "crawl is a source with no key: the uid of a batch, which must be the same in every attempt, "
    'comes from the item: set key to the name of a field, such as key="url"',
    source_with_unknown_key: "crawl: the key 'urn' is not a field of Page, which has url, number",
    source_with_random_key: "Source: the key 'id' of Item has a default_factory, so each attempt would give the same",
    neither_process_nor_produce: "Count names types, but defines neither process nor produce; is 'proces' meant to be",
    both_process_and_process_batch: "Count defines both process and process_batch: remove one of them",
    both_process_and_produce: "Count defines both process and produce: a source has produce, any other handler process",
    item_of_another_type: "Count.process takes Words, but the class names Page as the type of its items",
    result_of_another_type: "Count.process returns Page, but the class names Words as the type of its results",
    function_without_item: "now has no parameter for its item: let the first one receive it",
    context_before_the_item: "now: the first parameter must be the item; put ctx after it",
    type_that_is_not_known: "now: the type 'Missing' of page is not known where now is defined: import it outside of",
    type_that_pydantic_cannot_validate: "now: pydantic cannot validate Socket: ",
    parameters_by_star: "now: FlowKit passes parameters by name, so **more: 'int' is not possible: declare each of",
    reserved_parameter: "now: a parameter cannot be called 'input_args', which is a key of FlowKit in io.input_inline",
    third_argument_of_process: "Count.process is called with the item and the context, so its parameter 'lang' gets",
    context_before_the_results: "finalize of now: the first parameter must be the item; put ctx after it",
    coroutine_that_collects_a_list: "now collects, and is a coroutine function, so it receives all items as an "
    "AsyncIterator, not as list[Page]",
    plain_function_that_collects_an_iterator: "now collects, and is a plain function, so it receives all items as a "
    "list, not as AsyncIterator[Page]",
    finalize_of_other_results: "finalize of now receives results of the type Page, but now returns Words",
    finalize_of_no_list: "finalize of now is a plain function, so it receives the results as a list, not as Words",
    protocol_as_an_item: "now: the type of page, Linked, is a Protocol, which has no form in JSON: name a model",
    protocol_as_an_item_of_a_class: "Count: the type of its items, Linked, is a Protocol, which has no form in JSON",
    protocol_as_a_parameter: "now: the type of linked, Linked, is a Protocol, which has no form in JSON: name a",
    list_of_other_items: "Count.process takes list[Words], but the class names list[Page] as the type of its items",
    collector_without_items: "now collects, but has no parameter for its items: let the first one",
    collector_with_finalize: "@role('now', collects=True) has finalize: its function finishes the node; remove",
    class_as_a_role: "@role must decorate a function, not <class ",
}


@pytest.mark.parametrize("define", REFUSED)
def test_wrong_definition_is_refused_at_once(define: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        define()
    assert str(refused.value).startswith(REFUSED[define])


def test_class_without_a_role_is_checked_when_it_is_loaded() -> None:
    class Base(RoleHandler[Page, Page]):
        async def produce(self, given: Page, ctx: RunContext) -> AsyncIterator[Page]:
            yield given

    class Good(Base):
        key = "url"

    assert types_problem(Good()) is None
    with pytest.raises(ConfigError, match="Base is a source with no key"):
        Worker(db=memory_database(), handlers={"crawl": Base()})


def test_what_finishes_a_node_may_name_a_wider_type() -> None:
    async def wider(results: AsyncIterable[BaseModel]) -> None: ...

    def plain(results: Sequence[Words | Page]) -> None: ...

    def untyped(results: Any) -> None: ...

    functions: list[Any] = [wider, plain, untyped]
    for number, finalize in enumerate(functions):

        @role(f"count-{number}", finalize=finalize)
        async def count(page: Page) -> Words:
            return Words(words=1)

        assert count.output_type is Words


# --- known --------------------------------------------------------------------------------------------------------


def test_handler_knows_its_types_and_schemas() -> None:
    assert (length.input_type, length.output_type, length.is_source) == (Page, Words, False)
    schema = length.input_schema()
    assert schema is not None and [*schema["properties"]] == ["url", "n"]
    assert length.output_schema() == Words.model_json_schema()
    parameters = length.parameters_schema()
    assert parameters is not None
    assert parameters["required"] == ["least"] and parameters["properties"]["lang"]["default"] == "en"


def test_input_of_a_source_is_its_inline_input() -> None:
    assert crawl.is_source
    assert crawl.input_schema() == crawl.parameters_schema()
    schema = crawl.input_schema()
    assert schema is not None and (schema["required"], [*schema["properties"]]) == (
        ["folder"],
        ["folder", "limit"],
    )


def test_handler_without_types_knows_none() -> None:
    handler = RoleHandler()
    assert (handler.input_type, handler.output_type, handler.is_source) == (None, None, False)
    assert (handler.input_schema(), handler.output_schema(), handler.parameters_schema()) == (
        None,
        None,
        None,
    )


def test_types_of_a_generic_base_reach_the_class_that_fixes_them() -> None:
    T = TypeVar("T")

    class Base(RoleHandler[T, Words], Generic[T]):
        async def process(self, item: T, ctx: RunContext) -> Words:
            return Words(words=1)

    class Concrete(Base[Page]):
        role = "concrete"

    class Deeper(Concrete):
        role = "deeper"

    assert Base().input_type is None
    assert (Concrete().input_type, Deeper().input_type, Deeper().output_type) == (Page, Page, Words)


def test_types_inside_of_the_types_of_a_generic_base_are_replaced_too() -> None:
    T = TypeVar("T")

    class First(RoleHandler[list[T], dict[str, T]]):
        role = "first"

        async def process(self, item: list[T], ctx: RunContext) -> dict[str, T]:
            return {"first": item[0]}

    class FirstPage(First[Page]): ...

    assert First._flowkit_types is None
    assert (FirstPage().input_type, FirstPage().output_type) == (list[Page], dict[str, Page])


async def test_process_may_leave_its_types_to_the_class() -> None:
    class Given(TypedDict):
        url: str

    class Count(RoleHandler[Given, Words]):
        role = "count"

        async def process(self, item: Any, ctx: RunContext) -> Any:
            return {"words": len(item["url"])}

    class CountAgain(Count):
        async def process(self, item: Given, ctx: RunContext) -> Words:
            return Words(words=len(item["url"]))

    for handler in (Count(), CountAgain()):
        assert await handler.try_on({"url": "abc"}) == Words(words=3)


async def test_function_that_returns_only_batch_results_has_results_of_any_type() -> None:
    @role("by_hand")
    async def by_hand(page: Page) -> BatchResult:
        return BatchResult(success=True, metrics={"url": page.url})

    result: Any = await by_hand.try_on(Page(url="a"))
    assert result == {"url": "a"}
    assert by_hand.output_schema() is None


async def test_class_that_only_names_its_types_keeps_its_hooks_for_batches() -> None:
    class Old(RoleHandler[Page, Words]):
        role = "old"

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            return BatchResult(success=True, metrics={"words": 5})

    assert Old().output_type is Words
    assert (await finished([Old()], node("old", "old"))).nodes["old"].batches == [{"words": 5}]


def test_type_of_the_result_may_be_omitted() -> None:
    class Look(RoleHandler[Page]):
        role = "look"

        async def process(self, item: Page, ctx: RunContext) -> Any:
            return item

    assert (Look().input_type, Look().output_type, Look().output_schema()) == (Page, Any, None)


def test_type_of_what_a_batch_result_holds_is_not_known() -> None:
    @role("pack")
    def pack(page: Page) -> BatchResult:
        return BatchResult(success=True)

    class Pack(RoleHandler[Page, BatchResult]):
        role = "pack"

        def process(self, item: Page, ctx: RunContext) -> BatchResult:
            return BatchResult(success=True)

    for handler in (pack, Pack()):
        assert (handler.output_type, handler.output_schema()) == (Any, None)


def test_hook_may_take_and_return_any() -> None:
    class Look(RoleHandler[Page, Words]):
        role = "look"

        async def process(self, item: Any, ctx: RunContext) -> Any:
            return item

    assert (Look().input_type, Look().output_type) == (Page, Words)


def test_key_may_be_a_method() -> None:
    class Source(RoleHandler[Page, Page]):
        role = "source"

        def key(self, page: Page) -> str:
            return page.url

        async def produce(self, given: Page, ctx: RunContext) -> AsyncIterator[Page]:
            yield given

    assert Source().is_source


def test_types_that_are_texts_are_resolved() -> None:
    class Count(RoleHandler["Page", "Words"]):
        role = "count"

        async def process(self, item: Page, ctx: RunContext) -> Words:
            return Words(words=1)

    assert (Count().input_type, Count().output_type) == (Page, Words)


# --- functions ----------------------------------------------------------------------------------------------------


async def test_function_of_a_role_is_called_as_before() -> None:
    assert isinstance(length, FunctionRole) and isinstance(crawl, SourceRole)
    assert await length(Page(url="abc"), handler_context(), lang="de", least=3) == Words(words=3)
    assert [page.url async for page in crawl("x")] == ["x"]
    assert (length.role, length.handler_version, crawl.inline) == ("length", "7", True)
    assert (length.__doc__, vars(length)["__name__"]) == ("Return the length.", "length")


def test_function_is_loaded_and_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(length)) is length
    handlers = load_handlers([f"{__name__}:length", f"{__name__}:crawl"])
    assert handlers == {"length": length, "crawl": crawl}
    with pytest.raises(ConfigError) as refused:
        load_handlers([f"{__name__}:nothing_like_this"])
    assert "its handlers are length, crawl" in str(
        getattr(refused.value, "__notes__", None) or vars(refused.value)
    )


def test_version_of_a_function_covers_its_module_only(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def read_source(module: str) -> bytes:
        read.append(module)
        return b""

    monkeypatch.setattr("flowkit.activities.handlers._read_source", read_source)
    assert version_of(crawl)
    assert version_of(length) == "7"
    assert read == [__name__]


def test_typed_handlers_have_no_misspelled_or_unfit_hook() -> None:
    for handler in (length, crawl):
        assert misspelled_hook(handler) is None and unfit_hook(handler) is None

    class Count(RoleHandler[Page, Words]):
        role = "count"

        async def process(self, item: Page, ctx: RunContext) -> Words:
            return Words(words=1)

        async def finalise(self, ctx: RunContext) -> None: ...

    assert "did you mean 'finalize'" in str(misspelled_hook(Count()))
