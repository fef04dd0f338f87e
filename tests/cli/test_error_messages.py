"""User errors: each prints one line that says how to fix it, and exits with the code of its kind."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.conftest import Program, ProgramOutput
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server  # some need no server, but each starts a program, which takes time

NOWHERE = {"TEMPORAL_ADDRESS": "127.0.0.1:1", "MONGO_URL": "mongodb://127.0.0.1:1", "FLOWKIT_QUEUE": ""}
"""Addresses without servers, for errors that FlowKit detects before it connects."""

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
    "reading.py": "import os\nos.environ['NOT_SET']\n",
    "needing.py": "import a_library_that_is_not_there\n",
    "good.json": '{"nodes": [{"node_id": "a", "type": "count"}]}',
    "text.json": "nodes: []",
    "list.json": "[1, 2]",
    "wrapped.json": '{"graph": {"nodes": []}, "parms": {}}',
    "typo.json": '{"nodes": [{"node_id": "a", "type": "count", "dependson": []}]}',
    "cycle.json": '{"nodes": [{"node_id": "a", "type": "t", "depends_on": ["b"]},'
    ' {"node_id": "b", "type": "t", "depends_on": ["a"]}]}',
    "odd.json": '{"nodes": [{"node_id": "a", "type": "t", "depends_on": ["b"],'
    ' "io": {"input_inline": {"input_adapter": "noop"}}}, {"node_id": "b", "type": "t"},'
    ' {"node_id": "c", "type": "t"}], "edges": [["c", "a"]]}',
    "unknown.json": '{"windo": 3}',
    "zero.json": '{"window": 0}',
    "worker.json": '{"max_concurent": 3}',
}


@dataclass(frozen=True, slots=True)
class Mistake:
    """A command line, and its expected error."""

    command: str
    reported: list[str]
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
        "worker broken:Count", ["'broken' has a syntax error at broken.py:1: ", "correct the line"]
    ),
    "raises": Mistake(
        "worker raising:Count",
        ["'raising'", "RuntimeError: no licence, at raising.py:1 in <module>", "correct the module"],
    ),
    "no variable": Mistake(
        "worker reading:Count",
        ["KeyError: 'NOT_SET', at reading.py:2 in <module>", "set this environment variable"],
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
    "engine file no json": Mistake("engine --config text.json", ["text.json:1:1: not JSON"]),
    "engine setting": Mistake("engine --config unknown.json", ["unknown.json", "'windo'", "mean 'window'?"]),
    "engine value": Mistake("engine --config zero.json", ["window is 0", "it must be a"]),
    "function form": Mistake(
        "engine --function report", ["--function 'report'", "NAME=module:function", "example"]
    ),
    "function value": Mistake("engine --function r=good:number", ["good:number", "type int", "async def"]),
    "mongo address": Mistake(
        "engine", ["MONGO_URL (http://h)", "mongodb://host"], env={"MONGO_URL": "http://u:pw@h"}
    ),
    "mongo port": Mistake(
        "list", ["MONGO_URL", "check port", "mongodb://host"], env={"MONGO_URL": "mongodb://h:abc"}
    ),
    **{
        f"data converter of {command.split()[0]}": Mistake(
            command,
            ["FLOWKIT_DATA_CONVERTER is 'nowhere:CONVERTER'", "module:attribute"],
            env={"FLOWKIT_DATA_CONVERTER": "nowhere:CONVERTER"},
        )
        for command in ("engine", "worker good:Count", "bridge a", "status t", "up")
    },
    "unconfirmed writes": Mistake(
        "list", ["w=0", "remove w=0 from MONGO_URL"], env={"MONGO_URL": "mongodb://127.0.0.1:1/?w=0"}
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
    "no graph": Mistake("run no.json", ["no graph file 'no.json'", "path of a JSON or YAML file"]),
    "graph folder": Mistake("run .", ["graph file '.' cannot be read", "path of a JSON or YAML file"]),
    "no json": Mistake("run text.json", ["text.json:1:1: not JSON", "it looks like YAML"]),
    "shape": Mistake("run list.json", ["graph must be an object with 'nodes', not [1, 2]"]),
    "outer key": Mistake("run wrapped.json", ["unknown key 'parms'", "did you mean 'params'?"]),
    "node key": Mistake("run typo.json", ["node 'a'", "'dependson'", "did you mean 'depends_on'?"]),
    "cycle": Mistake("validate cycle.json", ["cycle", "a -> b -> a", "remove one"]),
    "strict": Mistake("validate odd.json --strict", ["node 'a'", "edges ['c'] differ"]),
    "params no json": Mistake("run good.json --params {a:1}", ["--params:1:2: not JSON", "double quotes"]),
    "params no object": Mistake("run good.json --params [1]", ["--params holds a list", "for example"]),
    "params file": Mistake("run good.json --params @no.json", ["no file of --params 'no.json'", "YAML file"]),
    "timeout": Mistake("run good.json --timeout 5", ["--timeout requires --watch", "add --watch"]),
    "status of a list": Mistake("list --status done", ["status 'done' is unknown", "queued, running"]),
    "limit": Mistake("list --limit 0", ["--limit", "1", "flowkit list --help"]),
    "dash": Mistake(
        "attempts t -dash", ["No such option: -d", "`flowkit attempts --help`", "put `--` before"]
    ),
    "command": Mistake("star", ["No such command 'star'", "flowkit --help"]),
    "option": Mistake("run good.json --wach", ["--wach", "flowkit run --help"]),
}


@pytest.fixture
def files(program: Program) -> Program:
    """The program in a folder with valid and invalid files."""
    for name, text in FILES.items():
        program.write(name, text)
    return program


def problems(output: ProgramOutput, mistake: Mistake) -> Iterator[str]:
    """Yield the differences between the output and the expected error."""
    lines = [line for line in output.err.splitlines() if not line.startswith("  | ")]  # those show the place
    if output.code != mistake.code:
        yield f"exit code {output.code}"
    if output.out or len(lines) != 1 or "Traceback" in output.err:
        yield f"not one line on stderr: {output}"
    yield from (
        f"lacks {part!r}: {output.err}" for part in ["flowkit: ", *mistake.reported] if part not in output.err
    )


@pytest.mark.parametrize("mistake", WITHOUT_SERVERS.values(), ids=WITHOUT_SERVERS.keys())
def test_invalid_input_prints_one_line_with_a_remedy(files: Program, mistake: Mistake) -> None:
    output = files.run(*mistake.command.split(), env=NOWHERE | mistake.env)
    assert list(problems(output, mistake)) == []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "engine --config unknown.json",
            "unknown.json: CoordinatorConfig has no setting 'windo'; did you mean 'window'?; ",
        ),
        (
            "worker good:ready --config worker.json",
            "worker.json: WorkerConfig has no setting 'max_concurent'; did you mean 'max_concurrent'?; ",
        ),
    ],
    ids=["engine", "worker"],
)
def test_error_of_a_setting_names_its_file_once(files: Program, command: str, message: str) -> None:
    output = files.run(*command.split(), env=NOWHERE)
    assert output.err == f"flowkit: {message}docs/configuration.md lists the settings\n"


def test_worker_with_a_misspelled_hook_prints_the_right_name(files: Program) -> None:
    files.write(
        "typo.py",
        "from flowkit.worker import RoleHandler\n\nclass Count(RoleHandler):\n    role = 'count'\n"
        "    async def proces_batch(self, batch, ctx):\n        pass\n",
    )
    assert files.run("worker", "typo:Count", env=NOWHERE).err == (
        "flowkit: Count.proces_batch is not a hook of RoleHandler, so FlowKit never calls it; did you mean "
        "'process_batch'? If it is a helper, begin its name with '_'\n"
    )


def test_run_prints_one_line_for_each_problem_of_a_graph(program: Program) -> None:
    graph = {"nodes": [{"node_id": "a", "type": "x y"}, {"node_id": "b", "type": "t", "io": 7}]}
    program.write("bad.json", json.dumps(graph))
    lines = program.run("run", "bad.json", env=NOWHERE).err.splitlines()
    assert [line.split("'")[1] for line in lines] == ["a", "b"]


@pytest.mark.parametrize("name", ["no json", "node key", "no graph", "timeout"])
def test_json_option_prints_the_error_as_one_document(files: Program, name: str) -> None:
    mistake = WITHOUT_SERVERS[name]
    output = files.run(*mistake.command.split(), "--json", env=NOWHERE)
    error = json.loads(output.out)["error"]
    assert (output.code, output.err) == (2, "")
    assert {"code", "message", "remedy"} <= error.keys()
    assert all(part in " ".join(map(str, error.values())) for part in mistake.reported)


def test_verbose_option_also_prints_the_traceback(files: Program) -> None:
    output = files.run("worker", "raising:Count", "--verbose")
    assert "Traceback" in output.err
    assert output.err.splitlines()[-1].startswith("flowkit: module 'raising'")


# --- with servers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Late:
    """An error that requires servers. The test replaces `{ended}` and `{queue}` in the command."""

    command: str
    reported: list[str]
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
    "explanation of an unknown task": Late("explain nothing", ["no task 'nothing'", "flowkit list"], 4),
    "cancel of an unknown task": Late("cancel nothing", ["no task 'nothing'", "flowkit list"], 4),
    "cancel of an ended task": Late(
        "cancel {ended}", ["task {ended} is already finished", "nothing to cancel"], 2
    ),
    "id that is taken": Late(
        "run good.json --task-id {ended}", ["'{ended}' belongs to an earlier task", "choose another id"], 2
    ),
}


async def test_error_from_a_server_prints_one_line_with_a_remedy(harness: Harness, files: Program) -> None:
    await harness.engine()
    ended = await harness.create({"node_id": "a", "type": "coordinator_fn"})
    await harness.result(ended)
    wrong: dict[str, list[str]] = {}
    for name, late in WITH_SERVERS.items():
        mistake = Mistake(late.command, [part.format(ended=ended) for part in late.reported], late.code)
        command = late.command.format(ended=ended).split()
        output = await files.call(*command, env={**harness.environment, **late.env})
        wrong |= {name: found} if (found := list(problems(output, mistake))) else {}
    assert wrong == {}


async def test_watched_task_without_an_engine_reports_the_missing_engine(
    harness: Harness, files: Program
) -> None:
    environment = harness.environment
    output = await files.call("run", "good.json", "--watch", "--timeout", "10", env=environment)
    assert (
        f"no engine polls queue {harness.queue}; start one with `flowkit engine --queue {harness.queue}`"
        in output.out
    )
    assert output.code == 124
    assert "it continues" in output.err
    started = await files.call("run", "good.json", "--json", env=environment)
    assert "no engine polls" in json.loads(started.out)["hints"][0]


async def test_watched_node_without_a_worker_reports_the_missing_worker(
    harness: Harness, files: Program
) -> None:
    await harness.engine()
    task_id = await harness.create(node("a", "nobody"))

    async def status() -> Any:
        """Return the output when the node runs. A busy engine may not answer in time, which the hint says."""
        output = await files.call("status", task_id, "--json", env=harness.environment)
        found = json.loads(output.out)
        is_silent = any("does not respond" in each for each in found["hints"])
        return (
            found if found["nodes"] and found["nodes"][0]["status"] == "running" and not is_silent else None
        )

    found = await eventually(status)
    option = f"--queue {harness.queue}"
    start = f"start one with `flowkit worker module:Handler {option}`, or `flowkit bridge nobody {option}` if external"
    assert found["hints"] == [f"no worker has ever polled role nobody; {start} workers run it"]
    assert found["nodes"][0]["waiting"]
    people = await files.call("status", task_id, env=harness.environment)
    assert "no worker has started it yet" in people.out


async def test_role_that_nobody_has_ever_polled_suggests_one_that_is_polled(
    harness: Harness, files: Program
) -> None:
    await harness.engine()
    await harness.worker()
    alone = {"input_adapter": "noop"}
    files.write(
        "typo.json", json.dumps({"nodes": [node("a", "quik"), node("b", "quick", "a", inline=alone)]})
    )
    start = f"start one with `flowkit worker module:Handler --queue {harness.queue}`"
    hint = f"no worker has ever polled role quik; did you mean quick? If not, {start}"

    async def call(*command: str) -> ProgramOutput:
        return await files.call(*command, env=harness.environment)

    assert (await call("validate", "typo.json")).err == f"warning: {hint}\n"
    assert json.loads((await call("validate", "typo.json", "--json")).out)["hints"] == [hint]
    started = json.loads((await call("run", "typo.json", "--json")).out)
    assert started["hints"] == [hint]
    assert json.loads((await call("status", started["task_id"], "--json")).out)["hints"] == [hint]


async def test_task_of_another_database_than_the_engines_is_a_warning(
    harness: Harness, files: Program
) -> None:
    await harness.engine()
    other = f"{harness.database}_other"
    output = await files.call(
        "run", "good.json", "--json", env=harness.environment | {"MONGO_DATABASE": other}
    )
    assert json.loads(output.out)["hints"][0] == (
        f"no engine of database {other!r} polls queue {harness.queue}: the engines there use database "
        f"{harness.database!r}; set the same MONGO_URL and MONGO_DATABASE for both"
    )
    await harness.db.client.drop_database(other)
