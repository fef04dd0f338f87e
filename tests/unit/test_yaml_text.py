"""YAML 1.2 with its core schema, as far as JSON has the value, and bounds for texts that stand for much."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from tests.processor_time import at_most
from tests.unit.property_examples import examples

from flowkit.validation.yaml_text import YamlRefused, load_yaml

TEXTS = [
    "no", "on", "y", "2026-01-31", "2001-12-14t21:59:43.10-05:00", "1:30", "1:30:05", "1_000", "0b11",
    "0o8", "0x", "1e", ".", "+", "=", "a:b", "http://x", "inf", "nan", "nULL", "tRUE", "-0o7", "0X1F",
    "a#b", "<",
]  # fmt: skip
VALUES: dict[str, Any] = {
    **{text: text for text in TEXTS},
    "null": None,
    "Null": None,
    "NULL": None,
    "~": None,
    "": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
    "0": 0,
    "-0": 0,
    "+12": 12,
    "017": 17,
    "0o17": 15,
    "0x1F": 31,
    "1.": 1.0,
    ".5": 0.5,
    "-1.5E+3": -1500.0,
    "'no'": "no",
    '"1"': "1",
    "'~'": "~",
    '"\\u00e9\\/"': "é/",
    "! 12": "12",
    "!!str 12": "12",
    "!!int '7'": 7,
    "!!float 1": 1.0,
    "!!null ''": None,
    "!!bool 'true'": True,
    "!!seq [1]": [1],
    "[1, no, {a: ~}]": [1, "no", {"a": None}],
    "{a: 1,}": {"a": 1},
    '{"a":1,"b":[]}': {"a": 1, "b": []},
    "|\n  x\n  y": "x\ny\n",
    ">-\n  x\n  y": "x y",
    "x # comment": "x",
    "&a [1]": [1],
}


@pytest.mark.parametrize("text", VALUES)
def test_value_follows_the_core_schema(text: str) -> None:
    read = load_yaml(f"a: {text}\n")["a"]
    assert (read, type(read)) == (VALUES[text], type(VALUES[text]))


def test_directive_comments_and_line_breaks_of_other_systems_are_read() -> None:
    text = "\ufeff%YAML 1.2\r\n--- # a graph\r\na: 1 # one\r\nb:\r\n- x\r\n...\r\n# end\r\n"
    assert load_yaml(text) == {"a": 1, "b": ["x"]}
    assert load_yaml('"no": &x {a: [1]}\n<: *x\n"<<": *x') == {key: {"a": [1]} for key in ("no", "<", "<<")}


def test_a_change_of_what_an_alias_stands_for_changes_nothing_else() -> None:
    read = load_yaml("a: &a {x: [1]}\nb: *a\n")
    read["b"]["x"].append(2)
    assert read["a"] == {"x": [1]}


REFUSED: dict[str, tuple[int, str]] = {
    "a: 1\nb: 2\na: 3": (10, "the top level has the key 'a' twice, first on line 1"),
    "x:\n  - {a: 1, b: 2, a: 3}": (20, "x[0] has the key 'a' twice, first on line 2"),
    "&k a: 1\n*k : 2": (8, "the key 'a' twice"),
    "1: a": (0, 'a key is a number; put it in quotes: "1"'),
    "true: a": (0, 'a key is true or false; put it in quotes: "true"'),
    "~: a": (0, "a key is null"),
    "? [a]\n: b": (2, "a key is an object or a list"),
    "a: &x [1, *x]": (10, "contains itself"),
    "a: &x:y z": (3, "the name of an anchor has only letters"),
    "[?a]": (2, "put a text that begins with ? in quotes"),
    "a: *y": (3, "nothing before it has the anchor &y"),
    "b: &b {}\na: {<<: *b}": (13, "`<<` is no merge key in YAML 1.2"),
    "a: !!python/object:os.system x": (
        3,
        "the tag '!!python/object:os.system' is none of YAML's core schema",
    ),
    "a: !has(vars.x)": (
        3,
        "the tag '!has(vars.x)' is none of YAML's core schema; put a text that begins with !",
    ),
    "a: !!timestamp 2026-01-31": (3, "the tag '!!timestamp'"),
    "a: !!set {x}": (3, "the tag '!!set'"),
    "a: !!bool yes": (3, "'yes' is no bool"),
    "a: !!int 1.5": (3, "'1.5' is no int"),
    "%TAG !e! tag:x,2026:\n---\na: 1": (0, "%TAG"),
    "%YAML 1.1\n---\na: no": (0, "FlowKit reads YAML 1.2"),
    "a: 1\n---\nb: 2": (5, "a second document begins"),
    "": (0, "the text has no value"),
    "# nothing\n": (10, "the text has no value"),
    "a: .nan": (3, "JSON has no number '.nan'"),
    "a: -.INF": (3, "JSON has no number '-.INF'"),
    "a: -1e999": (3, "'-1e999' is beyond the range of numbers"),
    f"a: {'9' * 5_000}": (3, "at most 4,300 digits"),
    f"a: 0x{'f' * 5_000}": (3, "at most 3,500 digits"),
    "a:\n\t- b": (3, "no value starts with a tab; indent with spaces"),
    "a: @b": (3, "no value starts with '@'; put the text in quotes"),
    "a: b: c": (4, "mapping values are not allowed in this context; check the indentation"),
    'a: "x\nb: 1': (3, "the text in quotes that begins here has no end"),
    "a: [1,\n  b: c\nd: e": (15, "did not find expected ',' or ']' in the list that begins in line 1"),
    "a: \x85": (3, r"cannot contain the character '\x85'"),
    "a: x\u2028y": (4, r"cannot contain the character '\u2028'"),
    "a: \x00": (3, r"cannot contain the character '\x00'"),
    "a: \ud800": (3, r"cannot contain the character '\ud800'"),
    'a: "\\ud83d\\ude00"': (6, "invalid Unicode character escape code; write the character itself"),
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text[:20]))
def test_text_is_refused_at_its_place(text: str) -> None:
    offset, problem = REFUSED[text]
    with pytest.raises(YamlRefused) as caught:
        load_yaml(text)
    assert problem in str(caught.value)
    assert caught.value.offset == offset


ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
CHAIN = "c0: &c0 [x]\n" + "".join(f"c{i}: &c{i} [*c{i - 1}]\n" for i in range(1, 500))
TOO_MUCH = {
    "billion laughs": (ALIASES, "more than 2,000,000 values"),
    "chain of aliases": (CHAIN, "deeper than 200 levels"),
    "lists": ("[" * 100_000, "deeper than 200 levels"),
    "objects": ("{a: " * 100_000, "deeper than 200 levels"),
    "items": ("- " * 100_000, "deeper than 200 levels"),
    "keys": ("? " * 100_000, "a key is an object or a list"),
    "directives": ("".join(f"%TAG !{i}! tag:x:\n" for i in range(50_000)) + "---\na: 1", "%TAG"),
}


@pytest.mark.parametrize(("text", "problem"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_text_that_stands_for_too_much_is_refused_at_once(text: str, problem: str) -> None:
    with at_most(10), pytest.raises(YamlRefused, match=problem):
        load_yaml(text)


def test_places_are_those_of_keys_and_items() -> None:
    places: dict[Any, Any] = {}
    load_yaml("# graph\ngraph:\n  nodes:\n    - node_id: a\n    - {node_id: b}\n", places)
    assert places[("graph", "nodes")] == (3, 3)
    assert [places[("graph", "nodes", index)] for index in (0, 1)] == [(4, 7), (5, 7)]
    load_yaml("- [{a: 1}, {a: 1, b: 2}]", places := {})
    assert places[(0, 1, "b")] == (1, 19)


# --- every value ----------------------------------------------------------------------------------------------------

PRINTABLE = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Cn"], exclude_characters="\u2028\u2029\ufeff")
).filter(lambda text: not text.startswith((":", "?")))
"""Texts that the dumper of ruamel.yaml writes as YAML 1.2 has them. `[:0]` and `[?0]`, without quotes, are refused."""
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    PRINTABLE,
    st.sampled_from([text for text in VALUES if "\n" not in text]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(PRINTABLE | st.sampled_from(TEXTS), inner),
    max_leaves=20,
)


@settings(max_examples=examples(100))
@given(JSON, st.booleans())
def test_a_value_that_another_library_writes_reads_back_equal(value: Any, flow: bool) -> None:
    dumper = YAML(typ="safe", pure=True)
    dumper.default_flow_style, dumper.width = flow, 80
    written = io.StringIO()
    dumper.dump(value, written)
    assert load_yaml(written.getvalue()) == value


@settings(max_examples=examples(100))
@given(JSON)
def test_a_json_text_is_a_yaml_text(value: Any) -> None:
    for indent in (None, 2):
        assert load_yaml(json.dumps(value, ensure_ascii=False, indent=indent)) == value


@settings(max_examples=examples(100))
@given(st.text(st.sampled_from("ab:-?[]{},'\"|>&*!#%\n \t01.e~<")))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        json.dumps(load_yaml(text))
    except YamlRefused as error:
        assert 0 <= error.offset <= len(text)
