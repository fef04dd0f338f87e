"""`flowkit graph` draws the graph of a file; `tests/cli/test_tasks.py` has that of a task."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.cli.app import run
from tests.unit.graphs import node

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Call = Callable[..., tuple[int, str, str]]

GRAPH: dict[str, Any] = {"nodes": [node("a", type="t"), node("b", type="t", depends_on=["a"])]}
TEXT = """\
┌───┐   ┌───┐
│ a │   │ b │
│ t │──▶│ t │
└───┘   └───┘
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a graph."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH), encoding="utf-8")


@pytest.fixture
def call(capfdbinary: pytest.CaptureFixture[bytes]) -> Call:
    """Return a function that runs `flowkit graph`, and returns its exit code and output."""

    def run_graph(*arguments: str) -> tuple[int, str, str]:
        code = run(["graph", *arguments])
        printed = capfdbinary.readouterr()
        return code, printed.out.decode(), printed.err.decode()

    return run_graph


def test_a_graph_is_drawn_as_text(call: Call) -> None:
    assert call("graph.json") == (0, TEXT, "")


def test_validate_draws_a_valid_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "--picture", "graph.json"]) == 0
    assert capsys.readouterr().out.endswith(f"graph.json is valid: 2 nodes\n\n{TEXT}")
    assert run(["validate", "--picture", "--json", "graph.json"]) == 2
    assert "--picture and --json exclude each other" in capsys.readouterr().out


def test_stdin_is_read(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"graph": GRAPH, "params": {"day": 1}})))
    assert call("-", "--format", "mermaid") == (
        0,
        'flowchart TB\n  n0("a<br/>t")\n  n1("b<br/>t")\n  n0 --> n1\n  linkStyle 0 stroke:#57606a\n',
        "",
    )


def test_the_name_of_the_file_says_the_format(tmp_path: Path, call: Call) -> None:
    for name, start in {"a.txt": "┌", "b.mmd": "flowchart", "c.DOT": "digraph", "d.gv": "digraph"}.items():
        assert call("graph.json", "-o", name) == (0, "", f"wrote {name}\n")
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)
    assert call("graph.json", "-o", "a.txt", "--format", "dot")[0] == 0
    assert (tmp_path / "a.txt").read_text(encoding="utf-8").startswith("digraph")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.txt",
        "b.mmd",
        "c.DOT",
        "d.gv",
        "graph.json",
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["none.json"], "there is no graph file 'none.json'"),
        (["graph.json", "-o", "."], "--output '.' is a folder; name a file in it"),
        (["graph.json", "-o", "no/a.svg"], "--output 'no/a.svg': there is no folder 'no'; create it"),
        (["graph.json", "-o", "graph.json", "--format", "dot"], "--output 'graph.json' is the graph itself"),
        (["graph.json", "-o", "/dev/null"], "--output '/dev/null' is no regular file"),
        (
            ["graph.json", "-o", "a.pdf"],
            "--output 'a.pdf': the end of its name is no known format; end it in .txt,",
        ),
        (["--task", "graph.json/" + "x" * 300], "TASK"),
    ],
)
def test_errors_name_the_value_and_the_remedy(arguments: list[str], problem: str, call: Call) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert problem in err
    assert err.count("\n") == 1


def test_an_invalid_graph_has_the_errors_of_validate(tmp_path: Path, call: Call) -> None:
    (tmp_path / "graph.json").write_text('{"nodes": [{"node_id": "a"}]}', encoding="utf-8")
    code, out, err = call("graph.json", "-o", "a.svg")
    assert (code, out) == (2, "")
    assert "'a'" in err
    assert not (tmp_path / "a.svg").exists()


def test_png_is_not_written_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(["graph", "graph.json", "--format", "png"]) == 2
    assert (
        "stdout is a terminal; write it to a file, for example with -o graph.png" in capsys.readouterr().err
    )
