"""The pages match the code: they describe every setting, limit, error code and field, with its value."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
from dataclasses import MISSING, Field, fields
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import typer
from tests.docs.pages import DOCS, PAGES, ROOT

from reference import parts_of

if TYPE_CHECKING:
    from pathlib import Path

import flowkit
from flowkit import CoordinatorConfig, WorkerConfig, limits, reason_codes
from flowkit.activities.builtin_functions import METHODS, CoordinatorAdapters, default_adapters
from flowkit.cli.app import app
from flowkit.cli.project.scaffold import TEMPLATES
from flowkit.config import _Topics
from flowkit.errors import FlowKitError
from flowkit.graph import input_adapters
from flowkit.graph.fields import IO, NODE, RETRY_POLICY
from flowkit.graph.submission import parse_input
from flowkit.graph.validation import parse_graph
from flowkit.local.temporal import DYNAMIC_CONFIG
from flowkit.models import (
    RUNTIME_KEYS,
    NodeStatus,
    OnNodeFailure,
    RetryPolicy,
    SkipReason,
    TaskStatus,
    temporal_names,
)
from flowkit.testing import memory_database

SOURCES = [ROOT / "src/flowkit", *(ROOT / name for name in ("activities", "adapters", "bridge", "workflows"))]
PROJECT = [ROOT / "src/flowkit/cli/project/templates" / name for name in ("common", "batch")]
"""The files of a project of `flowkit init`; some pages name them."""


def page(name: str) -> str:
    """Return the text of a page."""
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """Return the part of a page under a second-level heading."""
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of the tables in `text`, by each name in code in their first cell."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            found |= {name: cells for name in re.findall(r"`([^`]+)`", cells[0])}
    return found


# --- settings -----------------------------------------------------------------------------------------------------


def default_of(field: Field[Any]) -> str:
    """Return the default of a setting as the page writes it."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return "none" if value is None else f"`{json.dumps(value)}`" if is_code(value) else str(value)


def is_code(value: object) -> bool:
    """Return whether the page writes the value as code."""
    return isinstance(value, (str, list, bool))


TOPICS = {field.name for field in fields(_Topics)}


@pytest.mark.parametrize(("config", "heading"), [(CoordinatorConfig, "Engine"), (WorkerConfig, "Worker")])
def test_every_setting_is_described_with_its_default(config: type[Any], heading: str) -> None:
    text = page("configuration")
    own = rows(section(text, heading))
    kafka = rows(section(text, "Kafka"))
    for field in fields(config):
        table = kafka if field.name in TOPICS else own
        assert field.name in table, f"docs/configuration.md does not describe {config.__name__}.{field.name}"
        assert table[field.name][1] == default_of(field), field.name
    assert set(own) == {field.name for field in fields(config)} - TOPICS


@pytest.mark.parametrize("config", [CoordinatorConfig, WorkerConfig])
def test_every_derived_setting_is_named(config: type[Any]) -> None:
    derived = {name for name in vars(config) if name.endswith("_ms")} - {f.name for f in fields(config)}
    assert derived
    assert {name for name in derived if f"`{name}`" not in section(page("configuration"), "Engine")} == set()


def test_every_environment_variable_is_described() -> None:
    text = "".join(file.read_text(encoding="utf-8") for folder in SOURCES for file in folder.rglob("*.py"))
    ours = set(re.findall(r"(?:envvar=|environ\.get\(|environ\[)\"([A-Z_]+)\"", text))
    assert {"MONGO_URL", "FLOWKIT_QUEUE", "WORKER_TYPES", "FLOWKIT_CACHE"} <= ours
    assert ours <= set(rows(section(page("configuration"), "Environment")))


# --- limits -------------------------------------------------------------------------------------------------------


def test_every_limit_is_described_with_its_value() -> None:
    described = rows(page("limits"))
    constants = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert constants
    for name, value in constants.items():
        assert name in described, f"docs/limits.md does not describe {name}"
        if isinstance(value, int):
            assert described[name][1].split()[0] == f"{value:,}", name
    assert {name for name in described if name.isupper()} == set(constants)


def test_settings_among_the_limits_have_their_defaults() -> None:
    described, config = rows(page("limits")), CoordinatorConfig()
    assert described["window"][1] == str(config.window)
    held = [f"{config.hold_starts_events:,}", f"{config.hold_starts_bytes:,}"]
    assert described["hold_starts_events"][1].split("; ") == held


# --- errors -------------------------------------------------------------------------------------------------------


def every_error() -> set[type[FlowKitError]]:
    """Return all error classes of FlowKit."""
    for module in pkgutil.walk_packages(flowkit.__path__, "flowkit."):
        importlib.import_module(module.name)
    found = {FlowKitError}
    while more := {sub for one in found for sub in one.__subclasses__()} - found:
        found |= more
    named = (error for error in found if error.__module__.startswith("flowkit"))
    return {error for error in named if not error.__name__.startswith("_")}


def test_every_error_is_described_under_its_code() -> None:
    described = rows(section(page("errors"), "Errors of FlowKit"))
    errors = every_error()
    assert len(errors) > 10
    for error in errors:
        assert error.code in described, f"docs/errors.md does not describe {error.__name__}, {error.code}"
        assert f"`{error.__name__}`" in described[error.code][1]
        assert described[error.code][2].startswith("waits") or not waits(error)
    assert set(described) == {error.code for error in errors}


def waits(error: type[FlowKitError]) -> bool:
    """Return whether FlowKit repeats the call that raises the error."""
    return error.retryable and error.code != "temporal_unavailable"


def ends_of_tasks() -> set[str]:
    """Return the codes in the column of values of the table in `How tasks end`."""
    lines = section(page("errors"), "How tasks end").splitlines()
    values = [line.split(" | ")[1] for line in lines if line.startswith("| ") and " | " in line]
    return {code for value in values for code in re.findall(r"`(\w+)(?::[^`]*)?`", value)}


def test_every_reason_code_is_described_and_no_other() -> None:
    codes = {value for name, value in vars(reason_codes).items() if name.isupper()}
    errors, attempts, requests = (
        set(rows(section(page("errors"), heading)))
        for heading in ("Errors of FlowKit", "Reason codes of nodes", "Why requests are not admitted")
    )
    assert "lease_lost" in attempts
    assert "user_request" in ends_of_tasks()
    assert errors | attempts | requests | ends_of_tasks() == codes


def test_permanent_codes_are_reason_codes_of_nodes() -> None:
    assert set(RetryPolicy().permanent_on) <= set(rows(section(page("errors"), "Reason codes of nodes")))


# --- graphs -------------------------------------------------------------------------------------------------------


def test_every_field_of_a_node_is_described_and_nothing_else() -> None:
    described = set(rows(section(page("graphs"), "Node fields")))
    assert described == NODE.fields.keys() | IO.fields.keys() | {"x-…"}


def test_every_field_that_an_engine_writes_is_named() -> None:
    text = section(page("graphs"), "Node fields")
    assert {key for key in RUNTIME_KEYS if f"`{key}`" not in text} == set()


def test_every_field_of_a_retry_policy_is_described_with_its_default() -> None:
    described, policy = rows(section(page("graphs/failures"), "Retries")), RetryPolicy()
    assert set(described) == RETRY_POLICY.fields.keys()
    for name in RETRY_POLICY.fields.keys() - {"permanent_on"}:
        value = getattr(policy, name)
        assert described[name][1] == ("none" if value is None else f"{value:g}"), name
    assert described["permanent_on"][1] == ", ".join(f"`{code}`" for code in policy.permanent_on)


def test_every_input_adapter_and_argument_is_described() -> None:
    text = section(page("graphs/data"), "Input adapters")
    names = [*input_adapters.ADAPTERS, *input_adapters.RECHUNK_ARGS]
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_every_status_and_skip_reason_is_described() -> None:
    text = section(page("graphs"), "Statuses")
    values = [value for kind in (NodeStatus, TaskStatus, SkipReason) for value in kind]
    assert {value for value in values if f"`{value.value}`" not in text} == set()


def test_every_failure_rule_is_described() -> None:
    text = section(page("graphs/failures"), "Failure")
    assert {rule for rule in OnNodeFailure if f'`on_node_failure: "{rule.value}"`' not in text} == set()


# --- variables ----------------------------------------------------------------------------------------------------


def test_every_built_in_function_is_described_with_its_signature() -> None:
    described = rows(section(page("variables"), "The built-in functions"))
    assert {name for name in described if name in METHODS} == set(METHODS)
    for name, method in METHODS.items():
        parameters = list(inspect.signature(getattr(CoordinatorAdapters, method)).parameters.values())[1:]
        shown = inspect.Signature([each.replace(annotation=each.empty) for each in parameters])
        assert described[name][1] == f"`{method}{shown}`".replace("'", '"')


def example_nodes() -> list[dict[str, Any]]:
    """Return the nodes in the examples of the variables page."""
    blocks = re.findall(r"```json\n(.*?)```", page("variables"), re.DOTALL)
    return [json.loads(block) for block in blocks]


def test_every_example_of_a_function_node_is_valid() -> None:
    nodes = example_nodes()
    parents = {parent for node in nodes for parent in node.get("depends_on", [])}
    roles = [{"node_id": parent, "type": "role"} for parent in parents]
    assert {node["io"]["fn"] for node in nodes} >= METHODS.keys() - {"noop"}
    assert parse_graph({"nodes": [*roles, *nodes]}, params={}).warnings == ()


async def test_functions_in_the_examples_work() -> None:
    db = memory_database()
    await db.tasks.insert_one({"id": "t", "graph": {"nodes": [{"node_id": "pages"}]}})
    functions = default_adapters(db=db)
    asked = [node["io"] for node in example_nodes() if node["io"]["fn"] in METHODS]
    assert all([(await functions[io["fn"]]("t", **io["fn_args"]))["ok"] for io in asked])
    variables = (await db.tasks.find_one({"id": "t"}))["coordinator"]["vars"]
    assert variables == {"routing": {"sla": "gold"}, "counts": {"done": 3, "failed": 0, "skipped": 0}}


# --- operations and performance -----------------------------------------------------------------------------------


def _list_commands(group: Any, before: str = "") -> list[str]:
    """Return the commands of a group, and of the groups below it."""
    with typer.Context(group) as context:
        below = {name: group.get_command(context, name) for name in group.list_commands(context)}
    deeper = [
        _list_commands(each, f"{before}{name} ") for name, each in below.items() if hasattr(each, "commands")
    ]
    return [*(before + name for name in below), *chain.from_iterable(deeper)]


def test_every_command_is_described() -> None:
    names = _list_commands(typer.main.get_command(app))
    assert {"engine", "worker", "gateway import", "admission limits set", "token create"} <= set(names)
    assert {name for name in names if f"flowkit {name}" not in page("cli")} == set()


def test_every_template_of_a_new_project_is_described() -> None:
    described = rows(section(page("cli"), "A new project"))
    assert described.keys() - {"--template"} == TEMPLATES.keys()


def test_every_search_attribute_is_described() -> None:
    assert set(temporal_names.SEARCH_ATTRIBUTES) <= set(rows(section(page("operations"), "The Web UI")))


def test_every_setting_of_the_temporal_server_is_explained() -> None:
    text = page("performance")
    assert {key for key in DYNAMIC_CONFIG if f"`{key}`" not in text} == set()


# --- all pages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_every_link_has_a_target(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        other = (file.parent / path).resolve() if path else file
        assert other.is_file(), f"{file.name}: {target}"
        assert not anchor or anchor in anchors(other) or is_generated(other), f"{file.name}: {target}"


def is_generated(page: Path) -> bool:
    """Return whether the build of the site, which checks anchors too, adds parts to a page."""
    return bool(parts_of(page.read_text(encoding="utf-8")))


def anchors(file: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def exists(name: str) -> bool:
    """Return whether a file is in this repository, or in a new project."""
    return (ROOT / name).is_file() or any((folder / f"{name}.tmpl").is_file() for folder in PROJECT)


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_every_named_file_and_make_target_exists(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    folders = "activities|adapters|benchmarks|deploy|examples|src|tests|workflows"
    named = re.findall(rf"`((?:{folders})/[\w/.-]+\.(?:py|yaml|sh|toml))`", text)
    assert [name for name in named if not exists(name)] == []
    makefiles = (ROOT / "Makefile", PROJECT[0] / "Makefile.tmpl")
    given = "".join(each.read_text(encoding="utf-8") for each in makefiles)
    targets = re.findall(r"^([a-z]+):", given, re.MULTILINE)
    wanted = re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)
    assert set(wanted) <= set(targets)


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_every_example_is_valid(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(code, file.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for given in re.findall(r"--input '(\{.*?\})'", text, re.DOTALL):
        task = parse_input("example", json.loads(given))
        parse_graph(task.graph, params=task.params)
