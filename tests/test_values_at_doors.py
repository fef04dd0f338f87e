"""A value that is not valid is refused in the same words at every door: its place, the value, and what it must be."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from pydantic import ValidationError

from flowkit import CoordinatorConfig, Flow
from flowkit.actions.table import parse_action
from flowkit.activities.json_types import JsonType
from flowkit.admission.kafka import AdmissionTopics, read
from flowkit.admission.models import Kind
from flowkit.admission.queue import request_of
from flowkit.errors import ActionRejected, ConfigError, GraphError
from flowkit.gateway.importing import FlowFile, read_flow_file
from flowkit.masks import HIDDEN
from flowkit.models.admission import Admission
from flowkit.server.auth import Caller
from flowkit.server.errors import HttpError
from flowkit.server.openapi import parse_params
from flowkit.server.rpc import Call, Params, RpcDispatcher
from flowkit.server.tokens import Right
from flowkit.validation.arguments import whole_problem
from flowkit.validation.invalid import show
from tests.admission.events import REQUESTED
from tests.server.servers import methods, rpc

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECRET: Final = "s3cret-4711"
NO_WHOLE_NUMBER: Final[tuple[Any, ...]] = (
    *("", " ", "x", "1 2", "1.5x", "--1", "0x10", "1e", "é", "٣x", "null", "none", "true!", "[1]", "{}"),
    *("\0", "\x1b[31mred", "a\nb", "\u202e4321", "\u2028", "'", '"', "\\", "%s", "{number}", "x" * 5_000),
    *(f"http://user:{SECRET}@host:1/?key={SECRET}", f"mongodb://u:{SECRET}@h1,h2/db"),
    *(1.5, -0.25, 1e-9, [], [1], [[]], [None, SECRET], {}, {"a": 1}, {"password": SECRET}, {"": {"": []}}),
    [{"token": SECRET}] * 1_000,
)
"""JSON values that no door takes for a whole number."""


class Number(Params):
    """Parameters with one field."""

    number: int


def settings(value: Any) -> None:
    CoordinatorConfig(window=value)


def arguments(value: Any) -> None:
    if problem := whole_problem(value, "number", 0, 10):
        raise ConfigError(problem)


def actions(value: Any) -> None:
    parse_action("pause", {"if_revision": value})


def http(value: Any) -> None:
    parse_params(Number, {"number": value}, strict=True)


def json_rpc(value: Any) -> None:
    call = Call(caller=Caller(actor=7, rights=frozenset({Right.FLOWS})))
    found = asyncio.run(RpcDispatcher(methods()).dispatch(json.dumps(rpc("add", {"a": value})), call))
    assert found is not None
    [problem] = json.loads(found[0])["error"]["data"]["problems"]
    raise ConfigError(f"{problem['field']} is {problem['value']}; {problem['problem']}")


def admission(value: Any) -> None:
    request_of(Admission(user_id="u"), "e", {**REQUESTED, "timeout_seconds": value}, Kind.EXECUTION)


def admission_kafka(value: Any) -> None:
    event = {**REQUESTED, "timeout_seconds": value}
    read(AdmissionTopics(), "execution_requested", json.dumps(event).encode())


def typed_handler(value: Any) -> None:
    kind = JsonType(Number, "test")
    try:
        kind.from_json({"number": value})
    except ValidationError as error:
        raise ConfigError(kind.problems(error, str)) from None


def flow_params(value: Any) -> None:
    Flow("f", params=Number).dump_params({"number": value})


PLACES: Final[dict[Callable[[Any], None], str]] = {
    settings: "CoordinatorConfig.window",
    arguments: "number",
    actions: "pause: if_revision",
    http: "number",
    json_rpc: "a",
    admission: "timeout_seconds",
    admission_kafka: "timeout_seconds",
    typed_handler: "number",
    flow_params: "params.number",
}
"""Where each door says that the number stands."""


@pytest.mark.parametrize("door", PLACES)
def test_every_door_names_the_place_the_value_and_what_it_must_be(door: Callable[[Any], None]) -> None:
    for value in NO_WHOLE_NUMBER:
        with pytest.raises((ConfigError, ActionRejected, HttpError, GraphError, ValueError)) as caught:
            door(value)
        given = HIDDEN if door is admission_kafka else show(value)
        text = str(caught.value)
        assert text.startswith(f"{PLACES[door]} is {given}; it must be ")
        assert "a whole number" in text
        assert SECRET not in text
        assert text.isprintable()


def test_a_file_that_is_imported_is_refused_in_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "flow.json"
    for value in NO_WHOLE_NUMBER:
        path.write_text(json.dumps({**_FLOW, "caller": value}), encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            read_flow_file(path)
        assert str(caught.value) == f"{path}: caller is {HIDDEN}; it must be a whole number"


_FLOW: Final = FlowFile.model_validate({"jobs": [{"id": "a", "executor": "e", "script": "s"}]}).model_dump(
    mode="json", exclude_unset=True
)
