import pytest

from flowkit.testing import simulate
from other_systems.on_flowkit import fetch, flow
from other_systems.steps import Params, Report


@pytest.mark.parametrize(("decision", "published"), [("approve", ["Lima", "Oslo"]), ("reject", [])])
async def test_run(decision: str, published: list[str]) -> None:
    run = await simulate(flow, params={"cities": ["Lima", "Oslo", "Turin"]}, decide={"approve": decision})
    assert run.final("report", Report).published == published


async def test_nothing_to_approve() -> None:
    run = await simulate(flow, params={"cities": ["Turin"]})
    run.assert_finished()
    run.assert_skipped("approve", "publish")


async def test_report_runs_after_a_failure() -> None:
    run = await flow.test(Params(cities=["Lima", "Atlantis"]))
    run.assert_failed()
    assert run.final("report", Report).published == []


async def test_one_step() -> None:
    assert (await fetch.try_on("Oslo")).city == "Oslo"
