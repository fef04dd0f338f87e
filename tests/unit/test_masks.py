"""What is secret, and in which spellings texts for people hide it."""

from __future__ import annotations

import asyncio
import base64
import html
import io
import json
import logging
import shlex
import threading
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from pydantic import BaseModel, Field, SecretStr
from tests.product_code import needs_product

from flowkit import masks, reason_codes
from flowkit.cli import output
from flowkit.core.log import DRIVERS, process_formatter
from flowkit.masks import (
    HIDDEN,
    UNKNOWN_VALUES,
    AttemptMask,
    Mask,
    forms_of,
    hide,
    hide_forms,
    hides_value,
    is_secret_name,
    secret_paths,
    values_at,
)
from flowkit.testing import memory_database, run_graph
from flowkit.worker import Batch, BatchFailure, BatchResult, RoleHandler, RunContext

SECRETS = ['pa"ss\\wörd-4711', "p@ss/word+1 2", "plain0815secret", "it's <b>&amp;", "tab\tand\nline feed"]


def spelled(secret: str) -> dict[str, str]:
    """Return texts that contain a secret, by how they spell it."""
    encoded = secret.encode()
    return {
        "as it is": secret,
        "json": json.dumps({"k": secret}),
        "json, not ascii": json.dumps([secret], ensure_ascii=False),
        "json in json": json.dumps({"body": json.dumps({"k": secret})}),
        "json in json, not ascii": json.dumps(json.dumps(secret, ensure_ascii=False), ensure_ascii=False),
        "json with escaped slashes": json.dumps(secret).replace("/", "\\/"),
        "repr": repr([secret]),
        "ascii": ascii(secret),
        "repr in json": json.dumps(repr(secret)),
        "json in repr": repr(json.dumps(secret)),
        "url": f"https://h/?k={quote(secret)}",
        "url, all": quote(secret, safe=""),
        "url, lower case": quote(secret, safe="").lower().replace("+", "%2b"),
        "form": quote_plus(secret),
        "html": f"<p title='{html.escape(secret)}'>",
        "html, decimal": html.escape(secret).replace("&#x27;", "&#39;"),
        "json in html": html.escape(json.dumps(secret)),
        "base64": base64.b64encode(encoded).decode(),
        "basic auth": base64.b64encode(b"u:" + encoded).decode(),
        "base64 within": base64.b64encode(b"user:" + encoded + b":end").decode(),
        "base64 for urls": base64.urlsafe_b64encode(encoded).decode(),
        "command": f"login {shlex.quote(secret)}",
    }


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_hidden_however_it_is_spelled(secret: str) -> None:
    mask = Mask({"password": secret})
    kept = {
        how: mask.text(text)
        for how, text in spelled(secret).items()
        if "lower" not in how or secret.islower()
    }
    assert {how: text for how, text in kept.items() if HIDDEN not in text} == {}


def test_a_basic_authorization_keeps_nothing_of_the_password() -> None:
    shown = hide(base64.b64encode(b"user:correct-horse-battery").decode(), ["correct-horse-battery"])
    left = shown.replace(HIDDEN, "")
    assert len(left) < 12
    assert b"orse" not in base64.b64decode(left + "=" * (-len(left) % 4))


def test_lines_of_a_secret_are_hidden_one_by_one_from_eight_characters_on() -> None:
    key = "-----BEGIN KEY-----\nMIIBOgIBAAJBAKj3\nshort\n  indented line\n-----END KEY-----"
    shown = hide('the line "MIIBOgIBAAJBAKj3", the short one, and an indented line', [key])
    assert shown == f'the line "{HIDDEN}", the short one, and an {HIDDEN}'


def test_other_texts_stay() -> None:
    text = "batch 0f3a of /data/rows.csv at 12:30: no such file"
    assert hide(text, ["/data/columns.csv", "abc", "", 17, True, None, b"\xff\xfe\xfd\xfc"]) == text
    assert hide("day 2026-11-27, 123456", {"day": "2026-11-27", "n": [123456]}) == f"day {HIDDEN}, {HIDDEN}"


@pytest.mark.parametrize(
    ("secret", "text", "shown"),
    [
        ("https://u:pw@host/?key=0815-4711", "no https://u:pw@host/?key=0815-4711 here", f"no {HIDDEN} here"),
        ("JhbG", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", HIDDEN),
        ("hidden", "(it is hidden)", f"(it is {HIDDEN})"),
    ],
    ids=["an address with a password", "a part of a token", "the text in its place"],
)
def test_a_secret_is_hidden_whole_beside_texts_of_well_known_forms(
    secret: str, text: str, shown: str
) -> None:
    mask = Mask()
    mask.add_values([secret])
    assert mask.text(text) == shown


def test_of_secrets_that_overlap_nothing_stays() -> None:
    assert hide("x abcdef-123456 y", ["abcdef-1", "f-123456"]) == f"x {HIDDEN} y"
    assert hide("a dark den", list("(hiden)"), shortest=1) == f"a {HIDDEN}ark {HIDDEN}{HIDDEN}{HIDDEN}"


def test_a_long_text_has_as_many_forms_as_lines_beyond_the_limit() -> None:
    """A param of a megabyte would otherwise have half a million forms, for each of which every line is searched."""
    lines = [f"line {number}: 'some' <text> & more" for number in range(20_000)]
    forms = forms_of(["pass/word 1", "\n".join(lines)])
    assert len(forms) < 50_000
    assert hide_forms(f"{lines[0]} {lines[-1]} {quote('pass/word 1')}", forms) == " ".join([HIDDEN] * 3)


def test_thousands_of_values_are_hidden_as_they_are() -> None:
    values = [f"value-{number}" for number in range(2_000)]
    assert hide('value-1999 is "value-0"', values) == f'{HIDDEN} is "{HIDDEN}"'


def test_a_setting_adds_names_of_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_secret_name("db_password")
    assert not is_secret_name("customer_iban")
    monkeypatch.setenv("FLOWKIT_SECRET_NAMES", "iban, pin.code")
    assert is_secret_name("customer_IBAN")
    assert is_secret_name("pin.code")
    assert not is_secret_name("pinXcode")
    assert is_secret_name("db_password")
    assert Mask({"iban": "DE02 1203"}).text("for DE02 1203") == f"for {HIDDEN}"


class Account(BaseModel):
    """Some fields of a service."""

    user: str
    pin: SecretStr | None = None
    parent: Account | None = None


class Job(BaseModel):
    """Params of a task."""

    folder: str = "/data/in"
    day: str = "2026-11-27"
    code: int = Field(0, json_schema_extra={"x-secret": True})
    public: str = Field("", json_schema_extra={"x-secret": False, "format": "password"})
    accounts: list[Account] = []
    named: dict[str, SecretStr] = {}


def test_a_model_says_which_params_are_secret() -> None:
    inner = {"user": "u", "pin": "p2"}
    params = {
        "folder": "f",
        "code": 4711,
        "public": "x",
        "accounts": [{"user": "a", "pin": "p1", "parent": inner}],
        "named": {"k": "p3"},
    }
    paths = secret_paths(params, Job.model_json_schema())
    assert paths == [["code"], ["accounts", 0, "pin"], ["accounts", 0, "parent", "pin"], ["named", "k"]]
    assert values_at(params, [*paths, ["missing", "key"], ["accounts", 7]]) == [4711, "p1", "p2", "p3"]
    assert secret_paths(params, {"type": "object"}) == []
    many = {"named": {str(number): "x" for number in range(2_000)}}
    assert secret_paths(many, Job.model_json_schema()) == [[]]


PIN = {"type": "string", "x-secret": True}


@pytest.mark.parametrize(
    ("schema", "params", "paths"),
    [
        ({"properties": {"a": {"$ref": "#"}, "pin": PIN}}, {"a": {"pin": "1"}}, [["a", "pin"]]),
        ({"properties": {"a": {"$ref": "#/properties/pin"}, "pin": PIN}}, {"a": "1"}, [["a"]]),
        (
            {"properties": {"a": {"$ref": "#/$defs/b/anyOf/0"}}, "$defs": {"b": {"anyOf": [PIN]}}},
            {"a": "1"},
            [["a"]],
        ),
        ({"properties": {"a": {"$ref": "#own"}, "b": PIN}}, {"a": "1"}, [["a"]]),
        ({"properties": {"a": {}}, "patternProperties": {"^p": PIN}}, {"a": "1", "p1": "2"}, [["p1"]]),
        ({"properties": {"a": {"items": [{}, PIN]}}}, {"a": ["1", "2"]}, [["a", 1]]),
        ({"properties": {"a": {"prefixItems": [{}], "items": PIN}}}, {"a": ["1", "2"]}, [["a", 1]]),
        ({"if": {"required": ["a"]}, "then": {"properties": {"a": PIN}}}, {"a": "1"}, [["a"]]),
        ({"dependentSchemas": {"b": {"properties": {"a": PIN}}}}, {"a": "1", "b": "2"}, [["a"]]),
        ({"properties": {"b": {}}, "unevaluatedProperties": PIN}, {"a": "1", "b": "2"}, [["a"]]),
    ],
    ids=lambda each: (
        json.dumps(each)[:60] if isinstance(each, dict) and "x-secret" in json.dumps(each) else ""
    ),
)
def test_a_mark_counts_wherever_a_schema_has_it(
    schema: dict[str, Any], params: dict[str, Any], paths: list[Any]
) -> None:
    assert secret_paths(params, schema) == paths
    [path] = paths
    [value] = values_at(params, paths)
    assert hides_value(schema, path, value)


def test_alternatives_inside_of_alternatives_do_not_multiply() -> None:
    """Eighty levels of two alternatives each would otherwise never end, in the process of an engine."""
    both = {"anyOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}]}
    schema = {
        **both,
        "$defs": {name: {"properties": {"a": both, "pin": PIN}} for name in ("one", "two")},
    }
    params: dict[str, Any] = {"pin": "1"}
    for _ in range(80):
        params = {"a": params}
    path = [*["a"] * 80, "pin"]
    assert secret_paths(params, schema) == [path]
    assert hides_value(schema, path, "1")


def test_params_that_take_too_many_steps_are_secret_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_MOST_STEPS", 5_000)
    schema = {"items": {"anyOf": [{"title": str(number)} for number in range(100)]}, "not": PIN}
    assert secret_paths([1] * 20, schema) == []
    assert secret_paths([1] * 100, schema) == [[]]


@pytest.mark.parametrize(
    "keyword",
    ["properties", "patternProperties", "prefixItems", "items", "anyOf", "$ref", "dependentSchemas", "then"],
)
@pytest.mark.parametrize("wrong", [5, "x", [PIN, 5], {"a": 5}, None], ids=repr)
def test_a_schema_that_is_none_raises_nothing(keyword: str, wrong: Any) -> None:
    schema = {keyword: wrong, "not": PIN}
    assert isinstance(secret_paths({"a": [1], "b": 2}, schema), list)
    assert isinstance(hides_value(schema, ["a", 0], "1"), bool)


def test_an_error_says_why_it_hides_values_that_may_be_no_secrets() -> None:
    assert AttemptMask({"params.day": "monday"}).error("no monday") == f"no {HIDDEN}"
    unknown = AttemptMask({"params.day": "monday"}, are_known=False)
    assert unknown.error("no monday") == f"no {HIDDEN} ({UNKNOWN_VALUES})"
    assert unknown.error(unknown.error("no monday")) == f"no {HIDDEN} ({UNKNOWN_VALUES})"
    assert unknown.error("no tuesday") == "no tuesday"
    unknown.read(lambda: {"token": "t-12345"})
    assert unknown.text("t-12345") == HIDDEN


class Opener(RoleHandler):
    """Fails with what it has been given, as a handler does that finds no file."""

    role = "open"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> Any:
        """Fail."""
        given = ctx.input_inline or {}
        raise BatchFailure(
            f"{given['folder']}/{given['day']} does not exist for {ctx.params['password']}, {given['pin']}",
            reason_code="missing",
            permanent=True,
        )


PARAMS = {"folder": "/data/in", "day": "2026-11-27", "pin": "pin-4711", "password": "swordfish"}
EXPRESSIONS = {name: {"$cel": f"params.{name}"} for name in ("folder", "day", "pin")}
SCHEMA = {"type": "object", "properties": {"pin": {"type": "string", "x-secret": True}}}


async def error_of(**graph: Any) -> str:
    """Return the error of a node whose handler tells what it was given."""
    nodes = [{"node_id": "a", "type": "open", "io": {"input_inline": EXPRESSIONS}, "allow_failure": True}]
    run = await run_graph({"nodes": nodes, **graph}, Opener(), params=PARAMS)
    assert (run.nodes["a"].error or "").startswith("missing: ")
    return str(run.nodes["a"].error)


async def test_with_a_schema_of_the_params_errors_show_what_is_no_secret() -> None:
    error = await error_of(params_schema=SCHEMA)
    assert f"/data/in/2026-11-27 does not exist for {HIDDEN}, {HIDDEN}" in error
    assert UNKNOWN_VALUES not in error


async def test_without_a_schema_values_by_expression_are_hidden_and_the_error_says_how_to_show_them() -> None:
    error = await error_of()
    assert f"{HIDDEN}/{HIDDEN} does not exist for {HIDDEN}, {HIDDEN}" in error
    assert UNKNOWN_VALUES in error


@pytest.mark.parametrize(
    ("text", "shown", "hidden"),
    [
        ("{'k': 1}[params.day]", ["2026-11-27"], []),
        ("{'k': 1}[params.pin]", [HIDDEN], ["pin-4711"]),
    ],
)
async def test_a_value_that_cannot_be_evaluated_shows_what_is_no_secret(
    text: str, shown: list[str], hidden: list[str]
) -> None:
    nodes = [
        {"node_id": "a", "type": "open", "io": {"input_inline": {"x": {"$cel": text}}}, "allow_failure": True}
    ]
    graph = {"nodes": nodes, "params_schema": SCHEMA}
    run = await run_graph(graph, Opener(), params=PARAMS)
    error = run.nodes["a"].error or ""
    assert error.startswith(f"{reason_codes.BAD_EXPRESSION}: ")
    assert [each for each in shown if each not in error] == []
    assert [each for each in hidden if each in error] == []


class Talker(RoleHandler):
    """Logs what it has been given, in its own thread, too."""

    role = "talk"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Log the params."""
        logging.getLogger("shop").warning("params %s", ctx.params)
        await asyncio.to_thread(ctx.log.warning, "input %s", ctx.input_inline)
        thread = threading.Thread(target=ctx.log.warning, args=("alone with %s", json.dumps(ctx.params)))
        thread.start()
        thread.join()
        return BatchResult(success=True)


@needs_product("observe")
@pytest.mark.parametrize("form", ["text", "json"])
async def test_kept_lines_and_the_log_of_a_process_hide_the_secrets_of_an_attempt(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWKIT_LOG_FORMAT", form)
    stream, db = io.StringIO(), memory_database()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(process_formatter("%(levelname)s %(message)s"))
    nodes = [{"node_id": "a", "type": "talk", "io": {"input_inline": EXPRESSIONS}}]
    logging.getLogger().addHandler(handler)
    try:
        run = await run_graph({"nodes": nodes, "params_schema": SCHEMA}, Talker(), params=PARAMS, db=db)
    finally:
        logging.getLogger().removeHandler(handler)
    assert run.status == "finished"
    printed = stream.getvalue()
    kept = str(await db.attempt_logs.find({}).to_list(None))
    for text in (printed, kept):
        assert text.count("/data/in") >= 3
        assert text.count("2026-11-27") >= 3
        assert "pin-4711" not in text
        assert "swordfish" not in text
    if form == "json":
        assert all(json.loads(line)["message"] for line in printed.splitlines())


def test_the_log_of_a_process_has_no_details_of_drivers(capsys: pytest.CaptureFixture[str]) -> None:
    """MongoDB's driver logs each command with its documents at DEBUG."""
    handler = output._create_handler(process_formatter("%(name)s %(message)s"))
    for name in ("pymongo.command", "aiokafka.producer", "temporalio.worker", "flowkit.engine", "shop"):
        for level in (logging.DEBUG, logging.INFO):
            handler.handle(logging.LogRecord(name, level, "", 0, f"level {level}", None, None))
    lines = capsys.readouterr().err.splitlines()
    assert "flowkit.engine level 10" in lines
    assert "shop level 10" in lines
    assert not [each for each in lines if each.endswith("level 10") and each.split(".")[0] in DRIVERS]
    assert len(lines) == 7
