"""Where the tests find Prometheus and promtool: on PATH, in FlowKit's cache, or in the packages of Debian."""

from __future__ import annotations

import functools
import shutil
from typing import TYPE_CHECKING

import pytest

from flowkit.local.errors import DevServerError
from flowkit.local.install import cache_folder, install_once, run_command

if TYPE_CHECKING:
    from pathlib import Path

_UNPACKED = "usr/bin"


@functools.cache
def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`. Skip the test where neither PATH nor Debian has it."""
    if found := shutil.which(name):
        return found
    if not shutil.which("apt-get") and not (cache_folder() / "prometheus").is_dir():
        pytest.skip(f"`{name}` is not on PATH, and there is no apt-get to download it; install Prometheus")
    try:
        return str(install_once("prometheus", "debian", _download) / _UNPACKED / name)
    except DevServerError as error:
        pytest.skip(f"`{name}` is not on PATH, and Debian's package cannot be downloaded: {error}")


def _download(folder: Path) -> None:
    """Unpack Debian's package into a folder. This needs no rights, installs nothing, and starts no service."""
    run_command(["apt-get", "download", "prometheus"], folder=folder)
    [package] = folder.glob("prometheus_*.deb")
    run_command(["dpkg-deb", "--extract", str(package), str(folder)], folder=folder)
    package.unlink()
