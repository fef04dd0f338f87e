"""docs/observe.md names every alert and only panels that exist."""

from __future__ import annotations

import re

from tests.observability.test_dashboard import GRAPHS
from tests.observability.test_rules import ALERTS, ROOT

PAGE = (ROOT / "docs/observe.md").read_text(encoding="utf-8")


def test_the_page_lists_all_alerts_with_their_severities() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(operations\.md#(\w+)\) \| (\w+) \|", PAGE, re.MULTILINE)
    assert rows == [(name, name.lower(), rule["labels"]["severity"]) for name, rule in ALERTS.items()]


def test_panels_on_the_page_are_on_the_dashboard() -> None:
    questions = PAGE.partition("\n## Questions of a night\n")[2].partition("\n## Alerts\n")[0]
    named = {" ".join(name.split()) for name in re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", questions)}
    assert len(named) > 15
    assert named <= set(GRAPHS)
