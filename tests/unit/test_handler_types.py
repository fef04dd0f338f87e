"""What mypy says about typed handlers: nothing about right ones, and one plain error about each wrong one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.type_checker import fills_a_cache, run_mypy

if TYPE_CHECKING:
    from pathlib import Path

MODELS = """
from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Never

from pydantic import BaseModel
from typing_extensions import assert_type

from flowkit.worker import (
    Batch, BatchResult, CollectorRole, FinalizeResult, FunctionRole, RoleHandler, RunContext, SourceRole, role
)

class Page(BaseModel):
    url: str

class Words(BaseModel):
    words: int

@dataclass
class Total:
    words: int
"""

RIGHT = f"""{MODELS}
class Count(RoleHandler[Page, Words]):
    role = "count"

    async def process(self, item: Page, ctx: RunContext) -> Words:
        params = ctx.params_as(Words)
        return Words(words=params.words)

    async def finalize(self, ctx: RunContext) -> Total:
        return Total(words=sum([each.words async for each in self.results(ctx)]))

class Plain(RoleHandler[Page, Words]):
    role = "plain"

    def process(self, page: Page, ctx: RunContext, *, lang: str = "en") -> Words | BatchResult:
        return Words(words=1)

    def finalize(self, ctx: RunContext) -> dict[str, Any]:
        return {{}}

class Crawl(RoleHandler[Total, Page]):
    role = "crawl"
    key = "url"

    async def produce(self, given: Total, ctx: RunContext) -> AsyncIterator[Page]:
        yield Page(url="a")

class Keyed(RoleHandler[Total, Page]):
    role = "keyed"
    key = ("url", "text")

    def produce(self, given: Total, ctx: RunContext) -> Iterator[Page]:
        yield Page(url="a")

class Bare(RoleHandler):
    role = "bare"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=True, metrics={{"n": self.process(1, text="x")}})

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        return None

    def process(self, number: int, *, text: str) -> int:
        return number

@role("count")
async def count(page: Page) -> Words:
    return Words(words=1)

@role("second", finalize=lambda results: None)
async def second(page: Page, ctx: RunContext, *, lang: str = "en") -> Words | BatchResult:
    return Words(words=1)

@role("third")
def third(pages: list[Page], lang: str, ctx: RunContext) -> list[int]:
    return []

@role("optional")
async def optional(page: Page, *, ctx: RunContext) -> Words | None:
    return None

@role("fetch", key="url")
async def fetch(folder: str, limit: int = 10) -> AsyncIterator[Page]:
    yield Page(url=folder)

@role("read", key=lambda page: page.url)
def read(folder: str, ctx: RunContext) -> Iterator[Page]:
    yield Page(url=folder)

@role("pack")
async def pack(page: Page) -> BatchResult:
    return BatchResult(success=True)

@role("rank", collects=True)
async def rank(pages: AsyncIterator[Page], ctx: RunContext, *, least: int = 0) -> Total:
    return Total(words=1)

@role("join", collects=True, inline=True)
def join(pages: list[Page]) -> FinalizeResult:
    return FinalizeResult()

handlers: dict[str, RoleHandler] = {{"a": Count(), "b": Bare(), "c": count, "d": fetch}}

async def use(ctx: RunContext) -> None:
    assert_type(await count(Page(url="a")), Words)
    assert_type(await second(Page(url="a"), ctx, lang="de"), Words)
    assert_type(third([], "en", ctx), list[int])
    assert_type([page async for page in fetch("a", limit=3)], list[Page])
    assert_type([*read("a", ctx)], list[Page])
    assert_type(pack.output_type, Any)
    assert_type(await pack.try_on(Page(url="a")), Any)
    assert_type(join([Page(url="a")]), FinalizeResult)
    assert_type(await rank(fetch("a"), ctx, least=3), Total)
    assert_type(await Count().try_on(Page(url="a")), Words)
    assert_type(await optional.try_on(Page(url="a")), Words | None)
    assert_type(await fetch.try_produce(), list[Page])
    _count: RoleHandler[Page, Words] = second
    _third: RoleHandler[list[Page], list[int]] = third
    _fetch: RoleHandler[Never, Page] = fetch
    _rank: RoleHandler[Page, Page] = rank
"""

WRONG = f"""{MODELS}
class ItemOfAnotherType(RoleHandler[Page, Words]):
    async def process(self, item: Words, ctx: RunContext) -> Words:  # Signature of "process" incompatible with
        return item

class ResultOfAnotherType(RoleHandler[Page, Words]):
    async def process(self, item: Page, ctx: RunContext) -> Page:  # Signature of "process" incompatible with
        return item

class PlainResultOfAnotherType(RoleHandler[Page, Words]):
    def process(self, item: Page, ctx: RunContext) -> Page:  # Signature of "process" incompatible with supertype
        return item

class ItemsOfAnotherType(RoleHandler[Page, Words]):
    async def produce(self, given: Page, ctx: RunContext) -> AsyncIterator[Page]:  # Signature of "produce" incompatible
        yield given

class Number(RoleHandler[Page, Words]):
    async def finalize(self, ctx: RunContext) -> int:  # Return type "Coroutine[Any, Any, int]" of "finalize"
        return 3

@role("count")
async def count(page: Page) -> Words:
    return Words(words=1)

@role("fetch", key="url")
async def fetch(folder: str) -> AsyncIterator[Page]:
    yield Page(url=folder)

@role("rank", collects=True)
async def rank(pages: AsyncIterator[Page]) -> Total:
    return Total(words=1)

async def use() -> None:
    await rank([Words(words=1)])  # List item 0 has incompatible type "Words"; expected "Page"
    _rank: RoleHandler[Page, Total] = rank  # Incompatible types in assignment
    await count(Words(words=1))  # Argument 1 to "__call__" of "FunctionRole" has incompatible type "Words"
    await count.try_on(Words(words=1))  # Argument 1 to "try_on" of "RoleHandler" has incompatible type "Words"
    fetch(3)  # Argument 1 to "__call__" of "SourceRole" has incompatible type "int"; expected "str"
    _count: RoleHandler[Page, Page] = count  # Incompatible types in assignment
    _fetch: RoleHandler[Never, Words] = fetch  # Incompatible types in assignment
"""


@fills_a_cache
@pytest.mark.slow
def test_right_handlers_pass_and_wrong_ones_get_one_plain_error_each(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}_handlers.py" for name in ("right", "wrong")}
    files["right"].write_text(RIGHT, encoding="utf-8")
    files["wrong"].write_text(WRONG, encoding="utf-8")
    done = run_mypy("--strict", *map(str, files.values()))
    errors = re.findall(r"(right|wrong)_handlers\.py:(\d+): error: (.*)", done.stdout)
    assert [error for error in errors if error[0] == "right"] == []
    expected = {
        number: line.partition("  # ")[2]
        for number, line in enumerate(WRONG.splitlines(), 1)
        if "  # " in line
    }
    assert [int(number) for _, number, _ in errors] == [*expected], done.stdout
    for _, number, text in errors:
        assert text.startswith(expected[int(number)])
