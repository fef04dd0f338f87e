"""What FlowKit says about the mistakes that new users make most: the whole message of each."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.graphs import PULL, node, refusal, two
from tests.unit.handler_runs import artifacts, finished
from tests.unit.handler_runs import node as run_node

from flowkit.activities.conditions import Evaluation
from flowkit.activities.handlers import unfit_hook
from flowkit.cli.json_files import read_change
from flowkit.errors import BadCondition, ConfigError, GraphError
from flowkit.flow import Flow
from flowkit.graph.cel import ROOTS, compile_expression
from flowkit.graph.conditions import SecretRule
from flowkit.graph.fields import NODE, RETRY_POLICY
from flowkit.limits import CONDITIONS_SEC
from flowkit.testing import memory_database, run_graph
from flowkit.worker import Batch, BatchFailure, BatchResult, RoleHandler, role
from flowkit.worker.runner import Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from flowkit.graph.kinds import ValueKind
    from flowkit.worker.context import RunContext

RETRIES = 'set "retry_policy": {"max": n}, where n is the number of retries'
INPUT = 'put the input of the node into "io": {"input_inline": {...}}'

OTHER_NAMES = {
    "retries": RETRIES,
    "retry": RETRIES,
    "maxRetries": RETRIES,
    "retryStrategy": RETRIES,
    "retry_delay": 'set "retry_policy": {"backoff_sec": n}, where n is the number of seconds before the first retry',
    "timeout": "did you mean 'timeout_sec'?",
    "execution_timeout": "did you mean 'timeout_sec'?",
    "activeDeadlineSeconds": "did you mean 'timeout_sec'?",
    "deadline": "did you mean 'deadline_sec'?",
    "depends": "did you mean 'depends_on'?",
    "upstream": "did you mean 'depends_on'?",
    "dependencies": "did you mean 'depends_on'?",
    "downstream": "name this node in 'depends_on' of the nodes that follow it",
    "task_id": "did you mean 'node_id'?",
    "id": "did you mean 'node_id'?",
    "operator": "did you mean 'type'?",
    "role": "did you mean 'type'?",
    "trigger_rule": "set 'fan_in' to 'all', 'any' or 'count:n'; a node that handles a failure belongs in "
    "'routing.on_failure' of the node that fails",
    "condition": "did you mean 'when'?",
    "params": INPUT,
    "arguments": INPUT,
    "op_kwargs": INPUT,
    "python_callable": 'set "type": "coordinator_fn" and "io": {"fn": "the name of the function"}',
    "continueOn": "did you mean 'allow_failure'?",
    "on_failure_callback": 'name the nodes that follow in "routing": {"on_success": [...], "on_failure": [...]}',
    "tags": "did you mean 'meta'?",
    "priority_weight": "set 'priority' in the params of the task",
    "prerequisite": "did you mean 'prerequisites'?",
    "hold": "did you mean 'hold_on_failure'?",
    "suspend": 'set "type": "approval" and "io": {"input_inline": {"text": "..."}}',
    "sleep": 'set "type": "delay" and "io": {"input_inline": {"sec": n}}',
    "pool": "limit a role with the setting 'max_type_concurrency' of the engine",
}


@pytest.mark.parametrize(("key", "hint"), OTHER_NAMES.items(), ids=OTHER_NAMES.keys())
def test_key_of_another_system_suggests_ours(key: str, hint: str) -> None:
    assert refusal(two(**{key: 3})).problems == [f"node 'load': unknown key {key!r}; {hint}"]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("limit", "did you mean 'max'?"),
        (
            "maximumAttempts",
            "set 'max' to the number of retries, which is one less than the number of attempts",
        ),
        ("delay", "did you mean 'backoff_sec'?"),
        ("multiplier", "did you mean 'backoff_coefficient'?"),
        ("maxInterval", "did you mean 'max_backoff_sec'?"),
    ],
)
def test_key_of_another_retry_policy_suggests_ours(key: str, hint: str) -> None:
    error = refusal(two(retry_policy={key: 3}))
    assert error.problems == [f"node 'load': retry_policy: unknown key {key!r}; {hint}"]


@pytest.mark.parametrize("kind", [NODE, RETRY_POLICY])
def test_a_word_of_another_system_means_one_thing_and_is_no_field(kind: ValueKind) -> None:
    texts = [*(field.words for field in kind.fields.values()), *kind.remedies.values()]
    words = [word for text in texts for word in text.split()]
    assert len(words) == len({*words})
    assert not kind.fields.keys() & {*words}


def test_list_of_tasks_is_renamed_to_nodes() -> None:
    assert refusal({"tasks": [node()]}).problems == [
        "graph.nodes must be a list of at least one node, not None; rename 'tasks' to 'nodes'"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("params.n => 3", "token recognition error at: '=>'; did you mean '>='?"),
        ("params.n =< 3", "token recognition error at: '=<'; did you mean '<='?"),
        ("params.n = 3", "token recognition error at: '= '; did you mean '=='?"),
        ("params.n <> 3", "extraneous input '>'; did you mean '!='?"),
        ("params.a and params.b", "mismatched input 'and' expecting <EOF>; did you mean '&&'?"),
        ("not params.a", "mismatched input 'params' expecting <EOF>; did you mean '!'?"),
        ("params.a == None", "undeclared reference to 'None'; did you mean 'null'?"),
        ("params.a == 'x => y", "token recognition error at: ''x => y'"),
    ],
)
def test_operator_of_another_language_suggests_that_of_cel(text: str, problem: str) -> None:
    with pytest.raises(BadCondition) as caught:
        compile_expression(text)
    first, line, caret = str(caught.value).split("\n  | ")
    assert (first, line, caret.strip()) == (problem, text, "^")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "params.day > 3",
            (
                'Key not found in map: "day", in the condition params.day > 3; it reads params.day (not set); '
                "if it may be missing, write has(params.day) && … before it"
            ),
        ),
        (
            "vars.a.b.c",
            (
                'Key not found in map: "b", in the condition vars.a.b.c; it reads vars.a.b (not set); '
                "if it may be missing, write has(vars.a.b) && … before it"
            ),
        ),
        (
            'params["a day"] > 3',
            (
                'Key not found in map: "a day", in the condition params["a day"] > 3; '
                'it reads params["a day"] (not set); '
                'if it may be missing, write "a day" in params && … before it'
            ),
        ),
        (
            "vars.n / 0 == 1",
            "divide by zero, in the condition vars.n / 0 == 1; it reads vars.n = 1",
        ),
    ],
)
def test_value_that_is_missing_suggests_has(text: str, message: str) -> None:
    values: dict[str, Any] = {**{root: {} for root in ROOTS}, "vars": {"a": {}, "n": 1}}
    assert Evaluation(CONDITIONS_SEC, SecretRule(lambda path, value: False)).run([text], values) == [message]


# --- misspelled hooks ---------------------------------------------------------------------------------------------


def handler_with(*methods: str, base: type[RoleHandler] = RoleHandler) -> RoleHandler:
    """Return a handler whose class defines these methods."""
    body = dict.fromkeys(methods, lambda self, *given: None)
    made: Any = type("Count", (base,), {"role": "count", **body})()
    return made  # type: ignore[no-any-return]


def load(handler: RoleHandler) -> None:
    Worker(db=memory_database(), handlers={"count": handler})


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("proces_batch", "process_batch"),
        ("process_batches", "process_batch"),
        ("processBatch", "process_batch"),
        ("finalise", "finalize"),
        ("iter_batch", "iter_batches"),
        ("iterate_batches", "iter_batches"),
        ("load_inputs", "load_input"),
        ("classify_errors", "classify_error"),
    ],
)
def test_misspelled_hook_fails_when_the_worker_loads_the_handler(name: str, hook: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(handler_with(name))
    assert str(caught.value) == (
        f"Count.{name} is not a hook of RoleHandler, so FlowKit never calls it; did you mean {hook!r}? "
        "If it is a helper, begin its name with '_'"
    )


@pytest.mark.parametrize(
    "handler",
    [
        handler_with("init", "load_input", "iter_batches", "process_batch", "finalize", "classify_error"),
        handler_with("_proces_batch", "__finalise"),
        handler_with("finalize", "finalise"),
        handler_with("load_data", "process_row", "finalize_report", "initialize", "start"),
        handler_with("process_batch", base=type(handler_with("load_inputs"))),
        type("Count", (RoleHandler,), {"iter_batch": 5})(),
    ],
    ids=["hooks", "private", "beside the hook", "other names", "inherited", "no method"],
)
def test_helper_is_not_taken_for_a_misspelled_hook(handler: RoleHandler) -> None:
    load(handler)


# --- batches with one uid -----------------------------------------------------------------------------------------


class Listed(RoleHandler):
    """Yields the batches of the inline input, as pairs of uid and payload. The first attempt fails at a uid `fail`."""

    role = "listed"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        for uid, value in loaded["input_inline"]["batches"]:
            yield Batch(batch_uid=uid, payload={"value": value})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        if batch.batch_uid == "stored":
            await ctx.artifacts.upsert_partial("stored", {"value": 0})
        failed = batch.batch_uid == "fail" and ctx.attempt_epoch == 1
        return BatchResult(success=not failed, metrics={"value": batch.payload.get("value", 0)})


class Tolerant(Listed):
    allow_duplicate_uids = True


def listed(*batches: tuple[str | None, int], node_id: str = "a") -> dict[str, Any]:
    soon = {"max": 2, "backoff_sec": 0}
    return run_node(node_id, "listed", inline={"batches": [*batches]}, retry_policy=soon)


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        (
            [("x", 1), ("y", 2), ("x", 3)],
            (
                "Listed.iter_batches yields two batches with the uid 'x', and FlowKit stores one "
                "result for each uid: give "
                "each batch its own batch_uid, or set allow_duplicate_uids = True on the handler to "
                "keep only one of the "
                "results"
            ),
        ),
        (
            [(None, 1), (None, 2), (None, 1)],
            (
                "Listed.iter_batches yields two batches with equal payloads and without batch_uid, "
                "so that both have the "
                "same uid, and FlowKit stores one result for each uid: set a different batch_uid for each, or set "
                "allow_duplicate_uids = True on the handler to keep only one of the results"
            ),
        ),
    ],
    ids=["uid", "payload"],
)
async def test_two_batches_with_one_uid_fail_the_attempt_for_good(
    batches: list[tuple[str | None, int]], text: str
) -> None:
    run = await run_graph({"nodes": [listed(*batches)]}, Listed())
    found = run.nodes["a"]
    assert (found.status, found.attempts, found.error) == ("failed", 1, f"duplicate_uid: {text}")
    assert [each["meta"]["value"] for each in await artifacts(run)] == [1, 2]


async def test_tolerant_handler_keeps_one_result_of_batches_with_one_uid() -> None:
    run = await finished([Tolerant()], listed(("x", 1), ("y", 2), ("x", 3)))
    stored = {each.get("batch_uid"): each["meta"].get("value") for each in await artifacts(run)}
    assert stored == {"x": 3, "y": 2, None: None}


async def test_batches_of_other_attempts_and_sources_and_stored_ones_do_not_count() -> None:
    pulls = {"input_adapter": PULL, "input_args": {"from_nodes": ["a", "b"]}}
    run = await finished(
        [Listed()],
        listed(("x", 1), ("stored", 2), ("fail", 3)),
        listed(("x", 1), node_id="b"),
        run_node("z", "listed", "a", "b", inline=pulls),
    )
    assert {name: (each.attempts, len(each.batches)) for name, each in run.nodes.items()} == {
        "a": (2, 3),
        "b": (1, 1),
        "z": (2, 4),
    }


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "async def process_batch(self, batch): ...",
            (
                "Own.process_batch(batch) does not fit: too many positional arguments; write "
                "process_batch(self, batch, ctx)"
            ),
        ),
        (
            "def load_input(self, ref): ...",
            (
                "Own.load_input(ref) does not fit: too many positional arguments; write "
                "load_input(self, input_ref, input_inline)"
            ),
        ),
        (
            "def finalize(self, ctx, total): ...",
            "Own.finalize(ctx, total) does not fit: missing a required argument: 'total'; write finalize(self, ctx)",
        ),
        ("def init(self, info, ctx): ...", None),
        ("def iter_batches(self, loaded, *, ctx): ...", None),
        ("def process_batch(self, *given, **more): ...", None),
    ],
)
def test_hook_that_cannot_be_called_names_its_parameters(source: str, message: str | None) -> None:
    names: dict[str, Any] = {"RoleHandler": RoleHandler}
    exec(f"class Own(RoleHandler):\n    {source}", names)  # noqa: S102 - a handler as a user writes it
    assert unfit_hook(names["Own"]()) == message


async def test_default_classify_error_says_why_an_error_is_not_retried() -> None:
    class Reading(RoleHandler):
        role = "reading"

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            return BatchResult(success=True, metrics={"word": dict(ctx.params)["word"]})

    class ReadingVariable(RoleHandler):
        role = "variable"

        async def init(self, info: dict[str, Any]) -> None:
            os.environ["NOT_SET_ANYWHERE"]

    graph = {"nodes": [run_node("a", "reading"), run_node("b", "variable")], "on_node_failure": "continue"}
    run = await run_graph(graph, Reading(), ReadingVariable())
    assert str(run.nodes["a"].error).endswith(
        "Reading.process_batch; not retried, because classify_error takes every KeyError for bad input"
    )
    assert str(run.nodes["b"].error).endswith(
        "ReadingVariable.init; set this environment variable for the worker; "
        "not retried, because classify_error takes every KeyError for bad input"
    )


@pytest.mark.parametrize(
    ("text", "is_yaml"),
    [
        ("nodes:\n  - node_id: a\n", True),
        ("# a graph\n---\nnodes: []\n", True),
        ("- node_id: a", True),
        ('{"nodes": [}', False),
        ("{nodes: []}", False),
    ],
)
def test_yaml_is_named_as_such(tmp_path: Path, text: str, is_yaml: bool) -> None:
    file = tmp_path / "graph.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_change(str(file))
    assert ("it looks like YAML" in str(caught.value.__notes__)) is is_yaml


@pytest.mark.parametrize(
    "escape", [json.dumps, lambda name: "".join(["'", *map("\\u{:04x}".format, map(ord, name)), "'"])]
)
@pytest.mark.parametrize("name", ["x/y\\z", "a'b\"c\\", "plain"])
async def test_condition_can_name_every_node_id_with_escape_sequences(
    name: str, escape: Callable[[str], str]
) -> None:
    condition = f"nodes[{escape(name)}].status == 'finished'"
    run = await run_graph({"nodes": [run_node(name, "echo"), run_node("b", "echo", name, when=condition)]})
    assert run.nodes["b"].status == "finished"


async def test_graph_as_text_is_refused_with_the_way_to_load_it() -> None:
    with pytest.raises(GraphError) as caught:
        await run_graph("nodes:\n  - a")  # type: ignore[arg-type]
    assert caught.value.problems == [
        (
            "graph must be an object with 'nodes', not 'nodes:\\n  - a'; load the text first, for "
            "example with json.loads "
            "or yaml.safe_load"
        )
    ]


async def test_a_value_that_is_nested_too_deeply_is_refused_with_a_remedy() -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    too_deep = "it is nested too deeply, or contains itself; make it flatter"

    @role("deep")
    async def dig(item: int) -> list[Any]:
        return deep

    with pytest.raises(BatchFailure, match=too_deep):
        await dig.try_on(1)
    with pytest.raises(GraphError, match=f"params cannot be written as JSON: {too_deep}"):
        Flow("f").dump_params({"deep": deep})
    with pytest.raises(GraphError, match=f"input cannot be written as JSON: {too_deep}"):
        Flow("f").node("d", dig).input(deep=deep)
