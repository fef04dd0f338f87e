"""New projects: validate the name, render the templates, write the folder."""

from __future__ import annotations

import keyword
import re
import sys
from dataclasses import dataclass
from importlib import resources, util
from itertools import chain
from pathlib import Path, PurePosixPath
from string import Template
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from flowkit.cli.errors import add_remedy
from flowkit.core.version import __version__
from flowkit.errors import ConfigError
from flowkit.text import did_you_mean, printed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable

_NAME_PATTERN = re.compile(r"[a-z](?:[a-z0-9_-]*[a-z0-9])?", re.ASCII | re.IGNORECASE)
_NAME_RULE = "use letters, digits, '-' and '_'; start with a letter and end with a letter or digit"
_PROJECT_FOLDERS = {"tests", "deploy", "wheels"}
_SUFFIX = ".tmpl"
_PART_SUFFIX = ".part"
_PARTS = ("about", "targets", "services")
_HERE = PurePosixPath()
_COMMON = "common"


@dataclass(frozen=True, slots=True)
class ProjectTemplate:
    """What one template adds to the files that all projects have."""

    summary: str
    """One line, without a full stop, that says what its pipeline shows."""
    roles: tuple[str, ...]
    """The roles that a worker of FlowKit runs."""
    external: tuple[str, ...] = ()
    """The roles that external workers run."""


TEMPLATES = {
    "batch": ProjectTemplate(
        "a source, a node that processes its batches, and one that adds them up", ("pages", "words", "count")
    ),
    "streaming": ProjectTemplate(
        "nodes that start on the first batch of the one before", ("orders", "price", "book")
    ),
    "map": ProjectTemplate(
        "a node that processes the items of a list in the params, several at the same time",
        ("fetch", "rate", "rank"),
    ),
    "external": ProjectTemplate(
        "a node that an external worker runs, through Kafka; with the worker", ("pages", "report"), ("count",)
    ),
    "schedule": ProjectTemplate(
        "a schedule that starts a task every night, for the day that has ended",
        ("orders", "amounts", "report"),
    ),
    "approval": ProjectTemplate("a node that waits until a person approves or rejects", ("draft", "send")),
}
"""The templates by name. Each has a folder beside `common`, with the files in which its projects differ."""
DEFAULT_TEMPLATE = "batch"


class _Template(Template):
    """A template with `@@name` placeholders, because shell, make and Compose use `$`."""

    delimiter = "@@"


@dataclass(frozen=True, slots=True)
class Project:
    """A new project."""

    name: str
    template: str = DEFAULT_TEMPLATE

    @property
    def package(self) -> str:
        """Name of its Python package."""
        return self.name.replace("-", "_")

    @property
    def image(self) -> str:
        """Name of its container image and Compose project: lower case, without repeated separators."""
        return re.sub(r"[-_]+", "-", self.name.lower())

    def files(self) -> dict[PurePosixPath, str]:
        """Return the text of each file by its path in the project."""
        folder = resources.files("flowkit.cli.project") / "templates"
        own = folder / self.template
        values = self._values()
        values |= {name: _Template(text).substitute(values) for name, text in _parts(own).items()}
        return {
            self._target_path(path): _Template(template.read_text(encoding="utf-8")).substitute(values)
            for path, template in chain(_templates(folder / _COMMON), _templates(own))
        }

    def _values(self) -> dict[str, str]:
        template = TEMPLATES[self.template]
        return {
            "name": self.name,
            "package": self.package,
            "image": self.image,
            "version": __version__,
            "summary": template.summary,
            "roles": ", ".join(template.roles),
            "external": ",".join(template.external),
            "up_options": "".join(f" --external {role}" for role in template.external),
        }

    def _target_path(self, path: PurePosixPath) -> PurePosixPath:
        """Return the path in the project. Templates have other names, so that other tools ignore them."""
        parts = [self.package if part == "PACKAGE" else part for part in path.parts]
        parts[-1] = parts[-1].removesuffix(_SUFFIX)
        if parts[-1].startswith("dot-"):
            parts[-1] = f".{parts[-1].removeprefix('dot-')}"
        return PurePosixPath(*parts)


def _templates(
    folder: Traversable, prefix: PurePosixPath = _HERE
) -> Iterator[tuple[PurePosixPath, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        path = prefix / entry.name
        if entry.is_dir():
            yield from _templates(entry, path)
        elif entry.name.endswith(_SUFFIX):
            yield path, entry


def _parts(folder: Traversable) -> dict[str, str]:
    """Return the texts that a template adds to files of all projects, by their placeholders."""
    files = ((name, folder / f"{name}{_PART_SUFFIX}") for name in _PARTS)
    return {name: file.read_text(encoding="utf-8") if file.is_file() else "" for name, file in files}


def new_project(name: str, template: str = DEFAULT_TEMPLATE) -> Project:
    """Return the project with that name. Raises ConfigError if the name or the template is not valid."""
    if template not in TEMPLATES:
        raise add_remedy(ConfigError(f"there is no template {printed(template)}"), _choose_template(template))
    if problem := _name_problem(name):
        raise add_remedy(ConfigError(f"NAME {name!r} is not a valid project name: {problem}"), _NAME_RULE)
    project = Project(name, template)
    if conflict := _name_conflict(project.package):
        problem = f"NAME {name!r} gives the Python package {project.package!r}, which is {conflict}"
        raise add_remedy(ConfigError(problem), "choose another name")
    return project


def _choose_template(given: str) -> str:
    """Return a remedy with a line for each template."""
    guess = did_you_mean(given, TEMPLATES, otherwise="choose one of these")
    return "\n".join([guess, *describe_templates()])


def describe_templates() -> list[str]:
    """Return a line for each template, with its name and summary."""
    width = max(map(len, TEMPLATES))
    return [f"  {name:<{width}}  {template.summary}" for name, template in TEMPLATES.items()]


def _name_problem(name: str) -> str:
    """Return what is wrong with the name, or an empty string."""
    if _NAME_PATTERN.fullmatch(name):
        return ""
    if not name:
        return "it is empty"
    invalid = dict.fromkeys(repr(each) for each in name if not re.fullmatch(r"[A-Za-z0-9_-]", each))
    if invalid:
        return f"it contains {', '.join(invalid)}"
    if not name[0].isalpha():
        return f"it starts with {name[0]!r}"
    return f"it ends with {name[-1]!r}"


def _name_conflict(package: str) -> str:
    """Return what already has this name, or an empty string."""
    if keyword.iskeyword(package):
        return "a Python keyword"
    if package.lower() in _PROJECT_FOLDERS:
        return "another folder of the project"
    if package in sys.stdlib_module_names:
        return "a module of the standard library"
    found = util.find_spec(package)
    return "an installed package" if found is not None and found.origin else ""


def write_project(project: Project, folder: Path) -> list[PurePosixPath]:
    """Write the project into `folder`, which must be empty or not exist, and return its files.

    Writes all files or none. Raises ConfigError if the folder cannot be used.
    """
    try:
        _check_empty(folder)
        return _write(project.files(), folder)
    except OSError as error:
        problem = ConfigError(f"cannot write to folder {str(folder)!r}: {_error_text(error)}")
        raise add_remedy(problem, "choose another folder with --dir") from error


def _error_text(error: OSError) -> str:
    at = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{at}"


def _check_empty(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise add_remedy(ConfigError(f"{str(folder)!r} is a file"), "choose a folder with --dir")
    if folder.is_dir() and any(folder.iterdir()):
        problem = ConfigError(f"folder {str(folder)!r} is not empty, so nothing was written")
        raise add_remedy(problem, "choose another name, or another folder with --dir")


def _write(files: dict[PurePosixPath, str], folder: Path) -> list[PurePosixPath]:
    """Write to a temporary folder on the same disk, then rename it, or its entries if `folder` exists."""
    exists = folder.is_dir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".flowkit-init-", dir=folder if exists else folder.parent) as temporary:
        staged = Path(temporary) / "project"
        for path, text in files.items():
            (staged / path).parent.mkdir(parents=True, exist_ok=True)
            (staged / path).write_text(text, encoding="utf-8", newline="\n")
        if not exists:
            staged.rename(folder)
            return list(files)
        for entry in staged.iterdir():
            entry.rename(folder / entry.name)
    return list(files)
