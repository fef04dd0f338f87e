"""Every block of code on every page: graphs are valid, commands have these options, programs pass the type checker."""

from __future__ import annotations

import ast
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
from ruamel.yaml import YAML
from tests.docs.pages import DOCS, PAGES, ROOT, SHELL, Block, blocks, every_block, inline_codes, place

from flowkit.cli.app import app
from flowkit.workflows.inputs import parse_input
from flowkit.workflows.validation import parse_graph

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNREAD = {"", "text", "js", "dockerfile"}
"""Languages of which nothing is checked here: pictures, output, MongoDB's shell, images."""
CHECKED = {"python", "json", "yaml", "toml", *SHELL}


def test_every_language_is_known_to_these_tests() -> None:
    every = {block.language for page in PAGES for block in blocks(page)}
    assert {"python", "json", "sh", "yaml"} <= every
    assert every <= UNREAD | CHECKED | {"{eval-rst}"}


def test_directives_stand_on_generated_pages_only() -> None:
    assert {block.page.parent for block in every_block("{eval-rst}")} == {DOCS / "reference"}


# --- data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", every_block("json"), ids=place)
def test_every_json_block_is_valid_and_so_is_the_graph_in_it(block: Block) -> None:
    check_graph(value_of(block.text))


def value_of(text: str) -> Any:
    """What a block holds; a part of an object, `"key": …`, is shown without its braces."""
    return json.loads(f"{{{text}}}" if text.startswith('"') else text)


def check_graph(value: Any) -> None:
    """Validate a graph, a whole task, one of its nodes, or what belongs into a node."""
    if not isinstance(value, dict):
        return
    if "graph" in value:
        task = parse_input("example", {"params": {}, **value})
        parse_graph(task.graph, params=task.params)
    elif "nodes" in value:
        parse_graph(value, params={})
    elif "type" in value or {"retry_policy", "io", "allow_failure", "timeout_sec"} & value.keys():
        node = {"node_id": "n", "type": "role", **value}
        parents = [{"node_id": name, "type": "role"} for name in named_by(node)]
        parse_graph({"nodes": [*parents, node]}, params={})


def named_by(node: dict[str, Any]) -> list[str]:
    """The other nodes that a node needs around it."""
    inline = node.get("io", {}).get("input_inline") or {}
    return node.get("depends_on") or inline.get("input_args", {}).get("from_nodes") or []


def graphs_in(code: str) -> Iterator[dict[str, Any]]:
    """Graphs that stand in a program as literals."""
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
def test_every_file_of_settings_can_be_read(block: Block, tmp_path: Path) -> None:
    if block.language == "toml":
        assert tomllib.loads(block.text)
        return
    value = YAML(typ="safe").load(block.text)
    if "services" in value:
        (tmp_path / "compose.yaml").write_text(block.text, encoding="utf-8")
        schema = ["--builtin-schema", "vendor.compose-spec", str(tmp_path / "compose.yaml")]
        command = [sys.executable, "-m", "check_jsonschema", *schema]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# --- commands -----------------------------------------------------------------------------------------------------


def test_every_shell_block_has_the_syntax_of_a_shell() -> None:
    for block in every_block(*SHELL):
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block.place}: {done.stderr}"


@pytest.mark.parametrize("block", every_block(*SHELL), ids=place)
def test_every_flowkit_command_has_these_options(block: Block) -> None:
    for arguments in flowkit_commands(block.text):
        parse(arguments)


def flowkit_commands(text: str) -> Iterator[list[str]]:
    """Arguments of each `flowkit …` in a block."""
    for words in simple_commands(text):
        while words and re.fullmatch(r"\w+=.*", words[0], re.DOTALL):
            words = words[1:]
        if words and words[0].rpartition("/")[2] == "flowkit":
            yield words[1:]


class Lines:
    """Text of which a comment takes no line break: that one ends the command before it."""

    def __init__(self, text: str) -> None:
        self._text = io.StringIO(text)
        self.read = self._text.read
        self.close = self._text.close

    def readline(self) -> str:
        """The rest of the line, without its end."""
        line = self._text.readline()
        if line.endswith("\n"):
            self._text.seek(self._text.tell() - 1)
        return line


def simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each command; redirections, pipes and lists of commands are taken apart."""
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


def parse(arguments: list[str], *, whole: bool = True) -> None:
    """Read a command line as the app does, without doing anything; raises what is wrong with it.

    One that is not `whole` is part of a sentence: its arguments may be missing.
    """
    group: Any = typer.main.get_command(app)
    if not arguments or arguments[0] in {"--version", "--help"}:
        return
    with group.make_context("flowkit", list(arguments)) as context:
        name, command, rest = group.resolve_command(context, list(arguments))
        if "--help" not in rest:
            try:
                command.make_context(name, rest, parent=context).close()
            except typer.BadParameter as error:
                if whole or type(error).__name__ != "MissingParameter":
                    raise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_flowkit_command_in_a_sentence_has_these_options(page: Path) -> None:
    for code in inline_codes(page):
        for arguments in flowkit_commands(code.replace("…", "x").replace("COMMAND", "run")):
            parse(arguments, whole=False)


def test_a_wrong_option_would_be_noticed() -> None:
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
"""What the fragments on the pages take for granted."""


def test_every_program_passes_the_type_checker() -> None:
    """All blocks of a page are one module: what an earlier one defines, a later one uses."""
    folder = ROOT / "build" / "documented"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        for file in folder.glob("*.py"):
            file.unlink()
        written = [module for page in PAGES if (module := as_module(folder, page))]
        assert len(written) > 5
        command = [sys.executable, "-m", "mypy", *map(str, written)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def as_module(folder: Path, page: Path) -> Path | None:
    """The programs of a page in one file, on the lines on which they stand in the page."""
    programs = [block for block in blocks(page) if block.language == "python"]
    if not programs:
        return None
    lines = [""] * (max(block.line + block.text.count("\n") for block in programs) + 1)
    for block in programs:
        for number, line in enumerate(block.text.splitlines()):
            lines[block.line + number] = line
    file = folder / f"{'_'.join(page.relative_to(ROOT).with_suffix('').parts).replace('-', '_')}.py"
    file.write_text(implied(lines) + "\n".join(lines) + "\n", encoding="utf-8")
    return file


def implied(lines: list[str]) -> str:
    """One line that declares what the page does not define itself."""
    symbols = symtable.symtable("\n".join(lines), "page", "exec").get_symbols()
    own = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    return "; ".join(line for name, line in IMPLIED.items() if name not in own)
