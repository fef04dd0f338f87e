"""`flowkit debug`, which runs one node of a stored task in this process. It imports its dependencies when it runs."""

import asyncio
import logging
import sys
from bdb import BdbQuit
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowkit.cli import output
from flowkit.cli.errors import Exit, add_remedy
from flowkit.cli.options import AnyQueue, AsJson, DeploymentOptions, Functions, TaskId, TaskNode, with_options
from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from flowkit.activities.handlers import RoleHandler
    from flowkit.cli.debug.executors import DebugOutcome
    from flowkit.cli.debug.nodes import StoredNode
    from flowkit.cli.debug.recording import ReadOnly

_WARNING = (
    "FlowKit stores nothing of this run. What the code itself changes elsewhere, such as files, services and other "
    "databases, takes effect."
)


@with_options
def debug(
    task: TaskId,
    node: TaskNode,
    batch: Annotated[
        str | None, typer.Option("--batch", metavar="UID", help="Process only this batch, without finalize.")
    ] = None,
    handlers: Annotated[
        list[str] | None,
        typer.Option(
            "--handler",
            help="Handler of the node's role, as module:CLASS or module:object. Can be repeated; FlowKit takes the "
            "one of the role.",
        ),
    ] = None,
    functions: Functions = None,
    stops: Annotated[
        bool,
        typer.Option("--break", help="Stop in pdb before the first line of process_batch or the function."),
    ] = False,
    post_mortem: Annotated[
        bool, typer.Option("--pdb", help="Open pdb where the exception was raised, if there is one.")
    ] = False,
    show_input: Annotated[
        bool, typer.Option("--show-input", help="Print the stored input as JSON, and run nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before the code runs.")] = False,
    as_json: AsJson = False,
    *,
    where: AnyQueue,
) -> int:
    """Run the code of a node here, with its stored input, and compare the results with the stored ones.

    FlowKit writes nothing: it prints artifacts and variables instead. What the code changes elsewhere takes effect.
    """
    if as_json and (stops or post_mortem):
        name = "--break" if stops else "--pdb"
        raise add_remedy(ConfigError(f"{name} cannot be combined with --json"), "omit one of them")
    if show_input:
        return asyncio.run(_show_input(task, node, batch, where))
    if not yes and not sys.stdin.isatty():
        problem = ConfigError("`flowkit debug` asks before it runs code, and there is no terminal to ask on")
        raise add_remedy(problem, "pass --yes")
    code = _Code(handlers=handlers or [], functions=functions or [], stops=stops)
    # With --json, stdout has one document, whatever the code prints.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        plan = asyncio.run(_prepare(task, node, batch, code, where))
        _announce(plan)
        if not yes:
            typer.confirm("Run it?", abort=True, err=True)
        run = asyncio.run(_run(plan, code, where))
    _print(run, as_json=as_json)
    if post_mortem and run.outcome.failure is not None:
        _inspect(run.outcome)
    return Exit.OK if run.outcome.failure is None else Exit.TASK_FAILED


@asynccontextmanager
async def _read_only(where: DeploymentOptions) -> AsyncIterator["ReadOnly"]:
    from flowkit.cli.debug.recording import ReadOnly
    from flowkit.cli.servers import database

    async with database(where) as db:
        yield ReadOnly(db)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Code:
    """The code that the command line names."""

    handlers: list[str]
    functions: list[str]
    stops: bool
    """Whether to stop at its start."""

    def wrap(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return what to call around the user's function."""
        if not self.stops:
            return lambda function: function
        from flowkit.cli.debug.debugger import Breakpoint

        return Breakpoint().wrap


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chosen:
    """The code of a node."""

    name: str
    run: Callable[..., Any]
    """Runs it, with a database and a Debugged."""
    version: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What is about to run."""

    stored: "StoredNode"
    batch: str | None
    chosen: _Chosen

    @property
    def header(self) -> dict[str, Any]:
        """What the report says about the run."""
        stored, attempt = self.stored, self.stored.attempt
        return {
            "task_id": attempt.task_id,
            "node_id": attempt.node_id,
            "role": stored.node.type,
            "attempt": attempt.epoch,
            "generation": attempt.generation,
            "code": self.chosen.name,
            "version": self.chosen.version,
            "stored_version": stored.version,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A run, and its report without secrets."""

    document: dict[str, Any]
    outcome: "DebugOutcome"


async def _prepare(task: str, node: str, batch: str | None, code: _Code, where: DeploymentOptions) -> _Plan:
    from flowkit.cli.debug import nodes

    async with _read_only(where) as db:
        stored = await nodes.read_node(db, task, node)
        chosen = (
            _choose_function(stored, batch, code)
            if stored.node.is_function
            else _choose_handler(stored, code)
        )
        await nodes.check_values(db, stored)
    return _Plan(stored=stored, batch=batch, chosen=chosen)


async def _run(plan: _Plan, code: _Code, where: DeploymentOptions) -> _Run:
    from flowkit.cli.debug import nodes, report
    from flowkit.cli.debug.executors import Debugged
    from flowkit.cli.servers import database

    stored, batch = plan.stored, plan.batch
    async with database(where) as db:
        mask = report.mask_for(stored, await nodes.read_variables(db, stored.attempt.task_id))
        debugged = Debugged(
            attempt=stored.attempt,
            params=stored.params,
            wanted=batch,
            wrap=code.wrap(),
            observe=mask.add,
        )
        with _without_warnings():
            outcome = await plan.chosen.run(db, debugged)
        if isinstance(outcome.error, BdbQuit):
            raise typer.Abort
        if batch is not None and not outcome.batches and outcome.failure is None:
            raise await nodes.explain_missing(db, stored, batch, outcome.uids)
        known = await nodes.read_stored(db, stored, [run.uid for run in outcome.batches])
        document = report.make_document(stored, outcome, known)
    return _Run(document=mask.value({**plan.header, **document}), outcome=outcome)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep the executor from logging the traceback of an error: the report has it, without secrets."""
    logger = logging.getLogger("flowkit.worker")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _choose_function(stored: "StoredNode", batch: str | None, code: _Code) -> _Chosen:
    from functools import partial

    from flowkit.activities.builtin_functions import METHODS
    from flowkit.cli.debug.executors import run_function
    from flowkit.cli.loading import load_functions

    name = stored.attempt.io.fn
    if batch is not None:
        problem = ConfigError(
            f"node {stored.attempt.node_id!r} calls the function {name!r}, which has no batches"
        )
        raise add_remedy(problem, "omit --batch")
    known = load_functions(code.functions)
    if name not in known and name not in METHODS:
        problem = ConfigError(
            f"node {stored.attempt.node_id!r} calls the function {name!r}, which is not given"
        )
        raise add_remedy(problem, f"pass --function {name}=module:function")
    return _Chosen(name=f"function {name}", run=partial(run_function, functions=known))


def _choose_handler(stored: "StoredNode", code: _Code) -> _Chosen:
    from functools import partial

    from flowkit.activities.handlers import version_of
    from flowkit.cli.debug.executors import run_handler
    from flowkit.cli.loading import load_handlers

    role, known = stored.node.type, load_handlers(code.handlers)
    if role not in known:
        raise _explain_unknown(stored, sorted(known))
    handler: RoleHandler = known[role]
    kind = type(handler)
    return _Chosen(
        name=f"{kind.__module__}:{kind.__qualname__}",
        version=version_of(handler),
        run=partial(run_handler, handler=handler),
    )


def _explain_unknown(stored: "StoredNode", known: list[str]) -> ConfigError:
    role, node_id = stored.node.type, stored.attempt.node_id
    if stored.external and not known:
        problem = ConfigError(
            f"node {node_id!r} has role {role!r}, which external workers serve, so its code is not here"
        )
        return add_remedy(
            problem, "print its input with --show-input, and pass that to the worker's own code"
        )
    served = f"; the given handlers serve {', '.join(known)}" if known else ""
    problem = ConfigError(f"no handler for role {role!r} of node {node_id!r} is given{served}")
    return add_remedy(problem, "pass it with --handler module:CLASS, or print the input with --show-input")


def _announce(plan: _Plan) -> None:
    """Print what is about to run."""
    header, stored = plan.header, plan.stored
    version = f" (version {header['version']})" if header["version"] else ""
    output.note(
        f"runs {header['code']}{version} in this process, for node {header['node_id']} of task "
        f"{header['task_id']}: attempt {header['attempt']}, generation {header['generation']}"
    )
    if header["stored_version"] not in ("", header["version"]):
        output.note(f"the stored attempt ran version {header['stored_version']}")
    output.note("params, variables and stored batches are those of now, not those of the earlier attempt")
    for source in stored.sources:
        state = "" if source.status.ended else ", may store more"
        output.note(f"source {source.node_id} is {source.status}: {source.batches:,} batches{state}")
    output.note(_WARNING)


def _print(run: _Run, *, as_json: bool) -> None:
    from flowkit.cli.debug.report import lines_of

    if as_json:
        return output.document(run.document)
    for line in lines_of(run.document):
        output.echo(line)
    if not run.document["batches"] and run.document["failure"] is None and run.outcome.returned is None:
        output.note("the input has no batches")
    return None


def _inspect(outcome: "DebugOutcome") -> None:
    from flowkit.cli.debug.debugger import inspect_error

    if outcome.error is None or outcome.error.__traceback__ is None:
        output.note("no exception was raised, so --pdb has nothing to open; --break stops before the batch")
    else:
        inspect_error(outcome.error)


async def _show_input(task: str, node: str, batch: str | None, where: DeploymentOptions) -> int:
    from flowkit.cli.debug import inputs, nodes, report

    async with _read_only(where) as db:
        stored = await nodes.read_node(db, task, node)
        await nodes.check_values(db, stored)
        variables = await nodes.read_variables(db, task)
        document = await inputs.read_input(db, stored, batch)
        mask = report.mask_for(stored, variables)
        mask.add(document)
        output.document(mask.value({**document, "params": stored.params.decode(), "variables": variables}))
    return Exit.OK
