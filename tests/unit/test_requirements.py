"""FlowKit can be installed only with releases of its libraries that have no known vulnerabilities."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
ALL = [Requirement(line) for lines in (PROJECT["dependencies"], *EXTRAS.values()) for line in lines]

LAST_VULNERABLE = {
    "aiohttp": "3.13.3",
    "cryptography": "46.0.6",
    "filelock": "3.20.2",
    "h11": "0.15.0",
    "protobuf": "6.33.4",
    "pymongo": "4.20.0",
    "starlette": "0.49.0",
}
"""The last release of each library with a published vulnerability, which later ones do not have."""


@pytest.mark.parametrize("name", LAST_VULNERABLE)
def test_no_requirement_accepts_a_release_with_a_known_vulnerability(name: str) -> None:
    found = [each for each in ALL if each.name == name]
    assert found
    assert [str(each) for each in found if each.specifier.contains(LAST_VULNERABLE[name])] == []


def test_every_extra_with_uvicorn_limits_what_reads_its_requests() -> None:
    servers = {extra for extra, lines in EXTRAS.items() if any("uvicorn" in line for line in lines)}
    assert servers == {extra for extra, lines in EXTRAS.items() if any("h11" in line for line in lines)}
    assert servers
