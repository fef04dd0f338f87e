"""Check every code block on every page: graphs are valid, commands and options exist, programs type-check."""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import shlex
import subprocess
import symtable
import sys
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
import typer
from filelock import FileLock
from tests.docs.pages import DOCS, PAGES, ROOT, SHELL, Block, blocks, every_block, inline_codes, place
from tests.type_checker import fills_a_cache, run_mypy

from flowkit.actions.table import parse_action
from flowkit.cli.app import app
from flowkit.graph.submission import parse_input
from flowkit.graph.validation import parse_graph
from flowkit.validation.documents import Document

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNCHECKED = {"", "text", "js", "dockerfile"}
"""Languages that are not checked: diagrams, output, MongoDB's shell, Dockerfiles."""
CHECKED = {"python", "json", "yaml", "toml", *SHELL}


def test_every_language_is_known() -> None:
    every = {block.language for page in PAGES for block in blocks(page)}
    assert {"python", "json", "sh", "yaml"} <= every
    assert every <= UNCHECKED | CHECKED | {"{eval-rst}"}


def test_only_the_reference_of_the_python_api_contains_directives() -> None:
    assert {block.page for block in every_block("{eval-rst}")} == {DOCS / "python-api.md"}


# --- data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", every_block("json"), ids=place)
def test_json_block_and_its_graph_are_valid(block: Block) -> None:
    check_graph(value_of(block.text))


def value_of(text: str) -> Any:
    """Return the value of a block; for a part of an object, `"key": …`, the braces are missing."""
    return json.loads(f"{{{text}}}" if text.startswith('"') else text)


def check_graph(value: Any) -> None:
    """Validate a graph, a whole task, a change of a graph, a node, or fields of a node."""
    if not isinstance(value, dict):
        return
    if "changes" in value:
        parse_action("change_graph", value)
    elif "graph" in value:
        task = parse_input("example", {"params": {}, **value})
        parse_graph(task.graph, params=task.params)
    elif "nodes" in value:
        parse_graph(value, params={})
    elif "type" in value or {"retry_policy", "io", "allow_failure", "timeout_sec"} & value.keys():
        node = {"node_id": "n", "type": "role", **value}
        parents = [{"node_id": name, "type": "role"} for name in named_by(node)]
        parse_graph({"nodes": [*parents, node]}, params={})


def named_by(node: dict[str, Any]) -> list[str]:
    """Return the other nodes that a node refers to."""
    inline = node.get("io", {}).get("input_inline") or {}
    return node.get("depends_on") or inline.get("input_args", {}).get("from_nodes") or []


def graphs_in(code: str) -> Iterator[dict[str, Any]]:
    """Yield the graphs that a program contains as literals."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Dict) and any(
            isinstance(key, ast.Constant) and key.value == "nodes" for key in node.keys
        ):
            yield ast.literal_eval(node)


def test_every_graph_in_a_program_is_valid() -> None:
    found = [graph for block in every_block("python") for graph in graphs_in(block.text)]
    assert found
    for graph in found:
        parse_graph(graph, params={})


@pytest.mark.parametrize("block", every_block("yaml", "toml"), ids=place)
def test_settings_file_is_valid(block: Block, tmp_path: Path) -> None:
    if block.marks.get("file") == "typo.yaml":  # shows an error
        return
    if block.language == "toml":
        assert tomllib.loads(block.text)
        return
    value = Document(name="block.yaml", text=block.text).load()
    check_graph(value)
    if "services" in value:
        (tmp_path / "compose.yaml").write_text(block.text, encoding="utf-8")
        schema = ["--builtin-schema", "vendor.compose-spec", str(tmp_path / "compose.yaml")]
        command = [sys.executable, "-m", "check_jsonschema", *schema]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# --- commands -----------------------------------------------------------------------------------------------------


def test_every_shell_block_has_valid_syntax() -> None:
    for block in every_block(*SHELL):
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block.place}: {done.stderr}"


@pytest.mark.parametrize("block", every_block(*SHELL), ids=place)
def test_flowkit_command_is_valid(block: Block) -> None:
    for arguments in flowkit_commands(block.text):
        parse(arguments)


def flowkit_commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each `flowkit …` in a block."""
    for words in simple_commands(text):
        while words and re.fullmatch(r"\w+=.*", words[0], re.DOTALL):
            words = words[1:]
        if words and words[0].rpartition("/")[2] == "flowkit":
            yield words[1:]


class Lines:
    """Text in which a comment does not consume the line break, because it ends the command before it."""

    def __init__(self, text: str) -> None:
        self._text = io.StringIO(text)
        self.read = self._text.read
        self.close = self._text.close

    def readline(self) -> str:
        """Return the rest of the line, without the line break."""
        line = self._text.readline()
        if line.endswith("\n"):
            self._text.seek(self._text.tell() - 1)
        return line


def simple_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command; redirections, pipes and lists of commands are split."""
    lexer = shlex.shlex(Lines(text.replace("\\\n", " ")), posix=True, punctuation_chars=";|&<>\n")
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    words: list[str] = []
    for word in lexer:
        if word.strip(";|&<>\n"):
            words.append(word)
        else:
            yield words
            words = []
    yield words


@functools.cache
def flowkit_group() -> Any:
    """Return the commands of the app. Building them takes time."""
    return typer.main.get_command(app)


def parse(arguments: list[str], *, whole: bool = True) -> None:
    """Parse a command line as the app does, without running it; raises an error if it is invalid.

    If `whole` is false, the command is part of a sentence and may lack arguments.
    """
    group = flowkit_group()
    if not arguments or arguments[0] in {"--version", "--help"}:
        return
    with group.make_context("flowkit", list(arguments)) as context:
        parse_command(group, context, arguments, whole=whole)


def parse_command(group: Any, context: Any, arguments: list[str], *, whole: bool) -> None:
    """Parse the command of a group; the name of another group is a command only in a sentence."""
    name, command, rest = group.resolve_command(context, list(arguments))
    if "--help" in rest or not (rest or whole):
        return
    try:
        with command.make_context(name, list(rest), parent=context) as inner:
            if hasattr(command, "resolve_command") and (rest or not command.invoke_without_command):
                parse_command(command, inner, rest, whole=whole)
    except typer.BadParameter as error:
        if whole or type(error).__name__ != "MissingParameter":
            raise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_flowkit_command_in_a_sentence_is_valid(page: Path) -> None:
    for code in inline_codes(page):
        for arguments in flowkit_commands(code.replace("…", "x").replace("COMMAND", "run")):
            parse(arguments, whole=False)


def test_invalid_option_is_detected() -> None:
    [found] = flowkit_commands("A=1 .venv/bin/flowkit run graph.json --wach | tee log  # flowkit nonsense")
    assert found == ["run", "graph.json", "--wach"]
    for whole in (True, False):
        with pytest.raises(Exception, match="--wach"):
            parse(found, whole=whole)


# --- programs -----------------------------------------------------------------------------------------------------

IMPLIED = {
    "Any": "from typing import Any",
    "Client": "from temporalio.client import Client",
    "Replayer": "from temporalio.worker import Replayer",
    "Worker": "from flowkit.worker import Worker",
    "WorkerConfig": "from flowkit import WorkerConfig",
    "Coordinator": "from flowkit import Coordinator",
    "CoordinatorConfig": "from flowkit import CoordinatorConfig",
    "client": "client: Client",
    "coordinator": "coordinator: Coordinator",
    "task_id": "task_id: str",
    **{name: f"{name}: Any" for name in ("db", "graph", "history", "clean", "send_report")},
}
"""Declarations that the fragments on the pages rely on."""


@fills_a_cache
@pytest.mark.slow
def test_every_program_type_checks() -> None:
    """All blocks of a page form one module, so later blocks can use the definitions of earlier ones."""
    folder = ROOT / "build" / "documented"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        for file in folder.glob("*.py"):
            file.unlink()
        written = [module for page in PAGES if (module := as_module(folder, page))]
        assert len(written) > 5
        done = run_mypy(*map(str, written))
    assert done.returncode == 0, done.stdout + done.stderr


def as_module(folder: Path, page: Path) -> Path | None:
    """Write the programs of a page to one file, on the same lines as in the page."""
    programs = [block for block in blocks(page) if block.language == "python" and not is_shown_file(block)]
    if not programs:
        return None
    lines = [""] * (max(block.line + block.text.count("\n") for block in programs) + 1)
    for block in programs:
        for number, line in enumerate(block.text.splitlines()):
            lines[block.line + number] = line
    file = folder / f"{'_'.join(page.relative_to(ROOT).with_suffix('').parts).replace('-', '_')}.py"
    file.write_text(implied(lines) + "\n".join(lines) + "\n", encoding="utf-8")
    return file


def is_shown_file(block: Block) -> bool:
    """Return whether a block shows a file of the repository, whose types are checked where it is."""
    return "file" in block.marks and (ROOT / block.marks["file"]).is_file()


def implied(lines: list[str]) -> str:
    """Return one line that declares what the page does not define itself."""
    symbols = symtable.symtable("\n".join(lines), "page", "exec").get_symbols()
    own = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    return "; ".join(line for name, line in IMPLIED.items() if name not in own)
