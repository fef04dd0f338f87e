"""Which stored graphs of schedules `flowkit purge` keeps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from flowkit.cli.retention.purging import SETTLES, GraphUse, graphs_to_keep

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
CHANGED = NOW - timedelta(days=1)
USED = GraphUse("new", CHANGED)


@pytest.mark.parametrize(
    ("use", "running", "kept"),
    [
        (USED, [], {"a": "new"}),
        (USED, [("a", NOW - timedelta(minutes=5))], {"a": "new"}),
        (USED, [("a", CHANGED - timedelta(hours=1))], {}),
        (USED, [("a", NOW), ("a", CHANGED + SETTLES / 2)], {}),
        (USED, [("a", None)], {}),
        (USED, [("b", CHANGED - timedelta(hours=1))], {"a": "new"}),
        (GraphUse("new", NOW - SETTLES / 2), [], {}),
        (GraphUse(), [], {"a": ""}),
        (GraphUse(), [("a", NOW)], {}),
    ],
    ids=[
        "nothing runs",
        "a task since the change",
        "a task before the change",
        "a triggered task just before the change",
        "a task of an unknown time",
        "a task of another schedule",
        "changed just now",
        "deleted",
        "deleted while a task runs",
    ],
)
def test_earlier_graphs_are_kept_while_a_task_may_begin_with_one(
    use: GraphUse, running: list[tuple[str | None, datetime | None]], kept: dict[str, str]
) -> None:
    assert graphs_to_keep({"a": use}, running, NOW) == kept
