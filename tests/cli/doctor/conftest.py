"""Runs the checks of `flowkit doctor` on a machine without configured servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.cli.up.up_process import free_port_base

from flowkit.cli.doctor.checks import run_checks
from flowkit.cli.doctor.findings import Finding, Severity
from flowkit.cli.options import DEFAULT_MONGO_URL, DeploymentOptions

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings by name."""

    usable: bool
    findings: dict[str, Finding]

    def __getitem__(self, name: str) -> Finding:
        return self.findings[name]


Doctor = Callable[..., Report]


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Runs all checks, without configured servers unless `env` names them."""

    def check(*, port_base: int | None = None, **env: str) -> Report:
        for name in ("TEMPORAL_ADDRESS", "MONGO_URL", "KAFKA_BOOTSTRAP_SERVERS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**unreachable_temporal(tmp_path), **env}.items():
            monkeypatch.setenv(name, value)
        where = DeploymentOptions(mongo_url=env.get("MONGO_URL", DEFAULT_MONGO_URL))
        findings, usable = asyncio.run(run_checks(where, port_base or free_port_base()))
        assert [each.name for each in findings if each.state is not Severity.OK and not each.remedy] == []
        return Report(usable=usable, findings={finding.name: finding for finding in findings})

    return check


def unreachable_temporal(folder: Path) -> dict[str, str]:
    """Return an environment whose Temporal profile has an unreachable address instead of the default one."""
    profile = folder / "temporal.toml"
    profile.write_text('[profile.default]\naddress = "127.0.0.1:1"\n')
    return {"TEMPORAL_CONFIG_FILE": str(profile)}


def create_script(path: Path, script: str) -> Path:
    """Create a shell script that is executable."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path
