"""What the fields of actions must be. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from flowkit.graph.changes import CHANGEABLE
from flowkit.graph.encoding import json_bytes
from flowkit.graph.field_checks import node_field_problems
from flowkit.limits import (
    ACTION_BATCHES,
    ACTION_INPUT_BYTES,
    ACTION_SCOPES,
    ACTION_TEXT_CHARS,
    BATCH_UID_CHARS,
    GRAPH_CHANGE_BYTES,
    ID_CHARS,
)
from flowkit.models import APPROVE, REJECT
from flowkit.protocol.messages import FINAL_UID
from flowkit.validation.values import Must, batch_uid_problem, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from flowkit.validation.values import Wrong

SCOPE_FORMS: Final = "'task', 'node:ID', 'below:ID' or 'role:NAME'"
DIGEST_CHARS: Final = 16
"""Length of the digest of what an action would affect, in hexadecimal digits."""
_LARGEST_REVISION: Final = 2**31 - 1
_DIGEST: Final = re.compile(f"[0-9a-f]{{{DIGEST_CHARS}}}")


def _is_text(value: object, least: int, most: int) -> bool:
    return isinstance(value, str) and least <= len(value) <= most


def _is_object(
    value: object, fits: Callable[[Any], bool] = lambda _: True, most: int = ACTION_INPUT_BYTES
) -> bool:
    return isinstance(value, dict) and fits(value) and json_bytes(value) <= most


def _is_list(
    value: object, fits: Callable[[Any], object], count: float = math.inf, most: float = math.inf
) -> bool:
    """Return whether this is a list of at most `count` values that fit, of at most `most` bytes of JSON."""
    return (
        isinstance(value, (list, tuple))
        and len(value) <= count
        and all(map(fits, value))
        and (most == math.inf or json_bytes([*value]) <= most)
    )


def _is_batch(value: object) -> bool:
    return (
        isinstance(value, dict)
        and batch_uid_problem(value.get("batch_uid")) is None
        and value.keys() <= {"batch_uid", "metrics", "artifacts_ref"}
        and isinstance(value.get("metrics", {}), dict)
        and isinstance(value.get("artifacts_ref"), dict | None)
    )


def _are_batches(value: Any) -> bool:
    good = _is_list(value, _is_batch, ACTION_BATCHES, ACTION_INPUT_BYTES)
    return good and len({each["batch_uid"] for each in value}) == len(value)


def _is_node(value: object) -> bool:
    return isinstance(value, dict) and _is_text(value.get("node_id"), 1, ID_CHARS)


def _is_pair(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == len(("from", "to"))


def _is_edge(value: object) -> bool:
    return isinstance(value, dict) and {"from", "to"} <= value.keys()


def _are_patches(value: Mapping[str, Any]) -> bool:
    return all(isinstance(each, dict) and each and each.keys() <= {*CHANGEABLE} for each in value.values())


@dataclass(frozen=True, slots=True)
class _NodeField(Must):
    """The value of a field of a node, in the words of the validation of graphs."""

    name: str = ""

    def find(self, value: Any) -> Iterator[Wrong]:
        """Yield the first problem of the value."""
        for problem in islice(node_field_problems(self.name, value), 1):
            yield "", value, f"valid: {problem}"


def _node_field(name: str) -> _NodeField:
    return _NodeField(lambda value: not [*node_field_problems(name, value)], f"a valid {name}", name=name)


TEXT: Final = Must(
    partial(_is_text, least=0, most=ACTION_TEXT_CHARS), f"a text of at most {ACTION_TEXT_CHARS:,} characters"
)
NODE_ID: Final = Must(partial(_is_text, least=1, most=ID_CHARS), "the id of a node of the task")
PREREQUISITE: Final = Must(
    partial(_is_text, least=1, most=ID_CHARS), f"a prerequisite, a text of 1 to {ID_CHARS} characters"
)
REVISION: Final = Must(
    partial(is_whole, least=0, most=_LARGEST_REVISION),
    "the revision that `flowkit status` and the query `status` show, a whole number",
)
STATE: Final = Must(
    lambda value: isinstance(value, str) and _DIGEST.fullmatch(value) is not None,
    f"the `state` that a preview of the action returns, {DIGEST_CHARS} hexadecimal digits",
)
SCOPES: Final = Must(
    lambda value: _is_list(value, lambda each: isinstance(each, str), ACTION_SCOPES),
    f"a list of at most {ACTION_SCOPES} of {SCOPE_FORMS}",
)
DECISION: Final = Must(lambda value: value in (APPROVE, REJECT), f"{APPROVE!r} or {REJECT!r}")
OBJECT: Final = Must(_is_object, f"an object of at most {ACTION_INPUT_BYTES:,} bytes of JSON")
TIMEOUT: Final = _node_field("timeout_sec")
RETRY_POLICY: Final = _node_field("retry_policy")
BATCHES: Final = Must(
    _are_batches,
    f"a list of at most {ACTION_BATCHES:,} objects with a 'batch_uid' of 1 to {BATCH_UID_CHARS} "
    f"characters, without NUL, that no other has and that is not {FINAL_UID!r}, 'metrics' and optionally "
    f"'artifacts_ref', and of at most {ACTION_INPUT_BYTES:,} bytes of JSON",
)
BATCH_UIDS: Final = Must(
    lambda value: _is_list(
        value, partial(_is_text, least=1, most=BATCH_UID_CHARS), ACTION_BATCHES, ACTION_INPUT_BYTES
    ),
    f"a list of at most {ACTION_BATCHES:,} batch uids, as `flowkit batches --failed` shows them, and of at most "
    f"{ACTION_INPUT_BYTES:,} bytes of JSON; leave it out for all batches that are set aside",
)
NODES: Final = Must(
    lambda value: _is_list(value, _is_node, most=GRAPH_CHANGE_BYTES),
    f"a list of nodes as in a graph, each with a 'node_id', of at most {GRAPH_CHANGE_BYTES:,} bytes of JSON",
)
EDGES: Final = Must(
    lambda value: _is_list(value, _is_pair, most=GRAPH_CHANGE_BYTES),
    f"a list of [from, to] pairs of node ids, of at most {GRAPH_CHANGE_BYTES:,} bytes of JSON",
)
EDGES_EX: Final = Must(
    lambda value: _is_list(value, _is_edge, most=GRAPH_CHANGE_BYTES),
    f"a list of objects with 'from' and 'to', of at most {GRAPH_CHANGE_BYTES:,} bytes of JSON",
)
CHANGES: Final = Must(
    partial(_is_object, fits=_are_patches, most=GRAPH_CHANGE_BYTES),
    f"an object that has, by node id, new values of {', '.join(CHANGEABLE[:-1])} or {CHANGEABLE[-1]}, and at most "
    f"{GRAPH_CHANGE_BYTES:,} bytes of JSON",
)
