"""Find or install the `temporal` program."""

import os
import platform
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowkit.local.errors import InstallFailed, NoNetwork, ProgramMissing, WrongHash
from flowkit.local.install.cache import find_installed, fingerprint, install_once
from flowkit.local.install.commands import require_program, run_command
from flowkit.local.install.download import fetch

NAME, VERSION = "temporal-cli", "v1.5.1"
MODULE = "github.com/temporalio/cli"
# The driver of that version, v1.34.1, can leave a statement open when a request is cancelled. The server then
# fails every request with "interrupted (9)". Temporal CLI 1.9 has the driver below.
SQLITE_DRIVER = "modernc.org/sqlite@v1.51.0"
REMEDY = (
    "put `temporal` on PATH, set FLOWKIT_TEMPORAL_BIN to its path, install Go 1.25 or newer, "
    "or set TEMPORAL_ADDRESS to a running server"
)
RELEASES = f"https://github.com/temporalio/cli/releases/download/{VERSION}"
# SHA-256 of the archives of that release; public package recipes (hermit-packages, Nix) pin the same
# values.
ARCHIVES = {
    "linux_amd64": "ddc95e08b0b076efd4ea9733a3f488eb7d2be875f8834e616cd2a37358b4852d",
    "linux_arm64": "bd1b0db9f18b051026de8bf6cc1505f2510f14bbb7a8b9a4a91fff46c77454f5",
    "darwin_amd64": "bbb73e2a31135abe50a1f1cdb35030c42961df618e8ce9c60ae89f201540c5d9",
    "darwin_arm64": "cca01b7ea35ad56e2a328d9ae596bf716bd22313ef63c7a761c88354457c2415",
}
_MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True, slots=True)
class ReleaseArchive:
    """A release of the Temporal CLI for one platform."""

    url: str
    sha256: str


def temporal_cli() -> str:
    """Return the path of a `temporal` program, and install it if there is none.

    Looks at `FLOWKIT_TEMPORAL_BIN`, PATH and the cache, in this order. Otherwise downloads the program,
    or builds it with Go, which takes minutes. Raises InstallFailed if neither is possible.
    """
    return temporal_on_path() or cached_temporal() or install_temporal()


def temporal_on_path() -> str | None:
    """Return `FLOWKIT_TEMPORAL_BIN` or `temporal` on PATH. InstallFailed if the former is no program."""
    named = os.environ.get("FLOWKIT_TEMPORAL_BIN")
    if named and shutil.which(named) is None:
        raise InstallFailed(
            f"FLOWKIT_TEMPORAL_BIN is {named!r}, which is not an executable program; correct or unset it"
        )
    return named or shutil.which("temporal")


def cached_temporal() -> str | None:
    """Return the path of the program in the cache, or None."""
    folder = find_installed(NAME, _cache_version())
    return str(folder / "temporal") if folder else None


def install_temporal() -> str:
    """Install the program into the cache unless it is there, and return its path."""
    return str(install_once(NAME, _cache_version(), _install) / "temporal")


def release_archive() -> ReleaseArchive | None:
    """Return the release for this platform, or None."""
    kind = f"{platform.system().lower()}_{_MACHINES.get(platform.machine().lower(), 'other')}"
    name = f"temporal_cli_{VERSION.removeprefix('v')}_{kind}.tar.gz"
    return ReleaseArchive(f"{RELEASES}/{name}", ARCHIVES[kind]) if kind in ARCHIVES else None


def _install(folder: Path) -> None:
    """Download the release, or build it if there is no download. A file with a wrong hash is an error."""
    try:
        _download(folder)
    except WrongHash:
        raise
    except InstallFailed as not_downloaded:
        try:
            _build(folder)
        except (NoNetwork, ProgramMissing) as not_built:
            causes = f"{_without_remedy(not_downloaded)}, and {_without_remedy(not_built)}"
            text = f"cannot install the Temporal CLI: {causes}; {REMEDY}"
            raise type(not_downloaded)(text) from not_built


def _download(folder: Path) -> None:
    release = release_archive()
    if release is None:
        raise InstallFailed(f"there is no release for {platform.system()} on {platform.machine()}")
    packed = folder / "temporal.tar.gz"
    fetch(release.url, packed, sha256=release.sha256)
    with tarfile.open(packed) as archived, (folder / "temporal").open("wb") as program_file:
        member = archived.extractfile("temporal")
        assert member is not None
        shutil.copyfileobj(member, program_file)
    (folder / "temporal").chmod(0o755)
    packed.unlink()


def _build(folder: Path) -> None:
    """Build the program with a newer SQLite driver than its own, which `go install` cannot do."""
    go = require_program("go", remedy="install it to build the Temporal CLI")
    module = folder / "module"
    module.mkdir()
    environment = {**os.environ, "GOFLAGS": "-mod=mod", "GOWORK": "off"}
    for arguments in _go_commands(folder / "temporal"):
        run_command([go, *arguments], folder=module, env=environment)
    shutil.rmtree(module)


def _go_commands(program: Path) -> Sequence[Sequence[str]]:
    # Go's checksum database pins the modules, unless the user's Go settings disable it.
    return (
        ("mod", "init", "flowkit/temporal-cli"),
        ("get", f"{MODULE}@{VERSION}", SQLITE_DRIVER),
        ("build", "-buildvcs=false", "-trimpath", "-o", str(program), f"{MODULE}/cmd/temporal"),
    )


def _cache_version() -> str:
    return f"{VERSION}-{fingerprint(SQLITE_DRIVER)}"


def _without_remedy(error: InstallFailed) -> str:
    """Return the first part of the message, which says what is wrong."""
    return error.headline.partition(";")[0]
