"""The page: a live view of tasks and their graphs in a browser, with the actions of operators."""

from flowkit.server import check_packages


def check_installed() -> None:
    """Raise ConfigError if a package is not installed that the page needs."""
    check_packages("the page", extra="page")
