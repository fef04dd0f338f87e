"""The fields of a request, with their limits. Each door checks them with these types: HTTP, Kafka and Python.

The texts of the errors say what a value must be, and leave the name of the field and the value to the door.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from flowkit.errors import ConfigError
from flowkit.limits import ID_CHARS, USER_CHARS
from flowkit.models.admission import Priority
from flowkit.models.ownership import OwnerKind
from flowkit.validation.arguments import new_task_id_problem
from flowkit.validation.invalid import describe

SCRIPT_BYTES: Final = 1024 * 1024
"""Largest script of an execution, in bytes of UTF-8."""
MAX_TIMEOUT_SEC: Final = 86_400
"""Longest time that an execution may take."""
MAX_HELD: Final = 10_000
"""Largest limit of one user or tenant, whose requests are a list in one document."""
MAX_QUEUE: Final = 1_000_000
"""Largest limit of a queue."""
MAX_STALE_SEC: Final = 30 * 86_400
"""Longest time that a request may wait before it expires."""
USER_KEY_CHARS: Final = 2 * USER_CHARS + 1
"""Longest name of a user in the limits."""

_VERSION: Final = r"^[0-9A-Za-z][0-9A-Za-z._-]*$"
_CPU: Final = r"^[0-9]{1,6}(\.[0-9]{1,3}|m)?$"
_MEMORY: Final = r"^[0-9]{1,15}(\.[0-9]{1,3})?([kMGT]|[KMGT]i)?$"


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must not have control characters, or others that cannot be printed")
    return text


def _check_no_slash(text: str) -> str:
    if "/" in text:
        raise ValueError("it must not contain a slash")
    return text


def _check_new_id(text: str, *, kind: OwnerKind = OwnerKind.TASK) -> str:
    if new_task_id_problem(text, kind=kind):
        raise ValueError(
            "it must be the id of a new task: not '*', without blanks at its ends, without control and bidirectional "
            "characters, and none that is reserved"
        )
    return text


def _check_script(script: str) -> str:
    size = len(script.encode())
    if size > SCRIPT_BYTES:
        raise ValueError(f"it has {size:,} bytes, more than {SCRIPT_BYTES:,}; let the script read its data")
    return script


_Printable = AfterValidator(_check_printable)
_NoSlash = AfterValidator(_check_no_slash)

RequestId = Annotated[str, Field(min_length=1, max_length=ID_CHARS), _Printable]
"""The id of a request that exists."""
NewId = Annotated[RequestId, AfterValidator(_check_new_id)]
"""The id of a new request. Any request can be a task, so all ids follow the rule for those of tasks."""
_StoredId = Annotated[RequestId, AfterValidator(partial(_check_new_id, kind=OwnerKind.BACKFILL))]
"""The id of a request in the queue. Backfills submit those of nominal times, which the doors refuse."""
UrlId = Annotated[NewId, _NoSlash]
"""The id of a new request that its client will name in a URL."""
UserId = Annotated[str, Field(min_length=1, max_length=USER_CHARS), _Printable]
Tenant = Annotated[UserId, _NoSlash]
"""A tenant has no slash, because limits name a user of a tenant as `tenant/user`."""
UserKey = Annotated[str, Field(min_length=1, max_length=USER_KEY_CHARS), _Printable]
"""A user in the limits: `user` in all tenants, or `tenant/user`."""

Script = Annotated[
    str,
    Field(
        min_length=1, max_length=SCRIPT_BYTES, description=f"Its UTF-8 has at most {SCRIPT_BYTES:,} bytes."
    ),
    AfterValidator(_check_script),
]
Language = Annotated[str, Field(min_length=1, max_length=50), _Printable]
LanguageVersion = Annotated[str, Field(min_length=1, max_length=50, pattern=_VERSION)]
Image = Annotated[str, Field(min_length=1, max_length=500), _Printable]
Argument = Annotated[str, Field(min_length=1, max_length=4_096)]
Command = Annotated[list[Argument], Field(min_length=1, max_length=100)]
Filename = Annotated[str, Field(min_length=1, max_length=255), _Printable, _NoSlash]
Timeout = Annotated[int, Field(ge=1, le=MAX_TIMEOUT_SEC, strict=True)]
Cpu = Annotated[str, Field(max_length=20, pattern=_CPU, description="As in Kubernetes: `500m` or `0.5`.")]
Memory = Annotated[str, Field(max_length=20, pattern=_MEMORY, description="As in Kubernetes: `128Mi`.")]


class RequestFields(BaseModel):
    """What every request says. Fields that it does not name are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    execution_id: _StoredId
    user_id: UserId
    tenant: Tenant
    priority: Priority


class ExecutionFields(BaseModel):
    """What an execution says besides: its script, and how to run it. Fields that it does not name are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    script: Script
    language: Language
    language_version: LanguageVersion
    runtime_image: Image
    runtime_command: Command
    runtime_filename: Filename
    timeout_seconds: Timeout
    cpu_limit: Cpu
    memory_limit: Memory
    cpu_request: Cpu
    memory_request: Memory


def require(model: type[BaseModel], given: dict[str, Any]) -> None:
    """Raise ConfigError, which names the invalid fields, unless the values are those of a model."""
    try:
        model.model_validate(given)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None
