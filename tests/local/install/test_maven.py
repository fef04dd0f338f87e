"""Jars from Maven repositories."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flowkit.local.errors import DevServerError, DiskFull, NoNetwork, WrongHash
from flowkit.local.install import Jars, cache_size

NO_SPACE = r"""[ERROR] Failed to execute goal org.apache.maven.plugins:maven-dependency-plugin:2.8:copy-dependencies \
(default-cli) on project thing: Error copying artifact from /root/.m2/repository/thing-1.jar to /cache/thing-1.jar: \
No space left on device -> [Help 1]
[ERROR] [Help 1] http://cwiki.apache.org/confluence/display/MAVEN/MojoExecutionException""".replace(
    "\\\n", ""
)
UNREACHABLE = r"""[ERROR] Plugin org.apache.maven.plugins:maven-dependency-plugin:2.8 or one of its dependencies could not \
be resolved: Could not transfer artifact org.apache.maven.plugins:maven-dependency-plugin:pom:2.8 from/to central: \
transfer failed for https://repo.maven.apache.org/maven2/maven-dependency-plugin-2.8.pom: Connect to 127.0.0.1:1 \
[/127.0.0.1] failed: Connection refused -> [Help 1]
[ERROR] [Help 1] http://cwiki.apache.org/confluence/display/MAVEN/PluginResolutionException""".replace(
    "\\\n", ""
)
"""What Maven printed, shortened."""


@pytest.fixture
def maven(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a fake Maven with this script on PATH; the cache is empty."""

    def create(script: str) -> None:
        program = tmp_path / "bin" / "mvn"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return create


def test_a_jar_with_another_hash_is_reported_with_both_hashes(maven: Callable[[str], None]) -> None:
    maven("for last; do :; done\nprintf other > ${last#*=}/thing-1.jar")
    other = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(WrongHash) as caught:
        Jars("thing", "1", "group:thing:1", sha256={"thing-1.jar": "0" * 64}).folder()
    for part in ("thing-1.jar", other, "0" * 64, "~/.m2/repository"):
        assert part in str(caught.value)
    with pytest.raises(WrongHash, match="more-1.jar has SHA-256 none"):
        Jars("thing", "1", "group:thing:1", sha256={"more-1.jar": "0" * 64, "thing-1.jar": other}).folder()
    assert Jars("thing", "1", "group:thing:1", sha256={"thing-1.jar": other}).folder().is_dir()


@pytest.mark.parametrize(
    ("printed", "error", "text"),
    [
        (
            NO_SPACE,
            DiskFull,
            r"^cannot install thing: no space left on the disk that holds .*; free some space$",
        ),
        (
            UNREACHABLE,
            NoNetwork,
            r"^`mvn` cannot reach .*Connection refused\); check the connection, or configure",
        ),
    ],
    ids=["full disk", "no network"],
)
def test_a_failure_is_reported_in_one_line_and_leaves_nothing_behind(
    maven: Callable[[str], None], printed: str, error: type[DevServerError], text: str
) -> None:
    """Nightly tests let Maven itself fail."""
    maven(f"printf '\\033[0m%s\\n\\033[0m' '{printed}'; exit 1")
    with pytest.raises(error, match=text) as caught:
        Jars("thing", "1", "group:thing:1", sha256={}).folder()
    assert "\n" not in str(caught.value)
    assert cache_size() == 0
