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

NAME = "temporal-cli"
MODULE = "github.com/temporalio/cli"
RELEASE = "v1.9.1"
"""The release to download. Go cannot build it: its module replaces another one by a folder that Go does not fetch."""
BUILT = "v1.5.1"
"""The version that Go builds."""
# The driver of the built version, v1.34.1, can leave a statement open when a request is cancelled. The server then
# fails every request with "interrupted (9)". The release has the driver below.
SQLITE_DRIVER = "modernc.org/sqlite@v1.51.0"
REMEDY = (
    "put `temporal` on PATH, set FLOWKIT_TEMPORAL_BIN to its path, install Go 1.25 or newer, "
    "or set TEMPORAL_ADDRESS to a running server"
)
RELEASES = f"https://github.com/temporalio/cli/releases/download/{RELEASE}"
# SHA-256 of the archives, as in the release's own list; public projects pin the same values.
ARCHIVES = {
    "linux_amd64": "09a0326a51db84d02735e53542b9ebd8c4758daf47482a9ab0abce15844e60d5",
    "linux_arm64": "6c57c352d52fc3df34412376fd9ba6f74b7e3ace8e426e6cba8600156d36a145",
    "darwin_amd64": "48cdd6c84c56e27ae8e4d9a47052b89289a9c552dee029b49dd312c6fb72873f",
    "darwin_arm64": "41e0425378fcb4fb5766340b97435e20fe47bbff2d7bf644ec2d51f7662b7c56",
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
    """Return the path of the program in the cache, the downloaded one if it is there, or None."""
    folder = find_installed(NAME, RELEASE) or find_installed(NAME, _built_version())
    return str(folder / "temporal") if folder else None


def cached_version(program: str) -> str:
    """Return the version of a program in the cache."""
    return Path(program).parent.name.partition("-")[0]


def download_temporal() -> str:
    """Download the release into the cache unless it is there, and return the path of its program."""
    return str(install_once(NAME, RELEASE, _download) / "temporal")


def install_temporal() -> str:
    """Download the release, or else build a version with Go, unless it is cached; return the program's path.

    A file with a wrong hash is an error.
    """
    try:
        return download_temporal()
    except WrongHash:
        raise
    except InstallFailed as not_downloaded:
        try:
            return str(install_once(NAME, _built_version(), _build) / "temporal")
        except (NoNetwork, ProgramMissing) as not_built:
            causes = f"{_without_remedy(not_downloaded)}, and {_without_remedy(not_built)}"
            text = f"cannot install the Temporal CLI: {causes}; {REMEDY}"
            raise type(not_downloaded)(text) from not_built


def release_archive() -> ReleaseArchive | None:
    """Return the release for this platform, or None."""
    kind = f"{platform.system().lower()}_{_MACHINES.get(platform.machine().lower(), 'other')}"
    name = f"temporal_cli_{RELEASE.removeprefix('v')}_{kind}.tar.gz"
    return ReleaseArchive(f"{RELEASES}/{name}", ARCHIVES[kind]) if kind in ARCHIVES else None


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
        ("get", f"{MODULE}@{BUILT}", SQLITE_DRIVER),
        ("build", "-buildvcs=false", "-trimpath", "-o", str(program), f"{MODULE}/cmd/temporal"),
    )


def _built_version() -> str:
    return f"{BUILT}-{fingerprint(SQLITE_DRIVER)}"


def _without_remedy(error: InstallFailed) -> str:
    """Return the first part of the message, which says what is wrong."""
    return error.headline.partition(";")[0]
