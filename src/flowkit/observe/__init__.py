"""Metrics of the processes of FlowKit for Prometheus, and the lines that handlers log, kept with their attempts.

A process of the command line serves its metrics at `/metrics` of its health port. A program that embeds a `Coordinator`
or a `Worker` calls `start_metrics` before it connects to Temporal, and serves what `render` returns.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from flowkit.observe.process import MeasuredProcess

__all__ = ["CONTENT_TYPE", "check_installed", "start_metrics"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of the text that `render` returns."""


def is_installed() -> bool:
    """Return whether the packages are installed that metrics need."""
    return find_spec("prometheus_client") is not None


def check_installed() -> None:
    """Raise ConfigError if a package is not installed that metrics need."""
    if not is_installed():
        raise ConfigError("metrics need prometheus_client: run pip install 'flowkit-temporal[observe]'")


def start_metrics(kind: str, queue: str, sdk: bool = True) -> MeasuredProcess:
    """Measure this process from now on. A second call starts anew, at zero.

    `kind` and `queue` become labels of `flowkit_info`, for example `worker` and the task queue. Without `sdk`, the
    runtimes of `create_runtime` measure nothing. Raise ConfigError if the extra `observe` is not installed.
    """
    check_installed()
    from flowkit.observe.process import MeasuredProcess

    return MeasuredProcess.start(kind, queue, sdk)
