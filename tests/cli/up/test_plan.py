"""The plan of `flowkit up`: parts and ports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowkit.cli.up.plan import Ports, UpOptions, UpPlan, make_plan, parse_external
from flowkit.errors import ConfigError


def parts(*only: str, handlers: tuple[str, ...] = (), **environment: str) -> set[str]:
    """Return the parts that would start. A server counts only if the plan starts it."""
    plan = make_plan(UpOptions(only=only, handlers=handlers), environment)
    kinds = {"temporal": plan.starts_temporal, "mongo": plan.starts_mongo}
    assert not plan.uses_kafka
    return {str(part) for part in plan.parts if kinds.get(part, True)}


def test_without_options_everything_starts_but_a_worker_needs_handlers() -> None:
    assert parts() == {"temporal", "mongo", "engine"}
    assert parts(handlers=("m:H",)) == {"temporal", "mongo", "engine", "worker"}


def test_only_accepts_commas_and_repetition() -> None:
    assert parts("temporal,mongo") == parts("temporal", "mongo") == {"temporal", "mongo"}
    assert parts("worker", handlers=("m:H",)) == {"worker"}


def test_servers_in_the_environment_are_not_started() -> None:
    assert parts(TEMPORAL_ADDRESS="t:1") == {"mongo", "engine"}
    assert parts(TEMPORAL_ADDRESS="t:1", MONGO_URL="mongodb://m") == {"engine"}
    assert parts(TEMPORAL_ADDRESS="", MONGO_URL="") == {"temporal", "mongo", "engine"}, (
        "an empty variable counts as not set"
    )


@pytest.mark.parametrize(
    ("roles", "environment", "uses", "starts"),
    [
        ((), {}, False, False),
        ((), {"KAFKA_BOOTSTRAP_SERVERS": "k:9092"}, False, False),
        (("indexer",), {}, True, True),
        (("indexer",), {"KAFKA_BOOTSTRAP_SERVERS": ""}, True, True),
        (("indexer",), {"KAFKA_BOOTSTRAP_SERVERS": "k:9092"}, True, False),
    ],
)
def test_a_broker_starts_only_for_external_roles_and_if_none_is_configured(
    roles: tuple[str, ...], environment: dict[str, str], uses: bool, starts: bool
) -> None:
    plan = make_plan(UpOptions(external=roles), environment)
    assert (plan.uses_kafka, plan.starts_kafka) == (uses, starts)


def test_external_accepts_commas_and_repetition() -> None:
    assert parse_external(["indexer, grouper", "analyzer"]) == ("indexer", "grouper", "analyzer")


@pytest.mark.parametrize("names", [["in dexer"], ["indexer", "indexer"], ["coordinator_fn"]])
def test_external_accepts_only_roles_and_each_of_them_once(names: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"--external '{names[-1]}' is not allowed"):
        parse_external(names)


def test_consecutive_ports_follow_from_the_base() -> None:
    base, default = (replace(Ports.from_base(each), products={}) for each in (5000, None))
    assert base == Ports(temporal=5000, ui=5001, mongo=5002, temporal_http=5003, kafka=5004, health=5009)
    assert default == Ports(temporal=7233, ui=8233, mongo=27017, temporal_http=None, kafka=9092)


def test_only_without_engine_and_bridge_says_that_no_bridge_starts() -> None:
    def plan(*only: str) -> UpPlan:
        return make_plan(UpOptions(only=only, external=("indexer",)), {})

    assert [plan(part).starts_bridge for part in ("engine", "bridge", "mongo")] == [True, True, False]
    assert plan("mongo").notes == ["no bridge starts, because --only names neither engine nor bridge"]
    assert plan("bridge").notes == []
    with pytest.raises(ConfigError, match="a bridge needs roles"):
        make_plan(UpOptions(only=("bridge",)), {})


def test_each_process_has_a_documented_port_for_its_health_and_metrics() -> None:
    names = ("engine", "bridge", "gateway", "admission", "page", "worker-1", "worker-3", "other")
    ports = [Ports.from_base(None).health_port(name) for name in names]
    assert ports == [9656, 9657, 9658, 9659, 9660, 9661, 9663, None]
