"""An evaluation gets only the nodes that its expression names. Its result is the one with all nodes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.unit.property_examples import examples

from flowkit.errors import BadCondition
from flowkit.graph.cel import NODES, compile_value, evaluate_value, find_names
from flowkit.graph.conditions import select_values

IDS = [
    "a",
    "b",
    "a-b",
    "a.1",
    "r'a",
    'say "a"',
    "it's",
    "a\\b",
    "\\x61",
    "// a",
    "ä",
    "日本",
    "`",
    "in",
    "\U0001f600",
]
ALL: dict[str, Any] = {
    "params": {"day": "a", "list": ["a", "b"]},
    "vars": {"nodes": 1},
    "nodes": {
        each: {"status": "finished" if place % 2 else "failed", "error_code": "", "stats": {"n": place}}
        for place, each in enumerate(IDS)
    },
}


def text(value: str) -> st.SearchStrategy[str]:
    """Return texts of CEL with this value."""
    plain = "".join(f"\\{each}" if each in "\\\"'" else each for each in value)
    octal = "".join(f"\\{ord(each):03o}" if ord(each) < 0o400 else each for each in value)
    byte = "".join(f"\\x{ord(each):02x}" if ord(each) < 0x100 else each for each in value)
    short = "".join(f"\\u{ord(each):04x}" if ord(each) < 0x10000 else each for each in value)
    long = "".join(f"\\U{ord(each):08x}" for each in value)
    marks = ["'", '"', "'''", '"""']
    raw = [f"{kind}{mark}{value}{mark}" for mark in marks for kind in "rR"]
    return st.sampled_from(
        [*(f"{mark}{each}{mark}" for each in (plain, octal, byte, short, long) for mark in marks), *raw]
    )


SPACE = st.sampled_from(["", " ", "\n", "\t", " // it's nodes['c'] \"\n", "//\n"])
NAMES = st.sampled_from(IDS).flatmap(text)
NODE = st.one_of(
    st.builds("nodes{}[{}{}]".format, SPACE, NAMES, SPACE),
    st.sampled_from(["nodes.a", ".nodes.b", "(nodes).a", "nodes.`a-b`", "nodes.`a.1`", "nodes . missing"]),
)
FIELD = st.sampled_from(
    [".status", "['stats'].n", ".error_code", ".stats.missing", "[r'status']", ".`stats`"]
)
READ = st.builds("{}{}{}".format, NODE, SPACE, FIELD)
VALUE = st.one_of(
    READ,
    NAMES,
    st.sampled_from(["params.day", "vars.nodes", "1", "[]", "b'a'", "br'\\'", "{'nodes': 1}.nodes"]),
)
EXPRESSION = st.recursive(
    VALUE,
    lambda inner: st.one_of(
        st.builds("({} == {})".format, inner, inner),
        st.builds("[{},{}{}]".format, inner, SPACE, inner),
        st.builds("({} == 'finished' ? {} : {})".format, READ, inner, inner),
        st.builds("[{}].map(nodes, [nodes, {}])".format, inner, inner),
        st.builds("{{{}: {}}}".format, NAMES, inner),
        st.builds("[{}, size({})]".format, inner, NAMES),
    ),
    max_leaves=6,
)


@settings(max_examples=examples(100), deadline=None)
@given(EXPRESSION)
def test_value_is_the_same_with_only_the_nodes_that_the_expression_names(expression: str) -> None:
    try:
        accesses = compile_value(expression).accesses
    except BadCondition:
        assume(False)
    named = {*find_names(expression)}
    assert {each.path[0] for each in accesses if each.root == NODES} <= named
    given = {**ALL, "nodes": {each: facts for each, facts in ALL["nodes"].items() if each in named}}
    assert evaluated(expression, given) == evaluated(expression, ALL)


def evaluated(expression: str, values: dict[str, Any]) -> Any:
    """Return the value of an expression, or why it has none."""
    compiled = compile_value(expression)
    try:
        return evaluate_value(compiled, select_values(values, compiled.accesses))
    except BadCondition as error:
        return str(error)


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("nodes.a.status == 'finished' // b", ["nodes", "a", "status", "finished"]),
        (r"""nodes["a\"b\x63\U0010ffff"] + br'\'""", ["nodes", 'a"bc\U0010ffff', "\\"]),
        (r"""nodes['\U00110000\?'].`c d`""", ["nodes", "?", "c d"]),
    ],
)
def test_names_and_texts_of_an_expression(expression: str, names: list[str]) -> None:
    assert [*find_names(expression)] == names
