"""The report as data and as HTML: its numbers are correct, and text from the source tree is always escaped."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from tests.examples.runs import TREE, event, run

from code_index.flow import ENRICH, INDEX
from code_index.page import figures, text, timeline
from code_index.page.attempts import AttemptEnd, AttemptRun, build_attempts
from code_index.page.render import build_figures, page
from code_index.page.tables import node_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from code_index.page.data import DemoRun

# --- attempts ---------------------------------------------------------------------------------------------------


def attempt(of: DemoRun, node: str, epoch: int) -> AttemptRun:
    """Return one attempt of a run."""
    (found,) = [one for one in build_attempts(of) if (one.node, one.epoch) == (node, epoch)]
    return found


def with_events(*events: dict[str, Any]) -> DemoRun:
    """Return a run without a kill and without shards, with these events of enrich."""
    plain = run(incident=None)
    return replace(plain, documents=replace(plain.documents, shards=[], events=list(events)))


def test_attempts_are_in_the_order_of_the_graph() -> None:
    names = [(one.node, one.epoch) for one in build_attempts(run())]
    enrich = [("enrich", epoch) for epoch in (1, 2, 4, 5)]
    assert names == [("index", 1), *enrich, ("group", 1), ("analyze", 1)]


def test_attempt_of_a_shard_is_as_in_its_row() -> None:
    found = [attempt(run(), ENRICH, epoch) for epoch in (2, 4, 5)]
    assert [(one.shard, one.worker, one.started, one.ended, one.end) for one in found] == [
        (2, "worker-2", 0.7, 3.0, AttemptEnd.DONE),
        (1, "worker-2", 7.5, 8.9, AttemptEnd.DONE),
        (None, "worker-2", 8.95, 9.0, AttemptEnd.DONE),
    ]


def test_attempt_without_a_start_event_starts_as_in_the_document() -> None:
    index = attempt(run(), INDEX, 1)
    assert (index.started, index.ended, index.end, index.worker) == (0.1, 0.3, AttemptEnd.DONE, "worker-1")
    assert (len(index.stored), index.files) == (4, 4)


def test_killed_attempt_ends_with_its_worker() -> None:
    lost = attempt(run(), ENRICH, 1)
    assert (lost.started, lost.ended, lost.end, lost.reason) == (0.5, 2.0, AttemptEnd.LOST, "SIGKILL")
    assert lost.stored == pytest.approx((1.1, 1.2))


def test_killed_attempt_without_events_starts_as_in_its_row() -> None:
    killed = run()
    silent = replace(killed, documents=replace(killed.documents, events=[]))
    lost = attempt(silent, ENRICH, 1)
    assert (lost.started, lost.ended, lost.end) == (0.5, 2.0, AttemptEnd.LOST)


def test_lost_attempt_ends_with_its_last_batch() -> None:
    lost = attempt(with_events(event(ENRICH, 1, "TASK_ACCEPTED", 0.5, "worker-1")), ENRICH, 1)
    assert (lost.end, lost.reason) == (AttemptEnd.LOST, "")
    assert (lost.started, lost.ended) == pytest.approx((0.5, 1.2))


def test_attempt_without_events_is_reconstructed_from_its_batches() -> None:
    lost = attempt(with_events(), ENRICH, 1)
    assert (lost.worker, lost.end) == ("worker-1", AttemptEnd.LOST)
    assert (lost.started, lost.ended) == pytest.approx((1.1, 1.2))


@pytest.mark.parametrize(
    ("kind", "reason", "end"),
    [
        ("TASK_FAILED", "flaky_disk", AttemptEnd.FAILED),
        ("TASK_FAILED", "worker_shutdown", AttemptEnd.HANDED_OVER),
        ("CANCELLED", "", AttemptEnd.CANCELLED),
    ],
)
def test_end_of_an_attempt_comes_from_its_event(kind: str, reason: str, end: AttemptEnd) -> None:
    found = with_events(
        event(ENRICH, 1, "TASK_ACCEPTED", 0.5, "worker-1"), event(ENRICH, 1, kind, 1.5, "worker-1", reason)
    )
    ended = attempt(found, ENRICH, 1)
    assert (ended.end, ended.reason, ended.ended) == (end, reason, 1.5)


@pytest.mark.parametrize("kind", ["TASK_HEARTBEAT", "BATCH_OK", "BATCH_FAILED"])
def test_events_of_batches_and_heartbeats_end_no_attempt(kind: str) -> None:
    lost = attempt(
        with_events(
            event(ENRICH, 1, "TASK_ACCEPTED", 0.5, "worker-1"),
            event(ENRICH, 1, kind, 1.1, "worker-1", "flaky"),
        ),
        ENRICH,
        1,
    )
    assert (lost.end, lost.reason) == (AttemptEnd.LOST, "")
    assert (lost.started, lost.ended) == pytest.approx((0.5, 1.2))


def test_row_of_a_node_sums_its_attempts() -> None:
    (row,) = [row for row in node_rows(run(), build_attempts(run())) if row.node == ENRICH]
    assert (row.attempts, row.batches, row.files, row.workers) == (4, 4, 4, "worker-1, worker-2")
    assert row.errors == "1 × lost: SIGKILL"


def test_seconds_of_a_node_count_once_what_its_shards_run_together() -> None:
    (row,) = [row for row in node_rows(run(), build_attempts(run())) if row.node == ENRICH]
    assert row.seconds == pytest.approx((3.0 - 0.5) + (8.9 - 7.5) + (9.0 - 8.95))
    assert row.files_per_second == pytest.approx(4 / 3.95)


# --- text -------------------------------------------------------------------------------------------------------


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
def test_percentile_is_the_smallest_length_that_the_share_does_not_exceed(
    lengths: dict[str, int], share: float, lines: int
) -> None:
    assert text.percentile(lengths, share) == lines


def test_findings_describe_the_source_tree() -> None:
    found = " ".join(text.source_findings(run()))
    assert (
        "shop is the most complex package: 6 functions and branches, 60 % of the 10 in the whole tree."
        in found
    )
    assert "Half of the 5 functions have at most 3 lines, 90 % have at most 3." in found
    assert "1 file does not parse" in found


def test_findings_describe_the_kill_and_the_verification() -> None:
    found = " ".join(text.run_findings(run(), build_attempts(run())))
    assert "2 workers shared the batches of node enrich: 2 by worker-1, 2 by worker-2." in found
    assert (
        "worker-1 was killed with SIGKILL while it ran shard 1 of enrich in attempt 1, when 2 of 4 batches of the node "
        "were done. Other shards continued, and worker-3 was started. worker-2 took over what was "
        "claimed and not stored, "
        "5.5 s after the kill: files-0004." in found
    )
    assert "4 files, each found once and analyzed once" in found


def test_empty_tree_has_a_report() -> None:
    empty = run({})
    assert "contains no Python files" in text.headline(empty)
    assert [figure["name"] for figure in build_figures(empty, build_attempts(empty))] == ["gantt"]
    assert "contains no Python files" in page(empty)


# --- figures ----------------------------------------------------------------------------------------------------


def by_name(of: DemoRun) -> dict[str, figures.Figure]:
    """Return the figures of a run by name."""
    return {figure["name"]: figure for figure in build_figures(of, build_attempts(of))}


@pytest.mark.parametrize(
    "tree", [TREE, {}, {"a.py": b""}, {"a.py": b"x = 1\n"}], ids=["tree", "empty", "blank", "plain"]
)
def test_plotly_accepts_every_figure(tree: dict[str, bytes]) -> None:
    check = importlib.import_module("plotly.graph_objects").Figure
    for figure in by_name(run(tree)).values():
        check(data=figure["data"], layout=figure["layout"])


def test_treemap_nests_packages_and_counts_each_line_once() -> None:
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


def test_package_without_files_is_a_parent_in_the_treemap() -> None:
    (trace,) = by_name(run({"a/b/c.py": b"x = 1\n"}))["treemap"]["data"]
    assert (trace["ids"], trace["parents"], trace["values"]) == (["a", "a.b"], ["", "a"], [0, 1])


def test_gantt_chart_has_a_bar_for_each_attempt_and_each_wait() -> None:
    bars = {bar["name"]: bar for bar in by_name(run())["gantt"]["data"]}
    assert {name: len(bar["y"]) for name, bar in bars.items()} == {"done": 6, "lost": 1, "waiting": 1}
    assert (bars["lost"]["base"], bars["lost"]["x"]) == ([0.5], [1.5])
    assert (bars["waiting"]["base"], bars["waiting"]["x"]) == ([2.0], [5.5])
    assert bars["waiting"]["y"] == bars["lost"]["y"]


def test_throughput_counts_every_batch_of_every_node() -> None:
    traces = by_name(run())["throughput"]["data"]
    lines = {trace["name"]: trace["y"][-1] for trace in traces if trace["type"] == "scatter"}
    bars = {trace["name"]: sum(trace["y"]) for trace in traces if trace["type"] == "bar"}
    assert lines == bars == dict.fromkeys(("index", "enrich", "group", "analyze"), 4)


@pytest.mark.parametrize(("seconds", "step"), [(3, 0.1), (20, 0.5), (61, 2), (3600, 60), (10**6, 3600)])
def test_intervals_are_round_and_few(seconds: float, step: float) -> None:
    assert timeline.bin_seconds(seconds) == step


# --- escaping ---------------------------------------------------------------------------------------------------

HOSTILE = '<img src=x onerror="document.title=1">'
HOSTILE_TREE = {
    f"{HOSTILE}/a.py": b"def go():\n    return 1\n" * 3,
    "</script><script>document.title=2</script>/b.py": b"def go():\n    return 1\n",
    "{{ 7 * 7 }}/%{x}/<!--/c.py": b"def go():\n    return 1\n",
    f"ok/{HOSTILE}.py": b"def (:\n",
}


class Elements(HTMLParser):
    """Collects the elements of a page, without the content of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record an element."""
        self.found.append((tag, dict(attrs)))


def test_names_from_the_source_tree_are_escaped() -> None:
    text = page(run(HOSTILE_TREE, source=f"/src/{HOSTILE}"))
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
"""Properties in which Plotly interprets tags as formatting."""


def shown(part: Any) -> Iterator[str]:
    """Yield every text that a part of a figure shows."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        if key in SHOWN:
            yield from [value] if isinstance(value, str) else value
        elif isinstance(value, dict | list):
            yield from shown(value)


def test_names_in_figures_are_escaped() -> None:
    hostile = run(HOSTILE_TREE)
    found = "\n".join(map(str, shown(build_figures(hostile, build_attempts(hostile)))))
    assert "&lt;img src=x onerror=" in found
    assert re.findall(r"<(?!/?b>|br>)", found) == []


def test_content_security_policy_allows_only_the_two_scripts() -> None:
    text = page(run())
    (policy,) = [
        attributes["content"] or ""
        for tag, attributes in Elements(text).found
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"('sha256-[\w+/]+=*' ?){2}", rules["script-src"])


def test_unknown_web_ui_is_not_a_link() -> None:
    unknown = replace(run(), web_ui="<its Web UI>/namespaces/default")
    assert not [attributes for tag, attributes in Elements(page(unknown)).found if tag == "a"]
    assert "&lt;its Web UI&gt;" in page(unknown)


def test_graph_is_drawn_with_the_states_of_its_nodes() -> None:
    drawn = re.search(r'<pre class="graph">(.*?)</pre>', page(run()), re.DOTALL)
    assert drawn is not None
    assert "│ ✓ enrich                       │" in drawn[1]
    assert drawn[1].count("──▶") == 3


def test_rendering_is_deterministic() -> None:
    assert page(run()) == page(run())


def test_report_loads_no_external_resources() -> None:
    sources = [
        address
        for _, attributes in Elements(page(run())).found
        for name, address in attributes.items()
        if name in ("src", "href") and not (address or "").startswith(("http://127.0.0.1", "data:"))
    ]
    assert sources == []
