"""The commands that change a running task, such as `flowkit pause`, or run an ended one again. They import
their dependencies when they run."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from flowkit.actions.records import (
    CHANGE_GRAPH,
    COMPLETE_NODE,
    DECIDE,
    FAIL_NODE,
    PAUSE,
    RESUME,
    RETRY_BATCHES,
    RETRY_NODE,
    SATISFY,
    SKIP_BATCHES,
    SKIP_NODE,
    TASK_SCOPE,
)
from flowkit.cli import output
from flowkit.cli.errors import add_remedy
from flowkit.cli.json_files import read_change, read_object, read_objects, read_pairs
from flowkit.cli.options import (
    AnyQueue,
    AsJson,
    DeploymentOptions,
    Queue,
    TaskId,
    TaskNode,
    current_user,
    repeated_command,
    with_options,
)
from flowkit.errors import ActionRejected, ConfigError
from flowkit.models import APPROVE, REJECT
from flowkit.text import count_of, printed
from flowkit.validation.arguments import choice_problem, require

_SHOWN = 40
"""Maximum number of affected nodes in the table; --json has up to 1,000."""
_ENGINE_SEC = 60.0
"""How long an action waits for an engine."""

_SCOPES = "node:ID, below:ID (all nodes that depend on the node) or role:NAME. Repeatable."

_BATCHES = """batches are a list, for example '[{"batch_uid": "b0", "metrics": {"count": 7}}]'"""


def _check_decision(given: str) -> str:
    require(choice_problem(given, "the decision", (APPROVE, REJECT)))
    return given


Reason = Annotated[
    str, typer.Option("--reason", help="Why, up to 500 characters; the task keeps it in its audit.")
]
By = Annotated[
    str | None,
    typer.Option(
        "--by", help="Who requests the action. Default: your user name and host.", show_default=False
    ),
]
IfRevision = Annotated[
    int | None,
    typer.Option(
        "--if-revision",
        min=0,
        help="Reject the action if the task has another revision, because someone else acted meanwhile.",
    ),
]
IfState = Annotated[
    str | None,
    typer.Option(
        "--if-state",
        metavar="STATE",
        help="Reject the action unless what it affects is as a --dry-run has shown it, which prints this state.",
    ),
]
Interrupt = Annotated[
    bool,
    typer.Option("--interrupt", help="Stop attempts that the action affects, instead of being rejected."),
]
BatchUids = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[BATCH]...", help="Batches, as `flowkit batches --failed` shows them. Default: all of them."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Show what the action would affect, and the command that does it if nothing changes before.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionOptions:
    """The options of all actions. A group of options."""

    context: typer.Context
    reason: Reason = ""
    by: By = None
    if_revision: IfRevision = None
    if_state: IfState = None
    dry_run: DryRun = False
    as_json: AsJson = False


@with_options
def pause(
    task: TaskId,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCOPE", help=f"Pause only a part of the task: {_SCOPES} Default: the whole task."
        ),
    ] = None,
    interrupt: Annotated[
        bool,
        typer.Option("--interrupt", help="Stop running attempts too. They run again later, using no retry."),
    ] = False,
    *,
    how: ActionOptions,
    where: AnyQueue,
) -> None:
    """Start nothing new in a running task, or in a part of it, until `flowkit resume`. Running attempts finish."""
    _act(task, PAUSE, {"scopes": scope or [TASK_SCOPE], "interrupt": interrupt}, how, where)


@with_options
def resume(
    task: TaskId,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCOPE",
            help="Resume only this scope, as `flowkit status` shows it. Repeatable. Default: all.",
        ),
    ] = None,
    *,
    how: ActionOptions,
    where: AnyQueue,
) -> None:
    """Continue a paused task, or a part of it."""
    _act(task, RESUME, {"scopes": scope or []}, how, where)


@with_options
def retry(
    task: TaskId,
    node: TaskNode,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a key of the node's input_inline: JSON if it parses as JSON, else text; "
            "null removes the key. Repeatable.",
        ),
    ] = None,
    given_input: Annotated[
        str | None,
        typer.Option(
            "--input", help="Keys of input_inline to replace, as JSON, YAML or @FILE; --set overrides them."
        ),
    ] = None,
    timeout_sec: Annotated[float | None, typer.Option(help="New time limit of one attempt.")] = None,
    retries: Annotated[int | None, typer.Option(min=0, help="New number of retries.")] = None,
    backoff_sec: Annotated[
        float | None, typer.Option(min=0, help="New number of seconds before the first retry.")
    ] = None,
    interrupt: Interrupt = False,
    *,
    how: ActionOptions,
    where: AnyQueue,
) -> None:
    """Run a node again, and what depends on it, or end its wait for a retry. --interrupt restarts one that runs."""
    policy = {"max": retries, "backoff_sec": backoff_sec}
    given = {
        "node_id": node,
        "input_inline": _read_input(given_input, change or ()),
        "timeout_sec": timeout_sec,
        "retry_policy": {key: value for key, value in policy.items() if value is not None} or None,
        "interrupt": interrupt,
    }
    _act(task, RETRY_NODE, given, how, where)


@with_options
def skip(
    task: TaskId,
    node: TaskNode,
    interrupt: Interrupt = False,
    *,
    how: ActionOptions,
    where: AnyQueue,
) -> None:
    """End a node as skipped."""
    _act(task, SKIP_NODE, {"node_id": node, "interrupt": interrupt}, how, where)


@with_options
def complete(
    task: TaskId,
    node: TaskNode,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A final metric of the node: JSON if it parses as JSON, else text. Repeatable.",
        ),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(
            help="Batches for the nodes that pull from it, as JSON, YAML or @FILE: a list of objects with "
            "batch_uid and metrics."
        ),
    ] = None,
    interrupt: Interrupt = False,
    *,
    how: ActionOptions,
    where: AnyQueue,
) -> None:
    """End a node as finished, with results that you provide."""
    given = {
        "node_id": node,
        "metrics": read_pairs(metric or (), "--metric", "count=7") or None,
        "batches": None if batches is None else read_objects(batches, "--batches", _BATCHES),
        "interrupt": interrupt,
    }
    _act(task, COMPLETE_NODE, given, how, where)


@with_options
def fail(
    task: TaskId,
    node: TaskNode,
    interrupt: Interrupt = False,
    *,
    how: ActionOptions,
    where: AnyQueue,
) -> None:
    """End a node as failed; routes and allow_failure apply as to any failure."""
    _act(task, FAIL_NODE, {"node_id": node, "interrupt": interrupt}, how, where)


@with_options
def retry_batches(
    task: TaskId,
    node: TaskNode,
    batches: BatchUids = None,
    interrupt: Interrupt = False,
    *,
    how: ActionOptions,
    where: AnyQueue,
) -> None:
    """Run a node again for batches that it has set aside, and what depends on it. It keeps its other batches."""
    _act(
        task,
        RETRY_BATCHES,
        {"node_id": node, "batch_uids": batches or [], "interrupt": interrupt},
        how,
        where,
    )


@with_options
def skip_batches(
    task: TaskId,
    node: TaskNode,
    batches: BatchUids = None,
    interrupt: Interrupt = False,
    *,
    how: ActionOptions,
    where: AnyQueue,
) -> None:
    """Accept that batches are missing that a node has set aside; a failed or held node continues without them."""
    _act(
        task, SKIP_BATCHES, {"node_id": node, "batch_uids": batches or [], "interrupt": interrupt}, how, where
    )


@with_options
def decide(
    task: TaskId,
    node: TaskNode,
    decision: Annotated[str, typer.Argument(callback=_check_decision, help="`approve` or `reject`.")],
    comment: Annotated[str, typer.Option(help="A comment, up to 500 characters.")] = "",
    *,
    how: ActionOptions,
    where: AnyQueue,
) -> None:
    """Approve or reject at a node of the type approval."""
    _act(task, DECIDE, {"node_id": node, "decision": decision, "comment": comment}, how, where)


@with_options
def satisfy(
    task: TaskId,
    prerequisite: Annotated[str, typer.Argument(help="The prerequisite, as its nodes name it.")],
    *,
    how: ActionOptions,
    where: AnyQueue,
) -> None:
    """Satisfy a prerequisite, for all nodes of a task that name it."""
    _act(task, SATISFY, {"prerequisite": prerequisite}, how, where)


@with_options
def change(
    task: TaskId,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="JSON or YAML file with `nodes`, `edges` and `edges_ex` to add, `changes` by node id; - for stdin.",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NODE:KEY=VALUE",
            help="Replace a key of the input_inline of a node that has not started; null removes it. Repeatable.",
        ),
    ] = None,
    *,
    how: ActionOptions,
    where: AnyQueue,
) -> None:
    """Add nodes to the graph of a running task, and change nodes that have not started."""
    given = _add_inputs({} if file is None else read_change(file), _read_inputs(setting or ()))
    _act(task, CHANGE_GRAPH, given, how, where)


def _add_inputs(given: dict[str, Any], inputs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a change of the graph with the keys of `input_inline` that --set replaces."""
    changes = given.get("changes") or {}
    if not inputs or not isinstance(changes, dict):
        return given
    if twice := sorted(inputs.keys() & changes.keys()):
        problem = ConfigError(f"--set and the file both change node {printed(twice[0])}")
        raise add_remedy(problem, "put all changes of a node into the file")
    own = {node: {"io": {"input_inline": keys}} for node, keys in inputs.items()}
    return {**given, "changes": {**changes, **own}}


def _read_input(text: str | None, pairs: Sequence[str]) -> dict[str, Any] | None:
    """Return the keys of `input_inline` that --input and --set replace; None if they replace none."""
    example = """the input is an object, for example '{"limit": 5}'"""
    given = {} if text is None else read_object(text, "--input", example)
    return given | read_pairs(pairs, "--set", "limit=5") or None


def _act(task: str, name: str, given: dict[str, Any], how: ActionOptions, where: DeploymentOptions) -> None:
    common = {
        "reason": how.reason,
        "by": current_user() if how.by is None else how.by,
        "if_revision": how.if_revision,
        "if_state": how.if_state,
    }
    known = {key: value for key, value in {**given, **common}.items() if value is not None}
    result = asyncio.run(_send(task, name, known, where, dry_run=how.dry_run))
    command = _guarded_command(how.context, result) if how.dry_run else None
    if how.as_json:
        shown = {"task_id": task, "action": name, "dry_run": how.dry_run, **result}
        return output.document(shown | ({"command": command} if command else {}))
    done = (
        f"{name} would affect"
        if how.dry_run
        else f"{name} applied as revision {result['revision']}; it affects"
    )
    output.echo(f"{done} {count_of(len(result['affected']), 'node')} of task {task}")
    return _print_affected(result, command)


def _guarded_command(context: typer.Context, previewed: dict[str, Any]) -> str:
    """Return the command of a preview, which is rejected once something differs from what the preview has shown."""
    seen = {"--if-revision": previewed.get("revision"), "--if-state": previewed["state"]}
    return repeated_command(context, without=("--dry-run", "--json"), instead=seen)


def _print_affected(result: dict[str, Any], command: str | None) -> None:
    """Print the affected nodes and the notes of an action or a rerun, and the command after a preview."""
    affected = result["affected"]
    width = max((len(each["node_id"]) for each in affected[:_SHOWN]), default=0)
    for each in affected[:_SHOWN]:
        output.echo(f"  {each['node_id']:<{width}}  {each['from']} -> {each['to']}")
    if len(affected) > _SHOWN:
        output.echo(f"  … {len(affected) - _SHOWN:,} more; --json lists them")
    for note in result["notes"]:
        output.note(f"  {_as_option(note)}")
    if command is not None:
        output.note(f"  apply exactly this  {command}")


@with_options
def rerun(
    context: typer.Context,
    task: TaskId,
    nodes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NODE]...",
            help="Nodes to run again, with what depends on them. Default: those that failed, were cancelled, or were "
            "skipped for a failure or the end of the task.",
        ),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Replace one of the params: JSON if it parses as JSON, else text. Repeatable.",
        ),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NODE:KEY=VALUE", help="Replace a key of a node's input_inline. Repeatable."
        ),
    ] = None,
    failed_batches: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE",
            help="Run this node again only for the batches that it has set aside; it keeps the others. Repeatable.",
        ),
    ] = None,
    reason: Reason = "",
    by: By = None,
    if_state: IfState = None,
    dry_run: DryRun = False,
    queue: Queue = None,
    as_json: AsJson = False,
    *,
    where: AnyQueue,
) -> None:
    """Run an ended task again in a new run: what did not finish, or chosen nodes, and what depends on them."""
    options: dict[str, Any] = {
        "params": read_pairs(param or (), "--param", "day=2026-01-31"),
        "inputs": _read_inputs(change or ()),
        "failed_batches_of": failed_batches or (),
        "reason": reason,
        "by": current_user() if by is None else by,
        "if_state": if_state,
        "dry_run": dry_run,
    }
    result = asyncio.run(_run_again(task, nodes or None, options, where))
    command = _guarded_command(context, result) if dry_run else None
    if as_json:
        return output.document({**result, "dry_run": dry_run} | ({"command": command} if command else {}))
    started = "would run" if dry_run else "runs"
    nodes_again = count_of(len(result["affected"]), "node")
    output.echo(f"task {task} {started} again as run {result['run_seq']}, with {nodes_again}")
    return _print_affected(result, command)


def _read_inputs(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the keys of `input_inline` to replace, by node id, from texts `node:key=value`."""
    example = "load:limit=50"
    inputs: dict[str, dict[str, Any]] = {}
    for place, value in read_pairs(given, "--set", example).items():
        node, colon, key = place.rpartition(":")
        if not colon or not node or not key:
            problem = ConfigError(f"--set {printed(place)} names no node")
            raise add_remedy(problem, f"write, for example, --set {example}")
        inputs.setdefault(node, {})[key] = value
    return inputs


async def _run_again(
    task: str, nodes: Sequence[str] | None, options: dict[str, Any], where: DeploymentOptions
) -> dict[str, Any]:
    from flowkit.cli.servers import servers

    async with servers(where) as both:
        return await both.tasks.steering.rerun(task, nodes, **options)


async def _send(
    task: str, name: str, given: dict[str, Any], where: DeploymentOptions, *, dry_run: bool
) -> dict[str, Any]:
    from flowkit.cli.servers import servers

    async with servers(where) as both:
        try:
            if dry_run:
                return await both.tasks.steering.preview(task, name, given)
            return await both.tasks.steering.act(task, name, given, wait_sec=_ENGINE_SEC)
        except ActionRejected as error:
            raise ActionRejected(_as_option(str(error)), error.cause) from None


def _as_option(text: str) -> str:
    """Return a text of a task about `interrupt`, which is an option here."""
    return text.replace("interrupt=true", "--interrupt")
