"""docs/mongodb.md: every row has its source, and no operator, file or error code of the code is missing."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.fork_server import fork_server
from tests.mongo_commands import (
    BROKEN,
    COMMANDS,
    FOLDER,
    INDEX,
    OPTIONS,
    PIPELINE,
    QUERY,
    UPDATE,
    overlapping,
    shapes,
)
from tests.mongo_table import documented, missing_rows, rows, unseen_rows
from tests.sources import ROOT, sources

from flowkit.adapters import mongo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.mongo_commands import Shape
    from tests.servers import Start

TABLES = (COMMANDS, OPTIONS, QUERY, UPDATE, PIPELINE, INDEX)
CODES = "Error codes"
OPERATOR = re.compile(r"\$[A-Za-z]+")
SOURCE = re.compile(r"\[([^\]]+)\]\(https://www\.mongodb\.com/docs/manual/[\w./#-]+\)")
NOT_OF_MONGODB = frozenset({"$cel", "$defs", "$id", "$ref", "$schema"})
"""Keys of values by expression, and of JSON Schema."""
PRODUCT: dict[str, Any] = {"writeConcern": {"w": "majority", "j": True}, "readConcern": {"level": "local"}}


# --- the page


def test_every_row_names_its_page_of_the_manual_and_the_lowest_version() -> None:
    bad = [
        row.names
        for row in rows()
        if row.section in TABLES
        and not ((found := SOURCE.fullmatch(row.cells[3])) and re.fullmatch(r"\d\.\d", found[1]))
    ]
    assert {row.section for row in rows()} >= {*TABLES, CODES}
    assert bad == []


def test_every_row_has_all_cells_and_names_files_that_exist() -> None:
    assert [row.names for row in rows() if row.section in (*TABLES, CODES) and len(row.cells) != 5] == []
    places = {place for row in rows() for place in re.findall(r"`([\w/]+\.py)`", row.cells[2])}
    assert places
    assert [place for place in places if not (ROOT / place).is_file()] == []


def test_no_name_has_two_rows_in_one_table() -> None:
    named = [(row.section, name) for row in rows() for name in row.names if row.section in TABLES]
    assert sorted({*named}) == sorted(named)


@pytest.mark.slow(1)
def test_every_operator_in_the_code_has_a_row_and_every_row_occurs_in_the_code() -> None:
    """The run of the tests compares what is sent. This finds code that no test runs, and rows that are left over."""
    used = {name for path in sources().values() for name in operators(path)} - NOT_OF_MONGODB
    of_driver = {"$clusterTime", "$skip", "$limit"}
    described = {name for kind, names in documented() if kind in TABLES for name in OPERATOR.findall(names)}
    assert len(used) > 25
    assert used - described == set()
    assert described - used - of_driver == set()


def operators(path: Path) -> Iterator[str]:
    """Yield the keys of objects in a module that begin with a dollar sign, and placeholders in paths."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        keys = node.keys if isinstance(node, ast.Dict) else [getattr(node, "slice", None)]
        for key in keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and OPERATOR.fullmatch(key.value):
                yield key.value


def test_every_error_code_that_the_code_knows_has_a_row() -> None:
    known = {
        *mongo._UNREACHABLE_CODES,
        *mongo._DENIED_CODES,
        *mongo._PERMANENT_CODES,
        *mongo._INDEX_CONFLICTS,
        mongo._INDEX_NOT_FOUND,
    }
    texts = [" ".join(row.cells) for row in rows() if row.section == CODES]
    described = {int(code) for text in texts for code in re.findall(r"`(\d+)`", text)}
    assert described == known


# --- the comparison at the end of a run


def test_what_has_no_row_is_named() -> None:
    [line] = missing_rows([(COMMANDS, "find"), (QUERY, "$where")])
    assert line == "MongoDB: Query operators: $where has no row in docs/mongodb.md; add one with its source"


def test_a_broken_rule_is_named_whatever_the_page_says() -> None:
    assert len(missing_rows([(BROKEN, "an update names a and a.b")])) == 1


def test_rows_that_a_whole_run_has_not_sent_are_a_notice() -> None:
    sent = {(kind, name) for kind, name in documented() if (kind, name) != (INDEX, "sparse")}
    assert missing_rows(sent) == []
    assert unseen_rows(sent) == [
        "MongoDB: docs/mongodb.md also describes what this run has not sent: Index options: sparse"
    ]


@pytest.mark.server
def test_programs_that_tests_start_note_what_they_send(start_servers: Start, tmp_path: Path) -> None:
    noted = Path(os.environ[FOLDER])
    before = {*noted.iterdir()}
    environment = {**os.environ, **start_servers("mongo")}
    code, _, errors = fork_server().run(["token", "list"], tmp_path, environment, 60)
    assert code == 0, errors
    assert {*noted.iterdir()} - before - {noted / str(os.getpid())}


def of(name: str, **command: Any) -> set[Shape]:
    """Return the shapes of a command of the product, without its concern."""
    given = {name: "tasks", "$db": "flowkit", **command, **PRODUCT}
    ours = {(COMMANDS, name), *((OPTIONS, each) for each in PRODUCT)}
    found = {*shapes(name, given)}
    assert found >= ours
    return found - ours


def test_operators_options_and_paths_of_a_query_are_noted() -> None:
    wanted = {"id": "t", "a.b": {"$not": {"$gt": 1}}, "n.0.x": None, "$or": [{"l": {"$elemMatch": {"x": 1}}}]}
    assert of("find", filter=wanted, sort={"a": 1}) == {
        (OPTIONS, "sort"),
        *((QUERY, name) for name in ("$not", "$gt", "$or", "$elemMatch", "a.b", "a.0", "null")),
    }


def test_operators_and_modifiers_of_updates_are_noted() -> None:
    update = {"$push": {"a": {"$each": [1], "$slice": -1}}, "$set": {"h.$.x": 1, "n.0.s": 2}}
    found = of("update", updates=[{"q": {"_id": 1}, "u": update, "multi": False, "upsert": True}])
    assert found == {
        (OPTIONS, "upsert"),
        *((UPDATE, name) for name in ("$push", "$push $each", "$push $slice", "$set", "$", "a.b", "a.0")),
    }


@pytest.mark.parametrize(
    ("update", "name"),
    [([{"$set": {"a": 1}}], "pipeline"), ({"a": 1}, "replacement"), ({"$set": {}}, "empty $set")],
)
def test_other_forms_of_an_update_are_noted(update: Any, name: str) -> None:
    assert (UPDATE, name) in of("findAndModify", query={"_id": 1}, update=update)


def test_stages_and_options_of_indexes_are_noted() -> None:
    group = {"$group": {"_id": "$s", "count": {"$sum": 1}}}
    assert of("aggregate", pipeline=[{"$match": {"a": {"$in": [1]}}}, group]) == {
        *((PIPELINE, name) for name in ("$match", "$group", "$sum")),
        (QUERY, "$in"),
    }
    index = {"key": {"a": 1}, "name": "ix", "unique": True}
    assert of("createIndexes", indexes=[index]) == {(INDEX, "1"), (INDEX, "unique")}


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("update", {"updates": [{"q": {}, "u": {"$set": {"a": {}}, "$inc": {"a.b": 1}}}]}),
        ("update", {"updates": [{"q": {}, "u": {"$set": {"a..b": 1}}}]}),
        ("find", {"filter": {}, "projection": {"a": 1, "a.b": 1}}),
        ("find", {"filter": {}, "projection": {"a": 1, "b": 0}}),
        ("createIndexes", {"indexes": [{"key": {"a": 1}, "partialFilterExpression": {"s": {"$ne": 1}}}]}),
    ],
    ids=["paths of an update", "an empty part", "paths of a projection", "shown and hidden", "partial index"],
)
def test_what_mongodb_refuses_and_stand_ins_may_accept_is_noted(name: str, command: dict[str, Any]) -> None:
    assert BROKEN in {kind for kind, _ in of(name, **command)}


def test_commands_of_the_tests_do_not_count() -> None:
    assert [*shapes("find", {"find": "tasks", "filter": {"$where": "1"}})] == []
    assert [*shapes("insert", {"insert": "tasks", "writeConcern": {"w": 1}})] == []
    assert [*shapes("buildInfo", {"buildInfo": 1, "$db": "admin"})] == [(COMMANDS, "buildInfo")]


def test_overlapping_paths_are_found_whatever_lies_between_them() -> None:
    assert overlapping(["a", "a!b", "a.b"]) == ("a", "a.b")
    assert overlapping(["a.b", "a.bc", "ab"]) is None
