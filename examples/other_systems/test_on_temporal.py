import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from other_systems.on_temporal import Cities, fetch, publish, rate, report
from other_systems.steps import Params, Report


async def run(params: Params, approve: bool) -> Report:
    program = os.environ.get("TEMPORAL_CLI")  # without it, the SDK downloads one
    async with await WorkflowEnvironment.start_local(
        data_converter=pydantic_data_converter, dev_server_existing_path=program
    ) as env:
        with ThreadPoolExecutor(10) as threads:
            async with Worker(
                env.client,
                task_queue="q",
                workflows=[Cities],
                activities=[fetch, rate, publish, report],
                activity_executor=threads,
            ):
                handle = await env.client.start_workflow(Cities.run, params, id="cities", task_queue="q")
                await handle.execute_update(Cities.decide, approve)
                return await handle.result()


@pytest.mark.parametrize(("approve", "published"), [(True, ["Lima", "Oslo"]), (False, [])])
async def test_run(approve: bool, published: list[str]) -> None:
    assert (await run(Params(cities=["Lima", "Oslo", "Turin"]), approve)).published == published


async def test_report_runs_after_a_failure() -> None:
    with pytest.raises(WorkflowFailureError):
        await run(Params(cities=["Lima", "Atlantis"]), True)
    assert reported() == []


def reported() -> list[str]:
    return Report.model_validate_json(Path("report.json").read_text()).published
