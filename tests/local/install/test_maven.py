"""Jars from Maven repositories."""

import hashlib
import os
from pathlib import Path

import pytest

from flowkit.local.errors import WrongHash
from flowkit.local.install import Jars


def test_a_jar_with_another_hash_is_reported_with_both_hashes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fake Maven that copies a wrong jar."""
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
