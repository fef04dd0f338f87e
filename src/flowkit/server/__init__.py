"""The HTTP server for all front doors of FlowKit. Importing it raises ConfigError without the extra `server`."""

from importlib.util import find_spec

from flowkit.errors import ConfigError

_PACKAGES = (
    *("aiohttp", "cryptography", "prometheus_client", "ruamel"),
    *("starlette", "uvicorn", "websockets"),
)


def check_packages() -> None:
    """Raise ConfigError if a package of the extra `server` is not installed."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the HTTP server needs {', '.join(missing)}: run pip install 'flowkit-temporal[server]'"
        )


check_packages()
