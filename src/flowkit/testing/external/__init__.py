"""An external worker for tests, written from the protocol alone. It shares no code with the rest of FlowKit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowkit.testing.external.handlers import Batch, EachBatch, Final, Result
    from flowkit.testing.external.journal import Entry
    from flowkit.testing.external.misbehavior import Malformed, Misbehavior
    from flowkit.testing.external.runs import Run
    from flowkit.testing.external.settings import Clock, ExternalSettings
    from flowkit.testing.external.worker import ExternalWorker

_HOMES = {
    "Batch": "handlers",
    "Clock": "settings",
    "EachBatch": "handlers",
    "Entry": "journal",
    "ExternalSettings": "settings",
    "ExternalWorker": "worker",
    "Final": "handlers",
    "Malformed": "misbehavior",
    "Misbehavior": "misbehavior",
    "Result": "handlers",
    "Run": "runs",
}

__all__ = [
    "Batch",
    "Clock",
    "EachBatch",
    "Entry",
    "ExternalSettings",
    "ExternalWorker",
    "Final",
    "Malformed",
    "Misbehavior",
    "Result",
    "Run",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: only ExternalWorker needs a Kafka client."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
