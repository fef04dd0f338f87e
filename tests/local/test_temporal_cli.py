"""Programs are installed once, whole and with the expected hash; what stands in the way is told with its remedy."""

import hashlib
import http.server
import io
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.local.processes import stdout_of

from flowkit.local import mongo_stand_in as stand_in
from flowkit.local import temporal_cli as cli
from flowkit.local.errors import DiskFull, InstallFailed, NoNetwork, ProgramMissing, WrongHash
from flowkit.local.install.cache import cache_size, find_installed, install_once
from flowkit.local.install.commands import run_command
from flowkit.local.install.download import fetch
from flowkit.local.install.maven import Jars

NOBODY = "http://127.0.0.1:1"
"""A proxy that refuses every connection."""

needs_maven = pytest.mark.skipif(shutil.which("mvn") is None, reason="needs Maven")
needs_go = pytest.mark.skipif(shutil.which("go") is None, reason="needs Go")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("FLOWKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No way out for Python, Go and Maven, and nothing of theirs on this disk."""
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, NOBODY)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOMODCACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("GOPROXY", "https://proxy.golang.org")
    maven = f"-Dmaven.repo.local={tmp_path / 'repository'}"
    monkeypatch.setenv("MAVEN_OPTS", f"{maven} -Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=1")


def path_with(folder: Path, *names: str) -> str:
    """A PATH on which there are these programs and no others."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(Path(found).resolve())
    return str(folder)


# --- once -------------------------------------------------------------------------------------------------------

INSTALLER = """
import sys, threading
from pathlib import Path
from flowkit.local.install.cache import install_once

who, journal, gate = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])

def build(folder):
    (folder / f"by-{who}").touch()
    with journal.open("a") as log:
        log.write(who)
    print("building", flush=True)
    while not gate.exists():
        threading.Event().wait(0.01)

print("calling", flush=True)
install_once("thing", "1", build)
print("done", flush=True)
"""


@pytest.fixture
def installer(
    tmp_path: Path, cache: Path, python: Callable[..., subprocess.Popen[str]]
) -> Callable[[str], subprocess.Popen[str]]:
    """Installs the same thing as the others, until the gate opens."""
    return lambda who: python("-c", INSTALLER, who, str(tmp_path / "journal"), str(tmp_path / "gate"))


def test_of_two_callers_one_installs_and_the_other_waits(
    tmp_path: Path, installer: Callable[[str], subprocess.Popen[str]]
) -> None:
    first = installer("a")
    assert [stdout_of(first).readline() for _ in range(2)] == ["calling\n", "building\n"]
    second = installer("b")
    assert stdout_of(second).readline() == "calling\n"
    assert not (tmp_path / "cache/thing/1").exists()

    (tmp_path / "gate").touch()

    assert stdout_of(second).read() == "done\n"
    assert stdout_of(first).read() == "done\n"
    assert (tmp_path / "journal").read_text() == "a"


def test_a_killed_install_is_done_again_from_the_start(
    tmp_path: Path, installer: Callable[[str], subprocess.Popen[str]]
) -> None:
    first = installer("a")
    assert [stdout_of(first).readline() for _ in range(2)] == ["calling\n", "building\n"]
    first.kill()
    first.wait()
    (tmp_path / "gate").touch()

    second = installer("b")

    assert second.wait(timeout=20) == 0
    assert [path.name for path in (tmp_path / "cache/thing/1").iterdir()] == ["by-b"]


def test_a_failed_install_leaves_nothing_to_be_found(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise InstallFailed("no network")

    with pytest.raises(InstallFailed):
        install_once("thing", "1", fail)
    assert find_installed("thing", "1") is None
    assert cache_size() == 0
    assert list(install_once("thing", "1", lambda folder: None).iterdir()) == []


# --- finding the Temporal CLI -----------------------------------------------------------------------------------


def test_a_named_temporal_cli_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWKIT_TEMPORAL_BIN", "/no/such/program")
    with pytest.raises(InstallFailed, match="/no/such/program"):
        cli.temporal_cli()


# --- downloads --------------------------------------------------------------------------------------------------

CONTENT = b"#!/bin/sh\necho temporal version 1.5.1\n"


def packed(content: bytes) -> bytes:
    """A release archive with that program."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in (("LICENSE", b"free"), ("temporal", content)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


class Releases(http.server.BaseHTTPRequestHandler):
    """Serves one archive, whatever is asked for."""

    archive = packed(CONTENT)

    def do_GET(self) -> None:
        """Answers it."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.archive)))
        self.end_headers()
        self.wfile.write(self.archive)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of releases, at an address without a proxy before it."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Releases) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/temporal.tar.gz"
        server.shutdown()
        thread.join()


def test_a_download_is_kept_if_its_hash_is_the_expected_one(tmp_path: Path, releases: str) -> None:
    fetch(releases, tmp_path / "file", sha256=hashlib.sha256(Releases.archive).hexdigest())
    assert (tmp_path / "file").read_bytes() == Releases.archive


def test_a_download_with_another_hash_is_refused_with_both_hashes(tmp_path: Path, releases: str) -> None:
    found = hashlib.sha256(Releases.archive).hexdigest()
    with pytest.raises(WrongHash) as caught:
        fetch(releases, tmp_path / "temporal.tar.gz", sha256="0" * 64)
    for part in ("temporal.tar.gz", found, "0" * 64, releases, "do not use it"):
        assert part in str(caught.value)
    assert not (tmp_path / "temporal.tar.gz").exists()


def test_a_host_that_does_not_answer_is_named(tmp_path: Path, no_network: None) -> None:
    with pytest.raises(NoNetwork, match=r"cannot reach releases.example .*refused.*; check the connection"):
        fetch("https://releases.example/file", tmp_path / "file", sha256="")
    assert list(tmp_path.iterdir()) == []


def released(url: str, sha256: str) -> Callable[[], cli.ReleaseArchive]:
    """A release for this machine."""
    return lambda: cli.ReleaseArchive(url, sha256)


def test_the_temporal_cli_comes_from_its_release(
    cache: Path, releases: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = hashlib.sha256(Releases.archive).hexdigest()
    monkeypatch.setattr(cli, "release_archive", released(releases, sha256))
    program = cli.install_temporal()
    assert subprocess.run([program], capture_output=True, check=True).stdout == b"temporal version 1.5.1\n"
    assert [path.name for path in Path(program).parent.iterdir()] == ["temporal"]
    assert cli.cached_temporal() == program


def test_a_release_with_another_hash_is_not_built_around(
    cache: Path, releases: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "release_archive", released(releases, "0" * 64))
    with pytest.raises(WrongHash):
        cli.install_temporal()
    assert cli.cached_temporal() is None


@pytest.mark.parametrize("kind", ["linux_amd64", "linux_arm64", "darwin_amd64", "darwin_arm64"])
def test_every_kind_of_machine_has_a_release_with_a_hash(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system, machine = kind.split("_")
    monkeypatch.setattr("platform.system", lambda: system.capitalize())
    monkeypatch.setattr("platform.machine", lambda: {"amd64": "x86_64", "arm64": "aarch64"}[machine])
    release = cli.release_archive()
    assert release is not None
    assert release.url.endswith(f"/v1.5.1/temporal_cli_1.5.1_{kind}.tar.gz")
    assert len(bytes.fromhex(release.sha256)) == 32


# --- what stands in the way -------------------------------------------------------------------------------------


def test_without_any_way_to_a_temporal_cli_the_error_names_the_remedies(
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
def test_without_a_network_go_is_tried_and_both_are_told(cache: Path, no_network: None) -> None:
    with pytest.raises(NoNetwork) as caught:
        cli.install_temporal()
    for part in ("cannot reach github.com", "`go` cannot reach the network", "refused"):
        assert part in str(caught.value)
    assert find_installed(cli.NAME, cli.VERSION) is None


@pytest.mark.parametrize(
    ("there", "missing"), [((), "java"), (("java",), "mvn"), (("java", "mvn"), "javac")], ids=str
)
def test_a_missing_program_of_the_stand_in_is_named_with_the_remedies(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], missing: str
) -> None:
    if any(shutil.which(name) is None for name in there):
        pytest.skip(f"needs {there}")
    if missing == "javac":
        monkeypatch.setattr(stand_in.JARS, "folder", lambda: tmp_path)
    monkeypatch.setenv("PATH", path_with(tmp_path / "bin", *there))
    with pytest.raises(
        ProgramMissing, match=rf"`{missing}` is not on PATH; install .*a JDK 17 or newer and Maven"
    ):
        stand_in.stand_in_classpath()


@needs_maven
@pytest.mark.slow
def test_without_a_network_maven_is_told_to_be_the_one_that_needs_it(cache: Path, no_network: None) -> None:
    with pytest.raises(NoNetwork, match=r"`mvn` cannot reach .*refused\); check the connection") as caught:
        stand_in.stand_in_classpath()
    assert "\n" not in str(caught.value)
    assert not stand_in.stand_in_installed()


def test_a_jar_with_another_hash_is_refused_with_both_hashes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a Maven that fetches one jar, because the real one fetches what is right."""
    maven = tmp_path / "bin" / "mvn"
    maven.parent.mkdir()
    maven.write_text("#!/bin/sh\nfor last; do :; done\nprintf other > ${last#*=}/thing-1.jar\n")
    maven.chmod(0o755)
    monkeypatch.setenv("PATH", f"{maven.parent}:{os.environ['PATH']}")
    other = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(WrongHash) as caught:
        Jars("thing", "1", "group:thing:1", sha256={"thing-1.jar": "0" * 64}).folder()
    for part in ("thing-1.jar", other, "0" * 64, "~/.m2/repository"):
        assert part in str(caught.value)
    with pytest.raises(WrongHash, match="more-1.jar has SHA-256 none"):
        Jars("thing", "1", "group:thing:1", sha256={"more-1.jar": "0" * 64, "thing-1.jar": other}).folder()
    assert Jars("thing", "1", "group:thing:1", sha256={"thing-1.jar": other}).folder().is_dir()


def test_another_failure_of_a_program_shows_the_end_of_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(InstallFailed) as caught:
        run_command(
            [sys.executable, "-c", "print('what', 'went wrong'); raise SystemExit(4)"], folder=tmp_path
        )
    assert caught.value.headline.endswith("failed with code 4:")
    assert caught.value.log_lines == ["what went wrong"]


TINY = """
mount -t tmpfs -o size=1m tmpfs "$1" || exit 77
FLOWKIT_CACHE="$1" exec "$2" -c 'from flowkit.local.mongo_stand_in import JARS; JARS.folder()'
"""


@needs_maven
@pytest.mark.slow
def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """On a disk of one megabyte; the jars have six."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare")
    inside = ["sh", "-c", TINY, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(
        [unshare, "--mount", "--map-root-user", *inside], capture_output=True, text=True, check=False
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("may not mount a disk of its own here")
    if NoNetwork.__name__ in done.stderr:
        pytest.skip("needs the jars, or a network")
    assert (
        f"{DiskFull.__name__}: cannot install mongo-java-server: no space left on the disk that holds {tmp_path}"
        in done.stderr
    )
