"""Files and options in JSON or YAML: which of both they are, and where their errors are."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.property_examples import examples

from flowkit.cli.json_files import read_change, read_objects, read_params, read_task
from flowkit.config import CoordinatorConfig, WorkerConfig, split_settings
from flowkit.errors import ConfigError, GraphError
from flowkit.text import EXCERPT
from flowkit.validation.documents import Document
from flowkit.validation.json_places import PLACE_LEVELS, offsets, walk

ROOT = Path(__file__).parents[2]


def problem_of(name: str, text: str) -> list[str]:
    """Return the error of a text without its remedies, and the lines of its excerpt."""
    with pytest.raises(ConfigError) as caught:
        Document(name=name, text=text).load()
    return str(caught.value).split(EXCERPT)


# --- JSON or YAML ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stdin", "--params", "graph", "graph.txt", "graph.yaml", "graph.YML"])
def test_any_text_but_a_json_file_can_be_yaml(name: str) -> None:
    assert Document(name=name, text="day: 2026-01-31\n").load() == {"day": "2026-01-31"}
    assert Document(name=name, text="\ufeff- no # comment").load() == ["no"]


def test_json_file_is_json() -> None:
    assert problem_of("graph.json", "a: 1")[0].startswith("graph.json:1:1: not JSON: ")


@pytest.mark.parametrize("text", ["{day: x}", '{"a": None}', "[a, b]", '{"a": 1,}', "{'a': 1}", '{"a": 1'])
def test_text_that_begins_like_json_is_json_unless_the_name_says_yaml(text: str) -> None:
    for name in ("stdin", "--params"):
        assert problem_of(name, text)[0].startswith(f"{name}:1:")
        assert ": not JSON: " in problem_of(name, text)[0]
    if not text.endswith("1"):
        assert Document(name="a.yaml", text=text).load()


def test_json_in_a_yaml_file_is_read_as_json() -> None:
    text = '{"a": "\\ud83d\\ude00", "b":\t1e2}'
    assert Document(name="a.yaml", text=text).load() == {"a": "😀", "b": 100.0}
    assert problem_of("a.yaml", '{"a": 1, "a": 2}')[0].startswith(
        "a.yaml:1:10: the top level has the key 'a' twice"
    )
    assert problem_of("a.yaml", "{a: 1, a: 2}")[0].startswith(
        "a.yaml:1:8: the top level has the key 'a' twice"
    )


def test_every_json_file_of_the_repository_is_the_same_as_yaml() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]
    assert files
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert Document(name="a.yaml", text=f"# a comment\n{text}").load() == json.loads(text)


def test_yaml_is_read_wherever_json_is(tmp_path: Path) -> None:
    graph, change, batches, config = (
        tmp_path / f"{name}.yaml" for name in ("graph", "change", "batches", "config")
    )
    graph.write_text("params: {day: 2026-01-31}\ngraph:\n  nodes:\n    - {node_id: a, type: t}\n")
    task = read_task(str(graph), "limit: 5", ["full=no"])
    assert task.params == {"day": "2026-01-31", "limit": 5, "full": "no"}
    assert task.checked().nodes[0].node_id == "a"
    change.write_text("changes:\n  a: {timeout_sec: 5}\n")
    assert read_change(str(change)) == {"changes": {"a": {"timeout_sec": 5}}}
    batches.write_text("- uid: a\n")
    assert read_objects(f"@{batches}", "--batches", "") == [{"uid": "a"}]
    config.write_text("window: 50 # attempts\nmax_concurrent: {ocr: 2}\n")
    assert split_settings(config) == ({"window": 50}, {"max_concurrent": {"ocr": 2}})
    config.write_text("queue: no\n")
    assert [each.load(config).queue for each in (CoordinatorConfig, WorkerConfig)] == ["no", "no"]


# --- places -----------------------------------------------------------------------------------------------------------

PLACES = {
    "comma": (
        "a.json",
        '{"a": 1\n "b": 2}',
        ["a.json:2:2: not JSON: Expecting ',' delimiter", ' "b": 2}', " ^"],
    ),
    "number": (
        "a.json",
        '{"a": [\n0, 1e999]}',
        [
            "a.json:2:4: a[1] is '1e999', beyond the range of numbers; pass it as a string",
            "0, 1e999]}",
            "   ^",
        ],
    ),
    "second key": (
        "stdin",
        '{"a": {"x": 1},\n"b": [{"x": 1, "x": 2}]}',
        [
            "stdin:2:16: b[0] has the key 'x' twice, and JSON keeps one of them; remove one",
            '"b": [{"x": 1, "x": 2}]}',
            "               ^",
        ],
    ),
    "key in YAML": (
        "a.yml",
        "a:\n  b: 1\n  b: 2\n",
        ["a.yml:3:3: a has the key 'b' twice, first on line 2; remove one", "  b: 2", "  ^"],
    ),
    "end": ("a.json", '{"a": 1\n', ["a.json:2:1: not JSON: Expecting ',' delimiter"]),
    "no YAML": (
        "a.yaml",
        "a: [b: c: d]",
        [
            "a.yaml:1:9: not YAML: did not find expected ',' or ']'; put a comma between two values, or close the list",
            "a: [b: c: d]",
            "        ^",
        ],
    ),
}


@pytest.mark.parametrize(("name", "text", "shown"), PLACES.values(), ids=PLACES)
def test_error_shows_line_and_column(name: str, text: str, shown: list[str]) -> None:
    assert problem_of(name, text) == shown


def test_a_place_that_the_reader_tells_in_words_is_that_of_the_error() -> None:
    first = problem_of("a.json", f'{{"a":\n{"9" * 5_000}}}')[0]
    assert first.startswith("a.json:2:430")
    assert first.partition(": ")[2].startswith("number out of range; numbers have")


def test_error_in_a_long_line_shows_a_part_of_it() -> None:
    text = json.dumps({"a": ["x" * 10] * 5_000})
    [problem, shown, caret] = problem_of("a.json", f"{text[:-2]} 1]}}")
    assert re.fullmatch(r"a\.json:1:\d+: not JSON: Expecting ',' delimiter", problem)
    assert len(shown) <= 100
    assert shown[caret.index("^")] == "1"


@pytest.mark.parametrize(
    "text",
    [
        '{"kafka_sasl_password": "hunter2" 1}',
        "kafka_sasl_password: 'hunter2' 1",
        "password:\n  'hunter2' 1",
        "address: 'mongodb://me:hunter2@host' 1",
        "passwords:\n- one\n- two\n- hunter2: a: b",
        "password:\n  # of the shop\n\n  hunter2: a: b",
        '{"passwords": {\n  "a": [\n    "one",\n    "two",\n    "hunter2" 1',
        "password: !hunter2",
        "password: *hunter2",
        "password: !!int hunter2",
    ],
)
def test_line_that_may_have_a_secret_is_not_shown(text: str) -> None:
    [problem] = problem_of("stdin", text)
    assert "hunter2" not in problem


GRAPH = {"nodes": [{"node_id": "a", "type": "t"}, {"node_id": "it's", "type": "t", "dependson": ["a"]}]}
FILES = {
    "a.json": (json.dumps(GRAPH, indent=1), "10:4"),
    "b.json": (json.dumps({"params": {"n": [1, {}]}, "graph": GRAPH}, indent=1), "17:5"),
    "a.yaml": ("# x\nnodes:\n- {node_id: a, type: t}\n- type: t\n  node_id: it's\n  dependson: [a]\n", "6:3"),
    "b.yaml": (
        "graph:\n  nodes:\n  - {node_id: a, type: t}\n  - {node_id: it's, type: t, dependson: [a]}\n",
        "4:30",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_unknown_key_of_a_node_begins_with_its_line_and_column(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(FILES[name][0])
    with pytest.raises(GraphError) as caught:
        read_task(str(file)).checked()
    start = f"{file}:{FILES[name][1]}: node \"it's\": unknown key 'dependson'"
    assert caught.value.problems[0].startswith(start)


def test_warning_about_a_node_begins_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    nodes = "- {node_id: a, type: t}\n- {node_id: c, type: t}\n- {node_id: b, type: t, depends_on: [a]}"
    file.write_text(f"edges: [[c, b]]\nnodes:\n{nodes}")
    assert str(read_task(str(file)).checked().warnings[0]).startswith(f"{file}:5: node 'b'")


# --- hostile files ----------------------------------------------------------------------------------------------------


def test_file_without_end_is_read_only_in_part() -> None:
    with pytest.raises(ConfigError, match="/dev/zero has more than 64,000,000 bytes"):
        Document.read("/dev/zero")


def test_large_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "graph.yaml"
    file.touch()
    os.truncate(file, 200_000_000)
    with pytest.raises(ConfigError, match=r"graph\.yaml' has more than 64,000,000 bytes"):
        read_task(str(file))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a: 1\nb: é".encode("utf-16"), "is not UTF-8 in line 1"),
        (b"a: 1\nb: \xe9", "is not UTF-8 in line 2"),
        (b"\xef\xbb\xbfa: 1\n\x00", r":2:1: a YAML text cannot contain the character '\x00'"),
    ],
)
def test_file_that_is_not_utf_8_text_is_named(content: bytes, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        CoordinatorConfig.load(file)


def test_option_holds_an_object() -> None:
    with pytest.raises(ConfigError, match="--params holds a string, not an object"):
        read_params("day")


# --- the places in any JSON text --------------------------------------------------------------------------------------

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=examples(100))
@given(VALUES, st.sampled_from([None, 1]))
def test_every_value_of_a_json_text_is_found(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    steps = [step for step in walk(text) if not step.is_key]
    for step in steps:
        found = value
        for part in step.path:
            found = found[part]
        assert json.JSONDecoder().raw_decode(text, step.offset)[0] == found
    assert len({step.path for step in steps}) == len(steps)
    assert {path for path in offsets(text)} == {step.path for step in steps if len(step.path) <= PLACE_LEVELS}


GRAPH_PLACES = {
    "null nodes": ("name: x\n\nnodes: null\n", ["g.yaml:3: graph.nodes must be a list of at least one node"]),
    "list": ("# nodes\n- a\n", ["g.yaml:2: graph must be an object with 'nodes', not ['a']"]),
    "null": ("\nnull\n", ["g.yaml:2: graph must be an object with 'nodes', not None"]),
    "keys": (
        "nodes:\n  - node_id: a\n    type: b\n    depends: []\n    io: {inputs: 1}\n",
        ["g.yaml:4:5: node 'a': unknown key 'depends'", "g.yaml:5:10: node 'a': io: unknown key 'inputs'"],
    ),
    "keys below graph": (
        'graph:\n  nodes:\n    - {node_id: a, type: b, io: {"in puts": 1}}\n',
        ["g.yaml:3:34: node 'a': io: unknown key 'in puts'"],
    ),
    "keys in JSON": (
        '{"nodes": [\n  {"node_id": "a", "type": "b",\n   "depends": []}]}',
        ["g.yaml:3:4: node 'a': unknown key 'depends'"],
    ),
}


@pytest.mark.parametrize(("text", "expected"), GRAPH_PLACES.values(), ids=GRAPH_PLACES)
def test_problems_of_a_graph_name_the_line_and_of_an_unknown_key_the_column(
    text: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("g.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(GraphError) as caught:
        read_task("g.yaml").checked()
    assert [
        problem[: len(start)] for problem, start in zip(caught.value.problems, expected, strict=True)
    ] == expected
