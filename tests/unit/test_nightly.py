"""The nightly run: its steps, the totals that it prints, and the module of its server."""

from __future__ import annotations

from tests.nightly.__main__ import all_steps, totals_of
from tests.nightly.newer_server import module_file

GO_MOD = """\
module github.com/temporalio/cli

go 1.26.8

require (
\tgithub.com/google/uuid v1.6.0
\tgithub.com/temporalio/cli/cliext v0.0.0
)

replace github.com/temporalio/cli/cliext => ./cliext
"""


def test_the_module_of_the_server_needs_no_folder_of_the_release() -> None:
    assert module_file(GO_MOD).split() == [
        *("module", "flowkit/temporal-server", "go", "1.26.8"),
        *("require", "(", "github.com/google/uuid", "v1.6.0", ")"),
    ]


def test_the_totals_of_each_run_of_pytest_are_reported() -> None:
    output = "...\n2 failed, 10 passed, 1 skipped in 61.20s (0:01:01)\nin 3 steps\n5 passed in 0.10s\n"
    assert totals_of(output) == ("2 failed, 10 passed, 1 skipped", "5 passed")


def test_fuzz_and_chaos_are_bounded_in_minutes_and_large_in_nodes() -> None:
    steps = all_steps(minutes=7, sizes="1000", jobs=2, tests=["tests/integration"])
    assert list(steps) == ["long", "server", "drivers", "core", "cluster", "fuzz", "chaos", "large"]
    assert all({"MINUTES=7", "SIZES=1000"} <= set(steps[name].command) for name in ("fuzz", "chaos", "large"))
