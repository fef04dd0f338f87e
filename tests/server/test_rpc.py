"""JSON-RPC messages: which calls they contain, and the response to each."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import ValidationError
from pydantic import BaseModel

from flowkit.server.auth import Caller
from flowkit.server.rpc import (
    BATCH_BYTES,
    MAX_BATCH,
    MAX_PROBLEMS,
    RESULT_BYTES,
    AlreadyExists,
    Call,
    DagCycle,
    DagMissingDependency,
    InternalError,
    InvalidParams,
    InvalidRequest,
    InvalidTransition,
    LimitExceeded,
    Method,
    MethodNotFound,
    NoParams,
    NotFound,
    Params,
    ParseError,
    PermissionDenied,
    RpcDispatcher,
    RpcError,
    StorageError,
    SupervisorTimeout,
    SupervisorUnreachable,
    openrpc_document,
)
from flowkit.server.tokens import Right
from tests.server.openrpc import validate_result
from tests.server.servers import INFO, PASSWORD, methods, rpc

if TYPE_CHECKING:
    from collections.abc import Callable

CALL = Call(caller=Caller(actor=7, rights=frozenset({Right.FLOWS})))
DISPATCHER = RpcDispatcher(methods())


async def answer(message: Any) -> Any:
    """Return the response to a message, which is a text or a value to encode as JSON; None if there is none."""
    text = message if isinstance(message, str | bytes) else json.dumps(message)
    found = await DISPATCHER.dispatch(text, CALL)
    return None if found is None else json.loads(found[0])


async def error_of(message: Any) -> tuple[int, str]:
    """Return code and text of the error that a message causes."""
    error = (await answer(message))["error"]
    return error["code"], error["message"]


# --- params -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"a": 1, "b": 2}, [{"a": 1, "b": 2}], {"params": {"a": 1, "b": 2}}])
async def test_object_of_a_method_has_three_spellings(params: Any) -> None:
    assert await answer(rpc("add", params)) == {"jsonrpc": "2.0", "id": 1, "result": {"total": 3}}


@pytest.mark.parametrize("params", [None, {}, [], [{}], {"params": {}}])
async def test_method_without_required_params_needs_none(params: Any) -> None:
    assert (await answer(rpc("who", params)))["result"] == {"actor": 7, "operator": False}


async def test_field_named_params_is_not_unwrapped() -> None:
    assert (await answer(rpc("named", {"params": {"x": 1}})))["result"] == {"x": 1}
    assert (await answer(rpc("named", [{"params": {"x": 1}}])))["result"] == {"x": 1}


async def test_null_as_params_counts_as_left_out() -> None:
    assert "result" in await answer({"jsonrpc": "2.0", "id": 1, "method": "who", "params": None})


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"a": "1"}, {"field": "a", "value": "'1'", "problem": "it must be a whole number"}),
        ({"a": True}, {"field": "a", "value": "True", "problem": "it must be a whole number"}),
        ({"a": 1.0}, {"field": "a", "value": "1.0", "problem": "it must be a whole number"}),
        ({"a": {"x": PASSWORD}}, {"field": "a", "value": "an object with 1 field"}),
        ({"a": [1, 2]}, {"field": "a", "value": "a list of 2 values"}),
        ({"a": "x" * 900}, {"field": "a", "value": f"'{'x' * 78}…"}),
        ({"a": f"http://user:{PASSWORD}@h:1/?key={PASSWORD}"}, {"field": "a", "value": "'http://h:1'"}),
        ({}, {"field": "a", "problem": "it is missing"}),
        ({"a": 1, "bb": PASSWORD}, {"field": "bb", "problem": "there is no such field; did you mean 'b'?"}),
        ({"params": 5}, {"field": "params", "value": "5"}),
        ({"a": 1, "flow": {"nodes": [{"id": 1}, {"id": "2"}]}}, {"field": "flow.nodes.1.id", "value": "'2'"}),
        ({"a": 1, "flow": {"nodes": [{"id": 1, "x": 2}]}}, {"field": "flow.nodes.0.x"}),
    ],
)
async def test_invalid_field_is_reported_with_its_path_and_value(
    params: Any, problem: dict[str, Any]
) -> None:
    response = await answer(rpc("add", params))
    error = response["error"]
    [found] = error["data"]["problems"]
    assert error["code"] == InvalidParams.code
    assert error["message"] == f"{found['field']}: {found['problem']}"
    assert found == found | problem
    assert ("value" in found) == ("value" in problem)
    assert PASSWORD not in json.dumps(response)


@pytest.mark.parametrize("flow", [{"nodes": [{"id": 1, "secret": [PASSWORD]}]}, {"key": 12345}])
async def test_value_of_a_secret_is_never_shown(flow: Any) -> None:
    response = await answer(rpc("add", {"a": 1, "flow": flow}))
    [found] = response["error"]["data"]["problems"]
    assert "value" not in found
    assert not {PASSWORD, "12345"} & {*json.dumps(response).split('"')}


async def test_list_of_problems_is_bounded() -> None:
    nodes = [{"id": "x"}] * (MAX_PROBLEMS + 5)
    error = (await answer(rpc("add", {"a": 1, "flow": {"nodes": nodes}})))["error"]
    assert len(error["data"]["problems"]) == MAX_PROBLEMS
    assert error["message"].endswith("; 24 more problems")


@pytest.mark.parametrize("params", [[1], [{"a": 1}, {"a": 2}]])
async def test_list_must_hold_one_object(params: Any) -> None:
    code, text = await error_of(rpc("add", params))
    assert (code, text) == (
        -32602,
        f"params is a list of {'1 value' if len(params) == 1 else '2 values'}; pass one object",
    )


# --- messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "{", "nonsense", '{"a": NaN}', b"\xff", '"\\ud800"', "[" * 100_000], ids=repr
)
async def test_text_that_is_not_json_is_a_parse_error(text: str | bytes) -> None:
    response = await answer(text)
    assert (response["id"], response["error"]["code"]) == (None, -32700)
    assert response["error"]["message"].startswith("the message is not JSON: ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '{"jsonrpc": "2.0", "id": 1, "method": "who", "params": {"a": 1, "a": 2}}',
            "params has the key 'a' twice",
        ),
        ('{"jsonrpc": "2.0", "id": 1, "method": "who", "params": {"a": 1e999}}', "params.a is '1e999'"),
    ],
)
async def test_key_twice_or_number_beyond_the_range_is_a_parse_error(text: str, problem: str) -> None:
    response = await answer(text)
    assert (response["id"], response["error"]["code"]) == (None, -32700)
    assert response["error"]["message"].startswith(f"the message is rejected: {problem}")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (5, "a call must be an object, and this is an int"),
        ("null", "a call must be an object, and this is a NoneType"),
        ({"method": "who", "id": 1}, "jsonrpc is None; it must be '2.0'"),
        ({**rpc("who"), "jsonrpc": 2.0}, "jsonrpc is 2.0; it must be '2.0'"),
        ({**rpc("who"), "method": 5}, "method is 5; it must be the name of a method"),
        ({**rpc("who"), "params": "x"}, "params is a text; it must be an object"),
        ({**rpc("who"), "id": {}}, "id is an object; it must be a text, a number or null"),
        ({**rpc("who"), "params": 1.5}, "params is a float; it must be an object"),
        ({**rpc("who"), "id": True}, "id is a bool; it must be a text, a number or null"),
        ([], "the batch has 0 calls; send batches of 1 to 100 calls"),
        ([rpc("who")] * (MAX_BATCH + 1), "the batch has 101 calls; send batches of 1 to 100 calls"),
    ],
)
async def test_message_that_is_no_call_is_an_invalid_request(message: Any, problem: str) -> None:
    assert await error_of(message) == (-32600, problem)


async def test_invalid_request_has_the_id_of_the_call_if_it_is_valid() -> None:
    assert (await answer({"id": "a", "method": "who"}))["id"] == "a"


@pytest.mark.parametrize("call_id", ["a", 0, -1, 2**70, 1.5, None, ""])
async def test_response_has_the_id_of_the_call(call_id: Any) -> None:
    assert (await answer(rpc("who", call_id=call_id)))["id"] == call_id


async def test_notification_has_no_response_even_if_it_fails() -> None:
    for method in ("who", "nothing", "fail"):
        assert await answer({"jsonrpc": "2.0", "method": method}) is None


async def test_unknown_method_is_reported_with_a_similar_one() -> None:
    assert await error_of(rpc("ad")) == (-32601, "there is no method 'ad'; did you mean 'add'?")
    code, text = await error_of(rpc("x" * 1_000_000))
    assert (code, len(text) < 200) == (-32601, True)
    assert text.endswith("…; call rpc.discover for a list")


async def test_calls_of_a_batch_run_in_order_and_an_invalid_one_stops_no_other() -> None:
    message = [rpc("add", {"a": 1}, "x"), 5, {"jsonrpc": "2.0", "method": "who"}, rpc("nothing", call_id="y")]
    first, second, third = await answer(message)
    assert first == {"jsonrpc": "2.0", "id": "x", "result": {"total": 1}}
    assert (second["id"], second["error"]["code"]) == (None, -32600)
    assert (third["id"], third["error"]["code"]) == ("y", -32601)


class Blob(Params):
    """A size."""

    size: int


async def blob(call: Call, params: Blob) -> str:
    """Return a text of a size."""
    BLOBS.append(params.size)
    return "x" * params.size


BLOBS: list[int] = []
BLOB = RpcDispatcher([Method(name="blob", needs=Right.FLOWS, params=Blob, result=str, call=blob)])


async def test_calls_are_not_made_after_large_responses_of_their_batch() -> None:
    BLOBS.clear()
    sizes = [1, BATCH_BYTES - 1_000_000, 1_000_000, 2, 3]
    calls = [rpc("blob", {"size": size}, size) for size in sizes]
    del calls[1]["id"]  # a notification counts, too
    found = await BLOB.dispatch(json.dumps([*calls, {"nonsense": 1}]), CALL)
    assert found is not None
    responses = json.loads(found[0])
    assert BLOBS == sizes[:3]
    assert [each["id"] for each in responses] == [1, 1_000_000, 2, 3, None]
    error = responses[2]["error"]
    assert (error["code"], error["data"]) == (LimitExceeded.code, {"limit": BATCH_BYTES})
    assert "the call was not made, because the responses before it in the batch have 4,000,000 bytes" in str(
        error
    )


async def test_result_over_the_limit_is_left_out() -> None:
    found = None
    for size, code in ((RESULT_BYTES - 2, 0), (RESULT_BYTES - 1, LimitExceeded.code)):
        found = await BLOB.dispatch(json.dumps(rpc("blob", {"size": size})), CALL)
        assert found is not None
        assert found[1] == (code,)
    assert found is not None
    assert "its result has 16,000,001 bytes, more than 16,000,000; ask for less at once" in found[0]


async def test_batch_of_notifications_has_no_response() -> None:
    assert await answer([{"jsonrpc": "2.0", "method": "who"}] * 2) is None


async def test_batch_in_a_batch_is_an_invalid_request() -> None:
    [nested, called] = await answer([[rpc("who")], rpc("who")])
    assert (nested["id"], nested["error"]["message"]) == (
        None,
        "a call must be an object, and this is a list",
    )
    assert called["id"] == 1


async def test_two_calls_with_one_id_both_get_their_response() -> None:
    assert [each["result"] for each in await answer([rpc("add", {"a": 1}), rpc("add", {"a": 2})])] == [
        {"total": 1},
        {"total": 2},
    ]


# --- errors -------------------------------------------------------------------------------------------------------


async def test_error_of_a_method_has_its_code_text_and_data() -> None:
    response = await answer(rpc("fail", {"error": "not found"}))
    assert response["error"] == {"code": -32001, "message": "there is no flow 7", "data": {"flow": 7}}


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        (rpc("fail", {"error": "down"}), -32010, "MongoDB is unavailable; try the call again"),
        (rpc("fail", {"error": "refused"}), -32010, "MongoDB refuses a value of the call; change it"),
        (rpc("fail", {"error": "unexpected"}), -32603, "unexpected error "),
        (rpc("unwritable"), -32603, "unexpected error "),
    ],
)
async def test_other_errors_have_a_reference_and_no_internals(
    caplog: pytest.LogCaptureFixture, call: Any, code: int, text: str
) -> None:
    caplog.set_level(logging.DEBUG)
    response = await answer(call)
    error = response["error"]
    assert (error["code"], error["message"][: len(text)]) == (code, text)
    assert error["data"]["reference"] in caplog.text
    assert "tests/server/servers.py" in caplog.text or call["method"] == "unwritable"
    assert PASSWORD not in caplog.text + json.dumps(response)


async def test_params_never_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for given in ({"a": PASSWORD}, {"error": PASSWORD}, {PASSWORD: 1}, [PASSWORD]):
        for method in ("add", "fail", "nothing"):
            await answer(rpc(method, given))
    await answer(f'{{"{PASSWORD}')
    assert PASSWORD not in caplog.text


async def test_method_that_notifies_needs_a_websocket_connection() -> None:
    code, text = await error_of(rpc("subscribe"))
    assert (code, text) == (
        -32600,
        "subscribe sends notifications; call it over a WebSocket connection",
    )


def test_codes_of_errors_are_those_of_the_protocol() -> None:
    codes: dict[type[RpcError], int] = {
        ParseError: -32700,
        InvalidRequest: -32600,
        MethodNotFound: -32601,
        InvalidParams: -32602,
        InternalError: -32603,
        NotFound: -32001,
        AlreadyExists: -32002,
        PermissionDenied: -32003,
        InvalidTransition: -32004,
        StorageError: -32010,
        DagMissingDependency: -32020,
        DagCycle: -32021,
        SupervisorUnreachable: -32030,
        SupervisorTimeout: -32031,
    }
    assert {kind: kind("text").code for kind in codes} == codes
    assert {kind.name for kind in codes} == {kind.__name__ for kind in codes}
    assert NotFound("x").to_json() == {"code": -32001, "message": "x"}


# --- the description of the methods -------------------------------------------------------------------------------


def test_discovery_describes_each_method_with_its_models_and_errors() -> None:
    document = openrpc_document(methods(), INFO)
    described = {each["name"]: each for each in document["methods"]}
    add = described["add"]
    assert (document["openrpc"], document["info"]) == ("1.2.6", INFO)
    assert (add["summary"], add["description"]) == ("Add two numbers.", "The second one may be left out.")
    [param] = add["params"]
    assert (param["name"], param["required"]) == ("params", True)
    assert param["schema"] == {"$ref": "#/components/schemas/Add"}
    assert document["components"]["schemas"]["Add"]["additionalProperties"] is False
    assert not described["who"]["params"][0]["required"]
    assert {"$ref": "#/components/errors/AlreadyExists"} in add["errors"]
    known = document["components"]["errors"]
    assert known["AlreadyExists"]["code"] == -32002
    named = {error["$ref"].rpartition("/")[2] for each in document["methods"] for error in each["errors"]}
    assert named == {*known}
    assert all(each["summary"] for each in document["methods"])


async def test_results_have_the_described_form() -> None:
    document = openrpc_document(methods(), INFO)
    for method, params in (("add", {"a": 1}), ("who", {}), ("named", {"params": {"x": 1}})):
        validate_result(document, method, (await answer(rpc(method, params)))["result"])
    with pytest.raises(ValidationError):
        validate_result(document, "add", {"total": "1"})


def undocumented() -> Callable[..., Any]:
    async def call(call: Call, params: NoParams) -> None:
        return None

    return call


class Lenient(BaseModel):
    """A model that ignores unknown fields."""


async def documented(call: Call, params: Lenient) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"params": NoParams, "call": undocumented()}, "method x has no docstring"),
        (
            {"params": Lenient, "call": documented},
            "Lenient, the params of method x, accepts unknown fields; derive",
        ),
    ],
)
def test_method_needs_a_docstring_and_strict_params(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        Method(name="x", needs=Right.FLOWS, result=None, **given)


def test_two_methods_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match="two methods have the name add"):
        RpcDispatcher([*methods(), *methods()])
