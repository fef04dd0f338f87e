"""Submit a request to an admission queue, follow it, change its priority and cancel it."""

from __future__ import annotations

import uuid
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from flowkit.admission import rules
from flowkit.admission.client import describe
from flowkit.admission.models import ENDED, Changed, Kind, State
from flowkit.admission.queue import AdmissionQueue, request_of
from flowkit.admission.store import AdmissionStore
from flowkit.cli import output, servers
from flowkit.cli.errors import Exit, add_remedy
from flowkit.cli.following import follow, interruptible
from flowkit.cli.json_files import read_pairs, read_task
from flowkit.client import UnknownTask
from flowkit.errors import AdmissionRejected, ConfigError, StoreUnavailable
from flowkit.text import one_line, printed, shell_command, shown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from flowkit.admission.models import Request, RequestChange, Ticket
    from flowkit.cli.options import DeploymentOptions
    from flowkit.core.utils import Fields
    from flowkit.models.admission import Admission, Priority

_KINDS: Final[Mapping[str, type]] = {
    **dict.fromkeys(rules.RUNTIME, str),
    "runtime_command": list,
    **{name: type(value) for name, value in rules.EXECUTION.items()},
}
"""The fields that `--set` can give, with their types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitOptions:
    """What the command line says about what is to start."""

    graph: str | None
    params: str | None
    script: Path | None
    lang: str | None
    lang_version: str | None
    fields: Sequence[str]


@asynccontextmanager
async def open_queue(where: DeploymentOptions) -> AsyncIterator[AdmissionQueue]:
    """Yield the queue. What it has begun is ended afterwards, so that no other process needs to do it."""
    async with servers.database(where) as db:
        queue = AdmissionQueue(AdmissionStore(db, queue=where.engine_queue))
        try:
            yield queue
        finally:
            with suppress(StoreUnavailable):
                await queue.session.close()


# --- what is submitted


def read_request(given: SubmitOptions, request_id: str | None, who: Admission) -> Request:
    """Return the request. Raise ConfigError or GraphError if an option, a file or the graph is invalid."""
    _check_options(given)
    new_id = request_id or str(uuid.uuid4())
    if given.script is not None:
        return request_of(who, new_id, _read_execution(given, given.script), Kind.EXECUTION)
    task = read_task(given.graph or "", given.params)
    task.checked()
    return request_of(who, new_id, {"params": task.params, "graph": task.graph})


def _check_options(given: SubmitOptions) -> None:
    if (given.graph is None) == (given.script is None):
        problem = "neither GRAPH nor" if given.graph is None else "both GRAPH and"
        raise add_remedy(ConfigError(f"{problem} --script is given"), "give one of them")
    options = {"--lang": given.lang, "--lang-version": given.lang_version, "--set": given.fields}
    for name, value in options.items():
        if value and given.script is None:
            raise add_remedy(ConfigError(f"{name} needs --script"), f"omit {name}, or give a script")
    if given.params is not None and given.script is not None:
        raise add_remedy(ConfigError("--params needs GRAPH"), "omit --params")


def _read_execution(given: SubmitOptions, script: Path) -> Fields:
    """Return the fields of the event `execution_requested`, which the command to the executor repeats."""
    language, version = given.lang or rules.PYTHON, given.lang_version or rules.PYTHON_VERSION
    own = read_pairs(given.fields, "--set", "timeout_seconds=60")
    for name, value in own.items():
        _check_field(name, value)
    runtime = rules.default_runtime(language, version) or {name: own.get(name) for name in rules.RUNTIME}
    if missing := [name for name, value in runtime.items() if value is None]:
        problem = ConfigError(f"--lang {printed(language)} has no default for {', '.join(missing)}")
        raise add_remedy(
            problem,
            'give them with --set; runtime_command is a JSON list, such as ["ruby", "/scripts/main.rb"]',
        )
    return {
        "script": _read_script(script),
        "language": language,
        "language_version": version,
        **runtime,
        **rules.EXECUTION,
        **own,
    }


def _check_field(name: str, value: object) -> None:
    if name not in _KINDS:
        problem = ConfigError(f"--set {printed(name)} is no field of an execution")
        raise add_remedy(problem, f"choose from {', '.join(_KINDS)}")
    kind = _KINDS[name]
    if type(value) is not kind or (isinstance(value, int) and value < 1):
        wanted = {int: "a whole number, 1 or more", list: "a list of texts"}.get(kind, "a text")
        raise ConfigError(f"--set {name} is {shown(value)}; it must be {wanted}")


def _read_script(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        problem = ConfigError(f"there is no script {str(path)!r}")
        raise add_remedy(problem, "give the path of a text file") from None
    except (OSError, ValueError) as error:
        problem = ConfigError(f"script {str(path)!r} cannot be read: {one_line(error)}")
        raise add_remedy(problem, "give the path of a text file") from None


# --- submitting


async def submit(request: Request, where: DeploymentOptions, *, wait: bool, as_json: bool) -> Exit:
    """Submit a request, print what became of it, and return the exit code.

    Raise AdmissionRejected, but not for JSON.
    """
    async with open_queue(where) as queue:
        await queue.store.prepare()
        ticket = await queue.submit(request)
        if wait and ticket.accepted:
            ticket = await _follow(queue, ticket, quiet=as_json)
    if as_json:
        output.document(asdict(ticket))
    elif not ticket.accepted:
        raise AdmissionRejected(ticket.error or "", ticket.reason or "", ticket.retry_after_sec)
    elif not wait:
        _print_submitted(ticket)
    failed = not ticket.accepted or (wait and ticket.state is not State.COMPLETED)
    return Exit.TASK_FAILED if failed else Exit.OK


def _print_submitted(ticket: Ticket) -> None:
    output.echo(describe(ticket))
    if ticket.duplicate:
        output.note("  it was submitted earlier with the same id, and is unchanged")
    if ticket.state in ENDED:
        return
    name = ticket.execution_id
    output.note(f"  stop it  {shell_command('flowkit admission cancel', name)}")
    if ticket.kind is Kind.TASK:
        output.note(f"  watch it  {shell_command('flowkit status', name, options=['--watch'])}")


async def _follow(queue: AdmissionQueue, ticket: Ticket, *, quiet: bool) -> Ticket:
    """Print each change of a request until it has ended, and return it."""
    with interruptible(ticket.execution_id):
        return await follow(
            ticket,
            partial(queue.find, ticket.execution_id),
            describe=describe,
            until=lambda known: known.state in ENDED,
            quiet=quiet,
        )


async def show(request_id: str, where: DeploymentOptions, *, watch: bool, as_json: bool) -> None:
    """Print a request, with `watch` each of its changes until it ends. Raise UnknownTask if there is none."""
    async with open_queue(where) as queue:
        ticket = await queue.find(request_id)
        if ticket is None:
            raise _unknown(request_id, where)
        if watch:
            ticket = await _follow(queue, ticket, quiet=as_json)
    if as_json:
        output.document(asdict(ticket))
    elif not watch:
        output.echo(describe(ticket))


# --- changing requests


async def set_priority(request_id: str, priority: Priority, where: DeploymentOptions) -> Ticket:
    """Move a request to another band and return it. Raise UnknownTask, or ConfigError if it does not wait."""
    async with open_queue(where) as queue:
        changed = await queue.set_priority(request_id, priority)
    ticket = _known(changed, request_id, where)
    if changed.outcome is Changed.NOT_WAITING:
        problem = ConfigError(
            f"request {request_id} is {ticket.state}, so its priority stays {ticket.priority}"
        )
        raise add_remedy(problem, "only a request that waits can be moved to another band")
    return ticket


async def cancel(request_id: str, reason: str, by: str, where: DeploymentOptions) -> Ticket:
    """Cancel a request and return it. Raise UnknownTask, or ConfigError if it has ended."""
    async with open_queue(where) as queue:
        changed = await queue.cancel(request_id, reason=reason, by=by)
    ticket = _known(changed, request_id, where)
    if changed.outcome is Changed.ENDED:
        problem = ConfigError(f"request {request_id} is already {ticket.state}")
        raise add_remedy(problem, "there is nothing to cancel")
    return ticket


def _known(changed: RequestChange, request_id: str, where: DeploymentOptions) -> Ticket:
    if changed.ticket is None:
        raise _unknown(request_id, where)
    return changed.ticket


def _unknown(request_id: str, where: DeploymentOptions) -> UnknownTask:
    queue: Any = where.engine_queue
    problem = UnknownTask(request_id, f"there is no request {request_id!r} in the admission queue {queue!r}")
    return add_remedy(problem, "`flowkit admission list` shows the requests")
