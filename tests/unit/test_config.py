"""Settings: defaults, layers, derived values, and the rejection of invalid ones."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkit import CoordinatorConfig, WorkerConfig
from flowkit.errors import ConfigError
from flowkit.validation.invalid import musts_of

if TYPE_CHECKING:
    from pathlib import Path

Config = CoordinatorConfig | WorkerConfig
BOTH: list[type[Config]] = [CoordinatorConfig, WorkerConfig]


def names(config: type[Config]) -> list[str]:
    """Return the names of all settings of a configuration."""
    return [field.name for field in dataclasses.fields(config)]


def made(name: str, value: object) -> list[Config]:
    """Create every configuration that has the setting, with this value."""
    settings: dict[str, Any] = {name: value}
    return [config(**settings) for config in BOTH if name in names(config)]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KAFKA_BOOTSTRAP_SERVERS", "WORKER_TYPES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a path for a settings file."""
    return tmp_path / "settings.json"


# --- defaults -----------------------------------------------------------------------------------------------------


def test_defaults_are_the_documented_ones() -> None:
    engine, worker = CoordinatorConfig(), WorkerConfig()
    assert (engine.kafka_bootstrap, engine.lease_ttl_sec, engine.heartbeat_hard_sec) == (
        "kafka:9092",
        45,
        3600,
    )
    assert (worker.roles, worker.worker_id, worker.worker_version) == (["echo"], None, "2.0.0")
    assert (worker.lease_ttl_sec, worker.hb_interval_sec, worker.announce_interval_sec) == (60, 20, 60)
    assert (worker.executor, worker.process_workers, worker.max_buffered_mb) == ("loop", None, 64)


@pytest.mark.parametrize("config", BOTH)
def test_every_setting_has_a_rule_that_its_default_satisfies(config: type[Config]) -> None:
    assert {*names(config)} == musts_of(config).keys()
    assert config() == config(**dataclasses.asdict(config()))


def test_two_configurations_share_no_lists() -> None:
    mine = ["a"]
    one, other = WorkerConfig(roles=mine), WorkerConfig()
    mine.append("b")
    one.roles.append("c")
    assert (one.roles, other.roles, WorkerConfig().roles) == (["a", "c"], ["echo"], ["echo"])


@pytest.mark.parametrize("config", BOTH)
def test_topics_are_named_after_the_role(config: type[Config]) -> None:
    assert config().topic_cmd("indexer") == "cmd.indexer.v1"
    assert config(topic_status_fmt="eu.status.{type}").topic_status("indexer") == "eu.status.indexer"


def test_constructor_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "elsewhere:9092")
    monkeypatch.setenv("WORKER_TYPES", "a")
    assert CoordinatorConfig() == CoordinatorConfig(kafka_bootstrap="kafka:9092", worker_types=[])


# --- derived ------------------------------------------------------------------------------------------------------

DERIVED = {
    "hb_soft_ms": "heartbeat_soft_sec",
    "hb_hard_ms": "heartbeat_hard_sec",
    "lease_ttl_ms": "lease_ttl_sec",
    "discovery_window_ms": "discovery_window_sec",
    "cancel_grace_ms": "cancel_grace_sec",
    "scheduler_tick_ms": "scheduler_tick_sec",
    "finalizer_tick_ms": "finalizer_tick_sec",
    "hb_monitor_tick_ms": "hb_monitor_tick_sec",
    "outbox_dispatch_tick_ms": "outbox_dispatch_tick_sec",
    "hb_interval_ms": "hb_interval_sec",
    "announce_interval_ms": "announce_interval_sec",
}


def test_milliseconds_are_derived_from_seconds() -> None:
    for derived, seconds in DERIVED.items():
        for config in made(seconds, 0.25):
            assert getattr(config, derived) == 250
            assert isinstance(getattr(config, derived), int)
            setattr(config, seconds, 2)
            assert getattr(config, derived) == 2_000


def test_passing_derived_milliseconds_has_no_effect() -> None:
    for derived, seconds in DERIVED.items():
        settings: dict[str, Any] = {seconds: 3, derived: 7}
        for config in BOTH:
            if seconds in names(config):
                assert getattr(config(**settings), derived) == 3_000
                assert getattr(config.load(None, overrides=settings), derived) == 3_000


def test_changed_copy_derives_its_values_again() -> None:
    assert dataclasses.replace(CoordinatorConfig(), lease_ttl_sec=1).lease_ttl_ms == 1_000


# --- slots --------------------------------------------------------------------------------------------------------


def test_single_number_of_slots_applies_to_every_role() -> None:
    assert [WorkerConfig(max_concurrent=3).slots(role) for role in ("a", "b")] == [3, 3]


def test_roles_without_a_number_of_slots_have_one() -> None:
    config = WorkerConfig(max_concurrent={"a": 4})
    assert [config.slots(role) for role in ("a", "b")] == [4, 1]


# --- layers -------------------------------------------------------------------------------------------------------


def test_later_layers_take_precedence(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(
        json.dumps({"kafka_bootstrap": "file:1", "worker_types": ["f"], "window": 7, "sweep_sec": 5})
    )
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "env:1, env:2")
    monkeypatch.setenv("WORKER_TYPES", " a ,, b,")
    config = CoordinatorConfig.load(str(file), overrides={"kafka_bootstrap": "given:1", "sweep_sec": 0.5})
    assert (config.kafka_bootstrap, config.worker_types) == ("given:1", ["a", "b"])
    assert (config.window, config.sweep_sec, config.max_nodes) == (7, 0.5, 20_000)
    assert CoordinatorConfig.load(file).kafka_bootstrap == "env:1, env:2"


def test_empty_variable_sets_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('{"worker_types": ["f"]}')
    monkeypatch.setenv("WORKER_TYPES", "")
    assert CoordinatorConfig.load(file).worker_types == ["f"]


def test_worker_reads_its_file_in_the_working_directory_and_ignores_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "env:1")
    assert WorkerConfig.load() == WorkerConfig()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/worker.default.json").write_text('\ufeff{"roles": ["a"]}', encoding="utf-8")
    assert WorkerConfig.load() == WorkerConfig(roles=["a"])
    assert WorkerConfig.load(overrides={"roles": ["probe"]}).roles == ["probe"]


@pytest.mark.parametrize("config", BOTH)
def test_missing_file_is_not_an_error(config: type[Config], tmp_path: Path) -> None:
    assert config.load(tmp_path / "nowhere.json") == config.load(None) == config()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", ":1:2: not JSON: Expecting property name"),
        ("", ":1:1: not JSON: Expecting value"),
        ("[]", " must contain an object, not a list"),
        ("null", " must contain an object, not null"),
        (b"\xff\xfe\x00", " is not UTF-8 in line 1"),
    ],
)
@pytest.mark.parametrize("config", BOTH)
def test_unreadable_file_is_named_in_the_error(
    config: type[Config], text: str | bytes, problem: str, file: Path
) -> None:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=f"settings.json{problem}"):
        config.load(file)


def test_folder_instead_of_a_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        CoordinatorConfig.load(tmp_path)


@pytest.mark.parametrize("config", BOTH)
def test_unknown_setting_raises_type_error_with_a_suggestion(config: type[Config], file: Path) -> None:
    with pytest.raises(
        TypeError, match="overrides: .* has no setting 'lease_ttl'; did you mean 'lease_ttl_sec'"
    ):
        config.load(None, overrides={"lease_ttl": 1})
    file.write_text('{"quue": "x"}')
    with pytest.raises(TypeError, match=r"settings\.json: .* did you mean 'queue'"):
        config.load(file)
    unknown: dict[str, Any] = {"lease_ttl": 1}
    with pytest.raises(TypeError, match="lease_ttl"):
        config(**unknown)


def test_error_names_the_layer_of_an_invalid_value(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('{"window": "7"}')
    with pytest.raises(
        ConfigError, match=r"settings\.json: CoordinatorConfig\.window is '7'; it must be a whole"
    ):
        CoordinatorConfig.load(file)
    assert CoordinatorConfig.load(file, overrides={"window": 7}).window == 7
    monkeypatch.setenv("WORKER_TYPES", "a,b c")
    with pytest.raises(ConfigError, match=r"WORKER_TYPES: CoordinatorConfig\.worker_types\[1\] is 'b c'"):
        CoordinatorConfig.load()


# --- invalid and valid values -------------------------------------------------------------------------------------

NAMES = sorted({*names(CoordinatorConfig), *names(WorkerConfig)})
SECONDS = [name for name in NAMES if name.endswith("_sec")]
MAY_BE_ZERO = (
    "worker_events_ttl_sec",
    "attempt_logs_ttl_sec",
    "discovery_window_sec",
    "cancel_grace_sec",
    "_tick_sec",
    "_soft_sec",
    "_hard_sec",
)
WHOLE = [
    "window",
    "max_in_flight",
    "max_nodes",
    "hold_starts_events",
    "hold_starts_bytes",
    "outbox_max_retry",
    "dedup_cache_size",
]
WHOLE += [name for name in NAMES if name.endswith("_ms") or "_ms_" in name]
TEXTS = ["queue", "worker_id", "worker_version"]
TOPICS = [name for name in NAMES if name.startswith("topic_")]
NOT_NUMBERS: list[object] = ["7", "", None, True, False, [], {}, math.nan, math.inf, -math.inf, 1j, b"7"]


def refused(name: str, value: object) -> str:
    """Return the message with which a value is rejected."""
    with pytest.raises(ConfigError) as caught:
        made(name, value)
    return str(caught.value)


@pytest.mark.parametrize("name", SECONDS)
def test_duration_is_a_number_of_seconds_within_a_year(name: str) -> None:
    for value in [*NOT_NUMBERS, -1, -0.001, 31_536_001, 1e300, 10**400]:
        message = refused(name, value)
        assert f".{name} is " in message
        assert "it must be a number of seconds between" in message


def test_duration_can_be_a_fraction() -> None:
    for name in SECONDS:
        assert made(name, 0.001)
        if name.endswith(MAY_BE_ZERO):
            assert made(name, 0)
        else:
            assert "between 0.001" in refused(name, 0)


@given(st.floats() | st.integers() | st.text() | st.booleans() | st.none())
def test_lease_must_be_positive_and_finite(value: Any) -> None:
    try:
        config = WorkerConfig(lease_ttl_sec=value)
    except ConfigError:
        return
    assert not isinstance(value, (bool, str))
    assert 0 < config.lease_ttl_ms <= 31_536_000_000


@pytest.mark.parametrize("name", WHOLE)
def test_count_is_a_whole_number(name: str) -> None:
    for value in [*NOT_NUMBERS, 1.5, 1.0, -1]:
        assert f".{name} is " in refused(name, value)


@pytest.mark.parametrize(
    ("name", "edge"),
    [
        ("window", 2_000),
        ("max_in_flight", 1_500),
        ("max_nodes", 20_000),
        ("hold_starts_events", 50_000),
        ("hold_starts_bytes", 50_000_000),
    ],
)
def test_count_above_its_maximum_is_rejected(name: str, edge: int) -> None:
    assert made(name, edge)
    assert f"between 1 and {edge}" in refused(name, edge + 1)


@pytest.mark.parametrize("name", ["pull_poll_ms_default", "pull_empty_backoff_ms_max", "db_cancel_poll_ms"])
def test_poll_interval_of_zero_is_rejected(name: str) -> None:
    assert "between 1 and" in refused(name, 0)


@pytest.mark.parametrize("name", TEXTS)
def test_name_is_a_printable_text(name: str) -> None:
    for value in ["", " ", " a", "a\n", "a\x00b", 7, True, [], "x" * 201, "/_sys/q"]:
        assert "printable" in refused(name, value)


@pytest.mark.parametrize("name", ["roles", "worker_types"])
def test_roles_are_a_list_of_role_names(name: str) -> None:
    for value in [
        "extract",
        None,
        7,
        {"a": 1},
        {"a"},
        [7],
        [""],
        ["a b"],
        ["-a"],
        ["x" * 101],
        ["coordinator_fn"],
    ]:
        assert f".{name}" in refused(name, value)


def test_error_names_the_index_of_an_invalid_role() -> None:
    assert "WorkerConfig.roles[1] is 7; it must be a role" in refused("roles", ["a", 7])
    assert "WorkerConfig.roles[1] is 'a'; it must be a role that is not in the list yet" in refused(
        "roles", ["a", "a"]
    )
    assert "at least one role" in refused("roles", [])
    assert made("worker_types", [])
    assert made("roles", ("a", "b"))[0] == WorkerConfig(roles=["a", "b"])


def test_slots_are_whole_numbers_of_at_least_one() -> None:
    for value in [
        0,
        -1,
        10_001,
        1.5,
        "3",
        True,
        None,
        [],
        {"a": 0},
        {"a": "3"},
        {"a": True},
        {7: 1},
        {"a b": 1},
    ]:
        assert "WorkerConfig.max_concurrent" in refused("max_concurrent", value)


def test_memory_for_batches_is_a_positive_number() -> None:
    for value in [0, -1, "64", math.nan, math.inf, True, None]:
        assert "MiB above 0" in refused("max_buffered_mb", value)


def test_executor_is_one_of_two_values() -> None:
    assert "one of 'loop', 'process'; did you mean 'process'?" in refused("executor", "processes")
    for value in ("", None, 7, True):
        refused("executor", value)


def test_processes_are_a_count_or_chosen_by_the_worker() -> None:
    for value in [0, -1, 1.5, "2", True]:
        assert "none, or a whole number" in refused("process_workers", value)


def test_switch_is_true_or_false() -> None:
    for value in [0, 1, "true", "false", None]:
        assert "true or false" in refused("strict_input_adapters", value)


@pytest.mark.parametrize(
    "value",
    ["page.example", "ftp://page.example", "https://page/?a=1", "https://p/#a", "https://p/)b", 7, ""],
)
def test_address_of_the_page_is_a_plain_url(value: Any) -> None:
    with pytest.raises(ConfigError, match="must be none, or a URL without a user, a query or a fragment"):
        CoordinatorConfig(page_url=value)


def test_address_of_the_page_contains_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWKIT_PAGE_URL", "https://me:secret@page.example")
    with pytest.raises(ConfigError, match="^FLOWKIT_PAGE_URL: .*page_url is .hidden."):
        CoordinatorConfig.load()
    monkeypatch.setenv("FLOWKIT_PAGE_URL", "http://127.0.0.1:9655/")
    assert CoordinatorConfig.load().page_url == "http://127.0.0.1:9655/"


def test_brokers_are_hosts_with_ports() -> None:
    for value in ["", " ", "kafka:9092,", "PLAINTEXT://kafka:9092", "kafka:port", ["kafka:9092"], 7]:
        assert "host:port" in refused("kafka_bootstrap", value)


def test_several_brokers_are_accepted() -> None:
    for value in ["kafka", "a:1,b:2", "a:1, b:2", "[::1]:9092", "10.0.0.1:9092"]:
        assert made("kafka_bootstrap", value)


@pytest.mark.parametrize("name", TOPICS)
def test_topic_is_a_valid_kafka_topic(name: str) -> None:
    for value in ["", "a b", ".", 7, None, "x" * 250, "{typ}", "{type", "a.{}", "{type}.{type}"]:
        assert "a Kafka topic" in refused(name, value)


@pytest.mark.parametrize("name", ["topic_cmd_fmt", "topic_status_fmt"])
def test_topic_without_the_role_is_rejected(name: str) -> None:
    assert "{type} in place of the role" in refused(name, "cmd.v1")


def test_long_value_is_truncated_in_the_error() -> None:
    assert len(refused("queue", "x" * 10_000)) < 250
