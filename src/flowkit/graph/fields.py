"""The fields of a graph as users write it: a row for each, with its kind, its meaning and its names elsewhere. Pure.

The checks of graphs (`field_checks`), the JSON Schema (`flowkit.schema`), suggestions for unknown keys, and the order
in which a `Flow` writes a node follow from these rows. docs/graphs.md explains each field.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from flowkit import limits
from flowkit.graph import input_adapters
from flowkit.graph.encoding import encode_json
from flowkit.graph.expressions import expression_problems, may_hold_expressions
from flowkit.graph.kinds import (
    ANYTHING,
    EXPRESSION_SCHEMA,
    FLAG,
    OBJECT,
    SECONDS,
    TEXT,
    Field,
    ValueKind,
    by_name,
    number,
    object_of,
    object_schema,
    one_of,
    pattern_schema,
    texts,
    whole,
)
from flowkit.graph.params import PARAMS_SCHEMA
from flowkit.graph.routes import ON_FAILURE, ON_SUCCESS
from flowkit.graph.streams import EDGE_MODES, ON_BATCH
from flowkit.models import (
    COORDINATOR_FN,
    ENGINE_TYPES,
    RESERVED_TYPES,
    FanIn,
    OnNodeFailure,
    StartWhen,
    VersionPolicy,
)
from flowkit.text import did_you_mean, printed
from flowkit.validation.values import (
    ELEMENT_SUFFIX,
    NODE_ID_RULE,
    YEAR_SEC,
    has_blank_end,
    is_node_id,
    is_number,
    is_role,
    is_whole,
    name_bad_character,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flowkit.graph.kinds import Schema

FAN_IN: Final = re.compile(r"(all|any|all_done)|count:(\d{1,9})", re.IGNORECASE)
_SHARE: Final = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%")
_NO_CONTROL: Final[Schema] = {"pattern": r"[\u0000-\u001f\u007f-\u009f]"}
_NO_BLANK_ENDS: Final[Schema] = {"pattern": r"^\s|\s$"}
_EMPTY: Final[list[Any]] = [None, False, 0, "", [], {}]


# --- values -------------------------------------------------------------------------------------------------------


def parse_fan_in(value: object) -> FanIn | None:
    """Return the fan-in, which is `all` when `value` is None. Return None if `value` is not valid."""
    if value is None:
        return FanIn()
    return _parse_fan_in_text(value) if isinstance(value, str) else None


@lru_cache(maxsize=100)
def _parse_fan_in_text(text: str) -> FanIn | None:
    """Return the fan-in, parsed once for all nodes: a workflow task has two seconds for a graph of 20,000."""
    match = FAN_IN.fullmatch(text)
    if match is None:
        return None
    return FanIn(mode="count", count=int(match[2])) if match[2] else FanIn(mode=match[1].lower())


def read_share(value: object) -> float | None:
    """Return the share that a text such as `5%` gives, above 0 and up to 1; None for another value."""
    found = _SHARE.fullmatch(value) if isinstance(value, str) else None
    share = float(found[1]) / 100 if found else 0.0
    return share if 0 < share <= 1 else None


def when_problem(value: object) -> str | None:
    """Return why `value` cannot be a condition, or None. The expression is not parsed."""
    if isinstance(value, str) and 1 <= len(value) <= limits.CONDITION_CHARS:
        return None
    shown = f"has {len(value):,} characters; it" if isinstance(value, str) and value else f"{printed(value)}"
    return f"when {shown} must be a CEL expression of 1 to {limits.CONDITION_CHARS:,} characters"


def _find_when_problem(value: object) -> Iterator[str]:
    if problem := when_problem(value):
        yield problem


def _find_node_id_problem(value: object) -> Iterator[str]:
    if not is_node_id(value):
        yield f"node_id {printed(value)} must be {NODE_ID_RULE}{name_bad_character(value)}"


def _find_type_problem(value: object) -> Iterator[str]:
    if is_role(value) or (isinstance(value, str) and value in ENGINE_TYPES):
        return
    if isinstance(value, str) and value in RESERVED_TYPES:
        yield f"type {printed(value)} is reserved; name what the node waits for in its key 'prerequisites'"
        return
    yield (
        f"type {printed(value)} must be {COORDINATOR_FN!r} or a role: 1 to 100 of "
        "letters, digits, '.', '_', '-', beginning with a letter or digit"
    )


def _are_prerequisites(value: object) -> bool:
    given = value if isinstance(value, list) else [None]
    fits = {each for each in given if isinstance(each, str) and _is_prerequisite(each)}
    return len(fits) == len(given) <= limits.PREREQUISITES


def _is_prerequisite(text: str) -> bool:
    return 1 <= len(text) <= limits.PREREQUISITE_CHARS and text.isprintable() and not has_blank_end(text)


def _is_start_when(value: object) -> bool:
    return isinstance(value, str) and value.lower() in _START_WORDS


def _hint_start_when(value: object) -> str:
    hint = did_you_mean(value, _START_WORDS)
    return hint and f"; {hint}"


def _find_io_problems(value: Mapping[str, Any]) -> Iterator[str]:
    encoded = encode_json(value)
    if may_hold_expressions(encoded):
        yield from expression_problems(value)
    if len(encoded) > limits.NODE_IO_BYTES:
        yield f"io is {len(encoded):,} bytes of JSON, more than {limits.NODE_IO_BYTES:,}: pass a reference in input_ref"


def _find_retry_problems(value: Mapping[str, Any]) -> Iterator[str]:
    first, most = value.get("backoff_sec"), value.get("max_backoff_sec")
    if is_number(first) and is_number(most) and most < first:
        yield (
            f"retry_policy.max_backoff_sec {printed(most)} is below backoff_sec {printed(first)}, the wait before the "
            "first retry: raise it, or lower backoff_sec"
        )


_START_WORDS: Final = [word.value for word in StartWhen]
_NODE_ID: Final = ValueKind(
    schema={
        "type": "string",
        "minLength": 1,
        "maxLength": limits.ID_CHARS,
        "not": {"anyOf": [{"const": "*"}, {"pattern": ELEMENT_SUFFIX.pattern}, _NO_CONTROL, _NO_BLANK_ENDS]},
    },
    more=_find_node_id_problem,
)
_TYPE: Final = ValueKind(
    schema={
        **pattern_schema(limits.ROLE.pattern),
        "not": {"enum": sorted(RESERVED_TYPES - ENGINE_TYPES)},
    },
    more=_find_type_problem,
)
_NODE_IDS: Final = texts("a list of node ids")
_FAN_IN: Final = ValueKind(
    schema=pattern_schema(FAN_IN.pattern, any_case=True),
    fits=lambda value: parse_fan_in(value) is not None,
    must="'all', 'any', 'all_done' or 'count:n'",
)
_WHEN: Final = ValueKind(schema=EXPRESSION_SCHEMA, more=_find_when_problem)
_START_WHEN: Final = ValueKind(
    schema=pattern_schema("|".join(_START_WORDS), any_case=True),
    fits=_is_start_when,
    must="'ready' or 'first_batch'",
    hint=_hint_start_when,
)
_WAIT: Final = number(0, YEAR_SEC, f"a number of seconds, 0 or more, {YEAR_SEC:,} at most")
_RETRIES: Final = ValueKind(
    schema={"type": "integer", "minimum": 0, "maximum": limits.MAX_RETRIES},
    fits=lambda value: is_number(value) and value == int(value) and 0 <= value <= limits.MAX_RETRIES,
    must=f"a whole number of retries, 0 or more, {limits.MAX_RETRIES:,} at most",
)
_PARALLEL: Final = whole(1, limits.MAX_PARALLEL)
_MOST_ASIDE: Final = ValueKind(
    schema={
        "anyOf": [
            {"type": "integer", "minimum": 1, "maximum": limits.MAX_QUARANTINE},
            pattern_schema(_SHARE.pattern),
        ]
    },
    fits=lambda value: is_whole(value, 1, limits.MAX_QUARANTINE) or read_share(value) is not None,
    must=f"a number of batches from 1 to {limits.MAX_QUARANTINE:,}, or a share such as '5%'",
)
_PREREQUISITES: Final = ValueKind(
    schema={
        "type": "array",
        "items": {
            "type": "string",
            "minLength": 1,
            "maxLength": limits.PREREQUISITE_CHARS,
            "not": {"anyOf": [_NO_CONTROL, _NO_BLANK_ENDS]},
        },
        "maxItems": limits.PREREQUISITES,
        "uniqueItems": True,
    },
    fits=_are_prerequisites,
    must=f"a list of at most {limits.PREREQUISITES} different texts of 1 to {limits.PREREQUISITE_CHARS} printable "
    "characters, without blanks at their ends",
)


# --- objects of a node --------------------------------------------------------------------------------------------

IO: Final = object_of(
    by_name(
        Field(
            "fn",
            ValueKind(schema=TEXT.schema, fits=TEXT.fits, must="the name of a coordinator function"),
            "name of a coordinator function",
        ),
        Field("fn_args", OBJECT),
        Field("input_inline", input_adapters.INLINE),
        Field("input_ref", OBJECT),
        Field("batching", OBJECT),
        Field("start_when", _START_WHEN),
        Field(
            "max_ahead",
            whole(1, must="a whole number of batches, 1 or more"),
            "batches that the node may be ahead of its streaming children",
        ),
    ),
    "an object",
    more=_find_io_problems,
)
MAP: Final = object_of(
    by_name(
        Field(
            "over",
            ValueKind(
                schema=EXPRESSION_SCHEMA,
                fits=lambda value: when_problem(value) is None,
                must=f"a CEL expression of 1 to {limits.CONDITION_CHARS:,} characters, such as 'params.cities'",
            ),
            "a CEL expression that gives the list of items",
            required=True,
        ),
        Field("batch_size", whole(1, limits.MAP_BATCH_SIZE), "items of a batch"),
        Field("parallel", _PARALLEL, "number of shards that process the items together"),
    ),
    "an object with the key 'over', an expression that gives a list",
)
RETRY_POLICY: Final = object_of(
    by_name(
        Field("max", _RETRIES, _RETRIES.must, words="retries max_retries retry_limit limit count"),
        Field(
            "backoff_sec",
            _WAIT,
            _WAIT.must,
            words="delay delay_sec delay_seconds retry_delay retry_delay_seconds backoff interval initial_interval",
        ),
        Field(
            "backoff_coefficient",
            number(1, None, "a number, 1 or more"),
            "a number, 1 or more",
            words="factor multiplier backoff_factor",
        ),
        Field(
            "max_backoff_sec",
            _WAIT,
            _WAIT.must,
            words="max_delay max_backoff max_retry_delay max_interval maximum_interval",
        ),
        Field(
            "jitter",
            number(0, 1, "a number between 0 and 1"),
            "a number between 0 and 1",
            words="retry_jitter_factor",
        ),
        Field(
            "permanent_on",
            texts("a list of reason codes"),
            "a list of reason codes",
            words="permanent non_retryable_error_types",
        ),
    ),
    "an object",
    more=_find_retry_problems,
    remedies={
        "set 'max' to the number of retries, which is one less than the number of attempts": "max_attempts attempts "
        "maximum_attempts",
    },
)
ON_BATCH_FAILURE: Final = object_of(
    by_name(
        Field("attempts", whole(1, limits.BATCH_TRIES), "tries of a batch"),
        Field(
            "then",
            ValueKind(
                schema={"enum": ["quarantine", None]},
                fits=lambda value: value == "quarantine",
                must="'quarantine'",
            ),
            nullable=False,
        ),
        Field("max", _MOST_ASIDE, "how many batches may be set aside: a number, or 5%"),
    ),
    "an object such as {'attempts': 3, 'then': 'quarantine'}",
)
_ROUTES: Final = by_name(
    Field(ON_SUCCESS, _NODE_IDS, "ids of the nodes that the success of this node starts"),
    Field(ON_FAILURE, _NODE_IDS, "ids of the nodes that the permanent failure of this node starts"),
)
ROUTING: Final = object_of(
    _ROUTES,
    "an object with 'on_success' and 'on_failure'",
    # Earlier releases accepted any key with an empty value.
    counts=lambda value: any(value.values()),
    schema={
        "anyOf": [
            object_schema(_ROUTES),
            {"type": "object", "additionalProperties": {"enum": _EMPTY}},
            {"type": "null"},
        ]
    },
)

# --- nodes, edges, graph ------------------------------------------------------------------------------------------

NODE: Final = object_of(
    by_name(
        Field("node_id", _NODE_ID, words="id key task_id step_id op_id", required=True),
        Field(
            "type",
            _TYPE,
            f"A role, or one of {', '.join(sorted(ENGINE_TYPES))}.",
            words="role handler operator op task template kind action",
            required=True,
        ),
        Field(
            "depends_on",
            _NODE_IDS,
            "ids of the parents",
            words="depends dependency dependencies deps parents needs requires after wait_for upstream upstreams "
            "upstream_tasks upstream_task_ids",
        ),
        Field("fan_in", _FAN_IN, "all, any, all_done or count:n"),
        Field(
            "when", _WHEN, "the condition of the node, in CEL", words="if condition conditions run_if only_if"
        ),
        Field("io", IO),
        Field("map", MAP, "the items that the node processes in place of batches of other nodes"),
        Field("parallel", _PARALLEL, "number of shards that process the batches of a pulling node together"),
        Field("retry_policy", RETRY_POLICY),
        Field(
            "timeout_sec",
            SECONDS,
            "time limit of one attempt, in seconds",
            words="timeout timeouts timeout_seconds execution_timeout task_timeout active_deadline_seconds",
        ),
        Field(
            "deadline_sec",
            SECONDS,
            "seconds from the opening of the node's gate to its end",
            words="deadline deadline_seconds sla",
        ),
        Field("on_batch_failure", ON_BATCH_FAILURE, "when the node sets a failed batch aside and continues"),
        Field(
            "prerequisites",
            _PREREQUISITES,
            "what must be satisfied before the node starts",
            words="prerequisite precondition preconditions external_dependencies sensor sensors",
        ),
        Field("routing", ROUTING, "nodes that this node starts", nullable=False),
        Field(
            "allow_failure",
            FLAG,
            words="continue_on continue_on_error continue_on_failure ignore_failure soft_fail optional",
        ),
        Field(
            "hold_on_failure",
            FLAG,
            "whether a failure waits for a decision",
            words="hold on_hold pause_on_failure",
        ),
        Field(
            "hold_sec",
            SECONDS,
            "how long a held failure waits for a decision, in seconds",
            words="hold_seconds hold_timeout",
        ),
        Field("name", ANYTHING, nullable=False),
        Field("meta", ANYTHING, words="tags labels annotations metadata description doc_md", nullable=False),
    ),
    "an object",
    remedies={
        "name this node in 'depends_on' of the nodes that follow it": "children next then downstream downstreams "
        "downstream_tasks downstream_task_ids",
        "set 'fan_in' to 'all', 'any' or 'count:n'; a node that handles a failure belongs in 'routing.on_failure' "
        "of the node that fails": "trigger_rule join",
        'set "retry_policy": {"max": n}, where n is the number of retries': "retry retries max_retries "
        "retry_limit retry_strategy max_attempts attempts",
        'set "retry_policy": {"backoff_sec": n}, where n is the number of seconds before the first '
        "retry": "retry_delay retry_delay_seconds retry_delay_sec backoff backoff_sec",
        'put the input of the node into "io": {"input_inline": {...}}': "params parameters input inputs input_inline "
        "arguments args kwargs op_args op_kwargs config op_config with payload",
        'set "type": "coordinator_fn" and "io": {"fn": "the name of the function"}': "fn function callable "
        "python_callable",
        'name the nodes that follow in "routing": {"on_success": [...], "on_failure": [...]}': "on_success on_failure "
        "on_error on_success_callback on_failure_callback",
        'set "type": "approval" and "io": {"input_inline": {"text": "..."}}': "approval manual manual_approval "
        "human_input suspend",
        'set "type": "delay" and "io": {"input_inline": {"sec": n}}': "delay delay_seconds sleep wait wait_seconds",
        "set 'priority' in the params of the task": "priority priority_weight",
        "limit a role with the setting 'max_type_concurrency' of the engine": "pool concurrency parallelism",
    },
)
"""A node, with its fields in the order in which a `Flow` writes them."""

EDGE: Final = by_name(
    Field("from", TEXT, required=True),
    Field("to", TEXT, required=True),
    Field("mode", one_of(*EDGE_MODES), nullable=False),
    Field(ON_BATCH, ANYTHING, nullable=False),
    Field("when", _WHEN, "the condition of the edge, in CEL"),
)
"""The fields of an entry of `edges_ex`. Others are ignored."""
_EDGE_SCHEMA: Final[Schema] = {
    "type": "object",
    "required": ["from", "to"],
    "properties": {name: field.schema for name, field in EDGE.items()},
}
_PAIR_SCHEMA: Final[Schema] = {"type": "array", "items": TEXT.schema, "minItems": 2, "maxItems": 2}

GRAPH: Final = by_name(
    Field(PARAMS_SCHEMA, OBJECT, "JSON Schema of the params"),
    Field("on_node_failure", one_of(*(mode.value for mode in OnNodeFailure)), nullable=False),
    Field("deadline_sec", SECONDS, "seconds from the opening of the task to its end"),
    Field("hold_sec", SECONDS, "how long failures are held that wait for a decision, in seconds"),
    Field("version_policy", one_of(*(policy.value for policy in VersionPolicy)), nullable=False),
    Field("name", ANYTHING, "Name of the task if params contain no pipeline_name.", nullable=False),
    Field(
        "nodes",
        ValueKind(schema={"type": "array", "minItems": 1, "items": NODE.schema}),
        required=True,
    ),
    Field(
        "edges",
        ValueKind(schema={"type": "array", "items": _PAIR_SCHEMA}),
        "[parent, child] pairs of node ids",
    ),
    Field("edges_ex", ValueKind(schema={"type": "array", "items": _EDGE_SCHEMA})),
)
"""The fields of a graph: its settings in the order in which a `Flow` writes them, its name, nodes and edges."""
