"""The gateway: flows and jobs by JSON-RPC, whose nodes remote supervisors run."""

from flowkit.server import check_packages


def check_installed() -> None:
    """Raise ConfigError if a package is not installed that the gateway needs."""
    check_packages("the gateway", extra="gateway", needs=("aiohttp", "cryptography"))
