"""JSON-RPC 2.0 over HTTP and WebSocket, for methods whose parameters and results are pydantic models."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.responses import Response

from flowkit.core.utils import dumps
from flowkit.errors import StoreRefused, StoreUnavailable
from flowkit.masks import HIDDEN, is_secret_name
from flowkit.server.connection import Connection
from flowkit.server.errors import HttpError, log_unexpected
from flowkit.server.rights import HttpRoute, OpenAccess, SocketRoute, refusal
from flowkit.text import count_of, kind_of, printable, printed, suggestion, truncate
from flowkit.validation.invalid import problems_of
from flowkit.validation.json_keys import EqualKeys, JsonRefused, load_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.websockets import WebSocket

    from flowkit.server.auth import Caller
    from flowkit.server.rights import Need
    from flowkit.validation.invalid import InvalidValue, Path

MAX_BATCH = 100
"""Maximum number of calls in a batch."""

BATCH_BYTES = 4_000_000
"""Number of bytes of the responses of a batch from which on its further calls are not made."""

RESULT_BYTES = 16_000_000
"""Maximum size of the result of one call, in bytes of JSON."""

MAX_CONNECTIONS = 200
"""Maximum number of WebSocket connections at the same time; beyond it, the server returns status 503."""

MAX_PROBLEMS = 20
"""Maximum number of problems that an InvalidParams error lists."""

_NAME_CHARS, _PATH_CHARS = 100, 200
"""Maximum length of an unknown name for which the server looks for a similar one, and of a field's path in an error."""


class RpcError(Exception):
    """An error that a method returns to its caller, with its code and its name as class attributes."""

    code = -32603
    name = "InternalError"

    def __init__(self, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.data = data

    def to_json(self) -> dict[str, Any]:
        """Return the error as a response contains it: without `data` if it has none."""
        return {
            "code": self.code,
            "message": self.message,
            **({} if self.data is None else {"data": self.data}),
        }


class ParseError(RpcError):
    """The message is not JSON."""

    code = -32700
    name = "ParseError"


class InvalidRequest(RpcError):
    """The message is not a call, or cannot be made in this way."""

    code = -32600
    name = "InvalidRequest"


class MethodNotFound(RpcError):
    """There is no method with this name."""

    code = -32601
    name = "MethodNotFound"


class InvalidParams(RpcError):
    """The parameters do not have the form that the method requires; `data.problems` lists what is wrong."""

    code = -32602
    name = "InvalidParams"


class InternalError(RpcError):
    """The server failed unexpectedly; its log has more under the reference in `data`."""


class NotFound(RpcError):
    """What the call names does not exist."""

    code = -32001
    name = "NotFound"


class AlreadyExists(RpcError):
    """What the call would create exists already."""

    code = -32002
    name = "AlreadyExists"


class PermissionDenied(RpcError):
    """The token does not permit the call."""

    code = -32003
    name = "PermissionDenied"


class InvalidTransition(RpcError):
    """The state of what the call names does not allow the change."""

    code = -32004
    name = "InvalidTransition"


class LimitExceeded(RpcError):
    """A limit of the server does not allow the call or its result; the message says which, and what to do."""

    code = -32005
    name = "LimitExceeded"


class StorageError(RpcError):
    """The database is unavailable or refused the call."""

    code = -32010
    name = "StorageError"


class DagMissingDependency(RpcError):
    """A node depends on a node that the graph does not have."""

    code = -32020
    name = "DagMissingDependency"


class DagCycle(RpcError):
    """The nodes of the graph depend on each other in a cycle."""

    code = -32021
    name = "DagCycle"


class SupervisorUnreachable(RpcError):
    """The supervisor does not respond."""

    code = -32030
    name = "SupervisorUnreachable"


class SupervisorTimeout(RpcError):
    """The supervisor did not finish the call in time."""

    code = -32031
    name = "SupervisorTimeout"


class Params(BaseModel):
    """Base class for parameters: unknown fields are errors. Use it for nested models and for results, too."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NoParams(Params):
    """The parameters of a method that needs none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a method knows about the call besides its parameters."""

    caller: Caller
    connection: Connection | None = None
    """The WebSocket connection of the call; None if it came in an HTTP request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A method that clients can call. Its summary and its description come from the docstring of `call`.

    Raise TypeError if the function has no docstring, or if its parameters accept unknown fields.
    """

    name: str
    needs: Need
    """What the caller must have. The server checks it before it reads the parameters."""
    params: type[BaseModel]
    """The model of the one object that the method takes. Values must have the exact JSON type: `"1"` is no integer."""
    result: Any
    """The type of the result, for `rpc.discover`."""
    call: Callable[[Call, Any], Awaitable[Any]]
    errors: tuple[type[RpcError], ...] = ()
    """The errors that the method raises, besides InvalidParams, StorageError and InternalError."""
    websocket_only: bool = False
    """Whether a call over HTTP is an error, because the method sends notifications."""

    def __post_init__(self) -> None:
        if not inspect.getdoc(self.call):
            raise TypeError(f"the function of method {self.name} has no docstring; write one for its clients")
        if self.params.model_config.get("extra") != "forbid":
            raise TypeError(
                f"{self.params.__name__}, the params of method {self.name}, accepts unknown fields; derive "
                "it from Params"
            )

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.call) or "").partition("\n")[0]

    @property
    def description(self) -> str:
        """The docstring without its first line."""
        return (inspect.getdoc(self.call) or "").partition("\n")[2].strip()


def rpc_routes(
    path: str,
    methods: Sequence[Method],
    info: Mapping[str, Any],
    *,
    max_connections: int = MAX_CONNECTIONS,
) -> list[BaseRoute]:
    """Return the routes that serve the methods at `path`: POST for HTTP, and WebSocket.

    `info` is the `info` object of the OpenRPC document that the method `rpc.discover` returns.
    """
    dispatcher = RpcDispatcher([*methods, discovery(openrpc_document(methods, info))])
    connections: set[Connection] = set()

    async def respond(request: Request) -> Response:
        answer = await dispatcher.dispatch(await request.body(), Call(caller=request.user))
        if answer is None:
            return Response(status_code=204)
        return Response(answer[0], media_type="application/json")

    async def connect(socket: WebSocket) -> None:
        if len(connections) >= max_connections:
            raise HttpError(
                503,
                "too_many_connections",
                f"{max_connections} WebSocket connections are open; try again later",
            )
        connection = Connection(socket)
        call = Call(caller=socket.user, connection=connection)
        connections.add(connection)
        try:
            await connection.serve(lambda text: _answer_message(dispatcher, text, call))
        finally:
            connections.discard(connection)

    return [
        HttpRoute(path, respond, methods=["POST"], needs=OpenAccess.TOKEN),
        SocketRoute(path, connect, needs=OpenAccess.TOKEN),
    ]


def discovery(document: dict[str, Any]) -> Method:
    """Return the method that returns the OpenRPC document."""

    async def discover(call: Call, params: NoParams) -> dict[str, Any]:
        """Return the OpenRPC document that describes all methods."""
        return document

    kinds: dict[str, Any] = {"params": NoParams, "result": dict[str, Any]}
    return Method(name="rpc.discover", needs=OpenAccess.TOKEN, call=discover, **kinds)


async def _answer_message(dispatcher: RpcDispatcher, text: str | None, call: Call) -> str | None:
    if text is None:
        return _respond_error(None, InvalidRequest("the message is binary; send JSON as text"))[0].decode()
    answer = await dispatcher.dispatch(text, call)
    return None if answer is None else answer[0]


class RpcDispatcher:
    """Runs the calls of a message, one after another, and returns their responses.

    A batch with an invalid element runs its other calls, and a call with `"id": null` gets a response.
    """

    def __init__(self, methods: Iterable[Method]) -> None:
        """Raise TypeError if two methods have the same name."""
        self._runners: dict[str, _Runner] = {}
        for method in methods:
            if method.name in self._runners:
                raise TypeError(f"two methods have the name {method.name}")
            self._runners[method.name] = _Runner(method)

    async def dispatch(self, text: str | bytes, call: Call) -> tuple[str, tuple[int, ...]] | None:
        """Return the response to a message with the codes of its errors, 0 for a success; None if it needs none."""
        try:
            message = load_json(text, strict=True)
        except (EqualKeys, JsonRefused) as error:
            return _as_message(_respond_error(None, ParseError(f"the message is rejected: {error}")))
        except ValueError as error:
            return _as_message(_respond_error(None, ParseError(f"the message is not JSON: {error}")))
        if not isinstance(message, list):
            response = await self._respond(message, call)
            return None if _is_notification(message) else _as_message(response)
        if not 0 < len(message) <= MAX_BATCH:
            size = count_of(len(message), "call")
            problem = InvalidRequest(f"the batch has {size}; send batches of 1 to {MAX_BATCH} calls")
            return _as_message(_respond_error(None, problem))
        responses = await self._respond_to_batch(message, call)
        joined = b"[%s]" % b",".join(each for each, _ in responses)
        return (joined.decode(), tuple(code for _, code in responses)) if responses else None

    async def _respond_to_batch(self, batch: list[Any], call: Call) -> list[tuple[bytes, int]]:
        """Run calls until their responses, those of notifications included, have BATCH_BYTES bytes."""
        responses = []
        size = 0
        for element in batch:
            if size < BATCH_BYTES:
                response = await self._respond(element, call)
                size += len(response[0])
            else:
                response = _respond_error(_id_of(element), _not_made())
            if not _is_notification(element):
                responses.append(response)
        return responses

    async def _respond(self, element: Any, call: Call) -> tuple[bytes, int]:
        """Run one call. Return its response and the code of its error, 0 for a success."""
        call_id = _id_of(element)
        try:
            problem = request_problem(element)
            if problem:
                raise InvalidRequest(problem)
            result = await self._runner(element["method"]).run(call, element.get("params"))
            return b'{"jsonrpc":"2.0","id":%s,"result":%s}' % (dumps(call_id), result), 0
        except RpcError as error:
            return _respond_error(call_id, error)

    def _runner(self, name: str) -> _Runner:
        runner = self._runners.get(name)
        if runner is None:
            hint = suggestion(name[:_NAME_CHARS], self._runners) or "; call rpc.discover for a list"
            raise MethodNotFound(f"there is no method {printed(name)}{hint}")
        return runner


def _is_notification(element: Any) -> bool:
    """Return whether an element of a message is a valid call without an id, which gets no response."""
    return request_problem(element) is None and "id" not in element


def _not_made() -> LimitExceeded:
    return LimitExceeded(
        f"the call was not made, because the responses before it in the batch have {BATCH_BYTES:,} bytes or more; send "
        "it in another batch",
        {"limit": BATCH_BYTES},
    )


def _as_message(response: tuple[bytes, int]) -> tuple[str, tuple[int, ...]]:
    return response[0].decode(), (response[1],)


def _respond_error(call_id: Any, error: RpcError) -> tuple[bytes, int]:
    return dumps({"jsonrpc": "2.0", "id": call_id, "error": error.to_json()}), error.code


def _id_of(element: Any) -> Any:
    """Return the id of a call; None if it has none, or one that is not allowed."""
    call_id = element.get("id") if isinstance(element, dict) else None
    return call_id if isinstance(call_id, (str, int, float)) and not isinstance(call_id, bool) else None


def request_problem(element: Any) -> str | None:
    """Return what is wrong with an element of a message as a call, apart from its parameters; None if nothing is."""
    if not isinstance(element, dict):
        return f"a call must be an object, and this is {_kind(element)}"
    if element.get("jsonrpc") != "2.0":
        return f"jsonrpc is {printed(element.get('jsonrpc'))}; it must be '2.0'"
    if not isinstance(element.get("method"), str):
        return f"method is {printed(element.get('method'))}; it must be the name of a method"
    if element.get("id") is not None and _id_of(element) is None:
        return f"id is {_kind(element['id'])}; it must be a text, a number or null"
    if not isinstance(element.get("params"), dict | list | None):
        return f"params is {_kind(element['params'])}; it must be an object"
    return None


class _Runner:
    """Runs the calls of one method. Every error that it raises is an RpcError."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._is_secret = secrets_of(method.params)

    async def run(self, call: Call, params: Any) -> bytes:
        """Return the result of a call as JSON."""
        method = self._method
        if problem := refusal(call.caller, method.needs):
            raise PermissionDenied(
                f"{method.name}: {problem}", {"method": method.name, "right": method.needs}
            )
        read = self._read_params(params)
        if method.websocket_only and call.connection is None:
            raise InvalidRequest(f"{method.name} sends notifications; call it over a WebSocket connection")
        return await self._run(call, read)

    def _read_params(self, params: Any) -> BaseModel:
        """Return the parameters as the model of the method. Raise InvalidParams, which lists what is wrong."""
        model = self._method.params
        given = unwrap_params(params, model)
        try:
            return model.model_validate_json(to_json(given), strict=True)
        except ValidationError as error:
            found = problems_of(error, hides=self._is_secret, known=model.model_fields)
            problems = [_shown(each) for each in islice(found, MAX_PROBLEMS)]
            raise invalid_params(problems, more=error.error_count() - len(problems)) from None

    async def _run(self, call: Call, params: BaseModel) -> bytes:
        try:
            result = dumps(await self._method.call(call, params))
            self._check_size(len(result))
            return result
        except RpcError:
            raise
        except StoreUnavailable as error:
            raise self._storage_error(error, "MongoDB is unavailable; try the call again") from error
        except StoreRefused as error:
            raise self._storage_error(error, "MongoDB refuses a value of the call; change it") from error
        except Exception as error:
            reference = log_unexpected(error, self._method.name)
            raise InternalError(
                f"unexpected error {reference}; the log of the server has more", {"reference": reference}
            ) from error

    def _check_size(self, size: int) -> None:
        if size > RESULT_BYTES:
            raise LimitExceeded(
                f"the call was made, but its result has {size:,} bytes, more than {RESULT_BYTES:,}; ask for "
                "less at once",
                {"bytes": size, "limit": RESULT_BYTES},
            )

    def _storage_error(self, error: StoreUnavailable | StoreRefused, message: str) -> StorageError:
        reference = log_unexpected(error, self._method.name)
        return StorageError(message, {"retryable": error.retryable, "reference": reference})


def unwrap_params(params: Any, model: type[BaseModel]) -> Any:
    """Return the one object of a method from each of its spellings: itself, in a list, as `params`, or left out.

    Raise InvalidParams if the list does not have exactly one object.
    """
    if params is None or params == []:
        return {}
    if isinstance(params, list):
        if len(params) != 1 or not isinstance(params[0], dict):
            raise InvalidParams(f"params is a list of {count_of(len(params), 'value')}; pass one object")
        return params[0]
    if params.keys() == {"params"} and "params" not in model.model_fields:
        return params["params"]
    return params


def invalid_params(problems: Sequence[dict[str, Any]], more: int = 0) -> InvalidParams:
    """Return an error with these problems, each with `field`, `value` and `problem`; `more` counts those left out."""
    first = problems[0]
    others = len(problems) - 1 + more
    rest = f"; {count_of(others, 'more problem')}" if others else ""
    return InvalidParams(f"{first['field']}: {first['problem']}{rest}", {"problems": list(problems)})


def _shown(found: InvalidValue) -> dict[str, Any]:
    """Return a problem with one field of the parameters. The value of a secret, or of a missing field, is left out."""
    shown = {} if found.value in (None, HIDDEN) else {"value": found.value}
    field = printable(truncate(".".join(map(str, found.path)), _PATH_CHARS)) or "params"
    return {"field": field, **shown, "problem": found.problem}


def _kind(value: Any) -> str:
    """Return the type of a JSON value with its article, in words of JSON."""
    if isinstance(value, dict):
        return "an object"
    return "a text" if isinstance(value, str) else kind_of(value)


@cache
def secrets_of(model: type[BaseModel]) -> Callable[[Path, Any], bool]:
    """Return what decides whether the value at a path is secret: by its name, or by a type that pydantic masks."""
    schema = model.model_json_schema()
    models = [schema, *schema.get("$defs", {}).values()]
    secrets = {
        name
        for each in models
        for name, field in each.get("properties", {}).items()
        if any(part.get("format") == "password" for part in (field, *field.get("anyOf", ())))
    }
    return lambda path, _: any(part in secrets or is_secret_name(part) for part in path)


_STANDARD_ERRORS: tuple[type[RpcError], ...] = (InvalidParams, LimitExceeded, StorageError, InternalError)
"""Errors that every method may return."""


def openrpc_document(methods: Sequence[Method], info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the OpenRPC document that describes the methods, their models and their errors."""
    inputs: list[tuple[str, Any, TypeAdapter[Any]]] = []
    for method in methods:
        inputs.append((f"{method.name} params", "validation", TypeAdapter(method.params)))
        inputs.append((f"{method.name} result", "serialization", TypeAdapter(method.result)))
    schemas, definitions = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    components = {name: schema for (name, _), schema in schemas.items()}
    errors = {error.name: error for method in methods for error in (*_STANDARD_ERRORS, *method.errors)}
    return {
        "openrpc": "1.2.6",
        "info": dict(info),
        "methods": [
            _describe_method(method, components[f"{method.name} params"], components[f"{method.name} result"])
            for method in methods
        ],
        "components": {
            "schemas": definitions.get("$defs", {}),
            "errors": {
                name: {"code": error.code, "message": inspect.getdoc(error)} for name, error in errors.items()
            },
        },
    }


def _describe_method(method: Method, params: Any, result: Any) -> dict[str, Any]:
    errors = [*_STANDARD_ERRORS, *method.errors]
    required = any(field.is_required() for field in method.params.model_fields.values())
    return {
        "name": method.name,
        "summary": method.summary,
        **({"description": method.description} if method.description else {}),
        "paramStructure": "either",
        "params": [{"name": "params", "required": required, "schema": params}],
        "result": {"name": "result", "schema": result},
        "errors": [{"$ref": f"#/components/errors/{error.name}"} for error in errors],
    }
