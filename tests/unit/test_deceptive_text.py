"""Texts of workers cannot move the cursor of a terminal, reverse its text, or add links to the Web UI."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import select
import subprocess
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from rich.live import Live
from temporalio.runtime import Runtime
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.unit.test_cli_display import node, task
from tests.unit.test_details import only_row

import flowkit
from flowkit.cli import output
from flowkit.cli.screen import LiveScreen
from flowkit.cli.tasks.display import draw_task, task_table
from flowkit.core.log import TextLayout
from flowkit.errors import GraphError
from flowkit.graph.validation import parse_graph
from flowkit.models import NodeState, NodeStatus
from flowkit.reading.results import debug_command
from flowkit.text import shell_command, shell_word, visible
from flowkit.validation.arguments import new_task_id_problem

if TYPE_CHECKING:
    from collections.abc import Callable

ATTACK = "paid\x1b]0;owned\x07\x1b[2J\r\u202egpj.exe\u2066\x9b1m"
ESCAPED = r"paid\u001b]0;owned\u0007\u001b[2J\u000d\u202egpj.exe\u2066\u009b1m"
IN_TERMINAL = ESCAPED.replace(r"\u0007", "").replace(r"\u000d", "")
"""Rich removes the bell and the carriage return itself."""

DECEPTIVE = {"\x1b": "U+001B", "\x7f": "U+007F", "\x85": "U+0085", "\u2028": "U+2028", "\u202e": "U+202E"}


@pytest.mark.parametrize(("char", "code"), [*DECEPTIVE.items(), ("\u2067", "U+2067"), ("\n", "U+000A")])
def test_ids_with_control_and_bidirectional_characters_are_rejected_with_the_code(
    char: str, code: str
) -> None:
    assert (new_task_id_problem(f"orders{char}1") or "").endswith(f"; it contains {code}")
    with pytest.raises(GraphError, match=f"it contains {code.replace('+', '[+]')}"):
        parse_graph({"nodes": [{"node_id": f"a{char}b", "type": "count"}]})


@pytest.mark.parametrize("task_id", ["orders 1", "Bestellung-ß", "注文", "family 👨‍👩‍👧", "a\u00a0b"])
def test_ids_with_other_characters_are_allowed(task_id: str) -> None:
    assert new_task_id_problem(task_id) is None


def test_tabs_and_line_feeds_of_a_text_stay() -> None:
    assert visible("a\tb\nc") == "a\tb\nc"
    assert visible(ATTACK) == ESCAPED


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "two words",
        "it's",
        "",
        "-x",
        ATTACK,
        "a\nb\tc",
        "u\x15touch /tmp/x\n",
        "\x1b[201~\x15ls\n",
        "$'\\'\x01",
    ],
)
def test_a_word_of_a_command_has_no_character_that_acts_in_a_terminal(text: str) -> None:
    word = shell_word(text)
    assert word.isprintable()
    printed = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
    assert printed.decode() == text


def test_an_argument_of_a_command_is_never_taken_for_an_option() -> None:
    assert shell_command("flowkit status", "t 1", options=["--watch"]) == "flowkit status 't 1' --watch"
    assert shell_word("=ls") == "'=ls'"  # zsh would take it for the path of ls
    assert shell_command("flowkit retry", "-t", "a", options=["--json"]) == "flowkit retry --json -- -t a"
    assert debug_command("--json", "n") == "flowkit debug --handler MODULE:CLASS -- --json n"


def test_the_command_that_debugs_a_batch_can_be_pasted() -> None:
    assert debug_command("t", "n", "u\x15ls\n").isprintable()
    assert debug_command("t", "n", "b 1") == "flowkit debug t n --batch 'b 1' --handler MODULE:CLASS"


PASTED = [
    *(
        "plain",
        "two words",
        "it's",
        "-x",
        "--failed",
        "$(touch x)`id`",
        "a!b !! !$",
        "~ * ? [a]",
        "Bestellung-ß 注文",
    ),
    *(
        ATTACK,
        "a\nb\tc",
        "\x1b[201~\x15ls\n",
        "paid\u202egpj.exe",
        "$'\\'\x01",
        "\u200d\ufeff\U000e0041",
        "שלום",
    ),
]


def test_a_command_that_is_pasted_into_a_terminal_arrives_with_the_same_arguments(tmp_path: Path) -> None:
    """In an interactive bash on a terminal, typed key by key and pasted at once, with the expansion of its history."""
    program, got = tmp_path / "flowkit", tmp_path / "argv"
    program.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" >> '{got}'\n")
    program.chmod(0o700)
    commands = [debug_command("t", "n", uid) for uid in PASTED]
    keys = [f"{each}\r" for each in commands] + [f"\x1b[200~{each}\x1b[201~\r" for each in commands]
    type_into_bash([*keys, "exit\r"], PATH=f"{tmp_path}:{os.environ['PATH']}")
    end = ["--handler", "MODULE:CLASS"]
    sent = [
        ["debug", "t", "n", *([f"--batch={uid}"] if uid.startswith("-") else ["--batch", uid]), *end]
        for uid in PASTED * 2
    ]
    assert got.read_bytes().decode().split("\0")[:-1] == [word for words in sent for word in words]


def type_into_bash(keys: list[str], **environment: str) -> None:
    """Type keys into an interactive bash on a terminal of its own, until it ends."""
    master, slave = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "LC_ALL": "C.UTF-8", "TERM": "xterm", "HISTFILE": "", **environment},
    )
    os.close(slave)
    waiting = "".join(keys).encode()
    with suppress(OSError):  # the shell has closed the terminal
        while shell.poll() is None:
            readable, writable, _ = select.select([master], [master] if waiting else [], [], 1.0)
            if readable:
                os.read(master, 65_536)
            if writable:
                waiting = waiting[os.write(master, waiting[:64]) :]
    os.close(master)
    assert shell.wait(EVENT_TIMEOUT_SEC) == 0


def test_one_function_writes_the_words_of_commands_that_people_paste() -> None:
    source = Path(flowkit.__file__).parent
    own = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if "shlex.quote(" in path.read_text()
    }
    assert own == {"text.py", "masks.py"}, "masks.py hides secrets in commands of others"


@pytest.mark.parametrize("show", [output.echo, output.note, output.error, output.warn])
def test_commands_print_deceptive_characters_as_escapes(
    show: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    show(ATTACK)
    out, err = capsys.readouterr()
    assert IN_TERMINAL in out + err


def test_a_json_document_has_the_same_values_without_deceptive_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.document({"error": ATTACK})
    text = capsys.readouterr().out
    assert json.loads(text) == {"error": ATTACK}
    assert visible(text) == text


def test_tables_show_deceptive_characters_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    output.console().print(task_table(task(node(status="failed", note=ATTACK)), wide=False))
    assert IN_TERMINAL in capsys.readouterr().out


def test_a_live_table_keeps_its_own_control_sequences_only() -> None:
    out = io.StringIO()
    with Live(console=Console(file=out, width=150, force_terminal=True), auto_refresh=False) as live:
        table = LiveScreen(live, draw_task)
        for _ in range(2):
            table.show(task(node(status="failed", note=ATTACK)), [ATTACK])
    assert IN_TERMINAL in out.getvalue()
    assert "\x1b]0;owned" not in out.getvalue()
    assert "\u202e" not in out.getvalue()
    assert "\x1b[1A" in out.getvalue(), "the table updates in place"


def test_logs_of_processes_show_deceptive_characters_as_escapes() -> None:
    record = logging.LogRecord("flowkit", logging.WARNING, "", 1, "node failed: %s", (ATTACK,), None)
    assert TextLayout("%(message)s").format(record) == f"node failed: {ESCAPED}"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("see [here](javascript:alert(1))", r"see \[here\](javascript:alert(1))"),
        ("![pixel](//evil.example/p.png)", r"!\[pixel\](//evil.example/p.png)"),
        ("<img src=x onerror=alert(1)> &lt;", r"\<img src=x onerror=alert(1)\> \&lt;"),
        (
            "log in at https://evil.example or www.evil.example",
            r"log in at https\://evil.example or www\.evil.example",
        ),
        ("`code` *bold* _em_ ~~gone~~ a|b \\", r"\`code\` \*bold\* \_em\_ \~\~gone\~\~ a\|b \\"),
        ("bad_input: rates_by_day is 3", "bad_input: rates_by_day is 3"),
        (ATTACK, ESCAPED.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")),
    ],
)
def test_an_error_adds_no_format_to_the_web_ui(error: str, shown: str) -> None:
    row = only_row(NodeState(status=NodeStatus.FAILED, epoch=1, last_error=error))
    assert row[-1] == shown


def test_lines_of_temporals_core_have_the_form_of_other_log_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_runtimes: list[Runtime] = []
    monkeypatch.setattr(Runtime, "set_default", set_runtimes.append)
    logger = logging.getLogger("temporalio.core")
    monkeypatch.setattr(logger, "filters", [])
    output.forward_core_log()
    output.forward_core_log()
    assert (len(set_runtimes), len(logger.filters)) == (1, 1)
    record = logger.makeRecord("temporalio.core", logging.WARNING, "", 0, "call retried", (), None)
    record.temporal_log = SimpleNamespace(fields={"error": "refused\x1b"})
    assert logger.filters[0].filter(record)  # type: ignore[union-attr]
    line = TextLayout("%(levelname)s %(name)s: %(message)s").format(record)
    assert line == "WARNING temporalio.core: call retried (error=refused\\u001b)"
