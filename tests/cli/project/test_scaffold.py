"""Names of new projects, and the templates in the wheel."""

from __future__ import annotations

import tomllib
from glob import glob

import pytest
from tests.cli.project.new_project import files
from tests.integration.harness import ROOT

from flowkit.cli.project.scaffold import TEMPLATES, new_project


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


def test_every_template_has_a_folder_and_only_the_files_in_which_it_differs() -> None:
    folder = ROOT / "src/flowkit/cli/project/templates"
    common = files(folder / "common")
    own = {each.name: files(each) for each in folder.iterdir() if each.name != "common"}
    assert own.keys() == TEMPLATES.keys()
    for name, found in own.items():
        assert {"PACKAGE/pipeline.py.tmpl", "tests/test_pipeline.py.tmpl"} <= found, name
        assert not found & common, name


@pytest.mark.parametrize("template", TEMPLATES)
def test_no_placeholder_remains(template: str) -> None:
    written = new_project("shop", template).files()
    assert [path for path, text in written.items() if "@@" in text] == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_processes_of_a_new_project_can_serve_their_metrics(template: str) -> None:
    """Without the extra, `/metrics` of their health ports has the status 404."""
    written = {str(path): text for path, text in new_project("shop", template).files().items()}
    [required] = tomllib.loads(written["pyproject.toml"])["project"]["dependencies"]
    assert required.startswith("flowkit-temporal[observe]>=")
