"""Flows from YAML or JSON files: a file becomes calls of the gateway, which create its entities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flowkit.errors import ConfigError
from flowkit.gateway import models
from flowkit.validation.documents import Document
from flowkit.validation.invalid import describe

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_IDS_OF_A_FLOW: Final = 10_000
"""Jobs without an id of their own get `flow id * 10,000 + position`."""

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


def read_flow_file(path: Path, overrides: Mapping[str, int | None] | None = None) -> Import:
    """Return the calls that create the flow of a YAML or JSON file.

    `overrides` replaces `context`, `caller` and `flow`, by name. Raise ConfigError, which names the file and the field,
    if it cannot be read or is not valid.
    """
    try:
        document = Document.read(path).load()
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r}; give the path of a YAML or JSON file") from None
    try:
        return plan_import(_parse(document), overrides or {})
    except ValidationError as error:
        raise ConfigError(
            f"{path}: {describe(error, hides=lambda path, value: True, quotes=False)}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


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
