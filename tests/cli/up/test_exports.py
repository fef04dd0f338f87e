"""The `export` lines of `flowkit up` for scripts and for terminals."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from flowkit.cli.up.plan import (
    SERVERS,
    UpOptions,
    UpPlan,
    make_exports,
    make_plan,
    script_exports,
    terminal_exports,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


def plan(queue: str = "flowkit", database: str = "flowkit") -> UpPlan:
    """Return a plan that starts everything."""
    return make_plan(UpOptions(queue=queue, database=database), {})


ELSEWHERE = {"TEMPORAL_ADDRESS": "127.0.0.1:5000", "MONGO_URL": "mongodb://127.0.0.1:5002"}

DEFAULTS = {"TEMPORAL_ADDRESS": "127.0.0.1:7233", "MONGO_URL": "mongodb://127.0.0.1:27017"}


@pytest.mark.parametrize(
    ("environment", "servers", "options", "terminal"),
    [
        ({}, DEFAULTS, {}, []),
        ({}, ELSEWHERE, {}, [f"export {name}={value}" for name, value in ELSEWHERE.items()]),
        (ELSEWHERE, ELSEWHERE, {}, []),
        (
            {},
            DEFAULTS,
            {"queue": "q", "database": "d"},
            ["export MONGO_DATABASE=d", "export FLOWKIT_QUEUE=q"],
        ),
        ({"FLOWKIT_QUEUE": "q"}, DEFAULTS, {"queue": "q"}, []),
        ({"TEMPORAL_NAMESPACE": "other"}, DEFAULTS, {}, ["export TEMPORAL_NAMESPACE=default"]),
    ],
)
def test_a_terminal_gets_only_values_that_it_would_not_use_by_default(
    environment: Mapping[str, str], servers: dict[str, str], options: dict[str, str], terminal: list[str]
) -> None:
    everything = plan(**options)
    found = make_exports(everything, servers["TEMPORAL_ADDRESS"], servers["MONGO_URL"])
    assert terminal_exports(everything, environment, found) == terminal


def test_programs_get_the_broker_if_external_workers_serve_roles() -> None:
    options = UpOptions(external=("indexer",))
    bridged = make_plan(options, {})
    found = make_exports(bridged, "t:1", "mongodb://m", "127.0.0.1:9092")
    line = "export KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092"
    assert line in script_exports(bridged, {}, found)
    assert line in terminal_exports(bridged, {}, found)
    assert "KAFKA_BOOTSTRAP_SERVERS" not in make_exports(plan(), "t:1", "mongodb://m", "127.0.0.1:9092")


def test_a_script_always_gets_the_servers_and_can_evaluate_the_lines() -> None:
    url = "mongodb://127.0.0.1:5002/?a=1&b=2"
    everything = plan(queue="my queue")
    lines = script_exports(everything, {}, make_exports(everything, "127.0.0.1:5000", url))
    assert lines[0] == "export TEMPORAL_ADDRESS=127.0.0.1:5000"
    script = "\n".join([*lines, 'printf "%s|%s" "$MONGO_URL" "$FLOWKIT_QUEUE"'])
    completed = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True)
    assert completed.stdout == f"{url}|my queue"


def test_the_address_of_a_server_that_up_did_not_start_is_not_printed() -> None:
    """It may contain a password, and the script that evaluates the lines already has it."""
    environment = {
        "MONGO_URL": "mongodb://me:s3cret@db.example",
        "KAFKA_BOOTSTRAP_SERVERS": "broker.example:9092",
        "TEMPORAL_ADDRESS": "user:s3cret@temporal.example:7233",
    }
    external = make_plan(UpOptions(queue="mine", external=("indexer",)), environment)
    found = make_exports(external, *(environment[name] for name in SERVERS))
    lines = script_exports(external, environment, found)
    assert lines == ["export FLOWKIT_QUEUE=mine", *(f"# {name}: keep your value" for name in SERVERS)]
    assert terminal_exports(external, {}, found) == ["export FLOWKIT_QUEUE=mine"]
