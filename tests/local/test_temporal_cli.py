"""Finding and installing the Temporal CLI."""

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.local.release_server import Releases

from flowkit.local import temporal as cli
from flowkit.local.errors import InstallFailed, NoNetwork, WrongHash
from flowkit.local.install import fingerprint

needs_go = pytest.mark.skipif(shutil.which("go") is None, reason="needs Go")


def test_flowkit_temporal_bin_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWKIT_TEMPORAL_BIN", "/no/such/program")
    with pytest.raises(InstallFailed, match="/no/such/program"):
        cli.temporal_cli()


def released(url: str, sha256: str) -> Callable[[], cli.ReleaseArchive]:
    """Return a finder of a release for this machine."""
    return lambda: cli.ReleaseArchive(url, sha256)


def test_the_release_is_downloaded_and_cached(
    cache: Path, releases: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = hashlib.sha256(Releases.archive).hexdigest()
    monkeypatch.setattr(cli, "release_archive", released(releases, sha256))
    program = cli.install_temporal()
    assert subprocess.run([program], capture_output=True, check=True).stdout == b"temporal version 1.9.1\n"
    assert [path.name for path in Path(program).parent.iterdir()] == ["temporal"]
    assert cli.cached_temporal() == program
    assert cli.cached_version(program) == "v1.9.1"


def test_the_release_has_priority_over_a_built_program(cache: Path) -> None:
    for version in (cli.RELEASE, f"{cli.BUILT}-{fingerprint(cli.SQLITE_DRIVER)}"):
        (cache / cli.NAME / version).mkdir(parents=True)
    program = cli.cached_temporal()
    assert program is not None
    assert cli.cached_version(program) == cli.RELEASE
    (cache / cli.NAME / cli.RELEASE).rmdir()
    program = cli.cached_temporal()
    assert program is not None
    assert cli.cached_version(program) == cli.BUILT


def test_a_release_with_another_hash_is_an_error_without_a_build(
    cache: Path, releases: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "release_archive", released(releases, "0" * 64))
    with pytest.raises(WrongHash):
        cli.install_temporal()
    assert cli.cached_temporal() is None


@pytest.mark.parametrize("kind", ["linux_amd64", "linux_arm64", "darwin_amd64", "darwin_arm64"])
def test_each_platform_has_a_release_with_a_hash(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system, machine = kind.split("_")
    monkeypatch.setattr("platform.system", lambda: system.capitalize())
    monkeypatch.setattr("platform.machine", lambda: {"amd64": "x86_64", "arm64": "aarch64"}[machine])
    release = cli.release_archive()
    assert release is not None
    assert release.url.endswith(f"/v1.9.1/temporal_cli_1.9.1_{kind}.tar.gz")
    assert len(bytes.fromhex(release.sha256)) == 32


def test_without_network_and_go_the_error_names_the_remedies(
    tmp_path: Path, cache: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLOWKIT_TEMPORAL_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoNetwork) as caught:
        cli.temporal_cli()
    text = str(caught.value)
    assert "\n" not in text
    for part in (
        "FLOWKIT_TEMPORAL_BIN",
        "TEMPORAL_ADDRESS",
        "cannot reach github.com",
        "`go` is not on PATH",
    ):
        assert part in text


@needs_go
def test_without_network_the_error_reports_download_and_build(cache: Path, no_network: None) -> None:
    with pytest.raises(NoNetwork) as caught:
        cli.install_temporal()
    for part in ("cannot reach github.com", "`go` cannot reach the network", "refused"):
        assert part in str(caught.value)
    assert cli.cached_temporal() is None
