"""The bridge's messages equal the examples of the protocol byte for byte, and workers accept them."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.bridge_records import NODE, NOW, TASK, attempt
from tests.unit.property_examples import examples

from flowkit.bridge.rules.messages import (
    cancel_signal,
    key_of,
    pull_of,
    task_discover,
    task_start,
    worker_input,
)
from flowkit.graph.validation import parse_graph
from flowkit.models import NodeIO
from flowkit.testing.external import pipeline
from flowkit.testing.external.protocol import SignalPayload, StartPayload, compact, read
from flowkit.testing.external.runs import Run
from flowkit.testing.external.settings import Clock, ExternalSettings
from flowkit.testing.external.worker import Admission

if TYPE_CHECKING:
    from flowkit.models import AttemptInput
    from flowkit.protocol.messages import Envelope

TOKEN = "6513270e-269e-4d37-b2a7-4de452e6b438"
START = (
    '{"v":1,"msg_type":"cmd","role":"coordinator","corr_id":"d23f0824-128b-4f33-8c5c-7fd0a6a3a450",'
    '"dedup_id":"13638a9d603e3925eb7b28867a925497e2affb44","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90",'
    '"node_id":"extract","step_type":"indexer","attempt_epoch":1,"ts_ms":1764000000000,"payload":'
    '{"cmd":"TASK_START","input_ref":null,"input_inline":{"source":"database","batch_size":5},"batching":null,'
    '"cancel_token":"6513270e-269e-4d37-b2a7-4de452e6b438"},"target_worker_id":null}'
)
PULLING_START = (
    '{"v":1,"msg_type":"cmd","role":"coordinator","corr_id":"36f675cc-81e7-4ef5-a8e2-5d940ed90475",'
    '"dedup_id":"cd14eaf7904d3fdbe0f60beebc2080daf26bd0df","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90",'
    '"node_id":"transform","step_type":"enricher","attempt_epoch":1,"ts_ms":1764000006100,"payload":'
    '{"cmd":"TASK_START","input_ref":null,"input_inline":{"input_adapter":"pull.from_artifacts.rechunk:size",'
    '"input_args":{"from_nodes":["extract"],"size":3,"poll_ms":50,"meta_list_key":"skus"}},"batching":null,'
    '"cancel_token":"9531985d-5d9d-49f8-9818-e811892f902b"},"target_worker_id":null}'
)
DISCOVER = (
    '{"v":1,"msg_type":"query","role":"coordinator","corr_id":"7f150524-34b9-45df-9e77-69b10f4205b4",'
    '"dedup_id":"07a4d87e9e5408949efb65405b4b6cbfe3639b86","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90",'
    '"node_id":"extract","step_type":"indexer","attempt_epoch":2,"ts_ms":1764000095000,"payload":'
    '{"query":"TASK_DISCOVER","want_epoch":2},"target_worker_id":null}'
)
CANCEL = (
    '{"v":1,"msg_type":"event","role":"coordinator","corr_id":"c6f87718-6d76-407e-881e-d162ae2eb154",'
    '"dedup_id":"862bfe415da479b77f9a5621e1882c084d1bedc1","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90",'
    '"node_id":"extract","step_type":"indexer","attempt_epoch":1,"ts_ms":1764000030000,"payload":'
    '{"sig":"CANCEL","reason":"user_request","cancel_token":null,"deadline_ts_ms":1764000060000},'
    '"target_worker_id":"w-1a2b3c4d"}'
)
RECHUNK = {
    "input_adapter": "pull.from_artifacts.rechunk:size",
    "input_args": {"from_nodes": ["extract"], "size": 3, "poll_ms": 50, "meta_list_key": "skus"},
}


def with_inline(inline: dict[str, Any] | None, **changes: Any) -> AttemptInput:
    """Return an attempt with an inline input."""
    return attempt(io=NodeIO(input_inline=inline), **changes)


EXAMPLES = {
    "start": (START, task_start(with_inline({"source": "database", "batch_size": 5}), TOKEN, 1764000000.0)),
    "pulling start": (
        PULLING_START,
        task_start(
            with_inline(RECHUNK, node_id="transform", role="enricher"),
            "9531985d-5d9d-49f8-9818-e811892f902b",
            1764000006.1,
        ),
    ),
    "discover": (DISCOVER, task_discover(attempt(epoch=2), 1764000095.0)),
    "cancel": (
        CANCEL,
        cancel_signal(attempt(), "user_request", 1764000030.0, worker_id="w-1a2b3c4d", deadline=1764000060.0),
    ),
}


# --- byte compatibility -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_messages_equal_the_examples_of_the_protocol(name: str) -> None:
    expected, made = EXAMPLES[name]
    same_id = made.model_copy(update={"corr_id": json.loads(expected)["corr_id"]})
    assert same_id.to_json() == expected.encode()


def test_every_message_has_a_correlation_id_of_its_own() -> None:
    made = [task_start(attempt(), TOKEN, NOW) for _ in range(3)]
    assert len({each.corr_id for each in made}) == 3
    assert len({each.dedup_id for each in made}) == 1


def test_the_key_of_a_command_names_task_and_node() -> None:
    assert key_of(attempt()) == f"{TASK}:{NODE}"


def test_text_that_is_not_ascii_stays_unescaped() -> None:
    sent = task_start(with_inline({"имя": "жук 🐞"}), TOKEN, NOW).to_json()
    assert '"имя":"жук 🐞"'.encode() in sent


def test_each_epoch_has_a_dedup_id_of_its_own() -> None:
    ids = {task_start(attempt(epoch=epoch), TOKEN, NOW).dedup_id for epoch in (1, 2, 3)}
    assert len(ids) == 3


@pytest.mark.parametrize("ms", [0, 1, 999, 1_764_000_000_481, 1_764_000_006_100])
def test_times_are_exact_to_the_millisecond(ms: int) -> None:
    assert task_start(attempt(), TOKEN, ms / 1000).ts_ms == ms


def test_a_broadcast_signal_names_no_worker() -> None:
    sent = json.loads(cancel_signal(attempt(), "stop", NOW, worker_id=None).to_json())
    assert (sent["target_worker_id"], sent["payload"]["deadline_ts_ms"]) == (None, None)


# --- the inline input ---------------------------------------------------------------------------------------------


def test_workers_do_not_receive_the_adapter_noop() -> None:
    inline = {"input_adapter": "noop", "input_args": {"x": 1}, "source": "a"}
    assert worker_input(with_inline(inline)) == {"source": "a"}
    assert pull_of(with_inline(inline)) is None


@pytest.mark.parametrize("inline", [None, {"source": "a"}, {"input_adapter": "noop"}, RECHUNK])
def test_a_remediator_receives_what_failed(inline: dict[str, Any] | None) -> None:
    failed = [{"node_id": "a", "attempt_epoch": 2, "reason_code": "full", "error": "full: no space"}]
    attempt = with_inline(inline)
    expected = {**(worker_input(attempt) or {}), "failed_nodes": failed}
    assert worker_input(dataclasses.replace(attempt, failed_nodes=failed)) == expected


@pytest.mark.parametrize("inline", [None, {}, {"source": "a"}, RECHUNK])
def test_any_other_input_is_sent_unchanged(inline: dict[str, Any] | None) -> None:
    assert worker_input(with_inline(inline)) == inline


def test_the_arguments_of_a_pulling_node_are_known() -> None:
    found = pull_of(with_inline(RECHUNK))
    assert found is not None
    assert (found.from_nodes, found.size, found.meta_list_key) == (("extract",), 3, "skus")
    assert pull_of(with_inline({"source": "a"})) is pull_of(with_inline(None)) is None


# --- an independent worker accepts every message ------------------------------------------------------------------


def judge_start(message: Envelope, role: str) -> StartPayload:
    """Check a command as an external worker does before it runs it, and return the payload."""
    command = read(message.to_json())
    assert Admission(ExternalSettings()).refusal(command, role, 0) is None
    start = StartPayload.model_validate(command.payload)
    inline = start.input_inline or {}
    if adapter := inline.get("input_adapter"):
        check_adapter(adapter, inline.get("input_args"), Run.accepted(command, start, 0))
    return start


def check_adapter(adapter: str, given_args: object, run: Run) -> None:
    """Check the input adapter of a command. A worker without a store cannot read, but it checks the arguments."""
    assert adapter in pipeline.ADAPTERS
    args = pipeline.normalize_args(given_args, ExternalSettings())
    assert pipeline.find_problem(adapter, args, strict=False) is None
    assert args["from_nodes"], "a worker that pulls from no node ends at once"
    store: Any = None
    pipeline.Puller(run, store, Clock()).batches(adapter, args)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
IDS = st.text("abcäж-._ 1", min_size=1, max_size=10).filter(lambda text: bool(text.strip()))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXTS.filter(lambda key: not key.startswith("input_")), VALUES, max_size=3)
COUNTS = st.integers(1, 10_000)
TIMING = {"poll_ms": COUNTS, "backoff_max_ms": COUNTS, "eof_on_task_done": st.booleans()}
PULLS = st.fixed_dictionaries(
    {"input_adapter": st.just("pull.from_artifacts")},
    optional={
        "input_args": st.fixed_dictionaries({}, optional={"from_nodes": st.just(["up"]), **TIMING})
        | st.fixed_dictionaries({"from_node": st.just("up")}, optional=TIMING)
    },
)
RECHUNKS = st.fixed_dictionaries(
    {
        "input_adapter": st.just("pull.from_artifacts.rechunk:size"),
        "input_args": st.fixed_dictionaries(
            {"size": COUNTS}, optional={"meta_list_key": TEXTS.filter(bool), **TIMING}
        ),
    }
)
INLINE = st.none() | OBJECTS | PULLS | RECHUNKS | st.just({"input_adapter": "noop"})


@st.composite
def attempts(draw: st.DrawFn) -> AttemptInput:
    """Return the input of an attempt of a node that validation has accepted."""
    raw = {
        "input_inline": draw(INLINE),
        "input_ref": draw(st.none() | OBJECTS),
        "batching": draw(st.none() | OBJECTS),
    }
    nodes = [
        {"node_id": "up", "type": "indexer"},
        {"node_id": NODE, "type": "indexer", "depends_on": ["up"], "io": raw},
    ]
    node = parse_graph({"nodes": nodes}, params={}).nodes[1]
    task_id, epoch = draw(IDS), draw(st.integers(1, 2**31 - 1))
    return attempt(task_id=task_id, epoch=epoch, io=node.io)


@given(given_attempt=attempts(), token=st.uuids().map(str), at=st.floats(0, 4e9))
@settings(max_examples=examples(40))
def test_a_worker_accepts_every_start_and_runs_exactly_that_attempt(
    given_attempt: AttemptInput, token: str, at: float
) -> None:
    message = task_start(given_attempt, token, at)
    start = judge_start(message, given_attempt.role)
    command = read(message.to_json())
    assert (command.task_id, command.node_id) == (given_attempt.task_id, given_attempt.node_id)
    assert (command.attempt_epoch, start.cancel_token) == (given_attempt.epoch, token)
    assert start.input_ref == given_attempt.io.input_ref
    assert start.batching == given_attempt.io.batching
    assert start.input_inline == worker_input(given_attempt)


@given(
    given_attempt=attempts(), reason=TEXTS, worker_id=st.none() | IDS, deadline=st.none() | st.floats(0, 4e9)
)
@settings(max_examples=examples(40))
def test_a_worker_understands_every_signal(
    given_attempt: AttemptInput, reason: str, worker_id: str | None, deadline: float | None
) -> None:
    sent = read(cancel_signal(given_attempt, reason, NOW, worker_id=worker_id, deadline=deadline).to_json())
    signal = SignalPayload.model_validate(sent.payload)
    assert (signal.sig.upper(), signal.reason, sent.target_worker_id) == ("CANCEL", reason, worker_id)
    assert (sent.task_id, sent.attempt_epoch) == (given_attempt.task_id, given_attempt.epoch)


@given(given_attempt=attempts())
@settings(max_examples=examples(20))
def test_a_worker_understands_every_query(given_attempt: AttemptInput) -> None:
    sent = read(task_discover(given_attempt, NOW).to_json())
    assert (sent.msg_type, sent.step_type, sent.attempt_epoch) == ("query", "indexer", given_attempt.epoch)


def test_bytes_are_compact_and_in_the_order_of_the_protocol() -> None:
    for text, message in EXAMPLES.values():
        sent = message.to_json()
        assert compact(json.loads(sent)) == sent
        assert list(json.loads(sent)) == list(json.loads(text))
