"""Checks of this machine: packages, programs, ports, disk space, limits."""

from __future__ import annotations

import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from flowkit.cli.doctor.findings import Finding, bad, note, ok
from flowkit.local.container import find_engine
from flowkit.local.install import cache_folder, cache_size
from flowkit.local.ports import is_free, listening_process

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

PACKAGES = ("temporalio", "motor", "pymongo", "aiokafka")
TIMEOUT_SEC = 3.0
MIN_JAVA_VERSION = 17
MIN_OPEN_FILES = 1_024
GB = 1 << 30
MIN_FREE_BYTES, RECOMMENDED_FREE_BYTES = GB // 4, GB

PROGRAMS = ("java", "javac", "mvn", "go")
_PURPOSES = {
    "java": "run the stand-in for MongoDB",
    "javac": "compile the stand-in for MongoDB",
    "mvn": "download the stand-in for MongoDB",
    "go": "build the Temporal server if github.com is unreachable",
}
_REMEDIES = {
    "java": "install a JDK 17 or newer, or MongoDB, or set MONGO_URL",
    "javac": "install a JDK 17 or newer, or MongoDB, or set MONGO_URL",
    "mvn": "install Maven, or MongoDB, or set MONGO_URL",
    "go": "install Go 1.24 or newer, or the Temporal CLI, or set TEMPORAL_ADDRESS",
}
_VERSION_COMMANDS = {"java": ("-version",), "javac": ("-version",), "go": ("version",)}
"""Without Maven: printing its version takes as long as all other checks together."""


def check_packages() -> list[Finding]:
    """Check Python and the packages that connect to the servers."""
    findings = [ok("python", f"{platform.python_version()}, {sys.executable}")]
    for name in PACKAGES:
        try:
            findings.append(ok(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            findings.append(bad(name, "not installed", f"python -m pip install {name}"))
    return findings


def check_program(name: str, required: Collection[str]) -> Finding:
    """Check a program that local servers may need; `required` names those that they do need."""
    path = shutil.which(name)
    if path is None:
        if name in required:
            return bad(name, f"not on PATH, but needed to {_PURPOSES[name]}", _REMEDIES[name])
        return ok(name, "not on PATH; not needed here")
    version = _read_version(name, path)
    major = re.search(r"\d+", version)
    if name in ("java", "javac") and major and int(major[0]) < MIN_JAVA_VERSION:
        old = f"{version} is too old ({path})"
        return bad(name, old, _REMEDIES[name]) if name in required else note(name, old, _REMEDIES[name])
    return ok(name, f"{version}, {path}" if version else path)


def _read_version(name: str, path: str) -> str:
    """Return the first version number that the program prints, or an empty string."""
    arguments = _VERSION_COMMANDS.get(name)
    if arguments is None:
        return ""
    try:
        completed = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SEC,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\d+[\w.]*", completed.stdout)
    return found[0] if found else ""


def check_container_engine() -> Finding:
    """Check whether a container engine is running."""
    engine = find_engine()
    if engine is None:
        return ok("containers", "neither Docker nor Podman is running; not needed")
    return ok("containers", f"{engine.name} is running{' (rootless)' if engine.rootless else ''}")


def check_ports(ports: Mapping[str, int]) -> list[Finding]:
    """Check whether the ports that `flowkit up` would use are free; name the process that uses one."""
    return [_check_port(name, port) for name, port in ports.items()]


def _check_port(name: str, port: int) -> Finding:
    if is_free(port):
        return ok(f"port {port}", f"free for {name}")
    found = f"needed for {name}, but in use by {listening_process(port)}"
    return note(f"port {port}", found, "`flowkit up --port-base N` uses N to N+8")


def check_cache() -> Finding:
    """Report the cache folder and its size."""
    return ok("cache", f"{cache_folder()}, {_format_size(cache_size())}")


def check_disk() -> list[Finding]:
    """Check the free space for programs and for temporary data; one finding if both are on one disk."""
    folders = {"programs": cache_folder(), "temporary data": Path(tempfile.gettempdir())}
    usages = {name: shutil.disk_usage(_find_existing(path)) for name, path in folders.items()}
    if len(set(usages.values())) == 1:
        return [_check_space("disk", usages["programs"].free)]
    return [_check_space(f"disk for {name}", usage.free) for name, usage in usages.items()]


def _check_space(name: str, free: int) -> Finding:
    found = f"{_format_size(free)} free"
    if free >= RECOMMENDED_FREE_BYTES:
        return ok(name, found)
    return (bad if free < MIN_FREE_BYTES else note)(
        name, found, "free some space: the servers and their logs need about 1 GB"
    )


def _find_existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())


def check_open_files() -> Finding:
    """Check how many files and connections a process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= MIN_OPEN_FILES:
        return ok("open files", f"{'unlimited' if limit == resource.RLIM_INFINITY else limit} per process")
    return note("open files", f"{limit} per process", f"ulimit -n {4 * MIN_OPEN_FILES}")


def _format_size(count: int) -> str:
    return f"{count / GB:,.1f} GB" if count >= GB else f"{count / (1 << 20):,.0f} MB"
