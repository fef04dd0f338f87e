"""Pictures of graphs, compared with kept ones; and names of nodes that look like the language of a format."""

from __future__ import annotations

import html
import itertools
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from flowkit.models.waits import WaitKind
from flowkit.pictures.dot import to_dot
from flowkit.pictures.mermaid import to_mermaid
from flowkit.pictures.model import make_picture
from flowkit.pictures.text import MAX_BOXES, to_text
from flowkit.reading.graphs import EdgeKind, GraphEdge, GraphNode, GraphView
from tests.pictures.graphs import FOLDER, GRAPHS, drawn, picture_of, row, view
from tests.unit.property_examples import examples

MERMAID_TEXT = r"(?:[\w ()+,./:=×✓✕◆▶○⤼◷◼⊘…-]|[^\x00-\x7f]|#\d+;)*"
MERMAID_LINE = re.compile(
    rf'flowchart (?:TB|LR)|  n\d+(?:\(|\[\[)"{MERMAID_TEXT}(?:<br/>{MERMAID_TEXT})*"(?:\)|\]\])(?::::[a-z]+)?'
    rf'|  n\d+ (?:-->|==>|-\.->)(?:\|"{MERMAID_TEXT}"\|)? n\d+'
    r"|  classDef [a-z]+ [\w#:, -]+|  linkStyle [\d,]+ stroke:#\w+"
)
QUOTED = r'"(?:[^"\\\n]|\\.)*"'
DOT_ATTRIBUTES = rf"\[\w+={QUOTED}(?:, \w+={QUOTED})*\];"
DOT_LINE = re.compile(
    rf"digraph {QUOTED} \{{|  (?:graph|node|edge) {DOT_ATTRIBUTES}|  {QUOTED}(?: -> {QUOTED})? {DOT_ATTRIBUTES}|\}}"
)
DOT_LABEL = re.compile(rf"  {QUOTED} \[label=({QUOTED})")
AWKWARD = [
    "\\",
    '"',
    "\\n",
    "\\N",
    "&amp;",
    "<b>",
    "]",
    "%%{init: {}}%%",
    "-->",
    "#quot;",
    "`",
    ";",
    "|",
    "\x1b[31m",
    "\u202e",
]
NAMES = st.lists(st.sampled_from(AWKWARD) | st.text(max_size=4), min_size=1, max_size=6).map("".join)


@pytest.mark.parametrize("name", GRAPHS)
def test_picture_is_as_it_was(name: str) -> None:
    kept = {
        suffix: (FOLDER / f"{name}.{suffix}").read_text(encoding="utf-8") for suffix in ("txt", "mmd", "dot")
    }
    assert drawn(name) == kept, (
        "if the change is meant: PYTHONPATH=. .venv/bin/python -m tests.pictures.graphs"
    )


def test_kept_pictures_are_those_of_a_graph() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*GRAPHS}


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(NAMES, NAMES, NAMES)
def test_no_name_is_taken_for_the_language_of_a_format(first: str, second: str, condition: str) -> None:
    nodes = (GraphNode(node_id=first, role="r", when=condition), GraphNode(node_id=f"{second}2", role="r"))
    edge = GraphEdge(source=0, target=1, kind=EdgeKind.CONDITIONAL, condition=condition)
    picture = make_picture(GraphView(name=condition, nodes=nodes, edges=(edge,)))

    dot = to_dot(picture).splitlines()
    assert [line for line in dot if not DOT_LINE.fullmatch(line)] == []
    labels = [_unescaped(found[1]) for line in dot if (found := DOT_LABEL.match(line))]
    assert labels == [[box.heading, *box.details] for box in picture.boxes]

    assert [line for line in to_mermaid(picture).splitlines() if not MERMAID_LINE.fullmatch(line)] == []
    text = to_text(picture).plain
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert all(box.title.rstrip() in text for box in picture.boxes)


def _unescaped(label: str) -> list[str]:
    """Return the lines of a quoted label, as Graphviz shows them."""
    shown = re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], label[1:-1])
    return html.unescape(shown).split("\n")


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_text_shows_each_node_once_within_the_columns(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, MAX_BOXES))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(
        lambda pair: pair[0] < pair[1]
    )
    chosen = data.draw(st.lists(pairs, max_size=40, unique=True)) if count > 1 else []
    kinds = [data.draw(st.sampled_from(EdgeKind)) for _ in chosen]
    picture = make_picture(view(count, [(*pair, kind) for pair, kind in zip(chosen, kinds, strict=True)]))
    text = to_text(picture, 100).plain
    if text.startswith(f"{count} node"):
        assert [index for index in range(count) if not re.search(rf"  node-{index} ", text)] == []
    else:
        assert [index for index in range(count) if not re.search(rf"│ node-{index} +│", text)] == []
        assert max(map(cell_len, text.splitlines())) <= 100
        assert len(re.findall(r"[▶▼]", text)) <= len(chosen)
        assert len(re.findall("└", text.replace("╚", ""))) >= count


def test_text_is_a_list_if_the_picture_is_too_wide() -> None:
    picture = picture_of("diamond")
    assert "┌" in to_text(picture, 40).plain
    assert to_text(picture, 20).plain.startswith("4 nodes in 3 layers\n")


def test_text_is_a_list_if_a_layout_of_the_lines_takes_seconds() -> None:
    dense = view(MAX_BOXES, itertools.combinations(range(MAX_BOXES), 2))
    assert to_text(make_picture(dense)).plain.startswith("30 nodes in 30 layers\n")


def test_a_state_is_a_symbol_and_a_word_in_every_format() -> None:
    graph, rows = GRAPHS["pipeline-states"]
    for text in drawn("pipeline-states").values():
        for each in rows:
            assert each.status in text
        assert {*"✓▶✕○◆⤼"} <= {*text}
    plain = make_picture(graph)
    assert {box.status for box in plain.boxes} == {None}


def test_a_group_that_waits_for_a_person_says_so() -> None:
    graph = view(1_200, [(0, index) for index in range(1, 1_200)])
    picture = make_picture(graph, {"node-5": row("node-5", "deferred", wait_kind=WaitKind.DECISION)})
    assert [(box.members, box.symbol) for box in picture.boxes] == [(1, ""), (1_199, "◆")]
    assert picture.boxes[1].details == ("◷ 1 deferred", "◆ 1 wait for a decision")


def test_batches_that_are_set_aside_are_seen_in_every_format_and_in_groups() -> None:
    """However long the state of the node is: a box cuts what follows them."""
    graph = view(2, [(0, 1)])
    shards = "1,024 shards on 1,024 workers, 1,234,567 of 2,345,678 so far"
    wide = row("node-0", "running", attempt=1_000, failed_batches=1_200, shards=shards)
    picture = make_picture(graph, {"node-0": wide})
    for text in (to_text(picture).plain, to_mermaid(picture), to_dot(picture)):
        assert "1,200 set aside" in text
    many = view(1_200, [(0, index) for index in range(1, 1_200)])
    aside = make_picture(many, {"node-5": row("node-5", "finished", failed_batches=3)})
    assert aside.boxes[1].details == ("✓ 1 finished", "3 batches are set aside")
