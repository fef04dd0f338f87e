"""The protocol page matches the code: every topic, message, field, id and hazard, and no other."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from tests.docs.pages import ROOT
from tests.docs.test_docs import page, rows, section
from tests.unit.bridge_records import lease, record

from flowkit import CoordinatorConfig
from flowkit.adapters.dispatches import Dispatch, DispatchState, OutcomeKind, to_document
from flowkit.config import _Topics
from flowkit.core.utils import stable_hash
from flowkit.limits import KAFKA_RECORD_BYTES, LARGEST_EPOCH
from flowkit.protocol import messages as protocol_messages
from flowkit.protocol.messages import (
    ActiveRun,
    CommandKind,
    Envelope,
    EventKind,
    Lease,
    MsgType,
    QueryKind,
    ReplyKind,
    Role,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

PAGE = page("protocol")
MODELS: dict[str, type[BaseModel]] = {
    kind: model for models in protocol_messages._KINDS.values() for kind, model in models.items()
}
RESERVED = {CommandKind.TASK_PAUSE, CommandKind.TASK_RESUME}
"""Kinds without a payload."""

HAZARD_TESTS = {
    "H1": "tests/unit/test_bridge_commands.py::test_a_worker_accepts_every_start_and_runs_exactly_that_attempt",
    "H2": "tests/integration/bridge/test_external_tasks.py::test_dropped_command_is_dispatched_again_without_a_retry",
    "H3": "tests/unit/test_bridge_commands.py::test_each_epoch_has_a_dedup_id_of_its_own",
    "H4": "tests/integration/bridge/test_topics.py::test_a_worker_that_joins_later_reads_the_first_command",
    "H5": "tests/unit/test_partitions.py::test_commands_go_to_different_workers_while_some_are_free",
    "H6": "tests/integration/bridge/test_external_tasks.py::test_crash_of_a_worker_is_a_lost_lease",
    "H7": "tests/unit/test_bridge_fencing.py::test_a_second_acceptance_takes_the_run",
    "H8": "tests/integration/bridge/test_leases.py::test_replies_of_other_workers_neither_renew_nor_end_a_lease",
    "H9": "tests/integration/bridge/test_leases.py::test_run_of_a_restarted_worker_is_lost_at_once",
    "H10": "tests/integration/bridge/test_cancel.py::test_cancel_signals_name_worker_epoch_and_deadline_and_are_repeated",
    "H11": "tests/unit/test_bridge_outcomes.py::test_after_a_cancel_request_every_end_is_a_cancel",
    "H12": "tests/contract/test_cancel_flag.py::test_first_attempt_of_a_new_run_clears_all_flags_of_the_earlier_run",
    "H13": "tests/unit/test_bridge_outcomes.py::test_a_verdict_has_its_code_and_its_budget",
    "H14": "tests/integration/bridge/test_leases.py::test_run_of_a_worker_that_goes_offline_is_lost_at_once",
    "H15": "tests/unit/test_bridge_fencing.py::test_a_heartbeat_on_the_topic_of_another_role_renews_only_the_lease_that_it_names",
    "H16": "tests/integration/bridge/test_run_owners.py::test_ends_of_the_older_of_two_owners_change_nothing",
    "H17": "tests/unit/test_bridge_fencing.py::test_nothing_applies_after_the_end_and_no_lease_returns",
    "H18": "tests/integration/bridge/test_external_tasks.py::test_external_node_finishes_with_its_batches_and_final_metrics",
    "H19": "tests/integration/bridge/test_pulled_inputs.py::test_child_that_finishes_before_its_source_reads_the_rest_in_another_run",
    "H20": "tests/integration/bridge/test_pulled_inputs.py::test_child_reads_all_batches_of_a_large_source",
    "H21": "tests/integration/bridge/test_pulled_inputs.py::test_retry_gets_all_chunks_of_a_half_processed_batch",
    "H22": "tests/unit/test_bridge_outcomes.py::test_texts_name_the_worker_the_source_and_the_uid",
    "H23": "tests/unit/test_bridge_commands.py::test_a_worker_accepts_every_start_and_runs_exactly_that_attempt",
    "H24": "tests/integration/bridge/test_external_tasks.py::test_external_node_pulls_from_external_and_native_nodes",
    "H25": "tests/contract/test_artifacts.py::test_a_lower_epoch_is_fenced",
    "H26": "tests/integration/test_external_misbehavior.py::test_a_batch_beyond_the_record_limit_fails_the_task",
    "H27": "tests/unit/test_bridge_leases.py::test_a_lease_lasts_a_tenth_longer_than_the_worker_says",
    "H28": "tests/integration/bridge/test_lost_commands.py::test_worker_that_cannot_send_its_acceptance_keeps_the_command_until_it_dies",
    "H29": "tests/contract/test_indexes.py::test_indexes_have_the_documented_names_and_options",
    "H30": None,
    "H31": "tests/unit/test_bridge_fencing.py::test_nothing_applies_after_the_end_and_no_lease_returns",
    "H32": "tests/unit/test_external_protocol.py::test_the_external_worker_shares_no_code_with_the_rest_of_flowkit",
    "H33": "tests/unit/test_bridge_leases.py::test_every_event_renews_a_lease_for_its_own_duration",
    "H34": "tests/integration/bridge/test_leases.py::test_run_without_a_terminal_event_is_lost",
}
"""A test of what FlowKit does about each hazard; None if no test names the hazard yet."""


def parts(heading_level: str, text: str) -> dict[str, str]:
    """Return the parts of a text by their headings."""
    found = re.split(rf"^{heading_level} (.+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def messages() -> dict[str, str]:
    """Return the description of each kind of message."""
    described = parts("###", section(PAGE, "Messages"))
    return {kind: text for heading, text in described.items() for kind in re.findall(r"`(\w+)`", heading)}


def required(text: str) -> dict[str, bool]:
    """Return the fields that a table describes, and whether they are required."""
    return {name: cells[2] == "yes" for name, cells in rows(text).items()}


def fields_of(model: type[BaseModel]) -> dict[str, bool]:
    """Return the fields of a model, in order, and whether they are required."""
    return {name: field.is_required() for name, field in model.model_fields.items()}


# --- topics and messages ------------------------------------------------------------------------------------------


def test_every_topic_is_described_with_its_default_name() -> None:
    described = rows(PAGE.split("Consumer group", 1)[0])
    settings = {field.name for field in dataclasses.fields(_Topics)} - {"kafka_bootstrap"}
    assert {name for name in described if name.startswith("topic_")} == settings
    for name in settings:
        assert described[name][1] == f"`{getattr(CoordinatorConfig(), name)}`", name


def test_every_message_names_its_topic() -> None:
    topics = " ".join(cells[4] for name, cells in rows(section(PAGE, "Topics")).items() if "topic_" in name)
    events = {kind.value for kind in EventKind} - {"WORKER_ONLINE", "WORKER_OFFLINE"}
    named = set(re.findall(r"`([A-Z_]+)`", topics))
    assert named == messages().keys() - events
    assert "all events about attempts" in topics


def test_every_field_of_the_envelope_is_described_in_order() -> None:
    described = required(section(PAGE, "Envelope"))
    assert list(described.items()) == list(fields_of(Envelope).items())


def test_every_message_is_described_and_no_other() -> None:
    kinds = {*EventKind, *CommandKind, *QueryKind, *ReplyKind, "CANCEL"}
    assert MODELS.keys() == {str(kind) for kind in kinds} - {kind.value for kind in RESERVED} | {
        "TASK_RESUMED"
    }
    assert messages().keys() == {str(kind) for kind in kinds}


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_every_field_of_a_payload_is_described_in_order(kind: str) -> None:
    assert list(required(messages()[kind]).items()) == list(fields_of(MODELS[kind]).items())


@pytest.mark.parametrize("kind", sorted(RESERVED))
def test_reserved_kinds_have_no_fields(kind: str) -> None:
    assert rows(messages()[kind]) == {}


def test_every_field_of_a_lease_and_of_an_active_run_is_described() -> None:
    described = parts("###", section(PAGE, "Messages"))
    assert required(described["Lease"]) == fields_of(Lease)
    run = {
        field.name: field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(ActiveRun)
    }
    assert required(described["Active run"]).keys() == run.keys()


def test_every_type_of_message_and_sender_is_named() -> None:
    text = section(PAGE, "Envelope")
    assert {word for kind in (MsgType, Role) for word in kind if f"`{word}`" not in text} == set()
    states = protocol_messages.RTaskSnapshot.model_fields["run_state"].annotation
    assert all(f"`{state}`" in messages()["TASK_SNAPSHOT"] for state in getattr(states, "__args__", ()))


# --- ids and limits -----------------------------------------------------------------------------------------------


def vectors() -> dict[str, tuple[dict[str, Any], str]]:
    """Return the hashed object and the hash in each row of the tables of ids."""
    lines = re.findall(r"^\| (.+?) \| `(\{.+?\})` \| `(\w{40})` \|$", PAGE, re.MULTILINE)
    return {name.strip("`"): (json.loads(text), shown) for name, text, shown in lines}


@pytest.mark.parametrize("name", sorted(vectors()))
def test_every_hash_is_that_of_its_object(name: str) -> None:
    hashed, shown = vectors()[name]
    assert stable_hash(hashed) == shown


def test_every_message_with_an_id_is_in_the_table_of_ids() -> None:
    assert vectors().keys() - {"a chunk"} == protocol_messages._HASHED.keys() | {
        "TASK_HEARTBEAT",
        "TASK_SNAPSHOT",
    }


def test_the_objects_are_those_that_the_code_hashes() -> None:
    for name in protocol_messages._HASHED.keys() & vectors().keys():
        hashed, shown = vectors()[name]
        made = protocol_messages._HASHED[name](envelope_of(name, hashed))
        assert stable_hash(made) == shown, name


def envelope_of(kind: str, hashed: dict[str, Any]) -> Envelope:
    """Return a message whose hashed object is the one in the table."""
    word = {"CANCEL": "sig", "TASK_DISCOVER": "query"}.get(kind, "cmd" if "cmd" in hashed else "kind")
    fields = {
        "lease": "lease_id",
        "uid": "batch_uid",
        "r": "reason_code",
        "p": "permanent",
        "worker": "worker_id",
    }
    payload = {word: kind} | {long: hashed[short] for short, long in fields.items() if short in hashed}
    return Envelope(
        msg_type=MsgType.event,
        role=Role.worker,
        dedup_id="",
        task_id="7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90",
        node_id="extract",
        step_type="indexer",
        attempt_epoch=hashed.get("e", hashed.get("epoch", 0)),
        ts_ms=hashed.get("ts_ms", 0),
        payload=payload,
        target_worker_id=hashed.get("worker"),
    )


def test_limits_have_their_values() -> None:
    text = section(PAGE, "Limits")
    assert f"`KAFKA_RECORD_BYTES`, {KAFKA_RECORD_BYTES:,} bytes" in text
    assert f"`LARGEST_EPOCH`, {LARGEST_EPOCH:,}" in text


# --- dispatch records ---------------------------------------------------------------------------------------------


def test_every_field_of_a_dispatch_record_is_described_and_no_other() -> None:
    described = rows(PAGE.split("### dispatches\n", 1)[1].split("\n## ", 1)[0])
    assert described.keys() == to_document(record(lease=lease())).keys() | {"updated_at"}
    assert {name for name in Dispatch.__dataclass_fields__ if name not in described} == set()
    words = [*(f"`{state.value}`" for state in DispatchState), *(f"`{kind.value}`" for kind in OutcomeKind)]
    assert [word for word in words if word not in PAGE] == []


# --- hazards ------------------------------------------------------------------------------------------------------


def test_every_hazard_is_described_once_and_in_order() -> None:
    assert re.findall(r"^\| (H\d+) \|", section(PAGE, "Hazards"), re.MULTILINE) == list(HAZARD_TESTS)


@pytest.mark.parametrize("test", [test for test in HAZARD_TESTS.values() if test])
def test_every_test_of_a_hazard_exists(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, functions)}
