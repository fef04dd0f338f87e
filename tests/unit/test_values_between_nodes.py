"""What a node yields of a type, the next one reads by the same type or a wider one, wherever the task runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import create_model
from tests.value_pairs import Pair, are_same, is_refused, make_pairs

from flowkit import Flow
from flowkit.testing import simulate
from flowkit.worker import role

if TYPE_CHECKING:
    from flowkit.testing import GraphRun

PAIRS = make_pairs(200)
ALONE = 24
"""So many of the pairs have nodes of their own. The others are fields of models, because nodes take time."""
FIELDS = 16


def grouped(pairs: list[Pair]) -> list[Pair]:
    """Return pairs of models whose fields are those of several pairs, without the values that are refused."""
    stored = [each for each in pairs if not is_refused(each)]
    return [_group(stored[start : start + FIELDS]) for start in range(0, len(stored), FIELDS)]


def _group(pairs: list[Pair]) -> Pair:
    given: Any = {f"f{number}": (each.kind, ...) for number, each in enumerate(pairs)}
    taken: Any = {f"f{number}": (each.reader, ...) for number, each in enumerate(pairs)}
    kind = create_model("Given", **given)
    value = kind.model_construct(**{f"f{number}": each.value for number, each in enumerate(pairs)})
    return Pair(kind=kind, value=value, reader=create_model("Taken", **taken))


NODES = [*PAIRS[:ALONE], *grouped(PAIRS[ALONE:])]


def make_flow() -> tuple[Flow[Any], dict[int, Any]]:
    """Return a flow with two nodes for each pair, and what the second ones will read."""
    flow, read = Flow[Any]("values", on_node_failure="continue"), dict[int, Any]()
    for number, pair in enumerate(NODES):
        _add_pair(flow, number, pair, read)
    return flow, read


def _add_pair(flow: Flow[Any], number: int, pair: Pair, read: dict[int, Any]) -> None:
    async def make(item: Any) -> Any:
        return pair.value

    async def take(item: Any) -> int:
        read[number] = item
        return 1

    make.__annotations__["return"], take.__annotations__["item"] = pair.kind, pair.reader
    made = flow.node(f"make-{number}", role(f"make-{number}")(make)).retry(0)
    flow.node(f"take-{number}", role(f"take-{number}")(take)).pulls(made).retry(0)


def outcomes(run: GraphRun, read: dict[int, Any]) -> list[str]:
    """Return what has become of each value: read as it was, or refused where it was written."""
    return [_outcome(run, number, pair, read) for number, pair in enumerate(NODES)]


def _outcome(run: GraphRun, number: int, pair: Pair, read: dict[int, Any]) -> str:
    made = run.node(f"make-{number}")
    if made.status == "failed":
        assert is_refused(pair) and made.reason_code == "schema_mismatch", (pair, made.error)
        return f"refused: {made.error}"
    assert number in read, (pair, run.node(f"take-{number}").error)
    if number < ALONE:
        assert are_same(pair.value, read[number]), (pair, read[number])
    for name in () if number < ALONE else pair.kind.model_fields:
        assert are_same(getattr(pair.value, name), getattr(read[number], name)), (pair.kind, name)
    return "same"


async def test_a_wider_reader_gets_the_same_value_in_a_test_and_in_a_simulation_or_the_writer_fails() -> None:
    flow, read = make_flow()
    tested = outcomes(await flow.test(), read)
    assert ALONE / 2 < tested.count("same") < len(NODES)
    read.clear()
    assert outcomes(await simulate(flow), read) == tested
