"""External roles in graphs: their names fit Kafka topics, and nodes that pull from several nodes get a warning."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkit import CoordinatorConfig, limits
from flowkit.bridge.kafka.topics import Topics
from flowkit.errors import GraphError
from flowkit.graph.input_adapters import PULL, RECHUNK
from flowkit.graph.submission import validate_input

TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


def warnings(*sources: str, role: str = "external", adapter: str | None = PULL) -> tuple[str, ...]:
    """Return the warnings about a graph whose last node pulls from `sources`."""
    args: dict[str, Any] = {"from_nodes": list(sources)}
    args |= {"size": 2, "meta_list_key": "items"} if adapter == RECHUNK else {}
    inline = {"input_adapter": adapter, "input_args": args} if adapter else {}
    last = {"node_id": "z", "type": role, "depends_on": list(sources), "io": {"input_inline": inline}}
    nodes = [*({"node_id": source, "type": "native"} for source in sources), last]
    return validate_input(
        "t", {"params": {}, "graph": {"nodes": nodes}}, external_roles=["external"]
    ).warnings


def test_pulling_from_several_nodes_warns_of_equal_batch_uids() -> None:
    (warning,) = warnings("a", "b")
    assert warning.startswith("node 'z' has the external role 'external' and pulls from 2 nodes ('a', 'b')")
    assert warning.endswith("the attempt fails as batch_uid_clash if they do not")


def test_other_nodes_get_no_warning() -> None:
    assert warnings("a") == ()
    assert warnings("a", "b", role="native") == ()
    assert "external role" not in "".join(warnings("a", "b", adapter=None))
    assert warnings("a", "b", adapter=RECHUNK) == ()


@given(st.from_regex(limits.ROLE, fullmatch=True))
def test_every_role_of_a_graph_fits_the_names_of_the_topics(role: str) -> None:
    topics = Topics.of(CoordinatorConfig(worker_types=[role]))
    assert all(TOPIC.fullmatch(topic) and topic not in (".", "..") for topic in topics.all([role]))


@pytest.mark.parametrize("role", ["ä", "a b", "", ".", "..", "a/b", "r" * 101, "a\n"])
def test_roles_that_fit_no_topic_are_rejected_at_submission(role: str) -> None:
    graph = {"nodes": [{"node_id": "a", "type": role}]}
    with pytest.raises(GraphError, match="type"):
        validate_input("t", {"params": {}, "graph": graph}, external_roles=[role])
