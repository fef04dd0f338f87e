"""What mypy says about flows whose nodes do not fit: one plain error for each wrong line, and none for right ones."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.sources import ROOT
from tests.type_checker import fills_a_cache, run_mypy

if TYPE_CHECKING:
    from pathlib import Path

RIGHT = """
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from pydantic import BaseModel

from flowkit import Coordinator, Flow, cel
from flowkit.flow import FlowNode
from flowkit.worker import Batch, BatchResult, RoleHandler, RunContext, role

class City(BaseModel):
    name: str

class Params(BaseModel):
    cities: list[City]

class Page(BaseModel):
    city: str

class LongPage(Page):
    words: int

class Score(BaseModel):
    score: float

class Rate(RoleHandler[Page, Score]):
    role = "rater"

    async def process(self, item: Page, ctx: RunContext) -> Score:
        return Score(score=1)

class Rank(RoleHandler[Score, Score]):
    role = "ranker"

    def process(self, item: Score, ctx: RunContext) -> Score:
        return item

class Old(RoleHandler):
    role = "old"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=True)

@role("fetcher")
async def fetch_page(city: City, *, depth: int = 1) -> LongPage:
    return LongPage(city=city.name, words=depth)

@role("joiner")
def join(scores: list[Score]) -> Page:
    return Page(city="all")

@role("lister", key="name")
async def list_cities(count: int = 1) -> AsyncIterator[City]:
    yield City(name="x")

async def publish(task_id: str, day: str) -> None: ...

flow = Flow("cities", params=Params)
free = Flow("free")
cities = flow.node("cities", list_cities).input(count=cel("size(params.cities)"))
fetch = flow.node("fetch", fetch_page).maps("params.cities", City, parallel=3)
again = flow.node("again", fetch_page).pulls(cities, streaming=True)
rate = flow.node("rate", Rate).pulls(fetch, again, streaming="first_batch")
other = flow.node("other", Rate()).pulls(fetch)
joined = flow.node("joined", join).rechunks(rate, size=3)
mapped = flow.node("mapped", join).maps("vars.scores", Score, batch_size=10)
away = flow.external("away", "external", Page, Score)
old = flow.node("old", Old).pulls(fetch, rate).maps("vars.list", dict, batch_size=2)

@role("either")
async def either(item: City | Score) -> Score | None:
    return None

@role("many")
async def many(items: Sequence[City]) -> Page:
    return Page(city="all")

@role("sides")
async def either_side(item: City) -> Score | Page: ...

@role("plain-sides")
def either_plainly(item: City) -> Score | Page | None: ...

@role("reader-of-sides")
async def read_side(item: Score | Page | None) -> BatchResult: ...

@role("some")
async def some(item: City) -> Score | BatchResult: ...

@role("iterable", key="name")
def iterable(count: int = 1) -> Iterable[City]:
    yield City(name="x")

@role("async-iterable", key="name")
async def async_iterable() -> AsyncIterable[City]:
    yield City(name="x")

P = ParamSpec("P")
R = TypeVar("R")

def logged(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    return function

@role("decorated")
@logged
async def decorated(item: City) -> Score | Page: ...

class WithDefault(Rank):
    role = "default"

    def __init__(self, least: float = 0) -> None: ...

class NeedsStore(Rank):
    role = "store"

    def __init__(self, store: str) -> None: ...

sides = flow.node("sides", either_side).pulls(cities, flow.node("iterable", iterable), flow.node("ai", async_iterable))
plain_sides = flow.node("plain-sides", either_plainly).pulls(cities)
decorated_sides = flow.node("decorated", decorated).pulls(cities)
read_sides = flow.node("read-sides", read_side).pulls(sides, plain_sides, decorated_sides)
with_default = flow.node("default", WithDefault).pulls(rate, flow.node("some", some).pulls(cities), read_sides)
with_store = flow.node("store", NeedsStore("x")).pulls(rate)

def add_rating(node_id: str, *parents: FlowNode[City, LongPage]) -> FlowNode[Page, Score]:
    return flow.node(node_id, Rate).pulls(*parents)

both = flow.node("both", either).pulls(cities, rate)
union = flow.node("union", either).maps("params.list")
several = flow.node("several", many).maps("params.cities", City, batch_size=3)
by_city: dict[str, FlowNode[Page, Score]] = {name: add_rating(name, fetch) for name in ("a", "b")}
all_of = flow.node("all", Rank).pulls(*by_city.values())
rank = flow.node("rank", Rank).pulls(rate, away, old).gate(2).retry(5, backoff_sec=10)
ok = flow.approval("ok").after(rank, old).routes(on_success=[flow.function("publish", publish, day="x")])
kept: FlowNode[Page, Score] = rate

async def use(coordinator: Coordinator, params: Params) -> None:
    task_id: str = await flow.submit(coordinator, params)
    await flow.run(coordinator, params, timeout=5)
    await flow.test(params, fetch_page, Rank())
    await free.submit(coordinator, {"day": "x"})
"""

WRONG = [
    (
        'flow.node("a", Rank).pulls(fetch)',
        'Argument 1 to "pulls"',
        '"FlowNode[City, LongPage]"',
        '"Ref[Score]"',
    ),
    ('flow.node("a", Rate).pulls("fetch")', 'Argument 1 to "pulls"', 'type "str"', '"Ref[Page]"'),
    ('flow.node("a", Rank).pulls(rate, fetch)', 'Argument 2 to "pulls"', "LongPage", '"Ref[Score]"'),
    ('flow.node("a", Rate).pulls(ok)', 'Argument 1 to "pulls"', '"FlowNode[Never, object]"', '"Ref[Page]"'),
    ('flow.node("a", list_cities).pulls(fetch)', 'Argument 1 to "pulls"', "LongPage", '"Ref[Never]"'),
    ("ok.pulls(rate)", 'Argument 1 to "pulls"', "Score", '"Ref[Never]"'),
    ('flow.node("a", Rate).after("fetch")', 'Argument 1 to "after"', 'type "str"', '"Ref[object]"'),
    ('flow.node("a", Rank).gate("most")', 'Argument 1 to "gate"', "'most'", "'all', 'any', 'all_done'"),
    (
        'flow.node("a", Rate).maps("params.cities", City)',
        'Argument 2 to "maps"',
        "City",
        '"type[Page] | None"',
    ),
    (
        'flow.node("a", fetch_page).maps("params.cities", City, batch_size=3)',
        'Argument "batch_size" to "maps"',
        '"Literal[3]"',
        '"Literal[1]"',
    ),
    ('flow.node("a", join).rechunks(fetch, size=3)', 'Argument 1 to "rechunks"', "LongPage", '"Ref[Score]"'),
    ('flow.node("a", City)', 'Argument 2 to "node"', '"type[City]"', "RoleHandler"),
    ('flow.node("a", NeedsStore)', 'Argument 2 to "node"', '"type[NeedsStore]"', "Callable[[], RoleHandler"),
    ('flow.node("a", Rank).pulls(sides)', 'Argument 1 to "pulls"', '"FlowNode[City, Score | Page]"'),
    ('flow.node("a", publish)', 'Argument 2 to "node"', "Callable", "RoleHandler"),
    (
        'flow.node("a", Rate).routes(on_failure=["rank"])',
        'List item 0 has incompatible type "str"',
        "Ref[object]",
    ),
    ('flow.node("a", Rate).retries(3)', 'has no attribute "retries"'),
    ('flow.submit(coordinator, City(name="x"))', 'Argument 2 to "submit"', '"City"', '"Params | None"'),
    ('flow.test(City(name="x"))', 'Argument 1 to "test"', '"City"', '"Params | None"'),
    (
        'free.submit(coordinator, City(name="x"))',
        'Argument 2 to "submit"',
        '"City"',
        '"dict[str, Any] | None"',
    ),
    ("flow.test(None, publish)", 'Argument 2 to "test"', "Callable", "RoleHandler"),
]


@fills_a_cache
@pytest.mark.slow(8)
def test_mypy_refuses_each_wrong_line_with_one_error_and_no_right_one() -> None:
    folder = ROOT / "build" / "typed"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "wrong_flows.py"
    before = f"{RIGHT}\nasync def wrong(coordinator: Coordinator) -> None:\n"
    lines = [f"    {_awaited(statement)}" for statement, *_ in WRONG]
    file.write_text(before + "\n".join(lines) + "\n", encoding="utf-8")
    found = check_types(file)
    first = before.count("\n") + 1
    assert sorted(found) == list(range(first, first + len(WRONG))), found
    for number, (statement, *parts) in enumerate(WRONG, first):
        (error,) = found[number]
        assert [part for part in parts if part not in error] == [], (statement, error)


def _awaited(statement: str) -> str:
    return f"await {statement}" if re.match(r"\w+\.(submit|test|run)\(", statement) else statement


def check_types(file: Path) -> dict[int, list[str]]:
    """Return the errors that mypy reports in a file, by line."""
    done = run_mypy("--no-error-summary", "--disable-error-code", "empty-body", str(file))
    assert done.stderr == ""
    found: dict[int, list[str]] = {}
    for line in done.stdout.splitlines():
        match = re.fullmatch(rf"{file.relative_to(ROOT)}:(\d+): (error|note): (.*)", line)
        assert match, line
        if match[2] == "error":
            found.setdefault(int(match[1]), []).append(match[3])
    return found
