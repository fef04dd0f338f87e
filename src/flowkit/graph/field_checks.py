"""Check the keys and values of a graph as users write it. Pure."""

from __future__ import annotations

import json
import re
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flowkit import limits
from flowkit.errors import GraphError
from flowkit.graph import input_adapters
from flowkit.graph.engine_nodes import engine_node_problems
from flowkit.graph.expressions import expression_problems, may_hold_expressions
from flowkit.graph.routes import ROUTING_KEYS
from flowkit.graph.streams import edge_mode_problems, max_ahead_problems, start_when_problems
from flowkit.models import (
    COORDINATOR_FN,
    ENGINE_TYPES,
    RESERVED_TYPES,
    RUNTIME_KEYS,
    FanIn,
    OnNodeFailure,
    VersionPolicy,
)
from flowkit.text import did_you_mean, printed, shown_path
from flowkit.validation.values import (
    NODE_ID_RULE,
    SHORTEST_SEC,
    YEAR_SEC,
    has_blank_end,
    is_node_id,
    is_number,
    is_role,
    is_seconds,
    is_whole,
    name_bad_character,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

NODE_KEYS = frozenset(
    [
        "node_id",
        "type",
        "depends_on",
        "fan_in",
        "io",
        "retry_policy",
        "routing",
        "allow_failure",
        "timeout_sec",
        "when",
        "deadline_sec",
        "hold_sec",
        "hold_on_failure",
        "parallel",
        "map",
        "on_batch_failure",
        "prerequisites",
        "name",
        "meta",
    ]
)
IO_KEYS = frozenset(["input_ref", "input_inline", "batching", "start_when", "max_ahead", "fn", "fn_args"])
QUARANTINE_KEYS = frozenset(["attempts", "then", "max"])
SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%")
MAP_KEYS = frozenset(["over", "batch_size", "parallel"])
RETRY_KEYS = frozenset(
    ["max", "backoff_sec", "backoff_coefficient", "max_backoff_sec", "jitter", "permanent_on"]
)

_PATH_STEPS = 20
_PATH_CHARS = 300

FAN_IN = re.compile(r"(all|any|all_done)|count:(\d{1,9})", re.IGNORECASE)


def _by_word(words: dict[str, str]) -> dict[str, str]:
    """Return the keys of `words` by each word in their values."""
    return {word.replace("_", ""): ours for ours, many in words.items() for word in many.split()}


NODE_WORDS = _by_word(
    {
        "node_id": "id key task_id step_id op_id",
        "type": "role handler operator op task template kind action",
        "depends_on": "depends dependency dependencies deps parents needs requires after wait_for "
        "upstream upstreams upstream_tasks upstream_task_ids",
        "name this node in 'depends_on' of the nodes that follow it": "children next then "
        "downstream downstreams downstream_tasks downstream_task_ids",
        "set 'fan_in' to 'all', 'any' or 'count:n'; a node that handles a failure belongs in 'routing.on_failure' "
        "of the node that fails": "trigger_rule join",
        "when": "if condition conditions run_if only_if",
        'set "retry_policy": {"max": n}, where n is the number of retries': "retry retries max_retries "
        "retry_limit retry_strategy max_attempts attempts",
        'set "retry_policy": {"backoff_sec": n}, where n is the number of seconds before the first '
        "retry": "retry_delay retry_delay_seconds retry_delay_sec backoff backoff_sec",
        "timeout_sec": "timeout timeouts timeout_seconds execution_timeout task_timeout active_deadline_seconds",
        "deadline_sec": "deadline deadline_seconds sla",
        'put the input of the node into "io": {"input_inline": {...}}': "params parameters input inputs input_inline "
        "arguments args kwargs op_args op_kwargs config op_config with payload",
        'set "type": "coordinator_fn" and "io": {"fn": "the name of the function"}': "fn function callable "
        "python_callable",
        "allow_failure": "continue_on continue_on_error continue_on_failure ignore_failure soft_fail optional",
        'name the nodes that follow in "routing": {"on_success": [...], "on_failure": [...]}': "on_success on_failure "
        "on_error on_success_callback on_failure_callback",
        "hold_on_failure": "hold on_hold pause_on_failure",
        "hold_sec": "hold_seconds hold_timeout",
        "prerequisites": "prerequisite precondition preconditions external_dependencies sensor sensors",
        'set "type": "approval" and "io": {"input_inline": {"text": "..."}}': "approval manual manual_approval "
        "human_input suspend",
        'set "type": "delay" and "io": {"input_inline": {"sec": n}}': "delay delay_seconds sleep wait wait_seconds",
        "meta": "tags labels annotations metadata description doc_md",
        "set 'priority' in the params of the task": "priority priority_weight",
        "limit a role with the setting 'max_type_concurrency' of the engine": "pool concurrency parallelism",
    }
)
"""FlowKit's key, or what to do, by keys of nodes in other systems: Airflow, Prefect, Dagster, Argo and others.

The keys are in lower case and without separators, so that `maxRetries` and `max_retries` are one entry.
"""

RETRY_WORDS = _by_word(
    {
        "max": "retries max_retries retry_limit limit count",
        "set 'max' to the number of retries, which is one less than the number of attempts": "max_attempts attempts "
        "maximum_attempts",
        "backoff_sec": "delay delay_sec delay_seconds retry_delay retry_delay_seconds backoff interval "
        "initial_interval",
        "backoff_coefficient": "factor multiplier backoff_factor",
        "max_backoff_sec": "max_delay max_backoff max_retry_delay max_interval maximum_interval",
        "jitter": "retry_jitter_factor",
        "permanent_on": "permanent non_retryable_error_types",
    }
)
"""The same for the keys of `retry_policy`."""

_NODES_WORDS = ("tasks", "steps", "ops", "jobs", "operators", "templates")
"""What other systems call the nodes of a graph."""


def wrong_graph(graph: object) -> str:
    """Return the problem of a graph that is no object."""
    is_text = isinstance(graph, (str, bytes))
    hint = "; load the text first, for example with json.loads or yaml.safe_load" if is_text else ""
    return f"graph must be an object with 'nodes', not {printed(graph)}{hint}"


def graph_problems(graph: object) -> Iterator[str]:
    """Yield every problem with the keys and values of `graph`. Relations between nodes are not checked here."""
    if not isinstance(graph, dict):
        yield wrong_graph(graph)
        return
    nodes = graph.get("nodes")
    if not isinstance(nodes, list) or not nodes:
        other = next((word for word in _NODES_WORDS if nodes is None and graph.get(word)), None)
        hint = f"; rename {other!r} to 'nodes'" if other else ""
        yield f"graph.nodes must be a list of at least one node, not {printed(nodes)}{hint}"
        return
    modes = [mode.value for mode in OnNodeFailure]
    if graph.get("on_node_failure", "fail") not in modes:
        yield f"graph.on_node_failure is {printed(graph['on_node_failure'])}; allowed: {', '.join(modes)}"
    policies = [policy.value for policy in VersionPolicy]
    if graph.get("version_policy", "any") not in policies:
        yield f"graph.version_policy is {printed(graph['version_policy'])}; allowed: {', '.join(policies)}"
    for key in ("deadline_sec", "hold_sec"):
        if graph.get(key) is not None:
            yield from (f"graph.{problem}" for problem in _check_time_limit(key, graph[key]))
    yield from _edge_problems(graph)
    yield from _extended_edge_problems(graph)
    for index, node in enumerate(nodes):
        yield from _node_problems(index, node)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def json_bytes(value: object, name: str = "the input") -> int:
    """Return the size of `value` in bytes of UTF-8 JSON.

    Raise GraphError, which names the first part that JSON cannot represent.
    """
    return len(encode_json(value, name))


def encode_json(value: object, name: str = "the input") -> bytes:
    """Return `value` as UTF-8 JSON. Raise GraphError as `json_bytes` does."""
    try:
        return _encode_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise GraphError([f"{_find_place(value, name, 0)} must be JSON: {error}"]) from None


def _encode_json(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


def _find_place(value: Any, path: str, depth: int) -> str:
    """Return the path to the first part of `value` that JSON cannot represent, with the id of its node."""
    if isinstance(value, dict | list | tuple) and depth < _PATH_STEPS:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in pairs:
            if not _is_json(part):
                step = f".{key}" if isinstance(value, dict) else f"[{key}]"
                owner = f" (node {part['node_id']!r})" if isinstance(part, dict) and "node_id" in part else ""
                return _find_place(part, f"{path}{step}{owner}", depth + 1)
    return f"{shown_path(path, _PATH_CHARS)} = {printed(value)}"


def _is_json(value: object) -> bool:
    try:
        _encode_json(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


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


def _edge_problems(graph: dict[str, Any]) -> Iterator[str]:
    edges = graph.get("edges")
    if edges is None:
        return
    if not isinstance(edges, list):
        yield f"graph.edges must be a list of [parent, child] pairs of node ids, not {printed(edges)}"
        return
    for index, edge in enumerate(edges):
        if not _is_pair(edge):
            yield f"graph.edges[{index}] is {printed(edge)}; edges are [parent, child] pairs of node ids"


def _extended_edge_problems(graph: dict[str, Any]) -> Iterator[str]:
    edges = graph.get("edges_ex")
    if edges is None:
        return
    if not isinstance(edges, list):
        yield f"graph.edges_ex must be a list of objects with 'from' and 'to', not {printed(edges)}"
        return
    for index, edge in enumerate(edges):
        if not _is_extended_edge(edge):
            yield f"graph.edges_ex[{index}] must be an object with 'from' and 'to', not {printed(edge)}"
        else:
            yield from edge_mode_problems(edge)


def _is_pair(edge: object) -> bool:
    return isinstance(edge, (list, tuple)) and len(edge) == 2 and all(isinstance(end, str) for end in edge)


def _is_extended_edge(edge: object) -> bool:
    return isinstance(edge, dict) and isinstance(edge.get("from"), str) and isinstance(edge.get("to"), str)


def _node_problems(index: int, node: object) -> Iterator[str]:
    if not isinstance(node, dict):
        yield f"graph.nodes[{index}] must be an object, not {printed(node)}"
        return
    node_id = node.get("node_id")
    where = f"node {printed(node_id)}" if isinstance(node_id, str) else f"graph.nodes[{index}]"
    if not is_node_id(node_id):
        yield f"{where}: node_id {printed(node_id)} must be {NODE_ID_RULE}{name_bad_character(node_id)}"
    yield from (f"{where}: {problem}" for problem in _check_type(node.get("type")))
    yield from _find_unknown_keys(where, node, NODE_KEYS | RUNTIME_KEYS, NODE_WORDS)
    for key, check in _NODE_CHECKS.items():
        if node.get(key) is not None:
            yield from (f"{where}: {problem}" for problem in check(node[key]))
    yield from (f"{where}: {problem}" for problem in engine_node_problems(node))


def _check_type(value: object) -> Iterator[str]:
    if is_role(value) or (isinstance(value, str) and value in ENGINE_TYPES):
        return
    if isinstance(value, str) and value in RESERVED_TYPES:
        yield f"type {printed(value)} is reserved; name what the node waits for in its key 'prerequisites'"
        return
    yield (
        f"type {printed(value)} must be {COORDINATOR_FN!r} or a role: 1 to 100 of "
        "letters, digits, '.', '_', '-', beginning with a letter or digit"
    )


def _find_unknown_keys(
    where: str, given: dict[str, Any], known: frozenset[str], words: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    for key in given:
        if key not in known and not str(key).startswith("x-"):
            yield f"{where}: unknown key {printed(key)}; {_suggest_key(key, known, words)}"


def _suggest_key(key: object, known: frozenset[str], words: Mapping[str, str]) -> str:
    """Return what to write instead of an unknown key. `words` has the keys of other systems."""
    ours = words.get(re.sub("[_ -]", "", str(key)).lower())
    if ours in known:
        return f"did you mean {ours!r}?"
    return ours or did_you_mean(key, known, otherwise="start your own keys with 'x-'")


def _check_depends_on(value: object) -> Iterator[str]:
    if not isinstance(value, list) or not all(isinstance(parent, str) for parent in value):
        yield f"depends_on {printed(value)} must be a list of node ids"


def _check_fan_in(value: object) -> Iterator[str]:
    if parse_fan_in(value) is None:
        yield f"fan_in {printed(value)} must be 'all', 'any', 'all_done' or 'count:n'"


def _check_flag(key: str, value: object) -> Iterator[str]:
    if not isinstance(value, bool):
        yield f"{key} {printed(value)} must be true or false"


def _check_parallel(value: object) -> Iterator[str]:
    if not is_whole(value, 1, limits.MAX_PARALLEL):
        yield f"parallel {printed(value)} must be a whole number from 1 to {limits.MAX_PARALLEL:,}"


def _check_map(value: object) -> Iterator[str]:
    if not isinstance(value, dict) or "over" not in value:
        yield f"map {printed(value)} must be an object with the key 'over', an expression that gives a list"
        return
    yield from _find_unknown_keys("map", value, MAP_KEYS, {})
    over, size, parallel = (value.get(key) for key in ("over", "batch_size", "parallel"))
    if not isinstance(over, str) or not 1 <= len(over) <= limits.CONDITION_CHARS:
        yield (
            f"map.over {printed(over)} must be a CEL expression of 1 to {limits.CONDITION_CHARS:,} characters, such as "
            "'params.cities'"
        )
    if size is not None and not is_whole(size, 1, limits.MAP_BATCH_SIZE):
        yield f"map.batch_size {printed(size)} must be a whole number from 1 to {limits.MAP_BATCH_SIZE:,}"
    if parallel is not None:
        yield from (f"map.{problem}" for problem in _check_parallel(parallel))


def _check_on_batch_failure(value: object) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"on_batch_failure {printed(value)} must be an object such as {{'attempts': 3, 'then': 'quarantine'}}"
        return
    yield from _find_unknown_keys("on_batch_failure", value, QUARANTINE_KEYS)
    attempts, then, most = (value.get(key) for key in ("attempts", "then", "max"))
    if attempts is not None and not is_whole(attempts, 1, limits.BATCH_TRIES):
        yield (
            f"on_batch_failure.attempts {printed(attempts)} must be a whole number from 1 to {limits.BATCH_TRIES:,}"
        )
    if then not in (None, "quarantine"):
        yield f"on_batch_failure.then {printed(then)} must be 'quarantine'"
    if most is not None and not is_whole(most, 1, limits.MAX_QUARANTINE) and read_share(most) is None:
        yield (
            f"on_batch_failure.max {printed(most)} must be a number of batches from 1 to "
            f"{limits.MAX_QUARANTINE:,}, or a "
            "share such as '5%'"
        )


def read_share(value: object) -> float | None:
    """Return the share that a text such as `5%` gives, above 0 and up to 1; None for another value."""
    found = SHARE.fullmatch(value) if isinstance(value, str) else None
    share = float(found[1]) / 100 if found else 0.0
    return share if 0 < share <= 1 else None


def _check_prerequisites(value: object) -> Iterator[str]:
    given = value if isinstance(value, list) else [None]
    texts = {each for each in given if isinstance(each, str) and _is_prerequisite(each)}
    if len(texts) != len(given) or len(given) > limits.PREREQUISITES:
        yield (
            f"prerequisites {printed(value)} must be a list of at most {limits.PREREQUISITES} different texts of 1 to "
            f"{limits.PREREQUISITE_CHARS} printable characters, without blanks at their ends"
        )


def _is_prerequisite(text: str) -> bool:
    return 1 <= len(text) <= limits.PREREQUISITE_CHARS and text.isprintable() and not has_blank_end(text)


def _check_time_limit(key: str, value: object) -> Iterator[str]:
    if not is_seconds(value):
        yield (
            f"{key} {printed(value)} must be a number of seconds above 0 "
            f"({SHORTEST_SEC} at least, {YEAR_SEC:,} at most)"
        )


def when_problem(value: object) -> str | None:
    """Return why `value` cannot be a condition, or None. The expression is not parsed."""
    if isinstance(value, str) and 1 <= len(value) <= limits.CONDITION_CHARS:
        return None
    shown = f"has {len(value):,} characters; it" if isinstance(value, str) and value else f"{printed(value)}"
    return f"when {shown} must be a CEL expression of 1 to {limits.CONDITION_CHARS:,} characters"


def _check_when(value: object) -> Iterator[str]:
    if problem := when_problem(value):
        yield problem


def _check_routing(value: object) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"routing {printed(value)} must be an object with 'on_success' and 'on_failure'"
    elif any(value.values()):
        yield from _find_unknown_keys("routing", value, ROUTING_KEYS)
        for key in sorted(ROUTING_KEYS):
            if value.get(key) is not None and not _is_text_list(value[key]):
                yield f"routing.{key} {printed(value[key])} must be a list of node ids"


def _check_io(value: object) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"io {printed(value)} must be an object"
        return
    yield from _find_unknown_keys("io", value, IO_KEYS)
    for key in ("input_ref", "input_inline", "batching", "fn_args"):
        if not isinstance(value.get(key), (dict, type(None))):
            yield f"io.{key} {printed(value[key])} must be an object"
    yield from start_when_problems(value.get("start_when"))
    yield from max_ahead_problems(value.get("max_ahead"))
    if not isinstance(value.get("fn"), (str, type(None))):
        yield f"io.fn {printed(value['fn'])} must be the name of a coordinator function"
    if isinstance(value.get("input_inline"), dict):
        yield from input_adapters.inline_problems(value["input_inline"])
    encoded = encode_json(value)
    if may_hold_expressions(encoded):
        yield from expression_problems(value)
    if len(encoded) > limits.NODE_IO_BYTES:
        yield f"io is {len(encoded):,} bytes of JSON, more than {limits.NODE_IO_BYTES:,}: pass a reference in input_ref"


def _check_retry_policy(value: object) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"retry_policy {printed(value)} must be an object"
        return
    yield from _find_unknown_keys("retry_policy", value, RETRY_KEYS, RETRY_WORDS)
    for key, (allowed, fits) in RETRY_CHECKS.items():
        if value.get(key) is not None and not fits(value[key]):
            yield f"retry_policy.{key} {printed(value[key])} must be {allowed}"
    first, most = value.get("backoff_sec"), value.get("max_backoff_sec")
    if is_number(first) and is_number(most) and most < first:
        yield (
            f"retry_policy.max_backoff_sec {printed(most)} is below backoff_sec {printed(first)}, the "
            "wait before the first "
            "retry: raise it, or lower backoff_sec"
        )


def _is_text_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_SECONDS: tuple[str, Callable[[Any], bool]] = (
    f"a number of seconds, 0 or more, {YEAR_SEC:,} at most",
    lambda v: is_seconds(v, 0),
)
RETRY_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max": (
        f"a whole number of retries, 0 or more, {limits.MAX_RETRIES:,} at most",
        lambda v: is_number(v) and v == int(v) and 0 <= v <= limits.MAX_RETRIES,
    ),
    "backoff_sec": _SECONDS,
    "backoff_coefficient": ("a number, 1 or more", lambda v: is_number(v) and v >= 1),
    "max_backoff_sec": _SECONDS,
    "jitter": ("a number between 0 and 1", lambda v: is_number(v) and 0 <= v <= 1),
    "permanent_on": ("a list of reason codes", _is_text_list),
}


def node_field_problems(name: str, value: object) -> Iterator[str]:
    """Yield the problems of the value of one key of a node."""
    return _NODE_CHECKS[name](value)


_NODE_CHECKS: dict[str, Callable[[object], Iterator[str]]] = {
    "depends_on": _check_depends_on,
    "fan_in": _check_fan_in,
    "allow_failure": partial(_check_flag, "allow_failure"),
    "when": _check_when,
    "timeout_sec": partial(_check_time_limit, "timeout_sec"),
    "deadline_sec": partial(_check_time_limit, "deadline_sec"),
    "hold_sec": partial(_check_time_limit, "hold_sec"),
    "hold_on_failure": partial(_check_flag, "hold_on_failure"),
    "parallel": _check_parallel,
    "map": _check_map,
    "on_batch_failure": _check_on_batch_failure,
    "prerequisites": _check_prerequisites,
    "routing": _check_routing,
    "io": _check_io,
    "retry_policy": _check_retry_policy,
}
