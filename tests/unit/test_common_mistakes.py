"""What FlowKit says about the mistakes that new users make most: the whole message of each."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import node, refusal, two

from flowkit.activities.conditions import Evaluation
from flowkit.errors import BadCondition
from flowkit.graph.cel import ROOTS, compile_expression
from flowkit.graph.field_checks import NODE_KEYS, NODE_WORDS, RETRY_KEYS, RETRY_WORDS
from flowkit.limits import CONDITIONS_SEC

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


@pytest.mark.parametrize(("words", "known"), [(NODE_WORDS, NODE_KEYS), (RETRY_WORDS, RETRY_KEYS)])
def test_suggested_keys_exist(words: dict[str, str], known: frozenset[str]) -> None:
    assert {ours for ours in words.values() if ours.isidentifier()} <= known
    assert not words.keys() & known


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
                'Key not found in map: "a day", in the condition params["a day"] > 3; it reads params["a day"] (not set); '
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
    assert Evaluation(CONDITIONS_SEC, lambda path, value: False).run([text], values) == [message]
