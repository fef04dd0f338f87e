"""The environment in which other programs find what `flowkit up` runs, and the `export` lines for it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from flowkit.cli.options import DEFAULT_DATABASE, DEFAULT_MONGO_URL
from flowkit.config import DEFAULT_QUEUE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.cli.up.plan import Plan

DEFAULT_TEMPORAL_ADDRESS = "localhost:7233"

_USUAL = {
    "TEMPORAL_ADDRESS": {DEFAULT_TEMPORAL_ADDRESS, "127.0.0.1:7233"},
    "MONGO_URL": {DEFAULT_MONGO_URL, "mongodb://127.0.0.1:27017"},
    "MONGO_DATABASE": {DEFAULT_DATABASE},
    "FLOWKIT_QUEUE": {DEFAULT_QUEUE},
}


def exported(plan: Plan, temporal_address: str | None, mongo_url: str | None) -> dict[str, str]:
    """The environment in which other programs find what runs: servers, queue and database."""
    found: dict[str, str | None] = {
        "TEMPORAL_ADDRESS": temporal_address if plan.uses_temporal else None,
        "MONGO_URL": mongo_url if plan.uses_mongo else None,
    }
    if plan.starts_temporal:
        found["TEMPORAL_NAMESPACE"] = "default"
    found |= {"MONGO_DATABASE": plan.wanted.database, "FLOWKIT_QUEUE": plan.wanted.queue}
    return {name: value for name, value in found.items() if value}


def told_to_programs(environment: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """The `export` lines for scripts: the servers always, all else that is not what they would assume."""
    return [
        f"export {name}={shlex.quote(value)}"
        for name, value in found.items()
        if name in ("TEMPORAL_ADDRESS", "MONGO_URL") or value != environment.get(name, _assumed(name))
    ]


def told_to_people(environment: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """The `export` lines that another terminal like this one needs: none while everything is where it is assumed."""
    needed = {
        name: value
        for name, value in found.items()
        if value != environment.get(name) and (name in environment or value not in _usual(name))
    }
    return [f"export {name}={shlex.quote(value)}" for name, value in needed.items()]


def _usual(name: str) -> set[str]:
    return _USUAL.get(name, {"default"})


def _assumed(name: str) -> str:
    return next(iter(_usual(name)))
