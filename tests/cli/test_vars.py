"""`flowkit vars` shows and changes the variables of a task, and rejects invalid changes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.cli.app import run
from flowkit.cli.json_files import read_value
from flowkit.cli.tasks.variables import lines, plain
from flowkit.coordinator.adapters import CoordinatorAdapters
from tests.integration.harness import node

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Program, ProgramOutput
    from tests.integration.harness import Harness

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
SECRET = "AKIA" + "ABCDEFGHIJKLMNOP"


# --- without servers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ('"7"', "7"),
        ("gold", "gold"),
        ("", ""),
        ("null", None),
        ("true", True),
        ('{"a": [1]}', {"a": [1]}),
        ("{a: 1}", "{a: 1}"),
        ("a=b", "a=b"),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
    ],
)
def test_value_is_parsed_as_json_or_used_as_text(text: str, value: Any) -> None:
    assert read_value(text) == value


def test_each_leaf_has_one_line_sorted_by_path() -> None:
    tree = {"b": {"z": 1, "a": "gold"}, "a-": [1, "x"], "a": {"b": None}, "none": {}, "y" * 60: "über"}
    assert lines(tree) == [
        f"a.b{' ' * 37}  null",
        f'a-{" " * 38}  [1, "x"]',
        f'b.a{" " * 37}  "gold"',
        f"b.z{' ' * 37}  1",
        f"none{' ' * 36}  {{}}",
        f'{"y" * 60}  "über"',
    ]


def test_values_without_a_json_form_are_shown_as_text() -> None:
    found = {"at": NOON, "raw": b"\x00\xff", "rate": float("nan"), "all": [float("inf"), {"at": NOON}]}
    assert plain(found) == {
        "at": "2026-01-31T12:00:00+00:00",
        "raw": "AP8=",
        "rate": "nan",
        "all": ["inf", {"at": "2026-01-31T12:00:00+00:00"}],
    }


@pytest.fixture
def ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run `flowkit vars task …` without MongoDB, and return the exit code and the line on stderr with an excerpt."""
    monkeypatch.setattr("flowkit.cli.options.log_warnings", lambda verbose: None)
    monkeypatch.setenv("MONGO_URL", "mongodb://127.0.0.1:1")
    monkeypatch.setattr("flowkit.cli.servers._ANSWER_MS", 50)

    def call(*options: str) -> tuple[int, str]:
        code = run(["vars", "task", *options])
        output = capsys.readouterr()
        lines = [line for line in output.err.splitlines() if not line.startswith("  | ")]
        assert (output.out, len(lines)) == ("", 1)
        return code, output.err

    return call


MISTAKES = {
    "no value": (["--set", "novalue"], ["--set 'novalue' is not NAME=VALUE", "for example"]),
    "no name": (["--set", "=7"], ["--set '=7' is not NAME=VALUE", "for example"]),
    "twice": (["--set", "a=1", "--set", "a=2"], ["--set names 'a' twice", "pass it once"]),
    "bad path": (
        ["--set", "a..b=1"],
        ["vars.set: 'coordinator.vars.a..b'", "correct --set", "docs/variables.md"],
    ),
    "overlap": (["--set", "a=1", "--set", "a.b=2"], ["vars.a.b is below coordinator.vars.a", "--set"]),
    "too large": (["--set", f"a={'9' * 30}"], ["vars.a, an int, cannot be stored", "correct --set"]),
    "no json": (["--merge", "{a: 1}"], ["--merge:1:2: not JSON", "double quotes"]),
    "no object": (["--merge", "[1]"], ["--merge holds a list", "for example"]),
    "no file": (["--merge", "@no.json"], ["no file of --merge 'no.json'", "YAML file"]),
    "dotted merge": (["--merge", '{"a.b": 1}'], ["vars.merge: 'coordinator.vars.a.b'", "correct --merge"]),
    "no number": (["--incr", "k=abc"], ["--incr 'k=abc' is not NAME or NAME=NUMBER", "for example"]),
    "truth": (["--incr", "k=true"], ["--incr 'k=true' is not", "for example"]),
    "infinite": (["--incr", "k=1e999"], ["the value '1e999'", "beyond the range of numbers"]),
    "unset path": (["--unset", "$a"], ["vars.unset: 'coordinator.vars.$a'", "correct --unset"]),
    "only block": (["--block-sensitive"], ["--block-sensitive requires --set or --merge", "add one"]),
    "secret": (
        ["--set", f"k={SECRET}", "--block-sensitive"],
        ["--set has a value that looks like a secret", "reference"],
    ),
    "late": (
        ["--set", "a=1", "--incr", "b=1", "--unset", "a."],
        ["vars.unset: 'coordinator.vars.a.'", "correct --unset"],
    ),
}


@pytest.mark.parametrize(("options", "reported"), MISTAKES.values(), ids=MISTAKES.keys())
def test_invalid_argument_prints_one_line_with_a_remedy_before_connecting(
    ask: Callable[..., tuple[int, str]], options: list[str], reported: list[str]
) -> None:
    code, line = ask(*options)
    assert code == 2
    assert [part for part in ["flowkit: ", *reported] if part not in line] == []
    assert SECRET not in line


def test_unreachable_database_is_reported_with_a_remedy(
    ask: Callable[..., tuple[int, str]],
) -> None:
    code, line = ask("--incr", "a")
    assert code == 3
    assert line == (
        "flowkit: no MongoDB server responds at mongodb://127.0.0.1:1; start one, or set MONGO_URL\n"
    )


# --- with servers ---------------------------------------------------------------------------------------------------


class Vars:
    """Runs `flowkit vars` for one task without Temporal."""

    def __init__(self, harness: Harness, program: Program, task_id: str) -> None:
        self.harness = harness
        self.program = program
        self.task_id = task_id

    async def __call__(self, *options: str, task_id: str | None = None) -> ProgramOutput:
        """Run the command and return its output."""
        environment = {**self.harness.environment, "TEMPORAL_ADDRESS": "127.0.0.1:1"}
        return await self.program.call("vars", task_id or self.task_id, *options, env=environment)

    async def stored(self) -> dict[str, Any]:
        """Return the variables in the database."""
        return await self.harness.coordinator.vars(self.task_id)


@pytest.fixture
async def task_vars(harness: Harness, program: Program) -> Vars:
    """The command for a task without an engine."""
    return Vars(harness, program, await harness.create(node("a")))


@pytest.mark.server
async def test_task_without_variables_is_reported(task_vars: Vars) -> None:
    output = await task_vars()
    assert (output.code, output.out, output.err) == (0, "", "no variables\n")
    as_json = await task_vars("--json")
    assert (as_json.code, as_json.out, as_json.err) == (0, "{}\n", "")


@pytest.mark.server
async def test_options_change_the_variables_and_print_the_result(task_vars: Vars) -> None:
    task_vars.program.write("more.json", '{"routing": {"tier": 2}, "gone": 1}')
    changes = [
        "--unset",
        "gone",
        "--incr",
        "counts.done=2.5",
        "--incr",
        "counts.done",
        "--merge",
        "@more.json",
    ]
    output = await task_vars(*changes, "--set", "routing.sla=gold", "--set", 'code="7"')
    assert (output.code, output.err) == (0, "")
    assert output.out.splitlines() == [
        'code          "7"',
        "counts.done   3.5",
        'routing.sla   "gold"',
        "routing.tier  2",
    ]
    assert await task_vars.stored() == {
        "routing": {"sla": "gold", "tier": 2},
        "code": "7",
        "counts": {"done": 3.5},
    }
    assert (await task_vars()).out == output.out


@pytest.mark.server
async def test_json_option_prints_the_variables_as_one_document(task_vars: Vars) -> None:
    adapters = CoordinatorAdapters(db=task_vars.harness.db)
    await adapters.vars_set(task_vars.task_id, at=NOON, text="a :smile: b")
    output = await task_vars("--incr", "n", "--json")
    assert (output.code, output.err) == (0, "")
    assert json.loads(output.out) == {"at": "2026-01-31T12:00:00+00:00", "text": "a :smile: b", "n": 1}
    assert '"a :smile: b"' in (await task_vars()).out


@pytest.mark.server
async def test_conflict_is_reported_with_the_changes_that_were_made_before_it(task_vars: Vars) -> None:
    output = await task_vars("--set", "name=Ada", "--merge", '{"n": 1}', "--incr", "name", "--unset", "n")
    assert (output.code, output.out) == (2, "")
    assert output.err == (
        "flowkit: vars.incr: coordinator.vars.name holds a str, not a number; what --set and --merge changed "
        f"remains; `flowkit vars {task_vars.task_id}` shows the current variables\n"
    )
    assert await task_vars.stored() == {"name": "Ada", "n": 1}


@pytest.mark.server
async def test_invalid_option_prevents_all_other_changes(task_vars: Vars) -> None:
    for mistake in (["--unset", "a."], ["--merge", json.dumps({"k": SECRET}), "--block-sensitive"]):
        assert (await task_vars("--set", "a=1", *mistake)).code == 2
    assert await task_vars.stored() == {}


@pytest.mark.server
async def test_missing_task_exits_with_code_4_and_is_not_created(task_vars: Vars) -> None:
    output = await task_vars("--set", "a=1", "--json", task_id="nothing")
    assert (output.code, output.err) == (4, "")
    assert json.loads(output.out)["error"] == {
        "code": "unknown_task",
        "message": "there is no task 'nothing'",
        "remedy": "run `flowkit list` to see the existing tasks",
    }
    assert await task_vars.harness.db.tasks.count_documents({"id": "nothing"}) == 0
