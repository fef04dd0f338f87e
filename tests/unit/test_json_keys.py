"""Keys that JSON cannot distinguish: no value is dropped without an error that names the place and both keys."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from tests.processor_time import at_most

from flowkit.adapters.metrics import BadMetrics, storable
from flowkit.cli.json_files import read_params, read_task, read_value
from flowkit.config import CoordinatorConfig
from flowkit.errors import ConfigError, GraphError
from flowkit.graph.submission import convert_to_json
from flowkit.validation.json_keys import EqualKeys, JsonRefused, load_json, to_json_types, with_lists

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass
class Counts:
    """A value with an object inside."""

    by_name: Any = field(default_factory=dict)


class Row(BaseModel):
    """A value with fields."""

    items: Any


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({1: "int", "1": "text"}, "the top level has the keys 1 and '1'"),
        ({True: 3, "true": 4}, "the top level has the keys True and 'true'"),
        ({1.0: 1, "1.0": 2}, "the top level has the keys 1.0 and '1.0'"),
        ({None: 1, "None": 2}, "the top level has the keys None and 'None'"),
        ({b"a": 1, "a": 2}, "the top level has the keys b'a' and 'a'"),
        ({"rows": [{"a": 1}, {"b": {2: 1, "2": 2}}]}, "rows[1].b has the keys 2 and '2'"),
        ({"rows": (0, {"a": {2: 1, "2": 2}})}, "rows[1].a has the keys 2 and '2'"),
        ({"counts": Counts({1: 1, "1": 2})}, "counts.by_name has the key '1' twice"),
        ({"rows": deque([{2: 1, "2": 2}])}, "rows[0] has the keys 2 and '2'"),
        ({"half": "\ud800", "b": {1: 1, "1": 2}}, "b has the keys 1 and '1'"),
    ],
)
def test_two_keys_that_become_equal_are_named(value: dict[Any, Any], place: str) -> None:
    with pytest.raises(EqualKeys) as raised:
        to_json_types(value)
    assert str(raised.value).startswith(place)
    with pytest.raises(BadMetrics) as refused:
        storable("metrics of batch 'a'", value)
    assert str(refused.value).startswith(f"metrics of batch 'a': {place}")
    with pytest.raises(GraphError) as rejected:
        convert_to_json("params", value)
    assert str(rejected.value).startswith(f"params: {place}")


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda rows: (each for each in rows), "rows[0] has the keys 1 and '1'"),
        (iter, "rows[0] has the keys 1 and '1'"),
        (lambda rows: [map(iter, [rows])], "rows[0][0][0] has the keys 1 and '1'"),
        (lambda rows: Counts(iter(rows)), "rows.by_name[0] has the key '1' twice"),
        (lambda rows: Row(items=(iter(rows),)), "rows.items[0][0] has the key '1' twice"),
    ],
    ids=["generator", "iterator", "nested", "dataclass", "model"],
)
def test_equal_keys_in_what_can_be_read_only_once_are_named(make: Callable[[Any], Any], place: str) -> None:
    with pytest.raises(EqualKeys) as raised:
        to_json_types({"rows": make([{1: "int", "1": "text"}])})
    assert str(raised.value).startswith(place)


def test_iterators_become_lists_beside_a_long_duration() -> None:
    given = {
        "long": timedelta(days=400),
        "g": (timedelta(days=each) for each in (1, 400)),
        "d": deque([timedelta(days=366)]),
        "row": Row(items=iter([1])),
        "counts": Counts(iter([2])),
    }
    read = with_lists(given)
    kept = {
        "long": "P400D",
        "g": ["P1D", "P400D"],
        "d": ["P366D"],
        "row": {"items": [1]},
        "counts": {"by_name": [2]},
    }
    assert storable("metrics", read)[0] == storable("metrics", read)[0] == kept


def test_a_value_without_iterators_is_not_copied() -> None:
    given: dict[str, Any] = {"a": [1, {"b": (2, {3})}], "row": Row(items=[1])}
    given["self"] = [given, given]
    assert with_lists(given) is given


def test_other_keys_become_text_and_values_stay() -> None:
    given = {1: "int", True + 1: "two", None: 3, "1.5": 4, "n": float("nan"), "s": {1, 2}, "l": [{}, ({},)]}
    kept, _ = storable("metrics", given)
    assert kept == {"1": "int", "2": "two", "None": 3, "1.5": 4, "n": None, "s": [1, 2], "l": [{}, [{}]]}


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (timedelta(days=400), "P400D"),
        (timedelta(days=-400), "-P400D"),
        (timedelta(days=400, hours=1, microseconds=5), "P400DT1H0.000005S"),
        (timedelta(days=364, seconds=5), "P364DT5S"),
        (timedelta.max, "P999999999DT23H59M59.999999S"),
    ],
)
def test_duration_has_days_and_no_years(duration: timedelta, text: str) -> None:
    assert storable("metrics", {"a": [duration], "b": "P1Y"})[0] == {"a": [text], "b": "P1Y"}


@pytest.mark.parametrize(
    ("text", "place", "column"),
    [
        (
            '{"nodes": [{"node_id": "a", "type": "e", "type": "f"}]}',
            "node 'a': nodes[0] has the key 'type' twice",
            42,
        ),
        ('{"nodes": [], "nodes": [1]}', "the top level has the key 'nodes' twice", 15),
        ('{"a": {"x": 1, "x": 1}, "a": 2}', "the top level has the key 'a' twice", 25),
        ('[[{"": 1, "": 2}]]', "[0][0] has the key '' twice", 11),
    ],
)
def test_a_json_text_with_a_key_twice_is_refused(text: str, place: str, column: int, tmp_path: Path) -> None:
    with pytest.raises(EqualKeys) as raised:
        load_json(text)
    assert str(raised.value).startswith(place)
    file = tmp_path / "graph.json"
    file.write_text(text)
    for read in (read_task, CoordinatorConfig.load):
        with pytest.raises(ConfigError) as refused:
            read(str(file))
        assert str(refused.value).startswith(f"{file}:1:{column}: {place}")


def test_refusal_costs_no_more_with_a_long_key_above_many_values() -> None:
    rows = ",".join(["0"] * 200_000)
    with at_most(10):
        with pytest.raises(JsonRefused, match=r"k\[200000\] is '1e999'"):
            load_json(f'{{"{"k" * 1_000_000}": [{rows}, 1e999]}}')
        with pytest.raises(EqualKeys, match=r"k\[200000\] has the keys 1 and '1'"):
            to_json_types({"k" * 1_000_000: [*[0] * 200_000, {1: 1, "1": 2}]})


def test_options_with_a_key_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="--params:1:10: the top level has the key 'a' twice"):
        read_params('{"a": 1, "a": 2}')
    with pytest.raises(ConfigError, match="the top level has the key 'a' twice"):
        read_value('{"a": 1, "a": 2}')


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"nodes": []}')
    assert read_task(str(file)).graph == {"nodes": []}


def test_a_repeated_key_is_found_at_once_in_a_large_object() -> None:
    pairs = [*(f'"{number}": 0' for number in range(20_000)), '"19999": 1']
    with at_most(2), pytest.raises(EqualKeys, match="the key '19999' twice"):
        load_json(f"{{{','.join(pairs)}}}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": [0, 1e400]}', "a[1] is '1e400', beyond the range of numbers; pass it as a string"),
        ('{"nodes": [{"node_id": "x", "n": -1e999}]}', "node 'x': nodes[0].n is '-1e999'"),
        (f'{{"a": {"9" * 5_000}}}', "number out of range at line 1 column 43"),
        ("[" * 100_000, "recursion limit exceeded at line 1 column 202; "),
        ('{"a":' * 100_000, "recursion limit exceeded at line 1"),
    ],
    ids=lambda text: text[:20],
)
@pytest.mark.parametrize("strict", [True, False])
def test_values_that_python_does_not_read_are_named_with_their_place(
    text: str, problem: str, strict: bool
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem.rstrip("; "))) as caught:
        load_json(text, strict=strict)
    assert strict or isinstance(caught.value, JsonRefused)


def test_params_name_a_number_beyond_the_range() -> None:
    with pytest.raises(ConfigError, match="the value '1e400': the top level is '1e400', beyond the range"):
        read_value("1e400")
    assert (read_value("[NaN]"), read_value("1e4")) == ("[NaN]", 10_000)
