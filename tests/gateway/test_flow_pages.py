"""The permissions, the files and the secrets of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet

from flowkit.errors import ConfigError
from flowkit.gateway.importing import read_flow_file
from flowkit.gateway.permissions import PERMISSIONS, ActorPart, may_call, parts_of
from flowkit.gateway.secret_box import SecretBox, SecretError, masked
from reference.gateway_methods import document
from tests.processor_time import at_most


def test_every_method_has_a_permission_and_a_summary() -> None:
    listed = {each["name"]: each for each in document()["methods"]}
    assert listed.keys() == PERMISSIONS.keys() - {"flow.replace", "rpc.discover"}
    assert [name for name, each in listed.items() if not each["summary"]] == []


def test_parts_of_an_actor() -> None:
    context = {"admins": [1], "executors": [1, 2], "readers": [3]}
    assert parts_of(1, context) == {ActorPart.ADMIN, ActorPart.EXECUTOR}
    assert parts_of(2, context, creator=2) == {ActorPart.EXECUTOR, ActorPart.CREATOR}
    assert parts_of(4, context, creator=4) == parts_of(None, context) == frozenset()
    assert may_call("flow.cancel", frozenset({ActorPart.CREATOR}))
    assert not may_call("flow.cancel", frozenset({ActorPart.EXECUTOR, ActorPart.READER}))


# --- files ------------------------------------------------------------------------------------------------------


def file_of(folder: Path, text: str) -> Path:
    path = folder / "flow.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_short_form_becomes_jobs_with_numbers(tmp_path: Path) -> None:
    text = """
workflow:
  name: demo
  steps: [{id: a, runner: hero, payload: one}, {id: b, runner: sal, depends_on: [a], payload: two}]
"""
    made = read_flow_file(file_of(tmp_path, text), {"context": 3, "caller": 11, "flow": 40})
    assert made.names == {400001: "a", 400002: "b"}
    calls: list[tuple[str, Any]] = made.calls
    assert [method for method, _ in calls] == ["job.create", "job.create", "flow.create"]
    job = calls[1][1]["job"]
    assert (job["script"], job["executor"], job["caller_id"], job["context_id"]) == ("two", "sal", 11, 3)
    nodes = calls[2][1]["flow"]["nodes"]
    assert [(each["id"], each["depends"]) for each in nodes] == [(400001, []), (400002, [400001])]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "1:5: not YAML"),
        ("jobs: []", "jobs is (hidden); it must have at least 1 item"),
        ("workflow: {steps: [{id: a, runner: r}]}", "workflow.steps[0].payload is missing"),
        ("jobs: [{id: a, executor: e, script: s, depends: [b]}]", "job 'a' depends on 'b'"),
        ("jobs: [{id: a, executor: e, script: s}, {id: a, executor: e, script: s}]", "has 'a' twice"),
        ("jobs: [{id: a, executor: e, script: s, retry: 2}]", "jobs[0].retry: there is no such field"),
    ],
)
def test_errors_name_the_file_and_the_field(tmp_path: Path, text: str, problem: str) -> None:
    path = file_of(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        read_flow_file(path)
    assert str(path) in str(raised.value)
    assert problem in str(raised.value)


def test_the_example_of_the_page_is_a_flow_of_three_jobs() -> None:
    made = read_flow_file(Path(__file__).parents[2] / "examples" / "flows" / "report.yaml")
    method, params = made.calls[-1]
    assert (method, params["flow"]["jobs"]) == ("flow.create", [501, 502, 503])
    assert params["flow"]["nodes"][1]["prerequisites"] == ["approval:ops"]


# --- files ------------------------------------------------------------------------------------------------------


ALIASES = "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
CHAIN = "".join(f"c{i}: &c{i} [*c{i - 1}]\n" for i in range(1, 500))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "[" * 10_000,
            ":1:202: recursion limit exceeded; numbers have at most 4,300 digits, and values at most 200 levels",
        ),
        ("jobs:\n  - " + "{a: " * 10_000, ":2:797: the value is nested deeper than 200 levels"),
        ("m: &m {k: 1}\njobs:\n  - <<: *m", ":3:5: `<<` is no merge key in YAML 1.2"),
        (f"a0: &a0 [x]\n{ALIASES}", ":19:18: the text has more than 2,000,000 values"),
        (f"c0: &c0 [x]\n{CHAIN}", ":200:14: the value is nested deeper than 200 levels"),
        ("jobs: &a\n  - *a\n", ":2:5: the value contains itself"),
        (f"caller: {'9' * 5_000}", ":1:9: numbers have at most 4,300 digits"),
        (f"caller: 0x{'F' * 5_000}", ":1:9: numbers have at most 3,500 digits"),
        ("caller: !!int ''", ":1:9: '' is no int; correct it, or remove the tag"),
        ("jobs:\n  - !!bool maybe", ":2:5: 'maybe' is no bool"),
        ("flow: {execution_timeout: 1.0e+999}", ":1:27: '1.0e+999' is beyond the range of numbers"),
        ("\nflow: {execution_timeout: .nan}", ":2:27: JSON has no number '.nan'"),
        ("caller: 2026-13-45", "caller is (hidden); it must be a whole number"),
        ("jobs: []\njobs: []", "the key 'jobs' twice, first on line 1"),
    ],
    ids=lambda text: text[:12],
)
def test_file_that_stands_for_too_much_is_refused_at_once(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "flow.yaml"
    file.write_text(text)
    with at_most(10), pytest.raises(ConfigError) as caught:
        read_flow_file(file)
    assert str(caught.value).startswith(str(file))
    assert problem in str(caught.value)


# --- secrets ----------------------------------------------------------------------------------------------------


def test_secrets_are_references_or_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (Fernet.generate_key().decode() for _ in range(2))
    stored = SecretBox([old]).seal("word", as_operator=False)
    assert "word" not in stored
    assert masked(stored) == "***"
    assert SecretBox([new, old]).open(stored) == "word"
    monkeypatch.setenv("SUPERVISOR_A", "from the environment")
    (tmp_path / "s").write_text("from a file\n")
    box = SecretBox(references=["env:SUPERVISOR_*"])
    assert box.open(box.seal("env:SUPERVISOR_A", as_operator=False)) == "from the environment"
    assert box.open(box.seal(f"file:{tmp_path}/s", as_operator=True)) == "from a file"
    assert masked(box.seal("env:A", as_operator=True)) == "env:A"
    assert box.open(None) == ""


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Return a folder `team` of secrets beside a file that is none of them, with links between the two."""
    team = tmp_path / "team"
    (team / "own").mkdir(parents=True)
    (team / "own" / "k").write_text("own secret")
    (team / "current").symlink_to("own/k")
    (tmp_path / "key").write_text("the key of the gateway")
    (team / "out").symlink_to(tmp_path / "key")
    (team / "up").symlink_to(tmp_path)
    (team / "circle").symlink_to("circle")
    return tmp_path


@pytest.mark.parametrize("path", ["team/own/k", "team/current", "linked/own/k"])
def test_file_in_the_folder_of_its_pattern_is_a_secret(folders: Path, path: str) -> None:
    (folders / "linked").symlink_to("team")
    box = SecretBox(references=[f"file:{folders}/{path.partition('/')[0]}/*"])
    assert box.open(box.seal(f"file:{folders}/{path}", as_operator=False)) == "own secret"


@pytest.mark.parametrize(
    "path",
    [
        "team/../key",
        "team/own/../../key",
        "team/out",
        "team/up/key",
        "team/own/../own/k",
        "team/circle",
        "key",
    ],
)
def test_file_outside_the_folder_of_its_pattern_is_neither_stored_nor_read(folders: Path, path: str) -> None:
    box, reference = SecretBox(references=[f"file:{folders}/team/*"]), f"file:{folders}/{path}"
    with pytest.raises(SecretError, match="only an operator"):
        box.seal(reference, as_operator=False)
    with pytest.raises(SecretError, match="only an operator"):
        box.open(reference)


def test_stored_reference_is_checked_again_when_it_is_read(folders: Path) -> None:
    box, later = SecretBox(references=[f"file:{folders}/team/*", "env:A_*"]), folders / "team" / "later"
    stored = box.seal(f"file:{later}", as_operator=False)
    later.symlink_to(folders / "key")
    with pytest.raises(SecretError, match="only an operator"):
        box.open(stored)
    with pytest.raises(SecretError, match="only an operator"):
        SecretBox().open(box.seal("env:A_B", as_operator=False))
    assert SecretBox().open(box.seal(f"file:{later}", as_operator=True)) == "the key of the gateway"


def test_secrets_that_cannot_be_stored_or_read(tmp_path: Path) -> None:
    box = SecretBox()
    with pytest.raises(SecretError, match="no key"):
        box.seal("word", as_operator=True)
    with pytest.raises(SecretError, match="only an operator"):
        box.seal("env:PATH", as_operator=False)
    with pytest.raises(SecretError, match="FLOWKIT_NO_SUCH is not set"):
        box.open(box.seal("env:FLOWKIT_NO_SUCH", as_operator=True))
    with pytest.raises(SecretError, match="cannot be read"):
        box.open(box.seal(f"file:{tmp_path}/none", as_operator=True))
    sealed = SecretBox([Fernet.generate_key().decode()]).seal("word", as_operator=True)
    with pytest.raises(SecretError, match="set FLOWKIT_SECRET_KEY"):
        box.open(sealed)
    with pytest.raises(SecretError, match="another key"):
        SecretBox([Fernet.generate_key().decode()]).open(sealed)
    with pytest.raises(ConfigError, match="is not a key"):
        SecretBox(["short"])


def test_an_error_shows_no_value_of_a_file_that_may_hold_secrets(tmp_path: Path) -> None:
    for text in (
        "jobs: [{id: 1, env_vars: {PASSWORD: 918273645}}]",
        "runners: [{id: 1, secret: 918273645}]",
        "918273645",
    ):
        with pytest.raises(ConfigError) as caught:
            read_flow_file(file_of(tmp_path, text))
        assert "918273645" not in str(caught.value)
