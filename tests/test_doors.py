"""Every door, against every attack that one of them once let in: the test that shows it, or why the attack
does not apply.

A new door or a new attack is a new row or column, and each of its cells needs a test or a reason.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

TESTS: Final = Path(__file__).parent


class Attack(StrEnum):
    """What the other side tries."""

    FOREIGN_ID = "it names the id of another tenant, which it knows"
    GUESSED_ID = "it finds ids by trying"
    TAKEN_ID = "it uses an id before its owner does, or one that is in use"
    FOREIGN_TOKEN = "it has the token of another actor, or none"
    NO_RIGHT = "its token is valid, and does not permit the call"
    REDIRECT = "it redirects a request of ours to another place"
    LATE_REPLY = "it replies late, twice, or to another request"
    ENDLESS_REPLY = "what it sends never ends"
    TRICKLED_BYTES = "it sends, or reads, byte by byte"
    AMPLIFICATION = "a small request costs much"
    REGULAR_EXPRESSION = "it sends a regular expression or a schema that never ends"
    SECRET = "a secret appears in an error, a log or a record"
    OTHER_DEPLOYMENT = "another deployment in the namespace, the cluster or the server has the same ids"
    WEB_PAGE = "a web page in a browser of this machine causes the request"
    DECEPTIVE_TEXT = "a text of it moves the cursor of a terminal, hides text or acts where it is pasted"


@dataclass(frozen=True)
class Reason:
    """Why an attack does not apply to a door: the text continues "does not apply, because"."""

    text: str


@dataclass(frozen=True)
class Missing:
    """A cell that still needs a test."""

    text: str


Cell = tuple[str, ...] | Reason | Missing
Row = dict[Attack, Cell]

API, CONSUMER, RECORDS = "admission/test_api.py", "admission/test_consumer.py", "admission/test_records.py"
HTTP, AUTH, RPC, SOCKET = (f"server/test_{name}.py" for name in ("http", "auth", "rpc", "websocket"))
FLOWS, FAULTS = "integration/flows/test_tenants.py", "integration/flows/test_flow_faults.py"
CHECKS = "unit/test_params_checks.py"
SUPERVISORS, JOBS = "gateway/test_supervisors.py", "gateway/test_job_handler.py"
FENCING, READING = "unit/test_bridge_fencing.py", "unit/test_bridge_reading.py"
PAGE, BROWSER, FEED = "page/test_api.py", "page/test_browser.py", "page/test_live.py"
HEALTH, TEMPORAL = "unit/test_health_endpoint.py", "local/test_temporal.py"
SINKS, DECEPTION = "unit/test_sinks.py", "unit/test_deceptive_text.py"
SCHEDULES = "integration/test_schedules.py"


def of(file: str, *names: str) -> tuple[str, ...]:
    """Return the ids of tests of a file, whose names are given without `test_`."""
    return tuple(f"{file}::test_{name}" for name in names)


SHOWN: Final[Row] = {
    Attack.DECEPTIVE_TEXT: of(
        SINKS, "every_place_that_writes_for_people_has_a_row", "a_text_for_people_has_no_deceptive_characters"
    )
}
"""What comes through any door is shown at the same places."""
NO_BROWSER: Final[Row] = {Attack.WEB_PAGE: Reason("no browser speaks its protocol, or knows its address")}
SERVES: Final[Row] = {
    **SHOWN,
    **dict.fromkeys(
        (Attack.REDIRECT, Attack.LATE_REPLY, Attack.ENDLESS_REPLY),
        Reason("this door answers, and asks nobody"),
    ),
}
ASKS: Final[Row] = {
    **SHOWN,
    **NO_BROWSER,
    Attack.FOREIGN_TOKEN: Reason("this door asks, and shows the secret of the runner only"),
    Attack.NO_RIGHT: Reason("this door asks, and the gateway has checked the caller before"),
    Attack.REGULAR_EXPRESSION: Reason("replies are plain values, which no schema describes"),
    Attack.OTHER_DEPLOYMENT: Reason(
        "two deployments that call one supervisor have ids of their own there, as the row of the gateway shows"
    ),
}
WEB_PAGE: Final = (
    of(
        HTTP,
        "call_of_another_web_page_is_rejected",
        "another_web_page_does_not_see_whether_a_server_runs",
        "header_of_a_web_page_must_not_be_repeated",
    )
    + of(HTTP, "websocket_of_another_web_page_is_rejected_with_one_line_in_the_log")
    + of("unit/test_web_pages.py", "host_of_a_call_is_exactly_a_loopback_host_with_or_without_a_port")
)
HTTP_SERVER: Final[Row] = {
    Attack.WEB_PAGE: WEB_PAGE,
    Attack.TRICKLED_BYTES: of(
        HTTP,
        "slow_client_does_not_delay_others_and_is_cut_off",
        "body_over_the_limit_returns_413",
        "client_that_does_not_finish_a_call_is_cut_off",
        "client_that_does_not_read_its_response_is_cut_off",
        "connections_that_wait_keep_nobody_out",
        "health_is_served_while_too_many_calls_are_in_flight",
    )
    + of(
        SOCKET, "client_that_does_not_read_is_cut_off", "pongs_for_a_client_that_does_not_read_are_not_kept"
    ),
}

DOORS: Final[Mapping[str, Row]] = {
    "admission over HTTP": {
        **SERVES,
        **HTTP_SERVER,
        Attack.FOREIGN_ID: of(
            API,
            "user_sees_and_changes_only_its_own_requests",
            "user_of_another_tenant_or_door_is_another_user",
            "request_that_an_operator_repeats_stays_that_of_its_door",
        ),
        Attack.GUESSED_ID: of(
            API,
            "user_sees_and_changes_only_its_own_requests",
            "nobody_can_compute_the_id_behind_a_key_and_use_it_first",
        ),
        Attack.TAKEN_ID: of(
            API,
            "users_that_name_one_new_id_at_once_get_it_or_a_conflict",
            "same_id_is_one_request_of_its_user",
            "rejected_request_of_another_user_is_not_replaced",
        ),
        Attack.FOREIGN_TOKEN: of(API, "call_needs_a_token", "deployment_knows_no_token_of_another_one"),
        Attack.NO_RIGHT: of(
            API,
            "token_needs_the_right",
            "only_operators_use_the_admin_routes",
            "user_cannot_choose_what_operators_choose",
        ),
        Attack.AMPLIFICATION: of(
            API,
            "invalid_parameter_of_a_list_is_named",
            "script_has_at_most_one_mebibyte",
            "list_does_not_read_what_the_requests_contain",
        ),
        Attack.REGULAR_EXPRESSION: of(API, "invalid_field_is_named")
        + of(CHECKS, "cheap_checks_do_not_wait_for_endless_ones"),
        Attack.SECRET: of(API, "errors_of_mongodb_have_a_status_and_no_details")
        + of(HTTP, "each_request_is_logged_without_its_content"),
        Attack.OTHER_DEPLOYMENT: of(API, "deployment_knows_no_token_of_another_one"),
    },
    "admission over Kafka": {
        **SERVES,
        **NO_BROWSER,
        Attack.FOREIGN_ID: of(CONSUMER, "writers_of_a_topic_end_nothing_of_another_tenant"),
        Attack.GUESSED_ID: of(
            CONSUMER, "reports_about_unknown_ids_and_those_of_another_deployment_change_nothing"
        ),
        Attack.TAKEN_ID: of(
            CONSUMER,
            "a_record_does_not_take_the_id_of_a_request_of_another_door",
            "a_request_that_mongodb_refuses_says_nothing_about_one_of_its_id_and_blocks_no_other",
        ),
        Attack.FOREIGN_TOKEN: Reason("records have no tokens; ACLs of Kafka decide who writes to a topic"),
        Attack.NO_RIGHT: of(
            CONSUMER,
            "writers_of_a_topic_submit_nothing_for_another_tenant",
            "a_request_gets_at_most_the_band_of_its_topic",
        )
        + of(RECORDS, "the_topic_of_reports_takes_no_requests"),
        Attack.LATE_REPLY: of(CONSUMER, "a_late_report_changes_nothing")
        + of("integration/admission/test_kafka.py", "an_own_rejection_does_not_end_a_later_try"),
        Attack.ENDLESS_REPLY: of(RECORDS, "records_without_an_object_are_malformed"),
        Attack.TRICKLED_BYTES: Reason("Kafka delivers whole records"),
        Attack.AMPLIFICATION: of(
            "integration/admission/test_kafka.py",
            "a_dead_letter_has_the_beginning_of_its_record",
            "a_dead_letter_of_a_record_of_300_mb_has_no_value",
            "malformed_records_become_dead_letters_and_block_nothing",
        ),
        Attack.REGULAR_EXPRESSION: Reason("records carry scripts for an executor, and no graphs"),
        Attack.SECRET: of(RECORDS, "invalid_fields_are_named_without_their_value"),
        Attack.OTHER_DEPLOYMENT: of(
            CONSUMER,
            "only_the_header_of_the_queue_itself_makes_a_record_its_own",
            "reports_about_unknown_ids_and_those_of_another_deployment_change_nothing",
        ),
    },
    "admission from Python": {
        **SERVES,
        **NO_BROWSER,
        **dict.fromkeys(
            (
                *(Attack.FOREIGN_ID, Attack.GUESSED_ID, Attack.FOREIGN_TOKEN, Attack.NO_RIGHT),
                *(Attack.TRICKLED_BYTES, Attack.AMPLIFICATION, Attack.SECRET),
            ),
            Reason("such a program may read and write the database, so it may do everything"),
        ),
        Attack.TAKEN_ID: of("cli/test_admission.py", "id_of_another_user_is_taken"),
        Attack.REGULAR_EXPRESSION: of(CHECKS, "every_way_gives_up_an_endless_check"),
        Attack.OTHER_DEPLOYMENT: of(
            "integration/admission/test_ownership.py",
            "a_request_adopts_and_cancels_no_task_that_something_else_has_started",
        ),
    },
    "gateway": {
        **SERVES,
        **HTTP_SERVER,
        Attack.FOREIGN_ID: of(FLOWS, "a_tenant_reaches_nothing_of_another_one"),
        Attack.GUESSED_ID: of(FLOWS, "a_tenant_reaches_nothing_of_another_one"),
        Attack.TAKEN_ID: of("unit/test_ownership.py", "ids_of_runs_of_flows_are_reserved")
        + of("integration/test_deployments.py", "ids_of_flows_are_reserved_and_a_rerun_keeps_the_marker"),
        Attack.FOREIGN_TOKEN: of(FAULTS, "tokens_and_contexts_decide_who_may_do_what")
        + of(AUTH, "revoked_token_is_accepted_for_the_time_of_the_cache_only")
        + of(SOCKET, "connection_ends_with_its_token", "connection_needs_a_token"),
        Attack.NO_RIGHT: of(
            "server/test_rights.py",
            "every_call_is_permitted_to_the_tokens_of_the_table_and_to_no_others",
            "every_method_is_permitted_to_the_parts_of_the_table_and_to_no_others",
        ),
        Attack.AMPLIFICATION: of(
            RPC,
            "calls_are_not_made_after_large_responses_of_their_batch",
            "result_over_the_limit_is_left_out",
        )
        + of(
            "gateway/test_flow_lists.py",
            "page_of_jobs_ends_at_its_byte_limit",
            "messages_of_one_second_are_listed_once_newest_first",
            "logs_of_attempts_are_listed_in_pages",
            "flow_does_not_grow_over_its_limits",
        )
        + of(
            "gateway/test_subscriptions.py",
            "subscribers_of_a_flow_share_what_the_gateway_reads",
            "a_second_subscription_replaces_the_first_and_their_number_is_bounded",
            "a_gateway_looks_at_few_flows_at_once",
        ),
        Attack.REGULAR_EXPRESSION: Reason("flows have scripts and names, and no schemas"),
        Attack.SECRET: of(FAULTS, "the_secret_reaches_the_supervisor_and_nobody_else")
        + of(RPC, "value_of_a_secret_is_never_shown", "params_never_reach_the_log")
        + of(
            "gateway/test_flow_pages.py", "file_outside_the_folder_of_its_pattern_is_neither_stored_nor_read"
        ),
        Attack.OTHER_DEPLOYMENT: of(
            "integration/flows/test_deployments.py", "flows_with_equal_ids_in_two_deployments_share_nothing"
        ),
    },
    "nodes of type job": {
        **SERVES,
        **NO_BROWSER,
        Attack.FOREIGN_ID: of(
            JOBS, "a_node_that_the_gateway_has_not_started_fails_for_good_and_reads_no_job"
        ),
        Attack.GUESSED_ID: of(
            JOBS, "a_node_that_the_gateway_has_not_started_fails_for_good_and_reads_no_job"
        ),
        Attack.TAKEN_ID: of("unit/test_ownership.py", "ids_of_runs_of_flows_are_reserved")
        + of(JOBS, "a_node_whose_dispatch_has_the_same_id_does_not_end_that_of_a_job"),
        Attack.FOREIGN_TOKEN: Reason("nodes have no tokens; the flow that started the run counts"),
        Attack.NO_RIGHT: of(
            API,
            "graph_has_only_roles_and_functions_that_its_token_may_use",
            "a_token_with_fewer_roles_does_not_repeat_a_task_of_its_actor",
        ),
        Attack.TRICKLED_BYTES: Reason("Temporal delivers whole attempts"),
        Attack.AMPLIFICATION: of(JOBS, "attempts_that_start_together_read_the_runners_once"),
        Attack.REGULAR_EXPRESSION: Reason("jobs have scripts, and no schemas"),
        Attack.SECRET: of(FAULTS, "the_secret_reaches_the_supervisor_and_nobody_else"),
        Attack.OTHER_DEPLOYMENT: of(
            "gateway/test_flow_status.py", "ids_of_runs_and_jobs_differ_by_deployment_run_flow_and_retry"
        )
        + of(
            "integration/flows/test_deployments.py", "flows_with_equal_ids_in_two_deployments_share_nothing"
        ),
    },
    "supervisors over HTTP": {
        **ASKS,
        Attack.FOREIGN_ID: of(SUPERVISORS, "a_reply_to_another_request_is_rejected"),
        Attack.GUESSED_ID: of(SUPERVISORS, "a_supervisor_cannot_guess_the_ids_of_other_requests"),
        Attack.TAKEN_ID: of(
            "gateway/test_flow_status.py", "ids_of_runs_and_jobs_differ_by_deployment_run_flow_and_retry"
        ),
        Attack.REDIRECT: of(
            SUPERVISORS,
            "a_redirect_is_not_followed",
            "an_address_that_is_not_allowed_is_not_called",
            "a_name_that_leads_to_addresses_that_are_not_allowed_is_not_called",
        ),
        Attack.LATE_REPLY: of(
            SUPERVISORS,
            "a_supervisor_that_never_replies_times_out",
            "a_reply_to_another_request_is_rejected",
        ),
        Attack.ENDLESS_REPLY: of(SUPERVISORS, "a_huge_reply_is_rejected"),
        Attack.TRICKLED_BYTES: of(SUPERVISORS, "a_reply_that_trickles_times_out"),
        Attack.AMPLIFICATION: of(SUPERVISORS, "a_huge_reply_is_rejected"),
        Attack.SECRET: of(
            SUPERVISORS,
            "secrets_are_masked_and_not_logged",
            "a_secret_is_masked_however_it_is_spelled",
            "credentials_of_a_url_are_masked",
        ),
    },
    "supervisors over Mycelium": {
        **ASKS,
        Attack.FOREIGN_ID: of(SUPERVISORS, "messages_of_others_stay_in_the_inbox"),
        Attack.GUESSED_ID: of(SUPERVISORS, "a_supervisor_cannot_guess_the_ids_of_other_requests"),
        Attack.TAKEN_ID: of(
            "gateway/test_flow_status.py", "ids_of_runs_and_jobs_differ_by_deployment_run_flow_and_retry"
        ),
        Attack.REDIRECT: of(SUPERVISORS, "a_redirect_of_a_mycelium_node_is_not_followed"),
        Attack.LATE_REPLY: of(SUPERVISORS, "late_and_second_replies_are_reported_and_applied_only_in_time"),
        Attack.ENDLESS_REPLY: of(SUPERVISORS, "a_huge_message_is_rejected"),
        Attack.TRICKLED_BYTES: Reason("the operator's own daemon delivers whole messages"),
        Attack.AMPLIFICATION: of(SUPERVISORS, "messages_of_others_stay_in_the_inbox"),
        Attack.SECRET: of(SUPERVISORS, "of_a_late_reply_only_status_size_and_digest_are_kept"),
    },
    "external workers": {
        **SHOWN,
        **NO_BROWSER,
        Attack.FOREIGN_ID: of(
            FENCING,
            "events_on_the_topic_of_another_role_change_nothing",
            "the_end_of_another_workers_run_is_ignored",
        ),
        Attack.GUESSED_ID: of(FENCING, "an_attempt_without_a_record_is_unknown"),
        Attack.TAKEN_ID: of(FENCING, "an_acceptance_with_the_lease_of_another_worker_does_not_take_the_run"),
        Attack.FOREIGN_TOKEN: Reason("records have no tokens; ACLs of Kafka decide who writes to a topic"),
        Attack.NO_RIGHT: of(FENCING, "events_on_the_topic_of_another_role_change_nothing"),
        Attack.REDIRECT: Reason("Kafka has no redirects"),
        Attack.LATE_REPLY: of(
            "integration/bridge/test_late_events.py",
            "events_after_the_end_change_nothing",
            "events_of_a_failed_epoch_do_not_end_the_next_one",
        ),
        Attack.ENDLESS_REPLY: of(
            READING, "a_record_beyond_the_limit_is_malformed", "deep_nesting_is_malformed"
        ),
        Attack.TRICKLED_BYTES: Reason("Kafka delivers whole records"),
        Attack.AMPLIFICATION: of("unit/test_bridge_outcomes.py", "codes_and_texts_of_workers_are_bounded"),
        Attack.REGULAR_EXPRESSION: Reason("events have values, which no schema describes"),
        Attack.SECRET: of(
            "integration/bridge/test_secrets.py", "no_sink_contains_a_secret_that_is_not_documented"
        ),
        Attack.OTHER_DEPLOYMENT: of(FENCING, "an_attempt_without_a_record_is_unknown"),
    },
    "Temporal clients": {
        **SERVES,
        **NO_BROWSER,
        **dict.fromkeys(
            (
                Attack.FOREIGN_ID,
                Attack.GUESSED_ID,
                Attack.FOREIGN_TOKEN,
                Attack.NO_RIGHT,
                Attack.TRICKLED_BYTES,
            ),
            Reason("who may use the namespace may do everything there; Temporal's own rights protect it"),
        ),
        Attack.TAKEN_ID: of(
            "integration/test_plain_client_start.py",
            "id_of_an_earlier_task_is_rejected_and_its_document_unchanged",
        )
        + of("contract/test_open_task.py", "document_of_another_task_is_not_changed"),
        Attack.AMPLIFICATION: of(
            "integration/test_plain_client_start.py", "node_limit_of_the_engine_applies_to_a_plain_start"
        ),
        Attack.REGULAR_EXPRESSION: of(CHECKS, "every_way_gives_up_an_endless_check"),
        Attack.SECRET: of(
            "integration/bridge/test_secrets.py", "no_sink_contains_a_secret_that_is_not_documented"
        ),
        Attack.OTHER_DEPLOYMENT: of(
            "integration/test_namespaces.py", "engine_of_another_server_does_not_close_live_tasks"
        ),
    },
    "page": {
        **SERVES,
        **HTTP_SERVER,
        **dict.fromkeys(
            (Attack.FOREIGN_ID, Attack.GUESSED_ID),
            Reason("who may read on the page sees all tasks of the database, as the page says"),
        ),
        Attack.TAKEN_ID: of(FEED, "a_task_that_is_created_again_between_two_polls_has_another_origin"),
        Attack.FOREIGN_TOKEN: of(
            PAGE,
            "reading_needs_a_token_with_the_right_to_read",
            "only_the_files_of_the_page_are_public",
        ),
        Attack.NO_RIGHT: of(PAGE, "actions_need_the_right_to_operate_and_carry_the_actor"),
        Attack.AMPLIFICATION: of(FEED, "two_hundred_pages_of_a_task_cost_one_poll")
        + of("page/test_shared.py", "pages_that_ask_at_once_share_one_read_also_if_the_first_one_leaves"),
        Attack.REGULAR_EXPRESSION: Reason("its calls have ids and values, and no patterns"),
        Attack.SECRET: of(
            "unit/test_masks.py", "kept_lines_and_the_log_of_a_process_hide_the_secrets_of_an_attempt"
        ),
        Attack.OTHER_DEPLOYMENT: of(
            "integration/test_deployments.py", "a_task_is_absent_for_another_deployment"
        ),
        Attack.WEB_PAGE: WEB_PAGE
        + of(BROWSER, "a_link_opens_the_page_but_another_web_page_reads_nothing_of_it"),
        Attack.DECEPTIVE_TEXT: of(
            SINKS,
            "only_one_file_of_the_page_sets_texts_of_the_document",
            "the_page_escapes_the_same_characters_as_the_command_line",
        )
        + of(BROWSER, "control_and_bidirectional_characters_of_a_task_are_shown_as_escapes"),
    },
    "clipboard of the page": {
        **SERVES,
        **dict.fromkeys(
            set(Attack) - SERVES.keys(),
            Reason("a person copies there what the page shows, and the row of the page has its texts"),
        ),
        Attack.DECEPTIVE_TEXT: of(
            DECEPTION,
            "a_word_of_a_command_has_no_character_that_acts_in_a_terminal",
            "the_command_that_debugs_a_batch_can_be_pasted",
        ),
    },
    "health ports": {
        **SERVES,
        **dict.fromkeys(
            (
                *(Attack.FOREIGN_ID, Attack.GUESSED_ID, Attack.TAKEN_ID, Attack.REGULAR_EXPRESSION),
                *(Attack.OTHER_DEPLOYMENT, Attack.NO_RIGHT),
            ),
            Reason("a request names nothing but the health or the metrics of the process"),
        ),
        Attack.FOREIGN_TOKEN: Reason(
            "it has no tokens, and listens on loopback unless a setting says otherwise"
        ),
        Attack.TRICKLED_BYTES: of(
            HEALTH,
            "clients_that_do_not_finish_their_request_keep_no_probe_out",
            "client_that_sends_its_request_too_slowly_is_cut_off",
        ),
        Attack.AMPLIFICATION: of(HEALTH, "clients_that_do_not_finish_their_request_keep_no_probe_out"),
        Attack.SECRET: of(
            "integration/bridge/test_secrets.py", "no_sink_contains_a_secret_that_is_not_documented"
        ),
        Attack.WEB_PAGE: of(HEALTH, "web_pages_read_neither_health_nor_metrics")
        + of("unit/test_web_pages.py", "other_hosts_are_those_of_web_pages"),
    },
    "schedules": {
        **SERVES,
        **NO_BROWSER,
        **dict.fromkeys(
            (
                *(Attack.FOREIGN_ID, Attack.GUESSED_ID, Attack.FOREIGN_TOKEN, Attack.NO_RIGHT),
                Attack.TRICKLED_BYTES,
            ),
            Reason("who may use the namespace may do everything there; Temporal's own rights protect it"),
        ),
        Attack.TAKEN_ID: of(SCHEDULES, "a_taken_name_and_params_that_do_not_fit_are_refused"),
        Attack.AMPLIFICATION: of(
            "unit/test_scheduled.py", "params_of_a_schedule_hold_a_bounded_number_of_short_expressions"
        )
        + of("unit/test_backfills.py", "a_range_has_at_most_the_times_of_the_limit"),
        Attack.REGULAR_EXPRESSION: of(CHECKS, "every_way_gives_up_an_endless_check"),
        Attack.SECRET: Reason("its tasks are tasks, and the row of Temporal clients has their texts"),
        Attack.OTHER_DEPLOYMENT: of(
            "contract/test_stored_graphs.py",
            "purge_leaves_the_graph_of_a_schedule_of_the_same_name_in_another_namespace",
        ),
    },
    "servers of flowkit up": {
        **SERVES,
        **dict.fromkeys(
            set(Attack) - SERVES.keys(),
            Reason("they are the servers of one developer, on loopback, without users"),
        ),
        Attack.OTHER_DEPLOYMENT: of("cli/up/test_run.py", "two_cannot_use_the_same_folder_or_the_same_ports"),
        Attack.WEB_PAGE: of(TEMPORAL, "no_web_page_starts_or_reads_a_workflow"),
    },
}


@cache
def names_in(file: str) -> frozenset[str]:
    """Return the names of the tests of a file."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = (each for each in tree.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return frozenset(each.name for each in functions)


@pytest.mark.parametrize("door", DOORS)
def test_every_attack_on_a_door_has_a_test_that_exists_or_a_reason(door: str) -> None:
    row = DOORS[door]
    assert row.keys() == set(Attack)
    named = [each.partition("::") for cell in row.values() if isinstance(cell, tuple) for each in cell]
    assert [f"{file}::{name}" for file, _, name in named if name not in names_in(file)] == []


def test_no_cell_needs_a_test() -> None:
    cells = {(door, attack): cell for door, row in DOORS.items() for attack, cell in row.items()}
    assert [where for where, cell in cells.items() if isinstance(cell, Missing)] == []
