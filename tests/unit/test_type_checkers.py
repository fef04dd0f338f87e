"""What mypy and pyright find in about a hundred small programs, wrong and right ones (docs/workers.md).

Each program is the body of a function of one file, so that each checker runs once.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.own_environments import own_environment
from tests.sources import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

BEFORE = """
from __future__ import annotations

import datetime as dt
import enum
import functools
import uuid
from collections.abc import (
    AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
)
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, ParamSpec, Protocol, TypeVar

from pydantic import BaseModel, Field, RootModel
from typing_extensions import Self, TypedDict

from flowkit import Flow
from flowkit.worker import Batch, BatchResult, RoleHandler, RunContext, role

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

class City(BaseModel):
    name: str

class Town(City):
    mayor: str = ""

class Score(BaseModel):
    score: float

class Cat(BaseModel):
    kind: Literal["cat"] = "cat"

class Dog(BaseModel):
    kind: Literal["dog"] = "dog"

class Cow(BaseModel):
    kind: Literal["cow"] = "cow"

class Box(BaseModel, Generic[T]):
    item: T

class Numbers(RootModel[list[int]]): ...

class Named(Protocol):
    name: str

class Titled(Protocol):
    title: str

class Record(TypedDict):
    a: int

class OtherRecord(TypedDict):
    a: str

class PartialRecord(TypedDict, total=False):
    a: int

@dataclass
class Pair:
    a: int

@dataclass
class Triple:
    a: int
    b: str

class Row(NamedTuple):
    a: int
    b: str

class OtherRow(NamedTuple):
    a: str

class Color(enum.Enum):
    red = "red"

class Shape(enum.Enum):
    round = "round"

UserId = NewType("UserId", int)

class Params(BaseModel):
    day: str
    cities: list[City] = []

flow = Flow("f", params=Params)

@role("cities", key="name")
async def list_cities(count: int = 1) -> AsyncIterator[City]:
    yield City(name="x")

@role("towns", key="name")
def list_towns(count: int = 1) -> Iterator[Town]:
    yield Town(name="x")

@role("scores", key="score")
async def list_scores() -> AsyncIterator[Score]:
    yield Score(score=1)

@role("rate")
async def rate(item: City, *, least: int = 0) -> Score: ...

@role("rate-all")
async def rate_all(items: list[City]) -> Score: ...

cities = flow.node("cities", list_cities)
towns = flow.node("towns", list_towns)
scores = flow.node("scores", list_scores)
"""

EDGES: list[tuple[str, str, bool]] = [
    ("City", "City", True),
    ("City", "Score", False),
    ("Town", "City", True),
    ("City", "Town", False),
    ("City", "City | Score | None", True),
    ("City | Score", "City", False),
    ("City | None", "City", False),
    ("City | None", "City | None", True),
    ("str", "int", False),
    ("int", "float", True),
    ("int", "int | str", True),
    ("Decimal", "float", False),
    ("dt.date", "dt.datetime", False),
    ("dt.datetime", "dt.date", True),
    ("Color", "Color", True),
    ("Color", "Shape", False),
    ("uuid.UUID", "uuid.UUID", True),
    ("Path", "Path", True),
    ("bytes", "bytes", True),
    ('Literal["a"]', 'Literal["a", "b"]', True),
    ('Literal["a", "b"]', 'Literal["a"]', False),
    ("int", "UserId", False),
    ("UserId", "int", True),
    ("list[Town]", "list[City]", False),
    ("list[Town]", "Sequence[City]", True),
    ("list[City]", "City", False),
    ("dict[str, int]", "Mapping[str, int]", True),
    ("tuple[int, str]", "tuple[int, int]", False),
    ("Row", "tuple[int, str]", True),
    ("Row", "OtherRow", False),
    ("Record", "OtherRecord", False),
    ("PartialRecord", "PartialRecord", True),
    ("Pair", "Triple", False),
    ("Pair", "Pair", True),
    ("Numbers", "list[str]", False),
    ("Box[int]", "Box[str]", False),
    ("Box[int]", "Box[int]", True),
    ("Cat | Dog", "Cat | Dog", True),
    ("Cat | Dog | None", "Cat | Dog | None", True),
    ("Cat | Dog | Cow", "Cat | Dog", False),
    ("int | str", "int | str", True),
    ("list[int] | dict[str, int]", "list[int] | dict[str, int]", True),
    ('Annotated[Cat | Dog, Field(discriminator="kind")]', "Cat | Dog", True),
    ("City", "Named", True),
    ("City", "Titled", False),
    ("City", "object", True),
    ("Any", "City", True),
    ("City | BatchResult", "City", True),
    ("BatchResult", "City", True),
]
"""What a role writes, what another one that pulls from it reads, and whether that fits."""

BOTH, MYPY, PYRIGHT = "  # both", "  # mypy", "  # pyright"
"""What reports the line that ends so. No other line may be reported."""

PROGRAMS = f"""
flow.node("a", rate).pulls("cities"){BOTH}

flow.node("a", rate).pulls(cities, scores){BOTH}

flow.node("a", rate).pulls(cities, towns).gate(1)

flow.node("a", rate).pulls(cities).gate("most"){BOTH}

flow.node("a", rate).pulls(cities).retry("3"){BOTH}

flow.node("a", rate).pulls(cities).when(True){BOTH}

flow.node("a", rate).pulls(cities).routes(on_failure=["b"]){BOTH}

flow.node("a", rate).pulls(cities).retry(3, backoff_sec=dt.timedelta(seconds=3)).timeout(60).quarantine(max="5%")

flow.node("a", rate).maps("params.cities", City, parallel=3)

flow.node("a", rate).maps("params.cities", Score){BOTH}

flow.node("a", rate).maps("params.cities", City, batch_size=5){BOTH}

flow.node("a", rate_all).maps("params.cities", City, batch_size=5)

flow.node("a", rate_all).rechunks(cities, towns, size=5)

flow.node("a", rate_all).rechunks(scores, size=5){BOTH}

flow.node("a", rate).rechunks(cities, size=5){BOTH}

flow.node("a", list_cities).pulls(cities){BOTH}

flow.node("a", rate).pulls(flow.approval("ok", "go?")){BOTH}

flow.node("a", rate).pulls(flow.external("e", "ext", City, Score)){BOTH}

flow.node("a", rate).pulls(flow.external("e", "ext", Score, City).pulls(scores))

flow.node("a", City){BOTH}

async def plain(item: City) -> Score: ...
flow.node("a", plain){BOTH}

async def submit(client: Any) -> None:
    await flow.submit(client, City(name="x")){BOTH}
    await flow.submit(client, Params(day="x"))

async def call() -> None:
    await rate(Score(score=1)){BOTH}
    await rate(City(name="x"), least="much"){BOTH}
    score: Score = await rate(City(name="x"), least=1)

@role("r")
def both(item: int | str) -> int: ...
flow.node("a", both).maps("params.list", int)

@role("r")
def numbers(item: dict[str, int]) -> int: ...
flow.node("a", numbers).maps("params.list", dict[str, int])

@role("r")
async def optional(item: City | None = None, *, limit: int = 3) -> Score: ...
flow.node("a", optional).pulls(cities)

@role("r"){BOTH}
def broken() -> int: ...

flow.node("a", role("r")(lambda item: item)).pulls(cities)

@role("longest", collects=True)
async def longest(items: AsyncIterator[City], *, top: int = 3) -> int: ...
flow.node("a", longest).pulls(cities, towns)
flow.node("b", longest).pulls(scores){BOTH}

@role("all", collects=True)
def all_of(items: list[City]) -> int: ...
flow.node("c", rate).pulls(flow.node("a", all_of).pulls(cities))

@role("k", key="name")
async def wrong() -> AsyncIterator[City]:
    yield Score(score=1){BOTH}

@role("k", key=("name", "mayor"))
async def generator() -> AsyncGenerator[Town, None]:
    yield Town(name="x")
flow.node("a", rate).pulls(flow.node("s", generator))

@role("k", key="name")
def generator() -> Generator[Town, None, None]:
    yield Town(name="x")
flow.node("a", rate).pulls(flow.node("s", generator))

@role("k", key="name")
def generator(folder: str = "x") -> Iterable[Town]:
    yield Town(name="x")
flow.node("a", rate).pulls(flow.node("s", generator))

@role("k", key="name")
async def generator(folder: str = "x") -> AsyncIterable[Town]:
    yield Town(name="x")
flow.node("a", rate).pulls(flow.node("s", generator))

@role("k", key="name"){BOTH}
async def no_generator() -> City: ...

@role("k", key="kind")
async def animals() -> AsyncIterator[Cat | Dog]:
    yield Cat()
@role("r")
def pet(item: Cat | Dog) -> Cat | Dog: ...
flow.node("b", pet).pulls(flow.node("a", animals))

def logged(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return await function(*args, **kwargs)
    return call
@role("r")
@logged
async def decorated(item: City) -> Cat | Dog: ...
@role("p")
async def pet(item: Cat | Dog) -> int: ...
flow.node("b", pet).pulls(flow.node("a", decorated).pulls(cities))
flow.node("c", rate).pulls(flow.node("d", decorated).pulls(cities)){BOTH}

class H(RoleHandler[City, Score]):
    role = "h"
    async def process(self, item: City, ctx: RunContext) -> City:{BOTH}
        return item

class H(RoleHandler[City, Score]):
    role = "h"
    def process(self, item: City) -> City:{BOTH}
        return item

class H(RoleHandler[City, Score]):
    role = "h"
    async def process(self, item: Score, ctx: RunContext) -> Score:{MYPY}
        return item

class H(RoleHandler[list[City], Score]):
    role = "h"
    def process(self, item: list[Score]) -> Score:{MYPY}
        return item[0]

class H(RoleHandler[Town, City]):
    role = "h"
    async def process(self, item: City, ctx: RunContext) -> Town: ...
flow.node("a", H).pulls(towns)

class H(RoleHandler[City, Score]):
    role = "h"
    def process(self, item: City, *, lang: str = "en") -> Score | BatchResult: ...
    async def finalize(self, ctx: RunContext) -> Score:
        return Score(score=sum([each.score async for each in self.results(ctx)]))
flow.node("a", H).pulls(cities)

class H(RoleHandler[City, Score]):
    role = "h"
    async def process(self, item: City, ctx: RunContext) -> Score: ...
    async def finalize(self, ctx: RunContext) -> City:
        return City(name="".join([each.name async for each in self.results(ctx)])){BOTH}

class H(RoleHandler[City, Cat | Dog]):
    role = "h"
    async def process(self, item: City, ctx: RunContext) -> Cat | Dog: ...
@role("p")
async def pet(item: Cat | Dog) -> int: ...
flow.node("b", pet).pulls(flow.node("a", H).pulls(cities))

class H(RoleHandler[City, City]):
    role = "h"
    async def process(self, item: City, ctx: RunContext) -> City: ...
async def call() -> None:
    await H().try_on(Score(score=1)){BOTH}
    city: City = await H().try_on(City(name="x"))

class Base(RoleHandler[City, City]):
    role = "base"
    async def process(self, item: City, ctx: RunContext) -> City: ...
class H(Base):
    role = "h"
    async def process(self, item: City, ctx: RunContext) -> Town:
        return Town(name=(await super().process(item, ctx)).name)
flow.node("a", H).pulls(cities)

class Tap(RoleHandler[T, T]):
    async def process(self, item: T, ctx: RunContext) -> T: ...
class TapCity(Tap[City]):
    role = "tap"
flow.node("a", TapCity).pulls(cities)
flow.node("b", TapCity).pulls(scores){BOTH}

class H(RoleHandler[Params, City]):
    role = "h"
    key = "name"
    async def produce(self, given: Params, ctx: RunContext) -> AsyncIterator[City]:
        yield City(name="x")
flow.node("b", rate).pulls(flow.node("a", H).input(day="x"))

class H(RoleHandler[Params, City]):
    role = "h"
    key = "name"
    def produce(self, given: Params) -> list[City]: ...
flow.node("b", rate).pulls(flow.node("a", H))

class H(RoleHandler[City, Score]):
    role = "h"
    def __init__(self, table: str) -> None: ...
    async def process(self, item: City, ctx: RunContext) -> Score: ...
flow.node("a", H).pulls(cities){BOTH}
flow.node("b", H("x")).pulls(cities)

class H(RoleHandler[City, Score]):
    role = "h"
    def __init__(self, table: str = "x") -> None: ...
    def configured(self) -> Self: ...
    async def process(self, item: City, ctx: RunContext) -> Score: ...
flow.node("a", H).pulls(cities)
flow.node("b", H().configured()).pulls(cities)

class H(RoleHandler):
    role = "h"
    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult: ...
flow.node("b", rate).pulls(flow.node("a", H).pulls(cities, scores))
"""
"""Programs, with a blank line between them."""


@dataclass(frozen=True)
class Reported:
    """The lines that a checker reports, with what it says."""

    lines: Mapping[int, list[str]]

    def against(self, source: str, marks: Iterable[str]) -> list[str]:
        """Return what differs from the lines of the source that end with one of the marks."""
        lines = source.splitlines()
        wanted = {number for number, line in enumerate(lines, 1) if line.endswith(tuple(marks))}
        return [
            f"{lines[number - 1].strip()}: {self.lines.get(number, 'not reported')}"
            for number in sorted(wanted ^ self.lines.keys())
        ]


def source_of_all() -> str:
    """Return the file with all programs, each in a function."""
    edges = [
        f'@role("w")\nasync def writer(item: City) -> {writes}: ...\n'
        f'@role("r")\ndef reader(item: {reads}) -> int: ...\n'
        f'written = flow.node("w", writer).pulls(cities)\n'
        f'flow.node("r", reader).pulls(written){"" if fits else BOTH}'
        for writes, reads, fits in EDGES
    ]
    programs = [*edges, *PROGRAMS.strip().split("\n\n")]
    bodies = [
        f"def program_{number}() -> None:\n" + "\n".join(f"    {line}" for line in program.splitlines())
        for number, program in enumerate(programs, 1)
    ]
    return "\n\n".join([BEFORE, *bodies]) + "\n"


def written(name: str) -> Path:
    file = ROOT / "build" / "typed" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source_of_all(), encoding="utf-8")
    return file


def test_mypy_finds_what_the_pages_promise() -> None:
    file = written("programs_for_mypy.py")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--no-error-summary",
        "--disable-error-code",
        "empty-body",
        str(file),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found: dict[int, list[str]] = {}
    for match in re.finditer(r"^[^:\n]+:(\d+): error: (.*)", done.stdout, re.MULTILINE):
        found.setdefault(int(match[1]), []).append(match[2])
    assert done.stderr == "" and found
    assert Reported(found).against(file.read_text(encoding="utf-8"), [BOTH, MYPY]) == []


def test_pyright_finds_what_the_pages_promise(tmp_path: Path) -> None:
    python = own_environment(tmp_path / "venv", "pyright[nodejs]")
    file = written("programs_for_pyright.py")
    done = subprocess.run(
        [str(python), "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright does not run here: {done.stderr.strip()[-300:]}")
    found: dict[int, list[str]] = {}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        if each["severity"] == "error":
            found.setdefault(each["range"]["start"]["line"] + 1, []).append(each["message"])
    assert Reported(found).against(file.read_text(encoding="utf-8"), [BOTH, PYRIGHT]) == []
