"""The line that reports a ready engine or worker, written by the command line and read from a log."""

from __future__ import annotations

import pytest

from flowkit.core.ready_line import find_summary, ready_line


def test_summary_is_found_in_a_log_with_other_lines() -> None:
    log = f"INFO starting\n{ready_line('worker on queue a.b (c)')}\nINFO polling\n"
    assert find_summary(log) == "worker on queue a.b (c)"


@pytest.mark.parametrize("log", ["", "INFO starting\n", ready_line("engine")[:-1]])
def test_log_without_the_complete_line_has_no_summary(log: str) -> None:
    assert find_summary(log) == ""
