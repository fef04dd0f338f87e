"""Admission: a durable queue in front of tasks and outside executors, with priorities and limits for each user."""

from flowkit.server import check_packages


def check_installed() -> None:
    """Raise ConfigError if a package is not installed that the HTTP API needs."""
    check_packages("the HTTP API of admission", extra="admission", needs=("prometheus_client",))
