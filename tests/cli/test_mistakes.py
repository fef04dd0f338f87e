"""What people do wrong: each mistake is told in one line that says what to do, with the exit code of its kind."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.world import node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.conftest import Program, Said
    from tests.integration.world import World

pytestmark = pytest.mark.server  # some need none, but each starts a program, which takes its time

NOWHERE = {"TEMPORAL_ADDRESS": "127.0.0.1:1", "MONGO_URL": "mongodb://127.0.0.1:1", "FLOWKIT_QUEUE": ""}
"""Servers that are not there: what is found before they are asked needs none."""

FILES = {
    "good.py": """
from flowkit.worker import RoleHandler

class Count(RoleHandler):
    role = "count"

class Retry(RoleHandler):
    role = "count"

class NoRole(RoleHandler):
    pass

class BadRole(RoleHandler):
    role = "two words"

class Needy(RoleHandler):
    role = "needy"
    def __init__(self, path):
        self.path = path

class Other:
    role = "other"

ready = Count()
number = 7
""",
    "broken.py": "class Count(:\n    pass\n",
    "raising.py": "raise RuntimeError('no licence')\n",
    "leaving.py": "import sys\nsys.exit('bye')\n",
    "needing.py": "import a_library_that_is_not_there\n",
    "good.json": '{"nodes": [{"node_id": "a", "type": "count"}]}',
    "text.json": "nodes: []",
    "list.json": "[1, 2]",
    "wrapped.json": '{"graph": {"nodes": []}, "parms": {}}',
    "typo.json": '{"nodes": [{"node_id": "a", "type": "count", "dependson": []}]}',
    "cycle.json": '{"nodes": [{"node_id": "a", "type": "t", "depends_on": ["b"]},'
    ' {"node_id": "b", "type": "t", "depends_on": ["a"]}]}',
    "odd.json": '{"nodes": [{"node_id": "a", "type": "t", "depends_on": ["b"]}, {"node_id": "b", "type": "t"},'
    ' {"node_id": "c", "type": "t"}], "edges": [["c", "a"]]}',
    "unknown.json": '{"windo": 3}',
    "zero.json": '{"window": 0}',
    "worker.json": '{"max_concurent": 3}',
}


@dataclass(frozen=True, slots=True)
class Mistake:
    """A command line, and what is to be told of it."""

    command: str
    told: list[str]
    code: int = 2
    env: dict[str, str] = field(default_factory=dict)


WITHOUT_SERVERS = {
    "no module": Mistake("worker nowhere.handlers:Count", ["module 'nowhere' was not found", "PYTHONPATH"]),
    "no colon": Mistake(
        "worker good.Count", ["'good.Count' is not module:name", "mypackage.handlers:MyHandler"]
    ),
    "no attribute": Mistake("worker good:Cuont", ["'good' has no 'Cuont'", "did you mean 'Count'?"]),
    "attribute like none": Mistake(
        "worker good:Zzz", ["has no 'Zzz'", "its handlers are Count, Retry, NoRole"]
    ),
    "no handler": Mistake("worker good:number", ["good:number is of type int", "RoleHandler"]),
    "class of no handler": Mistake("worker good:Other", ["good:Other is a class", "RoleHandler"]),
    "no role": Mistake("worker good:NoRole", ["good:NoRole has no role", 'role = "..."']),
    "bad role": Mistake("worker good:BadRole", ["'two words'", "letters, digits"]),
    "arguments": Mistake("worker good:Needy", ["good:Needy", "'path'", "module:instance"]),
    "syntax": Mistake(
        "worker broken:Count", ["'broken' has a syntax error", "broken.py:1", "correct the line"]
    ),
    "raises": Mistake(
        "worker raising:Count", ["'raising'", "RuntimeError: no licence", "correct the module"]
    ),
    "exits": Mistake("worker leaving:Count", ["'leaving'", "SystemExit: bye", "correct the module"]),
    "library": Mistake("worker needing:Count", ["imports 'a_library_that_is_not_there'", "install it"]),
    "two for one": Mistake(
        "worker good:Count good:Retry", ["good:Count and good:Retry", "'count'", "one of them"]
    ),
    "unknown role": Mistake("worker good:ready --role cuont", ["role 'cuont'", "serve count"]),
    "concurrency": Mistake(
        "worker good:ready --concurrency 0", ["--concurrency", "1", "flowkit worker --help"]
    ),
    "worker file": Mistake("worker good:ready --config no.json", ["no file 'no.json'", "--config"]),
    "worker setting": Mistake(
        "worker good:ready --config worker.json",
        ["worker.json", "'max_concurent'", "'max_concurrent'?", "docs/"],
    ),
    "engine file": Mistake("engine --config no.json", ["no file 'no.json'", "--config"]),
    "engine file no json": Mistake("engine --config text.json", ["text.json is not valid JSON"]),
    "engine setting": Mistake("engine --config unknown.json", ["unknown.json", "'windo'", "mean 'window'?"]),
    "engine value": Mistake("engine --config zero.json", ["window is 0", "it must be a"]),
    "function form": Mistake(
        "engine --function report", ["--function 'report'", "NAME=module:function", "example"]
    ),
    "function value": Mistake("engine --function r=good:number", ["good:number", "type int", "async def"]),
    "mongo address": Mistake(
        "engine", ["MONGO_URL 'http://…@h'", "mongodb://host"], env={"MONGO_URL": "http://u:pw@h"}
    ),
    "mongo port": Mistake(
        "list", ["MONGO_URL", "Port", "mongodb://host"], env={"MONGO_URL": "mongodb://h:abc"}
    ),
    "database name": Mistake("list --database a.b", ["database name 'a.b'", "MONGO_DATABASE"]),
    "event loop": Mistake(
        "engine",
        ["FLOWKIT_EVENT_LOOP 'fast'", "neither 'asyncio' nor 'uvloop'"],
        env={"FLOWKIT_EVENT_LOOP": "fast"},
    ),
    "no mongo": Mistake("list", ["no MongoDB server responds at mongodb://127.0.0.1:1", "set MONGO_URL"], 3),
    "no temporal": Mistake("engine", ["no Temporal server responds at 127.0.0.1:1", "TEMPORAL_ADDRESS"], 3),
    "temporal address": Mistake(
        "run good.json",
        ["Temporal", "invalid port", "TEMPORAL_ADDRESS"],
        env={"TEMPORAL_ADDRESS": "localhost:abc"},
    ),
    "no graph": Mistake("run no.json", ["no graph file 'no.json'", "path of a JSON file"]),
    "graph folder": Mistake("run .", ["graph file '.' cannot be read", "path of a JSON file"]),
    "no json": Mistake("run text.json", ["text.json is not JSON", "double quotes"]),
    "shape": Mistake("run list.json", ["graph must be an object with 'nodes', not [1, 2]"]),
    "outer key": Mistake("run wrapped.json", ["unknown key 'parms'", "did you mean 'params'?"]),
    "node key": Mistake("run typo.json", ["node 'a'", "'dependson'", "did you mean 'depends_on'?"]),
    "cycle": Mistake("validate cycle.json", ["cycle", "a -> b -> a", "remove one"]),
    "strict": Mistake("validate odd.json --strict", ["node 'a'", "edges ['c'] differ"]),
    "params no json": Mistake("run good.json --params {a:1}", ["--params is not JSON", "double quotes"]),
    "params no object": Mistake("run good.json --params [1]", ["--params holds a list", "for example"]),
    "params file": Mistake("run good.json --params @no.json", ["no file of --params 'no.json'", "JSON file"]),
    "timeout": Mistake("run good.json --timeout 5", ["--timeout requires --watch", "add --watch"]),
    "status of a list": Mistake("list --status done", ["status 'done' is unknown", "queued, running"]),
    "limit": Mistake("list --limit 0", ["--limit", "1", "flowkit list --help"]),
    "command": Mistake("star", ["No such command 'star'", "flowkit --help"]),
    "option": Mistake("run good.json --wach", ["--wach", "flowkit run --help"]),
}


@pytest.fixture
def files(program: Program) -> Program:
    """The program, in a folder with good and bad files."""
    for name, text in FILES.items():
        program.write(name, text)
    return program


def problems(said: Said, mistake: Mistake) -> Iterator[str]:
    """What is wrong with the way a mistake is told."""
    lines = said.err.splitlines()
    if said.code != mistake.code:
        yield f"exit code {said.code}"
    if said.out or len(lines) != 1 or "Traceback" in said.err:
        yield f"not one line on stderr: {said}"
    yield from (
        f"lacks {part!r}: {said.err}" for part in ["flowkit: ", *mistake.told] if part not in said.err
    )


@pytest.mark.parametrize("mistake", WITHOUT_SERVERS.values(), ids=WITHOUT_SERVERS.keys())
def test_a_mistake_is_told_in_one_line_with_a_remedy(files: Program, mistake: Mistake) -> None:
    said = files.run(*mistake.command.split(), env=NOWHERE | mistake.env)
    assert list(problems(said, mistake)) == []


def test_all_that_is_wrong_with_a_graph_is_told_a_line_each(program: Program) -> None:
    graph = {"nodes": [{"node_id": "a", "type": "x y"}, {"node_id": "b", "type": "t", "io": 7}]}
    program.write("bad.json", json.dumps(graph))
    lines = program.run("run", "bad.json", env=NOWHERE).err.splitlines()
    assert [line.split("'")[1] for line in lines] == ["a", "b"]


@pytest.mark.parametrize("name", ["no json", "node key", "no graph", "timeout"])
def test_with_json_the_error_is_the_one_document(files: Program, name: str) -> None:
    mistake = WITHOUT_SERVERS[name]
    said = files.run(*mistake.command.split(), "--json", env=NOWHERE)
    error = json.loads(said.out)["error"]
    assert (said.code, said.err) == (2, "")
    assert {"code", "message", "remedy"} <= error.keys()
    assert all(part in " ".join(map(str, error.values())) for part in mistake.told)


def test_verbose_shows_the_traceback_as_well(files: Program) -> None:
    said = files.run("worker", "raising:Count", "--verbose")
    assert "Traceback" in said.err
    assert said.err.splitlines()[-1].startswith("flowkit: module 'raising'")


# --- with servers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Late:
    """A mistake that only the servers show; `{ended}` and `{queue}` are filled in."""

    command: str
    told: list[str]
    code: int
    env: dict[str, str] = field(default_factory=dict)


WITH_SERVERS = {
    "namespace": Late(
        "run good.json",
        ["no namespace 'nowhere'", "TEMPORAL_NAMESPACE", "namespace create"],
        3,
        {"TEMPORAL_NAMESPACE": "nowhere"},
    ),
    "worker without mongo": Late(
        "worker good:ready",
        ["no MongoDB server responds at", "set MONGO_URL"],
        3,
        {"MONGO_URL": "mongodb://127.0.0.1:1"},
    ),
    "status of an unknown task": Late("status nothing", ["no task 'nothing'", "flowkit list"], 4),
    "watching an unknown task": Late("status nothing --watch", ["no task 'nothing'", "flowkit list"], 4),
    "cancel of an unknown task": Late("cancel nothing", ["no task 'nothing'", "flowkit list"], 4),
    "cancel of an ended task": Late(
        "cancel {ended}", ["task {ended} is already finished", "nothing to cancel"], 2
    ),
    "id that is taken": Late(
        "run good.json --task-id {ended}", ["'{ended}' belongs to an earlier task", "choose another id"], 2
    ),
}


async def test_a_mistake_that_servers_show_is_told_in_one_line_with_a_remedy(
    world: World, files: Program
) -> None:
    await world.engine()
    ended = await world.create({"node_id": "a", "type": "coordinator_fn"})
    await world.result(ended)
    wrong: dict[str, list[str]] = {}
    for name, late in WITH_SERVERS.items():
        mistake = Mistake(late.command, [part.format(ended=ended) for part in late.told], late.code)
        command = late.command.format(ended=ended).split()
        said = await files.call(*command, env={**world.environment, **late.env})
        wrong |= {name: found} if (found := list(problems(said, mistake))) else {}
    assert wrong == {}


async def test_a_task_that_nobody_runs_is_told_of_the_missing_engine(world: World, files: Program) -> None:
    environment = world.environment
    said = await files.call("run", "good.json", "--watch", "--timeout", "3", env=environment)
    assert (
        f"no engine polls queue {world.queue}; start one with `flowkit engine --queue {world.queue}`"
        in said.out
    )
    assert said.code == 124
    assert "it continues" in said.err
    started = await files.call("run", "good.json", "--json", env=environment)
    assert "no engine polls" in json.loads(started.out)["hints"][0]


async def test_a_node_that_nobody_runs_is_told_of_the_missing_worker(world: World, files: Program) -> None:
    await world.engine()
    task_id = await world.create(node("a", "nobody"))

    async def status() -> Any:
        said = await files.call("status", task_id, "--json", env=world.environment)
        return json.loads(said.out)

    found = await status()
    while not found["nodes"] or found["nodes"][0]["status"] != "running":
        found = await status()
    assert found["hints"] == [
        f"no worker polls role nobody; start one with `flowkit worker module:Handler --queue {world.queue}`"
    ]
    assert found["nodes"][0]["waiting"]
    people = await files.call("status", task_id, env=world.environment)
    assert "no worker has started it yet" in people.out
