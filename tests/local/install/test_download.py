"""Downloads and their hashes."""

import hashlib
from pathlib import Path

import pytest
from tests.local.release_server import Releases

from flowkit.local.errors import NoNetwork, WrongHash
from flowkit.local.install import fetch


def test_a_download_with_the_expected_hash_is_kept(tmp_path: Path, releases: str) -> None:
    fetch(releases, tmp_path / "file", sha256=hashlib.sha256(Releases.archive).hexdigest())
    assert (tmp_path / "file").read_bytes() == Releases.archive


def test_a_download_with_another_hash_is_deleted_and_reported_with_both_hashes(
    tmp_path: Path, releases: str
) -> None:
    found = hashlib.sha256(Releases.archive).hexdigest()
    with pytest.raises(WrongHash) as caught:
        fetch(releases, tmp_path / "temporal.tar.gz", sha256="0" * 64)
    for part in ("temporal.tar.gz", found, "0" * 64, releases, "do not use it"):
        assert part in str(caught.value)
    assert not (tmp_path / "temporal.tar.gz").exists()


def test_an_unreachable_host_is_reported(tmp_path: Path, no_network: None) -> None:
    with pytest.raises(NoNetwork, match=r"cannot reach releases.example .*refused.*; check the connection"):
        fetch("https://releases.example/file", tmp_path / "file", sha256="")
    assert list(tmp_path.iterdir()) == []
