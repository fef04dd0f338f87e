"""The JSON schema of a task's params, in the key `params_schema` of its graph. Pure.

`create_task`, `flowkit run`, `run_graph` and the engine's activity `open_task` check the params. The workflow does not.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Any

from flowkit.text import printable, printed, truncate

if TYPE_CHECKING:
    from collections.abc import Iterator

PARAMS_SCHEMA = "params_schema"
_ENOUGH = 11
_SHOWN_CHARS = 300


def params_problems(graph: dict[str, Any], params: dict[str, Any] | None) -> list[str]:
    """Return the problems of the schema in `graph`, and of `params`, at most eleven.

    With `params` None, check only the schema itself. `$ref` resolves within the schema; nothing is downloaded.
    """
    schema = graph.get(PARAMS_SCHEMA)
    if schema is None:
        return []
    if not isinstance(schema, dict):
        return [f"graph.{PARAMS_SCHEMA} must be a JSON schema, which is an object, not {printed(schema)}"]
    return list(islice(_check(schema, params), _ENOUGH))


def _check(schema: dict[str, Any], params: dict[str, Any] | None) -> Iterator[str]:
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    validator = validator_for(schema, default=Draft202012Validator)
    try:
        validator.check_schema(schema)
        if params is not None:
            checked = validator(schema, registry=Registry(), format_checker=validator.FORMAT_CHECKER)
            yield from (
                f"params{error.json_path[1:]}: {_shown(error.message)}"
                for error in checked.iter_errors(params)
            )
    except SchemaError as error:
        yield f"graph.{PARAMS_SCHEMA}{error.json_path[1:]} is not valid in a JSON schema: {_shown(error.message)}"
    except Unresolvable as error:
        yield f"graph.{PARAMS_SCHEMA} refers to {printed(error.ref)}, which it does not contain; put the definition into $defs"
    except (re.error, RecursionError) as error:
        yield f"graph.{PARAMS_SCHEMA} cannot be applied: {_shown(str(error))}; correct its patterns and references"


def _shown(message: str) -> str:
    return truncate(printable(message), _SHOWN_CHARS)
