"""The Temporal identity of an engine names its database, for the warning that no engine of a database polls a queue."""

from __future__ import annotations

import pytest

from flowkit.models.temporal_names import engine_identity, other_databases, process_of

OURS, THEIRS = "11111111-2222/shop", "99999999-2222/flowkit"
FOREIGN = engine_identity("engine-7@host", THEIRS)


def test_identity_has_the_process_and_the_database() -> None:
    assert FOREIGN == "engine-7@host#flowkit:99999999"
    assert [process_of(each) for each in (FOREIGN, "engine-7@host", "w-1#a")] == [
        "engine-7@host",
        "engine-7@host",
        "w-1#a",
    ]


@pytest.mark.parametrize(
    ("pollers", "others"),
    [
        ([], []),
        ([FOREIGN, engine_identity("engine-8@host", THEIRS)], ["flowkit"]),
        ([FOREIGN, engine_identity("engine-8@host", OURS)], []),
        ([FOREIGN, "a worker of the user's own"], []),
    ],
    ids=["no engine", "only others", "one of ours", "one that may be ours"],
)
def test_other_databases_count_only_if_no_engine_may_use_ours(pollers: list[str], others: list[str]) -> None:
    assert other_databases(pollers, OURS) == others
