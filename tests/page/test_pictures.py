"""Pictures of graphs group nodes, and mark states and edges, as the page does."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flowkit.cli.tasks.explain import LABELS
from flowkit.pictures.groups import collapse
from flowkit.pictures.styles import EDGES, STATUSES

STATIC = Path(__file__).parents[2] / "src" / "flowkit" / "page" / "static"
PROGRAM = """
import {{ collapse }} from {module};
const graphs = {graphs};
console.log(JSON.stringify(graphs.map(([roles, edges]) => collapse(roles.map((role) => ({{ role }})), edges))));
"""


def random_graph(seed: int) -> tuple[list[str], list[tuple[int, int, str]]]:
    """Return the roles and edges of a graph whose nodes are often alike, or links of a chain."""
    chance = random.Random(seed)
    count = chance.randint(1, 25)
    edges = {
        (chance.randint(max(0, target - chance.choice((1, 3))), target - 1), target, chance.choice("pps"))
        for target in range(1, count)
        for _ in range(chance.choice((0, 1, 1, 2)))
    }
    return [chance.choice("aab") for _ in range(count)], sorted(edges)


def test_groups_are_those_of_the_page() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node.js on PATH, which runs the code of the page")
    graphs = [random_graph(seed) for seed in range(200)]
    module = json.dumps((STATIC / "groups.js").as_uri())
    program = PROGRAM.format(module=module, graphs=json.dumps(graphs))
    ended = subprocess.run(
        [node, "--input-type=module"], input=program, capture_output=True, text=True, check=True
    )
    on_page: list[dict[str, Any]] = json.loads(ended.stdout)
    for (roles, edges), expected in zip(graphs, on_page, strict=True):
        groups, between = collapse(roles, edges)
        assert {"groups": groups, "edges": [list(edge) for edge in between]} == expected


def test_symbols_and_colors_are_those_of_the_page() -> None:
    words = (STATIC / "words.js").read_text(encoding="utf-8")
    symbols = dict(re.findall(r'(\w+): \{ symbol: "(.)"', words))
    assert symbols == {status: style.symbol for status, style in STATUSES.items()}
    sheet = (STATIC / "style.css").read_text(encoding="utf-8").partition("@media")[0]
    colors = dict(re.findall(r"--([\w-]+): (#\w+);", sheet))
    full = {"#fff": "#ffffff"}
    for status, style in STATUSES.items():
        fill = colors[f"{status}-fill"]
        assert (style.stroke, style.fill) == (colors[status], full.get(fill, fill))
    assert {EDGES[kind].color for kind in EDGES} <= {*colors.values()}


def test_parts_of_the_time_have_the_words_and_colors_of_the_page() -> None:
    parts = (STATIC / "explain.js").read_text(encoding="utf-8").partition("PARTS = {")[2].partition("}")[0]
    assert dict(re.findall(r'(\w+): "(.+)"', parts)) == LABELS
    sheet = (STATIC / "style.css").read_text(encoding="utf-8")
    assert all(f".part.{part} {{ background:" in sheet for part in LABELS)
