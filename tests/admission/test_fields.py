"""A value of a field is valid at every door or at none: HTTP, Kafka and Python."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from pydantic import ValidationError

from flowkit.admission.api import ExecutionSubmission, TaskSubmission
from flowkit.admission.kafka import AdmissionTopics, BadRecord, read
from flowkit.admission.models import Kind
from flowkit.admission.queue import request_of
from flowkit.errors import ConfigError
from flowkit.models.admission import Admission
from tests.admission.events import REQUESTED

if TYPE_CHECKING:
    from collections.abc import Callable

OWNER: Final = ("user_id", "tenant")
RENAMED: Final = {"language": "lang", "language_version": "lang_version"}
FIELDS: Final = {
    name: value
    for name, value in REQUESTED.items()
    if name not in ("event_id", "event_type", "event_version", "timestamp", "aggregate_id", "metadata")
}


def over_http(fields: dict[str, Any]) -> None:
    """Check a request as the HTTP API does."""
    renamed = {RENAMED.get(name, name): value for name, value in fields.items()}
    ExecutionSubmission.model_validate_json(json.dumps(renamed), strict=True)


def over_kafka(fields: dict[str, Any]) -> None:
    """Check a request as the consumer of Kafka does."""
    event = {name: value for name, value in fields.items() if name not in OWNER}
    event["metadata"] = {name: value for name, value in fields.items() if name in OWNER}
    read(AdmissionTopics(), "execution_requested", json.dumps(event).encode())


def from_python(fields: dict[str, Any]) -> None:
    """Check a request as the command line does."""
    owner = {name: fields[name] for name in (*OWNER, "priority") if name in fields}
    request_of(Admission(**{"user_id": "u", **owner}), fields["execution_id"], fields, Kind.EXECUTION)


DOORS: Final[tuple[Callable[[dict[str, Any]], None], ...]] = (over_http, over_kafka, from_python)


def doors_that_refuse(**changed: Any) -> list[str]:
    """Return the doors that refuse the documented request with a changed field."""
    refused = []
    for door in DOORS:
        try:
            door({**FIELDS, **changed})
        except (ValidationError, BadRecord, ConfigError):
            refused.append(door.__name__)
    return refused


NOT_PRINTABLE: Final = ["a\nb", "a\0", "\x7f", "\u200bx", "\u202ex"]

BAD: Final[dict[str, list[Any]]] = {
    "execution_id": ["", "x" * 201, "*", " a", "a ", "a\nb", "\u202ex", "flow:7", 7],
    "user_id": ["x" * 201, 7, *NOT_PRINTABLE],
    "tenant": ["x" * 201, "a/b", 7, *NOT_PRINTABLE],
    "priority": ["urgent", "NORMAL", 2, True, []],
    "script": ["", 7, None, "x" * (1 << 20) + "x", "é" * (1 << 19) + "x"],
    "language": ["", "x" * 51, 7, *NOT_PRINTABLE],
    "language_version": ["", "x" * 51, "-3", "3:1", "3.11\n", 3],
    "runtime_image": ["", "x" * 501, 7, *NOT_PRINTABLE],
    "runtime_command": [[], "python", [""], [1], ["x" * 4_097], ["x"] * 101],
    "runtime_filename": ["", "x" * 256, "a/b", 7, *NOT_PRINTABLE],
    "timeout_seconds": [0, -1, 1.5, "60", True, None, 86_401],
    **{name: ["", "much", "1.5m", "-1", "1" * 7, 1] for name in ("cpu_limit", "cpu_request")},
    **{name: ["", "128MB", "-1Mi", "1" * 16, 128] for name in ("memory_limit", "memory_request")},
}

GOOD: Final[dict[str, list[Any]]] = {
    "execution_id": ["x", "x" * 200, "ex 1", "é"],
    "user_id": ["x", "x" * 200, "a/b", "é", "u dora"],
    "tenant": ["x", "x" * 200, "é"],
    "priority": ["critical", "background"],
    "script": ["x", "x" * (1 << 20), "é" * (1 << 19), "a\nb\0"],
    "language": ["c++", "x" * 50],
    "language_version": ["3", "3.11-slim", "x" * 50],
    "runtime_image": ["x" * 500, "registry:5000/team/python@sha256:0"],
    "runtime_command": [["x"], ["x" * 4_096] * 100],
    "runtime_filename": ["x" * 255, "a b.py"],
    "timeout_seconds": [1, 86_400],
    **{name: ["1", "0.5", "500m"] for name in ("cpu_limit", "cpu_request")},
    **{name: ["1", "0.5Gi", "128Mi", "1k"] for name in ("memory_limit", "memory_request")},
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    """Return a case for each value of a table."""
    return [
        pytest.param(name, value, id=f"{name}-{number}")
        for name, values in table.items()
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_an_invalid_value_is_refused_at_every_door(name: str, value: Any) -> None:
    assert doors_that_refuse(**{name: value}) == [door.__name__ for door in DOORS]


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_a_valid_value_is_accepted_at_every_door(name: str, value: Any) -> None:
    assert doors_that_refuse(**{name: value}) == []


def test_only_an_id_that_is_to_be_part_of_a_url_has_no_slash() -> None:
    assert doors_that_refuse(execution_id="a/b") == ["over_http"]


def test_a_task_has_the_same_owner_and_the_same_id_as_an_execution() -> None:
    bad = [(name, value) for name in ("execution_id", *OWNER) for value in BAD[name]]
    for name, value in [*bad, ("execution_id", "a/b")]:
        with pytest.raises(ValidationError):
            TaskSubmission.model_validate_json(json.dumps({"graph": {}, name: value}), strict=True)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"user_id": ""}, "user_id is ''; it must have at least 1 character"),
        ({"tenant": "a/b"}, "tenant is 'a/b'; it must not contain a slash"),
        ({"priority": "urgent"}, "priority is 'urgent'; choose from critical, high, normal, low, background"),
        ({"execution_id": "*"}, "execution_id is '*'; it must be the id of a new task: not '*'"),
        ({"timeout_seconds": 0}, "timeout_seconds is 0; it must be at least 1"),
        ({"script": "é" * 600_000}, "it has 1,200,000 bytes, more than 1,048,576; let the script read its"),
    ],
)
def test_error_of_a_program_names_field_and_value(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_python({**FIELDS, **changed})
    assert problem in str(caught.value)


def test_error_of_a_program_names_a_missing_field() -> None:
    fields = {name: value for name, value in FIELDS.items() if name != "script"}
    with pytest.raises(ConfigError, match="^script is missing$"):
        from_python(fields)
