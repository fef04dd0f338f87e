"""Programs decide by kinds, codes and classes, never by the words of a sentence, which the next writer may change.

Where a library, or a program, says what has happened in words only, a test has its present words: it fails when they
change. A new decision by words fails here, until it has a row with that test.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import flowkit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SOURCES: Final = Path(str(flowkit.__file__)).parent
PARTS: Final = {
    *("startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition"),
    *("split", "rsplit", "find", "rfind", "index", "count", "replace"),
}
"""Methods that look for a part of a text."""
SEARCHES: Final = {"match", "fullmatch", "search", "finditer", "findall", "sub", "split"}
"""Functions and methods of regular expressions."""
WORDS: Final = re.compile(r"[A-Za-z] [A-Za-z(']|^ [A-Za-z]|[A-Za-z],? $|:: [a-z]")
"""What a sentence has, and an identifier, an address or a pattern for one has not."""

_TYPED: Final = "tests.unit.test_typed_handlers::test_result_without_json_says_why"
_GRAPH_LINES: Final = (
    "tests.unit.test_documents::test_problems_of_a_graph_name_the_line_and_of_an_unknown_key_the_column"
)
_INSTALL: Final = (
    "tests.local.install.test_maven::test_a_failure_is_reported_in_one_line_and_leaves_nothing_behind"
)

PINNED: Final = {
    # pydantic
    ("activities/json_types.py", "Error calling function"): _TYPED,
    ("activities/json_types.py", "Unable to serialize"): _TYPED,
    ("activities/json_types.py", "surrogates not allowed"): _TYPED,
    (
        "validation/invalid.py",
        "Input should be",
    ): "tests.unit.test_json_types::test_value_that_its_reader_would_get_differently_is_refused",
    # MongoDB and its driver
    (
        "adapters/mongo.py",
        ":: caused by ::",
    ): "tests.contract.test_indexes::test_error_is_short_and_names_index_and_key_for_every_mongodb_message",
    (
        "adapters/mongo.py",
        "after close",
    ): "tests.contract.test_mongodb_unavailable::test_a_closed_client_of_each_driver_is_an_outage",
    (
        "cli/servers.py",
        "Did you mean",
    ): "tests.unit.test_addresses::test_an_ignored_option_of_a_mongodb_address_is_named",
    # Temporal's development server, with SQLite
    (
        "connection.py",
        "interrupted (9)",
    ): "tests.unit.test_connection::test_broken_development_server_is_reported_with_the_advice_to_restart_it",
    # CEL
    (
        "graph/cel.py",
        "Syntax error: |",
    ): "tests.unit.test_conditions::test_condition_that_cannot_work_is_rejected",
    (
        "graph/cel.py",
        "mismatched input",
    ): "tests.unit.test_expressions::test_expression_is_checked_on_submission",
    (
        "graph/cel.py",
        "undeclared reference to",
    ): "tests.unit.test_expressions::test_expression_is_checked_on_submission",
    # Programs that install and start servers
    ("local/install.py", "no space left on device"): _INSTALL,
    ("local/install.py", "no such host|unknown host"): _INSTALL,
    (
        "local/kafka.py",
        "Kafka Server started",
    ): "tests.local.test_kafka::test_topics_records_and_users_survive_a_stop_a_kill_and_a_move_to_other_ports",
    # libyaml and the readers of JSON
    (
        "validation/yaml_text.py",
        "cannot start any token",
    ): "tests.unit.test_yaml_text::test_text_is_refused_at_its_place",
    (
        "validation/documents.py",
        "at line (?P<line>",
    ): "tests.unit.test_documents::test_a_place_that_the_reader_tells_in_words_is_that_of_the_error",
    # problems of graphs, whose place in a file or a program is shown: a line more or less, no other decision
    ("validation/documents.py", ": (?:(?P<section>"): _GRAPH_LINES,
    ("validation/documents.py", "graph must be"): _GRAPH_LINES,
    ("validation/documents.py", "graph.nodes must be"): _GRAPH_LINES,
    ("validation/documents.py", "node (?P<id>"): _GRAPH_LINES,
    (
        "flow/checks.py",
        "node (?:: (",
    ): "tests.unit.test_flow::test_an_error_of_a_node_or_of_the_graph_names_its_line",
    # our own sentence, which is not added twice, and the place at the end of an error, which may differ
    (
        "masks.py",
        "values by expression are hidden",
    ): "tests.unit.test_masks::test_an_error_says_why_it_hides_values_that_may_be_no_secrets",
    (
        "cli/debug/report.py",
        ", at",
    ): "tests.cli.test_debug::test_the_same_error_may_come_from_another_place",
}
"""By file and the beginning of the words: the test that fails if the other side says something else."""

FORMS: Final = {
    ("graph/cel.py", "//[^"),  # tokens of CEL
    ("masks.py", "eyJ["),  # keys and tokens of other systems
    ("pictures/programs.py", "<pre id="),
    ("pictures/programs.py", "<svg width="),
    ("reading/timeline.py", "slot"),  # the end of an activity id
}
"""Forms of data that contain a space, and say nothing."""


def _texts(value: ast.expr | None, constants: Mapping[str, str]) -> Iterator[str]:
    """Yield the texts that an expression is made of: constants, the constant parts of f-strings, patterns."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.JoinedStr):
        yield "".join(str(each.value) for each in value.values if isinstance(each, ast.Constant))
    elif isinstance(value, ast.Name) and value.id in constants:
        yield constants[value.id]
    elif isinstance(value, (ast.Tuple, ast.List, ast.Set)):
        for each in value.elts:
            yield from _texts(each, constants)
    elif isinstance(value, ast.Call) and ast.unparse(value.func) == "re.compile":
        yield from _texts(value.args[0], constants)


def _constants(module: ast.Module) -> dict[str, str]:
    """Return the texts and the patterns of a module by name."""
    found: dict[str, str] = {}
    for each in module.body:
        target = each.targets[0] if isinstance(each, ast.Assign) else getattr(each, "target", None)
        if isinstance(target, ast.Name) and isinstance(each, (ast.Assign, ast.AnnAssign)):
            for text in _texts(each.value, found):
                found[target.id] = text
    return found


def _looked_for(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions for which a comparison or a call looks in a text."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        if not isinstance(node.comparators[0], (ast.Tuple, ast.List, ast.Set, ast.Dict)):
            yield node.left
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in PARTS:
            yield from node.args[:1]
        if node.func.attr in SEARCHES:
            yield from node.args[:1] if ast.unparse(node.func.value) == "re" else [node.func.value]


def _decisions(source: str) -> Iterator[str]:
    """Yield the words for which a module looks."""
    module = ast.parse(source)
    constants = _constants(module)
    for node in ast.walk(module):
        for looked_for in _looked_for(node):
            yield from (text for text in _texts(looked_for, constants) if WORDS.search(text))


def _found() -> Iterator[tuple[str, str]]:
    for folder, _, files in os.walk(SOURCES, followlinks=True):
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            for words in _decisions(path.read_text(encoding="utf-8")):
                yield path.relative_to(SOURCES).as_posix(), " ".join(words.split())


def _row_of(file: str, words: str) -> tuple[str, str] | None:
    rows = (row for row in (*PINNED, *FORMS) if row[0] == file and words.startswith(row[1]))
    return max(rows, key=lambda row: len(row[1]), default=None)


def test_each_decision_by_words_has_a_test_that_has_the_words() -> None:
    rows = {found: _row_of(*found) for found in _found()}
    assert [found for found, row in rows.items() if row is None] == []
    assert {*rows.values()} == {*PINNED, *FORMS}


def test_the_tests_of_the_words_exist() -> None:
    for name in PINNED.values():
        module, _, test = name.partition("::")
        assert hasattr(importlib.import_module(module), test), name


@pytest.mark.parametrize(
    "source",
    [
        "waits.text.startswith('a decision')",
        "'no slot' in text",
        "if text.endswith(' closed'): pass",
        "TEXT = 'no slot'\nif TEXT in text: pass",
        "_FOUND = re.compile('node (.*) waits for')\n_FOUND.match(text)",
        "re.search(f'{name} waits for', text)",
    ],
)
def test_a_decision_by_words_is_found(source: str) -> None:
    assert [*_decisions(source)]


@pytest.mark.parametrize(
    "source",
    [
        "wait.kind is WaitKind.DECISION",
        "kind in ('decision', 'an event')",
        "name.startswith('flow:')",
        "text.partition(': ')",
        "re.fullmatch('[a-z_]+-[0-9]+', name)",
    ],
)
def test_a_decision_by_a_kind_or_a_form_is_none(source: str) -> None:
    assert not [*_decisions(source)]
