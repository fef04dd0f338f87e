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


def script_exports(environment: Mapping[str, str], exports: Mapping[str, str]) -> list[str]:
    """Return the `export` lines for scripts: always the servers, and other variables that are not default."""
    return [
        f"export {name}={shlex.quote(value)}"
        for name, value in exports.items()
        if name in SERVERS or value != environment.get(name, _default(name))
    ]


def terminal_exports(environment: Mapping[str, str], exports: Mapping[str, str]) -> list[str]:
    """Return the `export` lines that another terminal needs: only variables that are not default there."""
    changed = {
        name: value
        for name, value in exports.items()
        if value != environment.get(name) and (name in environment or value not in _default_values(name))
    }
    return [f"export {name}={shlex.quote(value)}" for name, value in changed.items()]


def _default_values(name: str) -> set[str]:
    return _DEFAULTS.get(name, {"default"})


def _default(name: str) -> str:
    return next(iter(_default_values(name)))
