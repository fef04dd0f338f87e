"""Calls of an HTTP API whose parameters and results are pydantic models, and the OpenAPI document that describes them.

A table of operations makes both the routes and the document, so these never differ.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.responses import Response

from flowkit.core.utils import dumps
from flowkit.errors import ChecksBusy, StoreRefused, StoreUnavailable
from flowkit.server.errors import HttpError
from flowkit.server.rights import HttpRoute, OpenAccess
from flowkit.server.rpc import Params, secrets_of
from flowkit.text import kind_of
from flowkit.validation.invalid import describe
from flowkit.validation.json_keys import EqualKeys, JsonRefused, load_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from flowkit.server.auth import Caller
    from flowkit.server.rights import Need

GivenParams = TypeVar("GivenParams", bound=Params)

RETRY_SEC: Final = 1
"""After this time, a client can repeat a call that failed because MongoDB was unavailable."""

HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
"""Browsers keep no copy of what is known about tasks on their disks, and take it for nothing but JSON."""

_COMMON_ERRORS: Final[Mapping[int, str]] = {
    401: "There is no token, or an unknown, expired or revoked one: `unauthorized`.",
    403: "The token does not permit the call: `permission_denied`.",
    500: "A bug: `internal_error`. The message has a reference to the log.",
    503: "MongoDB is unavailable: `mongo_unavailable`. The params of a task could not be checked in "
    "time: `checks_busy`. The header `Retry-After` says when to try again.",
}
_INPUT_ERRORS: Final[Mapping[int, str]] = {422: "A field of the call is invalid: `invalid_request`."}
_BODY_ERRORS: Final[Mapping[int, str]] = {
    400: "The body is not JSON, has a key of an object twice, or a number beyond the range of numbers: `invalid_json`.",
    413: "The body is too large: `body_too_large`.",
}


class Problem(BaseModel):
    """What went wrong."""

    code: str
    message: str


class Failure(BaseModel):
    """The body of every response with a status of 400 or more."""

    error: Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class CallInput:
    """The validated input of a call. Each part is an instance of the operation's model, or None without one."""

    caller: Caller
    path: Any = None
    query: Any = None
    header: Any = None
    body: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A call that clients can make. Its description is the docstring of `call`."""

    method: str
    path: str
    call: Callable[[Any, CallInput], Awaitable[BaseModel]]
    """A method of the API. Raises HttpError."""
    result: type[BaseModel]
    needs: Need
    """What the caller must have."""
    parameters: Mapping[str, type[Params]] = field(default_factory=dict)
    """Models of the parameters by their place: `path`, `query` or `header`."""
    bodies: Mapping[str, type[Params]] = field(default_factory=dict)
    """Models of the body. The first one applies whose key is a field of the body, or is empty. None: no
    body is read."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """The errors that only this operation has, by their status."""


def operation_routes(
    operations: Sequence[Operation], api: object, info: Mapping[str, Any], *, document_path: str
) -> list[BaseRoute]:
    """Return the routes that call the operations of `api`, and serve their OpenAPI document at `document_path`."""
    document = dumps(openapi_document(operations, info))

    async def describe(request: Request) -> Response:
        return Response(document, media_type="application/json")

    routes = [
        HttpRoute(each.path, _endpoint(each, api), methods=[each.method], needs=each.needs)
        for each in operations
    ]
    return [*routes, HttpRoute(document_path, describe, needs=OpenAccess.TOKEN)]


def _endpoint(operation: Operation, api: object) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        caller: Caller = request.user
        given = CallInput(
            caller=caller, **_parameters(operation, request), body=await _body(operation, request)
        )
        content = dumps(await _call(operation, api, given))
        return Response(content, headers=HEADERS, media_type="application/json")

    return respond


async def _call(operation: Operation, api: object, given: CallInput) -> BaseModel:
    """Run an operation. Raise HttpError for errors of MongoDB, whose texts may contain addresses, and for
    ChecksBusy.
    """
    try:
        return await operation.call(api, given)
    except StoreUnavailable as error:
        raise mongo_unavailable(error) from error
    except ChecksBusy as error:
        raise HttpError(
            503, error.code, "the check of params takes too long now; try the call again"
        ) from error
    except StoreRefused as error:
        raise HttpError(422, error.code, "MongoDB refuses a value of the call; change it") from error


def mongo_unavailable(error: StoreUnavailable) -> HttpError:
    """Return the error of a call that MongoDB did not serve, with the time after which a client can repeat it."""
    after = (b"retry-after", b"%d" % RETRY_SEC)
    return HttpError(503, error.code, "MongoDB is unavailable; try the call again", (after,))


def _parameters(operation: Operation, request: Request) -> dict[str, Params]:
    found: Mapping[str, Mapping[str, Any]] = {
        "path": request.path_params,
        "query": request.query_params,
        "header": request.headers,
    }
    parts = {}
    for place, model in operation.parameters.items():
        given = found[place]
        if place == "header":
            names = [each.alias or name for name, each in model.model_fields.items()]
            given = {name: given[name] for name in names if name in given}
        parts[place] = parse_params(model, dict(given), strict=False)
    return parts


async def _body(operation: Operation, request: Request) -> Params | None:
    if not operation.bodies:
        return None
    try:
        given = load_json(await request.body(), strict=True)
    except (EqualKeys, JsonRefused) as error:
        raise HttpError(400, "invalid_json", f"the body is rejected: {error}") from None
    except ValueError as error:
        raise HttpError(400, "invalid_json", f"the body is not JSON: {error}; send an object") from None
    if not isinstance(given, dict):
        raise HttpError(422, "invalid_request", f"the body is {kind_of(given)}; send a JSON object")
    model = next(model for name, model in operation.bodies.items() if not name or name in given)
    return parse_params(model, given, strict=True)


def parse_params(model: type[GivenParams], given: Mapping[str, Any], *, strict: bool) -> GivenParams:
    """Return the values as an instance of a model. Raise HttpError, which names the invalid fields.

    With `strict`, values must have the exact JSON type; otherwise texts are converted.
    """
    try:
        return model.model_validate_json(to_json(given), strict=strict)
    except ValidationError as error:
        problem = describe(error, hides=secrets_of(model), known=model.model_fields)
        raise HttpError(422, "invalid_request", problem) from None


# --- the document -------------------------------------------------------------------------------------------------


def openapi_document(operations: Sequence[Operation], info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI document that describes the operations, their models and their errors."""
    inputs: dict[tuple[type[BaseModel], str], tuple[Any, Any, TypeAdapter[Any]]] = {}
    for each in operations:
        given = [*each.parameters.values(), *each.bodies.values()]
        modes = [
            *((model, "validation") for model in given),
            *((model, "serialization") for model in (each.result, Failure)),
        ]
        inputs |= {(model, mode): ((model, mode), mode, TypeAdapter(model)) for model, mode in modes}
    schemas, definitions = TypeAdapter.json_schemas(
        inputs.values(), ref_template="#/components/schemas/{model}"
    )
    described = _Described({key: schema for (key, _), schema in schemas.items()}, definitions["$defs"])
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = described.operation(each)
    listed = {described.name_of(model) for each in operations for model in each.parameters.values()}
    return {
        "openapi": "3.1.0",
        "info": dict(info),
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": {name: each for name, each in described.components.items() if name not in listed},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


class _Described:
    """The schemas of all models, and the parts of the document that use them."""

    def __init__(
        self, schemas: Mapping[tuple[type[BaseModel], str], Any], components: Mapping[str, Any]
    ) -> None:
        self._schemas = schemas
        self.components = components

    def name_of(self, model: type[BaseModel]) -> str:
        """Return the name of the component that describes a model of parameters."""
        return str(self._schemas[model, "validation"]["$ref"]).rpartition("/")[2]

    def operation(self, operation: Operation) -> dict[str, Any]:
        """Return the description of an operation."""
        summary, _, description = (inspect.getdoc(operation.call) or "").partition("\n")
        result = self._schemas[operation.result, "serialization"]
        return {
            "operationId": getattr(operation.call, "__name__", operation.path),
            "summary": summary,
            **({"description": description.strip()} if description.strip() else {}),
            "parameters": self._parameters(operation),
            **self._body(operation),
            "responses": {"200": _response("The result.", result), **self._errors(operation)},
        }

    def _parameters(self, operation: Operation) -> list[dict[str, Any]]:
        found = []
        for place, model in operation.parameters.items():
            schema = self.components[self.name_of(model)]
            for name, each in schema.get("properties", {}).items():
                text = each.get("description")
                found.append(
                    {
                        "name": name,
                        "in": place,
                        "required": name in schema.get("required", []),
                        **({"description": text} if text else {}),
                        "schema": {key: part for key, part in each.items() if key != "description"},
                    }
                )
        return found

    def _body(self, operation: Operation) -> dict[str, Any]:
        schemas = [self._schemas[model, "validation"] for model in operation.bodies.values()]
        if not schemas:
            return {}
        schema = schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

    def _errors(self, operation: Operation) -> dict[str, Any]:
        given = operation.parameters or operation.bodies
        parts = (
            _COMMON_ERRORS,
            _INPUT_ERRORS if given else {},
            _BODY_ERRORS if operation.bodies else {},
            operation.errors,
        )
        texts: dict[int, list[str]] = {}
        for part in parts:
            for status, text in part.items():
                texts.setdefault(status, []).append(text)
        failure = self._schemas[Failure, "serialization"]
        return {str(status): _response(" ".join(texts[status]), failure) for status in sorted(texts)}


def _response(description: str, schema: Any) -> dict[str, Any]:
    found = {"description": description, "content": {"application/json": {"schema": schema}}}
    if "`Retry-After`" in description:
        seconds = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
        found["headers"] = {"Retry-After": seconds}
    return found
