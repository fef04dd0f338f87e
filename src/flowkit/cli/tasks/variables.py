"""`flowkit vars`, which shows and changes the variables of a task. It imports its dependencies when it runs."""

import asyncio
import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowkit.cli import output
from flowkit.cli.errors import add_remedy
from flowkit.cli.json_files import read_object, read_value
from flowkit.cli.options import (
    AnyQueue,
    AsJson,
    DeploymentOptions,
    TaskId,
    with_options,
)
from flowkit.errors import AdapterError, ConfigError
from flowkit.text import shell_command

if TYPE_CHECKING:
    from flowkit.adapters.vars.changes import VarsChange
    from flowkit.adapters.vars.store import Variables

Tree = dict[str, Any]

_PATH_CHARS = 40
"""Maximum width of the column of names; the value of a longer name starts further right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariableStep:
    """One operation: the option that requests it, and the method of CoordinatorAdapters that runs it."""

    option: str
    method: str
    arguments: Tree


@with_options
def task_vars(
    task: TaskId,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a variable. VALUE is JSON, or else a string."),
    ] = None,
    merges: Annotated[
        list[str] | None,
        typer.Option(
            "--merge",
            metavar="JSON",
            help="Merge an object in JSON or YAML, or one from @FILE; its leaves overwrite others.",
        ),
    ] = None,
    adds: Annotated[
        list[str] | None, typer.Option("--incr", metavar="NAME[=N]", help="Add N to a number. Default: 1.")
    ] = None,
    removes: Annotated[
        list[str] | None,
        typer.Option("--unset", metavar="NAME", help="Remove a variable, or all variables below it."),
    ] = None,
    block_sensitive: Annotated[
        bool, typer.Option("--block-sensitive", help="Reject values that look like secrets.")
    ] = False,
    as_json: AsJson = False,
    *,
    where: AnyQueue,
) -> None:
    """Show a task's variables. Repeatable options change them first, in this order: --set, --merge, --incr, --unset."""
    if block_sensitive and not (sets or merges):
        raise add_remedy(ConfigError("--block-sensitive requires --set or --merge"), "add one")
    steps = [
        *_set(sets or [], block_sensitive),
        *_merge(merges or [], block_sensitive),
        *map(_incr, adds or []),
        *_unset(removes or []),
    ]
    for step in steps:
        _check(step)
    found = plain(asyncio.run(_run_steps(steps, task, where)))
    if as_json:
        return output.document(found)
    if not found:
        return output.note("no variables")
    for line in lines(found):
        output.echo(line)
    return None


# --- operations of the options --------------------------------------------------------------------------------------


def _set(texts: list[str], block: bool) -> Iterator[VariableStep]:
    """Yield one operation for all `--set` options, so that it sets all of them or none."""
    given: Tree = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not name or not sign:
            problem = ConfigError(f"--set {text!r} is not NAME=VALUE")
            raise add_remedy(problem, "for example --set routing.sla=gold")
        if name in given:
            raise add_remedy(ConfigError(f"--set names {name!r} twice"), "pass it once")
        given[name] = read_value(value)
    if given:
        yield VariableStep(
            option="--set", method="vars_set", arguments={"kv": given, "block_sensitive": block}
        )


def _merge(texts: list[str], block: bool) -> Iterator[VariableStep]:
    for text in texts:
        tree = read_object(
            text, "--merge", """variables are an object, for example '{"counts": {"done": 3}}'"""
        )
        yield VariableStep(
            option="--merge", method="vars_merge", arguments={"data": tree, "block_sensitive": block}
        )


def _incr(text: str) -> VariableStep:
    name, sign, amount = text.partition("=")
    by = read_value(amount) if sign else 1
    if not name or isinstance(by, bool) or not isinstance(by, (int, float)):
        problem = ConfigError(f"--incr {text!r} is not NAME or NAME=NUMBER")
        raise add_remedy(problem, "for example --incr counts.done=5")
    return VariableStep(option="--incr", method="vars_incr", arguments={"key": name, "by": by})


def _unset(names: list[str]) -> Iterator[VariableStep]:
    if names:
        yield VariableStep(option="--unset", method="vars_unset", arguments={"keys": names})


def _check(step: VariableStep) -> None:
    """Raise AdapterError for an invalid operation, before the command writes anything."""
    from flowkit.adapters.vars import changes
    from flowkit.adapters.vars.sensitive import Detector

    methods: dict[str, Callable[..., VarsChange]] = {
        "vars_set": lambda **given: changes.setting(given),
        "vars_merge": lambda **given: changes.merging(given),
        "vars_incr": changes.incrementing,
        "vars_unset": lambda keys: changes.unsetting((), keys),
    }
    try:
        change = methods[step.method](**step.arguments)
    except AdapterError as error:
        raise add_remedy(error, f"correct {step.option}; docs/variables.md has the rules") from None
    hits = Detector().hits((changes.full(path), value) for path, value in change.sets.items())
    if hits and change.block_sensitive:
        what = "a value that looks like a secret" if hits == 1 else f"{hits} values that look like secrets"
        problem = AdapterError(f"{step.option} has {what}")
        raise add_remedy(problem, "store a reference instead, or omit --block-sensitive")


# --- running the operations -----------------------------------------------------------------------------------------


async def _run_steps(steps: list[VariableStep], task_id: str, where: DeploymentOptions) -> Tree:
    """Run the operations and return the task's variables. Raise UnknownTask if the task does not exist."""
    from flowkit.activities.builtin_functions import CoordinatorAdapters
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.adapters.vars.store import Variables
    from flowkit.cli.servers import database

    async with database(where) as db:
        variables = Variables(TaskStore(db))
        found = await _read(variables, task_id)
        if not steps:
            return found
        adapters = CoordinatorAdapters(db=db)
        done: list[str] = []
        for step in steps:
            try:
                await getattr(adapters, step.method)(task_id, **step.arguments)
            except AdapterError as error:
                raise add_remedy(error, _remedy(done, task_id)) from None
            done.append(step.option)
        return await _read(variables, task_id)


async def _read(variables: "Variables", task_id: str) -> Tree:
    from flowkit.client import UnknownTask

    try:
        return await variables.read(task_id)
    except AdapterError:
        raise UnknownTask(task_id) from None


def _remedy(done: list[str], task_id: str) -> str:
    before = f"what {' and '.join(dict.fromkeys(done))} changed remains; " if done else ""
    return f"{before}`{shell_command('flowkit vars', task_id)}` shows the current variables"


def plain(value: Any) -> Any:
    """Return a value for JSON: a date as ISO text, bytes as base64, and any other type that JSON lacks as text."""
    match value:
        case dict():
            return {str(key): plain(inner) for key, inner in value.items()}
        case list():
            return [plain(inner) for inner in value]
        case datetime():
            return value.isoformat()
        case bytes():
            return base64.b64encode(value).decode()
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
    return str(value)


def lines(tree: Tree) -> list[str]:
    """Return one line for each leaf: its path, and its value as JSON."""
    leaves = sorted(_leaves(tree, ()), key=lambda leaf: leaf[0])
    shown = [(".".join(path), json.dumps(value, ensure_ascii=False)) for path, value in leaves]
    width = min(_PATH_CHARS, max(len(path) for path, _ in shown))
    return [f"{path:<{width}}  {value}" for path, value in shown]


def _leaves(tree: Tree, above: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value
