"""Input routes and their arguments: which are rejected, with which code and message, and which defaults apply."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkit.activities.batches.inputs import Input, InputSettings
from flowkit.activities.calls import Threads
from flowkit.activities.handlers import RoleHandler
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.supervision import AttemptFailed
from flowkit.errors import BadInput, GraphError
from flowkit.graph.input_adapters import (
    NOOP,
    PULL,
    RECHUNK,
    PullArgs,
    args_problems,
    inline_problems,
    parse_pull,
    replace_alias,
)
from flowkit.graph.validation import parse_graph
from flowkit.models import AttemptFailure, AttemptInput, FailureKind, NodeIO

PULLING = [PULL, RECHUNK]
DEFAULTS = {"poll_ms": 7, "backoff_max_ms": 77}


def route(adapter: object, /, **args: Any) -> dict[str, Any]:
    """Return an input route; a rechunking one gets a default size."""
    if adapter == RECHUNK:
        args = {"size": 2, **args}
    return {"input_adapter": adapter, "input_args": {"from_nodes": ["u"], **args}}


def refusal(inline: dict[str, Any], **options: Any) -> BadInput:
    """Return the error with which a route is rejected."""
    with pytest.raises(BadInput) as caught:
        parse_pull(inline, **options)
    return caught.value


# --- adapters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter", "hint"),
    [
        ("pull.from_artifact", f"did you mean {PULL!r}?"),
        ("pull.from_artifacts.rechunk", f"did you mean {RECHUNK!r}?"),
        ("kafka", "known: pull.from_artifacts, "),
        ("", "known: "),
        (7, "known: "),
        (["pull.from_artifacts"], "is unknown"),
    ],
)
def test_unknown_adapter_is_rejected_with_a_suggestion(adapter: object, hint: str) -> None:
    error = refusal({"input_adapter": adapter, "input_args": {"from_nodes": ["u"]}})
    assert error.reason_code == "bad_input_adapter"
    assert repr(adapter) in str(error)
    assert hint in str(error)


@pytest.mark.parametrize("inline", [{}, {"input_adapter": None}, {"rows": [1]}, {"input_args": 7}])
def test_inline_input_without_an_adapter_has_no_route(inline: dict[str, Any]) -> None:
    assert list(inline_problems(inline)) == []


@pytest.mark.parametrize("args", [None, {}])
def test_noop_adapter_accepts_any_arguments(args: object) -> None:
    assert list(args_problems(NOOP, args)) == []


# --- invalid arguments ----------------------------------------------------------------------------------------------

NOT_COUNTS: list[object] = [0, -1, 1.0, 2.5, True, "3", None, [3], float("nan")]
NOT_FLAGS: list[object] = ["true", 1, 0, None, []]
NOT_NODES: list[object] = ["u", {"u": 1}, [1], [""], [None], [["u"]], 7, None]
BAD: list[tuple[str, object]] = [
    *(("poll_ms", value) for value in NOT_COUNTS),
    *(("backoff_max_ms", value) for value in NOT_COUNTS),
    *(("eof_on_task_done", value) for value in NOT_FLAGS),
    *(("from_nodes", value) for value in NOT_NODES),
    ("poll", 5),
    ("task_id", "t"),
    ("cancel_flag", None),
    ("", 1),
]
BAD_RECHUNK: list[tuple[str, object]] = [
    *(("size", value) for value in NOT_COUNTS),
    *(("meta_list_key", value) for value in (7, None, "", ["skus"], b"skus", True)),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_invalid_argument_of_both_adapters_is_rejected(name: str, value: object) -> None:
    for adapter in PULLING:
        error = refusal(route(adapter, **{name: value}), parents=["u"])
        assert error.reason_code == "bad_input_args"
        assert f"input_args.{name} " in str(error)


@pytest.mark.parametrize(("name", "value"), BAD_RECHUNK, ids=str)
def test_invalid_argument_of_chunks_is_rejected(name: str, value: object) -> None:
    error = refusal(route(RECHUNK, **{name: value}))
    assert error.reason_code == "bad_input_args"
    assert f"input_args.{name} {value!r} must be" in str(error)


@pytest.mark.parametrize("name", ["size", "meta_list_key"])
def test_chunk_arguments_are_unknown_to_the_other_adapter(name: str) -> None:
    assert f"input_args.{name} is unknown to {PULL}; it takes from_nodes" in str(
        refusal(route(PULL, **{name: 1}))
    )


@pytest.mark.parametrize("value", [7, None, "", ["u"], True])
@pytest.mark.parametrize("adapter", PULLING)
def test_invalid_alias_is_rejected(adapter: str, value: object) -> None:
    inline = {"input_adapter": adapter, "input_args": {"from_node": value, "size": 1}}
    assert f"input_args.from_node {value!r} must be one node id" in str(refusal(inline))


def test_arguments_that_are_not_an_object_are_rejected() -> None:
    for args in [7, "u", ["u"], [], "", 0, False, ("from_nodes",)]:
        for adapter in PULLING:
            error = refusal({"input_adapter": adapter, "input_args": args}, parents=["u"])
            assert error.reason_code == "bad_input_args"
            assert "must be an object" in str(error)


@pytest.mark.parametrize("adapter", PULLING)
def test_argument_name_that_is_not_a_string_is_unknown(adapter: str) -> None:
    error = refusal({"input_adapter": adapter, "input_args": {1: 2, "from_nodes": ["u"], "size": 1}})
    assert (error.reason_code, "input_args.1 is unknown" in str(error)) == ("bad_input_args", True)


def test_chunk_size_is_required() -> None:
    error = refusal({"input_adapter": RECHUNK, "input_args": {"from_nodes": ["u"]}})
    assert str(error) == "input_args.size is missing; it must be a whole number above 0"
    assert "size is missing" in str(refusal({"input_adapter": RECHUNK}, parents=["u"]))


def test_sources_and_their_alias_cannot_be_combined() -> None:
    assert "both from_node and from_nodes" in str(refusal(route(PULL, from_node="u")))


def test_all_problems_are_reported_together() -> None:
    text = str(refusal(route(RECHUNK, size=0, poll_ms="x", typo=1)))
    assert all(name in text for name in ("size 0", "poll_ms 'x'", "typo is unknown"))


@pytest.mark.parametrize("adapter", PULLING)
@pytest.mark.parametrize("args", [None, {}])
def test_pull_without_sources_and_parents_is_rejected(adapter: str, args: dict[str, Any] | None) -> None:
    given_args = {**(args or {}), "size": 1} if adapter == RECHUNK else args
    error = refusal({"input_adapter": adapter, "input_args": given_args})
    assert error.reason_code == "bad_input_args"
    assert "from_nodes is missing, and the node has no parents" in str(error)


@pytest.mark.parametrize("adapter", PULLING)
@pytest.mark.parametrize("parents", [(), ("u",)])
@pytest.mark.parametrize("empty", [[], ()])
def test_explicit_empty_source_list_means_no_sources(
    adapter: str, parents: tuple[str, ...], empty: object
) -> None:
    assert parse_pull(route(adapter, from_nodes=empty), parents=parents).from_nodes == ()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([field.name for field in fields(PullArgs)] + ["from_node"]) | st.text(max_size=5)


@given(
    adapter=st.sampled_from(PULLING) | anything.filter(lambda value: value not in (None, NOOP)),
    args=st.dictionaries(names, anything, max_size=4) | anything,
    strict=st.booleans(),
)
def test_any_input_is_parsed_or_rejected_with_a_code(adapter: Any, args: Any, strict: bool) -> None:
    inline = {"input_adapter": adapter, "input_args": args}
    try:
        parsed = parse_pull(inline, parents=["p"], defaults=DEFAULTS, strict=strict)
    except BadInput as error:
        assert error.reason_code in ("bad_input_adapter", "bad_input_args")
        assert str(error)
    else:
        assert parsed.from_nodes


# --- valid arguments ------------------------------------------------------------------------------------------------


def test_all_documented_arguments_are_accepted() -> None:
    args: dict[str, Any] = {
        "from_nodes": ["u", "v"],
        "poll_ms": 25,
        "eof_on_task_done": False,
        "backoff_max_ms": 50,
        "size": 3,
        "meta_list_key": "skus",
    }
    inline = json.loads(json.dumps({"input_adapter": RECHUNK, "input_args": args}))
    assert parse_pull(inline, parents=["p"], defaults=DEFAULTS, strict=True) == PullArgs(
        **{**args, "from_nodes": ("u", "v")}
    )


def test_missing_arguments_get_the_documented_defaults() -> None:
    parsed = parse_pull(route(PULL))
    assert (parsed.poll_ms, parsed.eof_on_task_done, parsed.backoff_max_ms) == (300, True, 4000)
    assert (parsed.size, parsed.meta_list_key) == (None, None)


def test_missing_arguments_get_the_settings_of_the_worker() -> None:
    parsed = parse_pull(route(PULL, poll_ms=25), defaults=DEFAULTS)
    assert (parsed.poll_ms, parsed.backoff_max_ms) == (25, 77)


def test_parents_replace_only_missing_sources() -> None:
    assert parse_pull({"input_adapter": PULL}, parents=["p", "q"]).from_nodes == ("p", "q")
    assert parse_pull(route(PULL), parents=["p", "q"]).from_nodes == ("u",)


def test_alias_is_parsed_like_the_list() -> None:
    inline = {"input_adapter": PULL, "input_args": {"from_node": "u"}}
    assert parse_pull(inline, parents=["p"]).from_nodes == ("u",)
    assert replace_alias({"from_node": "u", "size": 3}) == {"from_nodes": ["u"], "size": 3}
    assert replace_alias(None) == {}


def test_arguments_of_the_caller_are_not_changed() -> None:
    args = {"from_node": "u"}
    parse_pull({"input_adapter": PULL, "input_args": args})
    assert args == {"from_node": "u"}


def test_only_a_strict_worker_requires_the_chunk_key() -> None:
    error = refusal(route(RECHUNK), strict=True)
    assert error.reason_code == "bad_input_args"
    assert "meta_list_key is missing" in str(error)
    assert parse_pull(route(RECHUNK, meta_list_key="skus"), strict=True).meta_list_key == "skus"
    assert parse_pull(route(PULL), strict=True).from_nodes == ("u",)


# --- how a worker applies them --------------------------------------------------------------------------------------


class TaskWithoutParents(TaskStore):
    """A task document whose only node has no parents."""

    def __init__(self) -> None:
        """Create it without a database."""

    async def wiring(self, task_id: str) -> dict[str, Any]:
        return {"nodes": [{"node_id": "a"}]}


async def refused(
    ordered: dict[str, Any] | None, proposed: object, *, strict: bool = False
) -> AttemptFailure:
    """Return the failure of an attempt with this command and this proposal."""
    anything: Any = None
    attempt = AttemptInput(
        task_id="t", node_id="a", index=0, role="r", epoch=1, io=NodeIO(input_inline=ordered)
    )
    source = Input(
        attempt=attempt,
        handler=RoleHandler(),
        ctx=anything,
        threads=Threads(1, "unused"),
        artifacts=anything,
        tasks=TaskWithoutParents(),
        settings=InputSettings(strict=strict),
        ahead=anything,
    )
    with pytest.raises(AttemptFailed) as caught:
        await anext(source.batches(proposed))
    return caught.value.failure


WRONG: list[tuple[dict[str, Any], str]] = [
    (route(RECHUNK, size=0), "bad_input_args"),
    (route(PULL, poll_ms="fast"), "bad_input_args"),
    ({"input_adapter": PULL}, "bad_input_args"),
    ({"input_adapter": PULL, "input_args": [["from_nodes", "u"]]}, "bad_input_args"),
    ({"input_adapter": PULL, "input_args": {1: 2}}, "bad_input_args"),
]


@pytest.mark.parametrize("by", ["ordered", "proposed"])
@pytest.mark.parametrize(("inline", "code"), WRONG, ids=str)
async def test_worker_rejects_invalid_routes_permanently(inline: dict[str, Any], code: str, by: str) -> None:
    failure = await (refused(inline, {}) if by == "ordered" else refused(None, inline))
    assert (failure.code, failure.permanent, failure.kind) == (code, True, FailureKind.FAILURE)


@pytest.mark.parametrize("adapter", ["kafka", 7, ["pull"], {"a": 1}])
async def test_worker_rejects_an_unknown_adapter_of_the_node_permanently(adapter: object) -> None:
    failure = await refused({"input_adapter": adapter}, route(PULL))
    assert (failure.code, failure.permanent) == ("bad_input_adapter", True)


@pytest.mark.parametrize("by", ["ordered", "proposed"])
async def test_strict_worker_rejects_chunks_without_a_key(by: str) -> None:
    inline = route(RECHUNK)
    failure = await (
        refused(inline, {}, strict=True) if by == "ordered" else refused(None, inline, strict=True)
    )
    assert (failure.code, failure.permanent) == ("bad_input_args", True)


@pytest.mark.parametrize("source", ["z", "after"])
def test_graph_in_which_a_node_pulls_from_a_descendant_is_rejected(source: str) -> None:
    inline = route(PULL, from_nodes=[source])
    nodes = [
        {"node_id": "u", "type": "r"},
        {"node_id": "z", "type": "r", "depends_on": ["u"], "io": {"input_inline": inline}},
        {"node_id": "after", "type": "r", "depends_on": ["z"]},
    ]
    with pytest.raises(GraphError, match=f"from_nodes .*{source}"):
        parse_graph({"nodes": nodes})
