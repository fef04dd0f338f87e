"""The cache of installed programs, and how FlowKit fills it: pinned downloads, Java programs from Maven,
other programs."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from filelock import FileLock
from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from flowkit.local.errors import (
    DevServerError,
    DiskFull,
    InstallFailed,
    NoNetwork,
    ProgramMissing,
    WrongHash,
    log_tail,
    translate_write_errors,
)
from flowkit.local.process_guard import guarded
from flowkit.text import truncate_start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

LINE_EVERY_SECONDS = 20.0


@contextmanager
def report_progress(what: str) -> Iterator[None]:
    """Show on stderr that `what` is being installed, for how long, and whether it succeeded.

    A terminal shows a spinner with the elapsed time. A log file gets a line at the start, one every 20
    seconds and one at the end.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    started = time.monotonic()
    try:
        with _spinner(console, what) if console.is_terminal else _lines(console, what):
            yield
    except BaseException:
        console.print(f"{what}: installation failed after {_elapsed(started)}")
        raise
    console.print(f"{what}: installed in {_elapsed(started)}")


@contextmanager
def _spinner(console: Console, what: str) -> Iterator[None]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        shown.add_task(f"{what}: installing")
        yield


@contextmanager
def _lines(console: Console, what: str) -> Iterator[None]:
    started, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(LINE_EVERY_SECONDS):
            console.print(f"{what}: still installing after {_elapsed(started)}")

    console.print(f"{what}: installing")
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()


def _elapsed(started: float) -> str:
    return f"{time.monotonic() - started:.1f} s"


_MAX_CHARS = 200
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_DISK_FULL = re.compile(r"no space left on device|disk is full|disk full|not enough space", re.IGNORECASE)
_NO_NETWORK = re.compile(
    r"no such host|unknown host|unknownhost|name or service not known|name resolution|network is unreachable"
    r"|no route to host|connection refused|connect(?:ion)? timed out|connection reset|i/o timeout|proxyconnect"
    r"|transfer failed for|could not transfer",
    re.IGNORECASE,
)


def mentions_full_disk(output: str) -> bool:
    """Whether the output reports a full disk."""
    return _DISK_FULL.search(output) is not None


def mentions_no_network(output: str) -> bool:
    """Whether the output reports an unreachable host or a lost connection."""
    return _NO_NETWORK.search(output) is not None


def relevant_line(output: str) -> str:
    """Return the line that names the cause, or else the last line; only the end of a long line."""
    plain = _COLORS.sub("", output)
    lines = [
        " ".join(line.split()).removesuffix(" -> [Help 1]") for line in plain.splitlines() if line.strip()
    ]
    relevant = [line for line in lines if mentions_no_network(line) or mentions_full_disk(line)]
    line = relevant[0] if relevant else lines[-1] if lines else "no output"
    return truncate_start(line, _MAX_CHARS)


def require_program(name: str, *, remedy: str) -> str:
    """Return the path of a program on PATH. Raises ProgramMissing with the remedy if it is missing."""
    found = shutil.which(name)
    if found is None:
        raise ProgramMissing(name, remedy=remedy)
    return found


def run_command(command: Sequence[str], *, folder: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command in a folder without output; it stops if this process exits.

    Raises InstallFailed if the command fails, or DiskFull if the disk is full.
    """
    # The guard stops the command when this pipe closes, for example on Ctrl-C.
    with subprocess.Popen(
        guarded(command),
        cwd=folder,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        code = process.wait()
    if code != 0:
        raise _failure(command, code, output, folder)


def _failure(command: Sequence[str], code: int, output: str, folder: Path) -> DevServerError:
    name = Path(command[0]).name
    if mentions_full_disk(output):
        return DiskFull(what=f"`{name}` failed", folder=folder)
    if mentions_no_network(output):
        line = relevant_line(output)
        return NoNetwork(
            f"`{name}` cannot reach the network ({line}); check the connection, or configure its proxy"
        )
    return InstallFailed(f"`{' '.join(command)}` failed with code {code}:", log_lines=log_tail(output))


def cache_folder() -> Path:
    """Return the folder of installed programs: `FLOWKIT_CACHE`, or else a folder in the user's cache."""
    configured = os.environ.get("FLOWKIT_CACHE")
    return Path(configured).expanduser().resolve() if configured else user_cache_path("flowkit")


def fingerprint(recipe: str) -> str:
    """Return a short hash of a build recipe. In a version, it makes a changed recipe install again."""
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def install_once(name: str, version: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of `name` at `version`; `build(empty_folder)` fills it if it does not exist.

    If several processes call at the same time, one builds and the others wait. The folder gets its final
    name only after `build` has returned, so an interrupted installation starts again from the beginning.
    """
    folder = cache_folder() / name / version
    if not folder.is_dir():
        what = f"cannot install {name}"
        try:
            with translate_write_errors(cache_folder(), what=what):
                _install(folder, build)
        except DiskFull as full:
            raise DiskFull(what=what, folder=cache_folder()) from full
    return folder


def find_installed(name: str, version: str) -> Path | None:
    """Return the folder of `name` at `version` if it is installed."""
    folder = cache_folder() / name / version
    return folder if folder.is_dir() else None


def cache_size() -> int:
    """Return the size of the cache in bytes."""
    files = (path for path in cache_folder().rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)


def _install(folder: Path, build: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with report_progress(f"{folder.parent.name} {folder.name}"):
                _build_atomically(folder, build)


def _build_atomically(folder: Path, build: Callable[[Path], None]) -> None:
    partial = Path(f"{folder}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(folder)


TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 1 << 20


def fetch(url: str, file: Path, *, sha256: str) -> None:
    """Download a file. Raises NoNetwork or WrongHash, and leaves no file then."""
    try:
        response_context = urllib.request.build_opener().open(url, timeout=TIMEOUT_SECONDS)
        with response_context as response, file.open("wb") as target:
            digest = _copy_and_hash(response, target)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        file.unlink(missing_ok=True)
        reason = getattr(error, "reason", None) or error
        host = urllib.parse.urlsplit(url).hostname
        raise NoNetwork(
            f"cannot reach {host} ({reason}); check the connection, or set HTTPS_PROXY"
        ) from error
    if digest != sha256:
        file.unlink()
        remedy = f"{url} returned a different file, so do not use it"
        raise WrongHash(file=file.name, expected=sha256, found=digest, remedy=remedy)


def _copy_and_hash(response: IO[bytes], target: IO[bytes]) -> str:
    """Copy the response and return the SHA-256 of its content."""
    digest = hashlib.sha256()
    while chunk := response.read(CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


def verify_hashes(folder: Path, expected: dict[str, str], *, remedy: str) -> None:
    """Raise WrongHash for the first jar that is missing, unexpected or has another hash."""
    hashes = {path.name: _sha256_of(path) for path in folder.glob("*.jar")}
    for name in sorted(hashes.keys() | expected.keys()):
        if hashes.get(name) != expected.get(name):
            raise WrongHash(
                file=name,
                expected=expected.get(name, "none (the file is not expected)"),
                found=hashes.get(name, "none (the file is missing)"),
                remedy=remedy,
            )


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


REMEDY = "install a JDK 17 or newer and Maven"
WRONG_HASH_REMEDY = (
    "delete it from Maven's local repository (~/.m2/repository) and try again; if that does not help, "
    "your Maven uses a remote repository whose file differs from the one on Maven Central"
)
# Maven itself and this plugin are not pinned: they come from the machine and the user's Maven settings.
COPY_DEPENDENCIES = "org.apache.maven.plugins:maven-dependency-plugin:2.8:copy-dependencies"
POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>flowkit.dev</groupId>
  <artifactId>{name}</artifactId>
  <version>{version}</version>
  <dependencies>{dependencies}
  </dependencies>
</project>
"""
DEPENDENCY = """
    <dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"""


class Jars:
    """Maven artifacts ("group:artifact:version") and their dependencies, each jar pinned by its SHA-256."""

    def __init__(self, name: str, version: str, *artifacts: str, sha256: Mapping[str, str]) -> None:
        dependencies = "".join(DEPENDENCY.format(*artifact.split(":")) for artifact in artifacts)
        self._name = name
        self._sha256 = dict(sha256)
        self._pom = POM.format(name=name, version=version, dependencies=dependencies)
        self._version = f"{version}-{fingerprint(self._pom + repr(sorted(self._sha256.items())))}"

    def is_cached(self) -> bool:
        """Whether the jars are in the cache."""
        return find_installed(self._name, self._version) is not None

    def folder(self) -> Path:
        """Return the folder of the jars; download and verify them first if they are not in the cache."""
        return install_once(self._name, self._version, self._fetch)

    def _fetch(self, folder: Path) -> None:
        (folder / "pom.xml").write_text(self._pom, encoding="utf-8")
        mvn = require_program("mvn", remedy=REMEDY)
        run_command([mvn, "-q", "-B", COPY_DEPENDENCIES, f"-DoutputDirectory={folder}"], folder=folder)
        verify_hashes(folder, self._sha256, remedy=WRONG_HASH_REMEDY)
