"""Flows from YAML files: a file becomes calls of the gateway, which create its entities."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from flowkit.errors import ConfigError
from flowkit.gateway import models
from flowkit.text import printed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_IDS_OF_A_FLOW: Final = 10_000
"""Jobs without an id of their own get `flow id * 10,000 + position`."""

_LEVELS: Final = 100
_VALUES: Final = 500_000
"""Most levels of nesting, and most values, of a YAML file. An alias counts as what it stands for."""

_DIGITS: Final = 400
"""Most characters of a number in a YAML file."""

_NODE_FIELDS: Final = ("depends", "prerequisites", "supervisor_url")


class _ImportedPart(BaseModel):
    model_config = ConfigDict(extra="forbid")


class JobEntry(_ImportedPart):
    """A job of a file, with its node in the flow."""

    id: int | str
    script: str
    executor: str
    timeout: float = models.DEFAULT_TIMEOUT_SEC
    retries: int = 0
    env_vars: dict[str, str] = Field(default_factory=dict)
    depends: list[int | str] = Field(default_factory=list)
    prerequisites: list[str] = Field(default_factory=list)
    supervisor_url: str = ""


class FlowEntry(_ImportedPart):
    """The flow of a file."""

    id: int = 1
    env_vars: dict[str, str] = Field(default_factory=dict)
    on_failure: str = "finish_running"
    execution_timeout: float | None = None


class FlowFile(_ImportedPart):
    """A file with a flow, and optionally with what it needs."""

    actors: list[models.ActorData] = Field(default_factory=list)
    context: models.ContextData | int = 1
    runners: list[models.RunnerData] = Field(default_factory=list)
    caller: int = 1
    flow: FlowEntry = Field(default_factory=FlowEntry)
    jobs: list[JobEntry] = Field(min_length=1)


class ImportedStep(_ImportedPart):
    """A step of the short form."""

    id: int | str
    runner: str
    payload: str
    depends_on: list[int | str] = Field(default_factory=list)


class Workflow(_ImportedPart):
    """The short form of a flow."""

    name: str = ""
    steps: list[ImportedStep] = Field(min_length=1)


class WorkflowFile(_ImportedPart):
    """A file in the short form."""

    workflow: Workflow


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """The calls that create the flow of a file."""

    context_id: int
    flow_id: int
    names: dict[int, str] = field(default_factory=dict)
    """The jobs by id, with the names that they have in the file."""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Methods and their parameters, in order."""


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raise YAMLError, or ValueError, which names the line, if it is not acceptable.

    A short text can stand for a very large value, because each alias repeats what it stands for.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer, yaml.Constructor = _FlatComposer, _SmallConstructor
    return yaml.load(text)


class _FlatComposer(Composer):
    """Composes nodes up to a level of nesting, since the parser is recursive."""

    _level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node. Raise ValueError if it is nested too deeply."""
        self._level += 1
        if self._level > _LEVELS:
            raise ValueError(_too_deep(self.parser.peek_event().start_mark.line))
        try:
            return super().compose_node(parent, index)
        finally:
            self._level -= 1


class _SmallConstructor(SafeConstructor):
    """Constructs a document only if it is small with its aliases replaced."""

    def construct_document(self, node: Node) -> Any:
        """Return the value of a document. Raise ValueError if it is not acceptable."""
        _measure(node, {})
        return super().construct_document(node)

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        """Return the value of a node. Raise ValueError for a scalar such as `2026-13-45` or `!!bool maybe`."""
        try:
            return super().construct_object(node, deep)
        except (LookupError, TypeError, ValueError):
            if not isinstance(node, ScalarNode):
                raise
            raise ValueError(
                f"line {node.start_mark.line + 1}: {printed(node.value)} is no {str(node.tag).rpartition(':')[2]}; "
                "correct it, or put a text in quotes"
            ) from None


def _measure(node: Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return how many values, and how many levels, a node has with its aliases replaced.

    `known` are the nodes seen before, to which an alias can refer; None for those that contain this one.
    Raise ValueError for a node that is too large, contains itself, or is a number with too many digits.
    """
    if id(node) in known:
        if (before := known[id(node)]) is None:
            raise ValueError(
                f"line {node.start_mark.line + 1}: the value contains itself by an alias; remove it"
            )
        return before
    known[id(node)] = None
    values, levels = 1, 1
    for part in _parts(node):
        inner = _measure(part, known)
        values, levels = values + inner[0], max(levels, 1 + inner[1])
    line = node.start_mark.line
    if values > _VALUES:
        raise ValueError(
            f"line {line + 1}: the value has more than {_VALUES:,} parts with its aliases; use fewer"
        )
    if levels > _LEVELS:
        raise ValueError(_too_deep(line))
    known[id(node)] = values, levels
    return values, levels


def _parts(node: Node) -> Iterator[Node]:
    """Yield the nodes in a node. Raise ValueError for a number that JSON does not have, or with too many digits."""
    match node:
        case MappingNode():
            for pair in node.value:
                yield from pair
        case SequenceNode():
            yield from node.value
        case ScalarNode() if str(node.tag).endswith((":int", ":float")):
            digits = node.value.lower().replace("_", "")
            if len(digits) > _DIGITS or _is_infinite(digits):
                raise ValueError(
                    f"line {node.start_mark.line + 1}: {printed(node.value)} is beyond the range of numbers; "
                    "put a text in quotes"
                )


def _is_infinite(digits: str) -> bool:
    try:
        return not isfinite(float(digits.replace(".inf", "inf").replace(".nan", "nan")))
    except ValueError:
        return False  # a number with another base


def _too_deep(line: int) -> str:
    return f"line {line + 1}: the value is nested deeper than {_LEVELS} levels; make it flatter"


def read_flow_file(path: Path, overrides: Mapping[str, int | None] | None = None) -> Import:
    """Return the calls that create the flow of a YAML file.

    `overrides` replaces `context`, `caller` and `flow`, by name. Raise ConfigError, which names the file and the field,
    if it cannot be read or is not valid.
    """
    try:
        document = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        return plan_import(_parse(document), overrides or {})
    except ValidationError as error:
        problems = "; ".join(_describe(each) for each in error.errors()[:5])
        raise ConfigError(f"{path}: {problems}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _describe(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"]) or "the file"
    return f"{place}: {problem['msg']}"


def _parse(document: object) -> FlowFile:
    if isinstance(document, dict) and "workflow" in document:
        return _from_workflow(WorkflowFile.model_validate(document).workflow)
    return FlowFile.model_validate(document)


def _from_workflow(workflow: Workflow) -> FlowFile:
    """Return the short form as a full one: `runner` is the executor, and `payload` the script."""
    jobs = [
        JobEntry(id=step.id, script=step.payload, executor=step.runner, depends=step.depends_on)
        for step in workflow.steps
    ]
    return FlowFile(jobs=jobs)


def plan_import(given: FlowFile, overrides: Mapping[str, int | None]) -> Import:
    """Return the calls that create a flow and what it needs. Raise ValueError for a dependency without a job."""
    context = given.context if isinstance(given.context, int) else given.context.id
    chosen = {name: value for name, value in overrides.items() if value is not None}
    context_id, flow_id = chosen.get("context", context), chosen.get("flow", given.flow.id)
    caller_id = chosen.get("caller", given.caller)
    ids = _number(given.jobs, flow_id)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("actor.create", {"actor": _dump(each)}) for each in given.actors
    ]
    if isinstance(given.context, models.ContextData):
        calls.append(("context.create", {"context": {**_dump(given.context), "id": context_id}}))
    own = {"context_id": context_id}
    calls += [("runner.create", {**own, "runner": _dump(each)}) for each in given.runners]
    owner = {**own, "caller_id": caller_id}
    for each in given.jobs:
        job = {**each.model_dump(exclude={*_NODE_FIELDS}), **owner, "id": ids[each.id]}
        calls.append(("job.create", {**own, "job": job}))
    nodes = [_node(each, ids) for each in given.jobs]
    flow = {**given.flow.model_dump(), **owner, "id": flow_id, "jobs": [*ids.values()], "nodes": nodes}
    calls.append(("flow.create", {**own, "flow": flow}))
    return Import(
        context_id=context_id,
        flow_id=flow_id,
        names={id: str(name) for name, id in ids.items() if name != id},
        calls=calls,
    )


def _number(jobs: list[JobEntry], flow_id: int) -> dict[int | str, int]:
    """Return the ids of the jobs by the ids or names that the file gives them."""
    found: dict[int | str, int] = {}
    for position, job in enumerate(jobs, 1):
        if job.id in found:
            raise ValueError(f"jobs has {job.id!r} twice; give each job an id of its own")
        found[job.id] = job.id if isinstance(job.id, int) else flow_id * _IDS_OF_A_FLOW + position
    return found


def _node(job: JobEntry, ids: Mapping[int | str, int]) -> dict[str, Any]:
    for name in job.depends:
        if name not in ids:
            raise ValueError(f"job {job.id!r} depends on {name!r}, which the file does not have")
    fields = job.model_dump(include={*_NODE_FIELDS})
    return {**fields, "id": ids[job.id], "depends": [ids[name] for name in job.depends]}


def _dump(entity: BaseModel) -> dict[str, Any]:
    return entity.model_dump(exclude_none=True)
