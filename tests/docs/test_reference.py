"""The reference is complete: it documents every public name, and the table of contents lists every page."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML
from tests.docs.pages import DOCS, every_block

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

PUBLIC = [
    "flowkit",
    "flowkit.client",
    "flowkit.config",
    "flowkit.coordinator",
    "flowkit.coordinator.adapters",
    "flowkit.core.log",
    "flowkit.errors",
    "flowkit.flow",
    "flowkit.limits",
    "flowkit.plugin",
    "flowkit.schema",
    "flowkit.testing",
    "flowkit.worker",
    "flowkit.worker.artifacts",
    "flowkit.worker.context",
    "flowkit.worker.handlers.base",
    "flowkit.worker.input.pull_adapters",
]
INTERNAL = {
    "KeptLogs": "both classes of settings have its fields",
    "TaskClient": "a Coordinator uses it",
    "TaskCatalog": "a Coordinator uses it",
    "jsonable": "a Coordinator prepares its requests with it",
    "split_settings": "`flowkit up` splits the file of --config with it",
}
"""Public names that only FlowKit's own modules use, each with the reason."""

DIRECTIVE = re.compile(r"\.\. auto(module|class):: ([\w.]+)(?:\(\))?((?:\n   .*)*)")


def own_names(module: ModuleType) -> list[str]:
    """Return the public names of a module: `__all__`, else its functions, classes and constants."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("__")]
    found = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return [name for name, value in found.items() if is_defined_in(module, name, value)]


def is_defined_in(module: ModuleType, name: str, value: Any) -> bool:
    """Return whether the value is a class or function of this module, or one of its limits."""
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__module__ == module.__name__
    return name.isupper() and module.__name__ == "flowkit.limits"


def documented() -> Iterator[tuple[ModuleType, str]]:
    """Yield module and name of everything that the reference documents."""
    for block in every_block("{eval-rst}"):
        for kind, target, options in DIRECTIVE.findall(block.text):
            if kind == "class":
                home, _, name = target.rpartition(".")
                yield importlib.import_module(home), name
                continue
            module = importlib.import_module(target)
            listed, left_out = members(options, "members"), members(options, "exclude-members")
            yield from ((module, name) for name in listed or own_names(module) if name not in left_out)


def members(options: str, name: str) -> list[str]:
    """Return the names in an option of a directive."""
    found = re.search(rf":{name}:(.*)", options)
    return [each.strip() for each in found[1].split(",") if each.strip()] if found else []


EVERYTHING = list(documented())


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    module = importlib.import_module(name)
    documented_values = [getattr(home, each) for home, each in EVERYTHING]
    missing = [
        each
        for each in own_names(module)
        if each not in INTERNAL and not any(getattr(module, each) is value for value in documented_values)
    ]
    assert own_names(module)
    assert missing == []


def test_no_class_is_in_the_reference_twice() -> None:
    classes = [value for home, name in EVERYTHING if inspect.isclass(value := getattr(home, name))]
    assert len(classes) > 20
    assert {value.__qualname__ for value in classes if classes.count(value) > 1} == set()


def test_table_of_contents_lists_every_page_once() -> None:
    contents = YAML(typ="safe").load((DOCS / "_toc.yml").read_text(encoding="utf-8"))
    listed = [contents["root"], *pages_of(contents)]
    pages = {
        str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md") if is_page(page.parts)
    }
    assert sorted(listed) == sorted(pages)


def is_page(parts: tuple[str, ...]) -> bool:
    """Return whether a Markdown file belongs to the site."""
    return "screenshots" not in parts


def pages_of(entry: dict[str, Any]) -> Iterator[str]:
    """Yield all pages below an entry; a pattern yields the pages that match it."""
    for tree in entry.get("subtrees", []):
        for child in tree["entries"]:
            if pattern := child.get("glob"):
                yield from (
                    str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.glob(f"{pattern}.md")
                )
            else:
                yield child["file"]
            yield from pages_of(child)
