import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.exceptions import UnfinishedRun
from prefect.flow_runs import resume_flow_run
from prefect.testing.utilities import prefect_test_harness

from other_systems import on_prefect
from other_systems.steps import Params, Report


@pytest.fixture(autouse=True, scope="module")
def server() -> Iterator[None]:
    with prefect_test_harness():
        yield


@pytest.mark.parametrize(("approve", "published"), [(True, ["Lima", "Oslo"]), (False, [])])
def test_run(approve: bool, published: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_prefect, "pause_flow_run", lambda **_: approve)
    assert on_prefect.cities(Params(cities=["Lima", "Oslo", "Turin"])).published == published


def test_report_runs_after_a_failure() -> None:
    with pytest.raises(UnfinishedRun):
        on_prefect.cities(Params(cities=["Lima", "Atlantis"]))
    assert Report.model_validate_json(Path("report.json").read_text()).published == []


def test_resume_of_a_paused_run() -> None:
    threading.Thread(target=approve_the_paused_run, daemon=True).start()
    assert on_prefect.cities(Params(cities=["Lima"])).published == ["Lima"]


def approve_the_paused_run() -> None:
    with get_client(sync_client=True) as client:
        while not (paused := [run for run in client.read_flow_runs() if run.state and run.state.is_paused()]):
            time.sleep(0.2)
    answer: dict[str, Any] = {"value": True}
    resume_flow_run(paused[0].id, run_input=answer)
