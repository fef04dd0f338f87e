"""The gateway: flows and jobs by JSON-RPC, whose nodes remote supervisors run."""

from typing import Final

from flowkit.server import check_packages

DEFAULT_MYCELIUM_URL: Final = "http://127.0.0.1:8990"
"""The API of a Mycelium node on this machine."""


def check_installed() -> None:
    """Raise ConfigError if a package is not installed that the gateway needs."""
    check_packages("the gateway", extra="gateway", needs=("aiohttp", "cryptography"))
