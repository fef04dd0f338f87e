"""The HTTP server of all front doors of FlowKit, and its tokens. The tokens need no extra package, the server does."""

from collections.abc import Collection
from importlib.util import find_spec

from flowkit.errors import ConfigError

PACKAGES = ("starlette", "uvicorn", "websockets")
"""What the server itself imports beside the packages that FlowKit always needs."""


def check_packages(product: str, *, extra: str, needs: Collection[str] = ()) -> None:
    """Raise ConfigError if a package is not installed that the server, or a product with this extra on it, needs."""
    missing = [name for name in sorted({*PACKAGES, *needs}) if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{product} needs {', '.join(missing)}: run pip install 'flowkit-temporal[{extra}]'"
        )
