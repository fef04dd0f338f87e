"""Names of new projects, and the templates in the wheel."""

from __future__ import annotations

import tomllib
from glob import glob

from tests.cli.project.new_project import files
from tests.integration.harness import ROOT

from flowkit.cli.project.scaffold import new_project


def test_package_and_image_names_follow_from_the_project_name() -> None:
    project = new_project("Big_-_Name-2")
    assert (project.package, project.image) == ("Big___Name_2", "big-name-2")


def test_the_wheel_contains_every_template() -> None:
    """Expands the patterns like setuptools; `make wheel` tests the wheel itself."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-data"
    ]
    package, folder = ROOT / "src/flowkit", "cli/project/templates"
    packed = {path for pattern in data["flowkit"] for path in glob(pattern, root_dir=package, recursive=True)}
    assert {f"{folder}/{path}" for path in files(package / folder)} <= packed
