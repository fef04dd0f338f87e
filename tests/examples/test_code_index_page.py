"""The report as data and as HTML: what it says is true, and nothing that comes from a source tree is markup."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from tests.examples.runs import TREE, event, run

from code_index.graph import ENRICH, INDEX
from code_index.page import figures, timeline, words
from code_index.page.attempts import AttemptRun, End, attempts_of
from code_index.page.render import drawn, page
from code_index.page.tables import node_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from code_index.page.data import Run

# --- attempts ---------------------------------------------------------------------------------------------------


def attempt(of: Run, node: str, epoch: int) -> AttemptRun:
    """One attempt of a run."""
    (found,) = [one for one in attempts_of(of) if (one.node, one.epoch) == (node, epoch)]
    return found


def with_events(*events: dict[str, Any]) -> Run:
    """A run without a kill, of whose enrich these events tell."""
    plain = run(incident=None)
    return replace(plain, documents=replace(plain.documents, events=list(events)))


def test_every_attempt_is_there_in_the_order_of_the_graph() -> None:
    names = [(one.node, one.epoch) for one in attempts_of(run())]
    assert names == [("index", 1), ("enrich", 1), ("enrich", 2), ("group", 1), ("analyze", 1)]


def test_an_attempt_without_a_start_event_began_as_the_document_says() -> None:
    index = attempt(run(), INDEX, 1)
    assert (index.began, index.ended, index.end, index.worker) == (0.1, 0.3, End.DONE, "worker-1")
    assert (len(index.stored), index.files) == (4, 4)


def test_a_killed_attempt_ends_with_its_worker() -> None:
    lost = attempt(run(), ENRICH, 1)
    assert (lost.began, lost.ended, lost.end, lost.reason) == (0.5, 2.0, End.LOST, "SIGKILL")
    assert lost.stored == pytest.approx((1.1, 1.2))


def test_a_killed_attempt_that_had_told_nobody_began_as_the_document_said_then() -> None:
    killed = run()
    silent = replace(killed, documents=replace(killed.documents, events=[]))
    lost = attempt(silent, ENRICH, 1)
    assert (lost.began, lost.ended, lost.end) == (0.6, 2.0, End.LOST)


def test_an_attempt_of_which_nothing_was_heard_again_ends_with_its_last_batch() -> None:
    lost = attempt(with_events(event(ENRICH, 1, "TASK_ACCEPTED", 0.5, "worker-1")), ENRICH, 1)
    assert (lost.end, lost.reason) == (End.LOST, "")
    assert (lost.began, lost.ended) == pytest.approx((0.5, 1.2))


def test_an_attempt_of_which_no_event_tells_is_put_together_from_its_batches() -> None:
    lost = attempt(with_events(), ENRICH, 1)
    assert (lost.worker, lost.end) == ("worker-1", End.LOST)
    assert (lost.began, lost.ended) == pytest.approx((1.1, 1.2))


@pytest.mark.parametrize(
    ("kind", "reason", "end"),
    [
        ("TASK_FAILED", "flaky_disk", End.FAILED),
        ("TASK_FAILED", "worker_shutdown", End.HANDED_OVER),
        ("CANCELLED", "", End.CANCELLED),
    ],
)
def test_events_tell_how_an_attempt_ended(kind: str, reason: str, end: End) -> None:
    told = with_events(
        event(ENRICH, 1, "TASK_ACCEPTED", 0.5, "worker-1"), event(ENRICH, 1, kind, 1.5, "worker-1", reason)
    )
    ended = attempt(told, ENRICH, 1)
    assert (ended.end, ended.reason, ended.ended) == (end, reason, 1.5)


@pytest.mark.parametrize("kind", ["TASK_HEARTBEAT", "BATCH_OK", "BATCH_FAILED"])
def test_events_of_batches_and_heartbeats_end_no_attempt(kind: str) -> None:
    told = with_events(
        event(ENRICH, 1, "TASK_ACCEPTED", 0.5, "worker-1"), event(ENRICH, 1, kind, 1.1, "worker-1", "flaky")
    )
    lost = attempt(told, ENRICH, 1)
    assert (lost.end, lost.reason) == (End.LOST, "")
    assert (lost.began, lost.ended) == pytest.approx((0.5, 1.2))


def test_the_table_of_nodes_adds_its_attempts_up() -> None:
    (row,) = [row for row in node_rows(run(), attempts_of(run())) if row.node == ENRICH]
    assert (row.attempts, row.batches, row.files, row.workers) == (2, 4, 4, "worker-1, worker-2")
    assert row.errors == "1 × lost: SIGKILL"
    assert row.seconds == pytest.approx(1.5 + 1.5)
    assert row.files_a_second == pytest.approx(4 / 3)


# --- words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "share", "lines"),
    [
        ({}, 0.5, 0),
        ({"3": 1}, 0.5, 3),
        ({"1": 5, "20": 5}, 0.5, 1),
        ({"2": 9, "100": 1}, 0.9, 2),
        ({"2": 8, "100": 2}, 0.9, 100),
    ],
)
def test_a_percentile_is_the_least_length_that_so_many_do_not_exceed(
    lengths: dict[str, int], share: float, lines: int
) -> None:
    assert words.percentile(lengths, share) == lines


def test_the_findings_are_those_of_the_tree() -> None:
    told = " ".join(words.findings(run()))
    assert (
        "shop is the most complex package: 6 functions and forks, 60 % of the 10 in the whole tree." in told
    )
    assert "Half of the 5 functions have at most 3 lines, nine of ten at most 3." in told
    assert "1 file does not parse" in told


def test_the_story_tells_of_the_kill_and_of_the_account() -> None:
    told = " ".join(words.story(run(), attempts_of(run())))
    assert (
        "worker-1 was killed with SIGKILL in attempt 1 of node enrich, when 2 of 4 batches were done." in told
    )
    assert "worker-2 took the node over 5.5 s later as attempt 2 (epoch 2)" in told
    assert "4 files, each found once and analysed once" in told


def test_an_empty_tree_has_a_page_too() -> None:
    empty = run({})
    assert "holds no Python files" in words.headline(empty)
    assert [figure["name"] for figure in drawn(empty, attempts_of(empty))] == ["gantt"]
    assert "holds no Python files" in page(empty)


# --- figures ----------------------------------------------------------------------------------------------------


def by_name(of: Run) -> dict[str, figures.Figure]:
    """The figures of a run."""
    return {figure["name"]: figure for figure in drawn(of, attempts_of(of))}


@pytest.mark.parametrize(
    "tree", [TREE, {}, {"a.py": b""}, {"a.py": b"x = 1\n"}], ids=["tree", "empty", "blank", "plain"]
)
def test_plotly_knows_every_property_of_every_figure(tree: dict[str, bytes]) -> None:
    check = importlib.import_module("plotly.graph_objects").Figure
    for figure in by_name(run(tree)).values():
        check(data=figure["data"], layout=figure["layout"])


def test_the_treemap_holds_every_line_once_and_each_package_within_its_parent() -> None:
    (trace,) = by_name(run())["treemap"]["data"]
    assert dict(zip(trace["ids"], trace["values"], strict=True)) == {
        "(top level)": 3,
        "shop": 9,
        "shop.web": 4,
    }
    assert dict(zip(trace["ids"], trace["parents"], strict=True)) == {
        "(top level)": "",
        "shop": "",
        "shop.web": "shop",
    }


def test_a_package_without_files_of_its_own_is_still_the_parent_of_others() -> None:
    (trace,) = by_name(run({"a/b/c.py": b"x = 1\n"}))["treemap"]["data"]
    assert (trace["ids"], trace["parents"], trace["values"]) == (["a", "a.b"], ["", "a"], [0, 1])


def test_the_timeline_has_a_bar_for_each_attempt_and_one_for_the_wait() -> None:
    bars = {bar["name"]: bar for bar in by_name(run())["gantt"]["data"]}
    assert {name: len(bar["y"]) for name, bar in bars.items()} == {"done": 4, "lost": 1, "waiting": 1}
    assert (bars["lost"]["base"], bars["lost"]["x"]) == ([0.5], [1.5])
    assert (bars["waiting"]["base"], bars["waiting"]["x"]) == ([2.0], [5.5])
    assert bars["waiting"]["y"] == bars["lost"]["y"]


def test_the_throughput_counts_every_batch_of_every_node() -> None:
    traces = by_name(run())["throughput"]["data"]
    lines = {trace["name"]: trace["y"][-1] for trace in traces if trace["type"] == "scatter"}
    bars = {trace["name"]: sum(trace["y"]) for trace in traces if trace["type"] == "bar"}
    assert lines == bars == dict.fromkeys(("index", "enrich", "group", "analyze"), 4)


@pytest.mark.parametrize(("seconds", "step"), [(3, 0.1), (20, 0.5), (61, 2), (3600, 60), (10**6, 3600)])
def test_steps_of_time_are_round_and_few(seconds: float, step: float) -> None:
    assert timeline.bin_seconds(seconds) == step


# --- escaping ---------------------------------------------------------------------------------------------------

EVIL = '<img src=x onerror="document.title=1">'
EVIL_TREE = {
    f"{EVIL}/a.py": b"def go():\n    return 1\n" * 3,
    "</script><script>document.title=2</script>/b.py": b"def go():\n    return 1\n",
    "{{ 7 * 7 }}/%{x}/<!--/c.py": b"def go():\n    return 1\n",
    f"ok/{EVIL}.py": b"def (:\n",
}


class Elements(HTMLParser):
    """The elements of a page, without what is written in scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.found.append((tag, dict(attrs)))


def test_names_from_the_source_tree_are_never_markup() -> None:
    text = page(run(EVIL_TREE, source=f"/src/{EVIL}"))
    elements = Elements(text).found
    assert [attributes for tag, attributes in elements if tag == "script"] == [
        {"type": "application/json", "id": "figures"},
        {},
        {},
    ]
    assert not any(
        tag == "img" or name.startswith("on") for tag, attributes in elements for name in attributes
    )
    assert text.count("&lt;img src=x onerror=") >= 3
    assert "{{ 7 * 7 }}" in text


SHOWN = ("labels", "text", "hovertext", "ticktext", "name")
"""Where Plotly takes tags in a text for formatting."""


def shown(part: Any) -> Iterator[str]:
    """Every text that a part of a figure shows."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        if key in SHOWN:
            yield from [value] if isinstance(value, str) else value
        elif isinstance(value, dict | list):
            yield from shown(value)


def test_names_in_figures_are_text_for_plotly_too() -> None:
    evil = run(EVIL_TREE)
    told = "\n".join(map(str, shown(drawn(evil, attempts_of(evil)))))
    assert "&lt;img src=x onerror=" in told
    assert re.findall(r"<(?!/?b>|br>)", told) == []


def test_only_the_two_scripts_of_the_page_may_run_and_nothing_may_be_fetched() -> None:
    text = page(run())
    (policy,) = [
        attributes["content"] or ""
        for tag, attributes in Elements(text).found
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"('sha256-[\w+/]+=*' ?){2}", rules["script-src"])


def test_the_address_of_an_unknown_web_ui_is_no_link() -> None:
    unknown = replace(run(), web_ui="<its Web UI>/namespaces/default")
    assert not [attributes for tag, attributes in Elements(page(unknown)).found if tag == "a"]
    assert "&lt;its Web UI&gt;" in page(unknown)


def test_the_same_run_makes_the_same_page() -> None:
    assert page(run()) == page(run())


def test_nothing_of_a_script_or_style_is_loaded_from_elsewhere() -> None:
    sources = [
        address
        for _, attributes in Elements(page(run())).found
        for name, address in attributes.items()
        if name in ("src", "href") and not (address or "").startswith(("http://127.0.0.1", "data:"))
    ]
    assert sources == []
