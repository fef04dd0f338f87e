"""The dashboard of Grafana: valid expressions of metrics that exist, and panels that do not overlap.

No Grafana runs here. Prometheus' own parser checks each expression, as a recording rule.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.observability.metric_names import labels_of
from tests.observability.test_rules import ALERTS, ROOT, promtool

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / "deploy/observability/grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboards/flowkit.json").read_text(encoding="utf-8"))
PANELS: dict[str, dict[str, Any]] = {panel["title"]: panel for panel in DASHBOARD["panels"]}
GRAPHS = {title: panel for title, panel in PANELS.items() if panel["type"] != "row"}
VARIABLES = {"$__rate_interval": "1m", "$role": ".*"}
"""What Grafana would put in place of its variables."""
OPERATORS = {"and", "or", "unless", "by", "on", "offset", "without", "ignoring"}


def expressions(panel: dict[str, Any]) -> list[str]:
    """Return the expressions of a panel, with values in place of the variables."""
    found = []
    for target in panel["targets"]:
        expression = target["expr"]
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        found.append(expression)
    return found


def every_expression() -> list[tuple[str, str]]:
    """Return all expressions of panels and alerts, each with its origin."""
    shown = [(title, each) for title, panel in GRAPHS.items() for each in expressions(panel)]
    return [*shown, *((name, rule["expr"]) for name, rule in ALERTS.items())]


def names_and_labels(expression: str) -> tuple[set[str], set[str]]:
    """Return the metrics that an expression names, and all labels that it groups or selects by."""
    plain = re.sub(r'"[^"]*"', '""', expression)
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\"", plain)
    grouped = ",".join(re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", plain))
    plain = re.sub(r"\b(?:by|on|without)\s*\([^)]*\)|\{[^}]*\}|\[[^\]]*\]|\boffset\s+\w+", " ", plain)
    words = re.findall(r"\b[A-Za-z_]\w*\b(?!\s*\()", plain)
    return set(words) - OPERATORS, {*selected, *(each.strip() for each in grouped.split(",") if each.strip())}


def test_panels_have_titles_and_ids_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len(PANELS) == len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("title", GRAPHS)
def test_panel_has_a_description_a_unit_and_legends(title: str) -> None:
    panel = PANELS[title]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert all(target["legendFormat"] for target in panel["targets"])
    assert panel["datasource"]["uid"] == "${datasource}"


def test_prometheus_accepts_every_expression(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression, "labels": {"origin": origin}}
        for number, (origin, expression) in enumerate(every_expression())
    ]
    file = tmp_path / "panels.json"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    promtool("check", "rules", str(file))


@pytest.mark.parametrize(("origin", "expression"), every_expression())
def test_expression_names_only_metrics_that_exist_with_labels_that_they_have(
    origin: str, expression: str
) -> None:
    names, labels = names_and_labels(expression)
    assert names, origin
    known = [labels_of(name) for name in names]
    assert labels <= set(itertools.chain({"job", "instance", "process"}, *known)), origin


def test_reader_of_expressions_finds_names_and_labels() -> None:
    expression = 'sum by (role) (rate(a_total{x=~"b|c"}[5m])) / on (role) (d offset 1h) > 0.2 or vector(0)'
    assert names_and_labels(expression) == ({"a_total", "d"}, {"role", "x"})


def test_legends_show_only_labels_that_the_expression_keeps() -> None:
    for title, panel in GRAPHS.items():
        for target, expression in zip(panel["targets"], expressions(panel), strict=True):
            _, labels = names_and_labels(expression)
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown <= labels | {"instance", "loop"}, title
