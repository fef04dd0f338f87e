"""The environment variables with which other programs reach the servers of `flowkit up`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from flowkit.cli.options import DEFAULT_DATABASE, DEFAULT_MONGO_URL
from flowkit.config import DEFAULT_QUEUE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.cli.up.plan import Plan

DEFAULT_TEMPORAL_ADDRESS = "localhost:7233"
SERVERS = ("TEMPORAL_ADDRESS", "MONGO_URL", "KAFKA_BOOTSTRAP_SERVERS")

_DEFAULTS = {
    "TEMPORAL_ADDRESS": {DEFAULT_TEMPORAL_ADDRESS, "127.0.0.1:7233"},
    "MONGO_URL": {DEFAULT_MONGO_URL, "mongodb://127.0.0.1:27017"},
    "MONGO_DATABASE": {DEFAULT_DATABASE},
    "FLOWKIT_QUEUE": {DEFAULT_QUEUE},
}


def make_exports(
    plan: Plan, temporal_address: str | None, mongo_url: str | None, kafka_bootstrap: str | None = None
) -> dict[str, str]:
    """Return the variables that name servers, task queue and database."""
    exports: dict[str, str | None] = {
        "TEMPORAL_ADDRESS": temporal_address if plan.uses_temporal else None,
        "MONGO_URL": mongo_url if plan.uses_mongo else None,
        "KAFKA_BOOTSTRAP_SERVERS": kafka_bootstrap if plan.uses_kafka else None,
    }
    if plan.starts_temporal:
        exports["TEMPORAL_NAMESPACE"] = "default"
    exports |= {"MONGO_DATABASE": plan.options.database, "FLOWKIT_QUEUE": plan.options.queue}
    return {name: value for name, value in exports.items() if value}


def script_exports(plan: Plan, environment: Mapping[str, str], exports: Mapping[str, str]) -> list[str]:
    """Return the lines for scripts: `export` lines for the servers that `up` starts and for values that are not default.

    The address of another server may contain a password, so a comment takes its place. Comments come last: a shell
    that evaluates the lines as one line ignores everything after the first.
    """
    own = own_servers(plan)
    lines = [
        _export(name, value)
        for name, value in exports.items()
        if name in own or (name not in SERVERS and value != environment.get(name, _default(name)))
    ]
    return lines + [f"# {name}: keep your value" for name in exports if name in SERVERS and name not in own]


def terminal_exports(plan: Plan, environment: Mapping[str, str], exports: Mapping[str, str]) -> list[str]:
    """Return the `export` lines that another terminal needs: only variables that are not default there."""
    own = own_servers(plan)
    changed = {
        name: value
        for name, value in exports.items()
        if value != environment.get(name)
        and (name in environment or value not in _default_values(name))
        and (name in own or name not in SERVERS)
    }
    return [_export(name, value) for name, value in changed.items()]


def own_servers(plan: Plan) -> set[str]:
    """Return the variables of the servers that `up` starts."""
    starts = (plan.starts_temporal, plan.starts_mongo, plan.starts_kafka)
    return {name for name, started in zip(SERVERS, starts, strict=True) if started}


def _export(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)}"


def _default_values(name: str) -> set[str]:
    return _DEFAULTS.get(name, {"default"})


def _default(name: str) -> str:
    return next(iter(_default_values(name)))
