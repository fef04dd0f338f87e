"""Installing the stand-in for MongoDB."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flowkit.local import mongo as stand_in
from flowkit.local.errors import DiskFull, NoNetwork, ProgramMissing

needs_maven = pytest.mark.skipif(shutil.which("mvn") is None, reason="needs Maven")


def path_with(folder: Path, *names: str) -> str:
    """Return a PATH with only these programs."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(Path(found).resolve())
    return str(folder)


@pytest.mark.parametrize(
    ("there", "missing"), [((), "java"), (("java",), "mvn"), (("java", "mvn"), "javac")], ids=str
)
def test_a_missing_program_is_reported_with_the_remedy(
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
@pytest.mark.nightly
def test_a_missing_network_is_reported_for_maven(cache: Path, no_network: None) -> None:
    with pytest.raises(NoNetwork, match=r"`mvn` cannot reach .*refused\); check the connection") as caught:
        stand_in.stand_in_classpath()
    assert "\n" not in str(caught.value)
    assert not stand_in.stand_in_installed()


TINY = """
mount -t tmpfs -o size=1m tmpfs "$1" || exit 77
FLOWKIT_CACHE="$1" exec "$2" -c 'from flowkit.local.mongo import JARS; JARS.folder()'
"""


@needs_maven
@pytest.mark.nightly
def test_a_full_disk_is_reported_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """On a disk of 1 MB; the jars need 6 MB."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare")
    inside = ["sh", "-c", TINY, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(
        [unshare, "--mount", "--map-root-user", *inside], capture_output=True, text=True, check=False
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("not permitted to mount a disk")
    if NoNetwork.__name__ in done.stderr:
        pytest.skip("needs the jars, or a network")
    assert (
        f"{DiskFull.__name__}: cannot install mongo-java-server: no space left on the disk that holds {tmp_path}"
        in done.stderr
    )
