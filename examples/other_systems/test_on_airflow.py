import os
from pathlib import Path
from tempfile import mkdtemp

os.environ |= {
    "AIRFLOW_HOME": mkdtemp(),
    "AIRFLOW__CORE__DAGS_FOLDER": str(Path(__file__).parent),
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__ALLOWED_DESERIALIZATION_CLASSES": "other_systems.steps.*",
}

import pytest
from airflow.utils.db import initdb

from other_systems.on_airflow import cities_dag
from other_systems.steps import Report


@pytest.fixture(autouse=True, scope="module")
def database() -> None:
    initdb()


def states(*cities: str) -> dict[str, str]:
    """Run the DAG; without a person, a pattern marks the approval as given."""
    run = cities_dag.test(run_conf={"cities": list(cities)}, mark_success_pattern="approve")
    return {ti.task_id: ti.state for ti in run.get_task_instances()} | {"run": run.state}


def test_run() -> None:
    assert set(states("Lima", "Oslo", "Turin").values()) == {"success"}
    assert Report.model_validate_json(Path("report.json").read_text()).published == ["Lima", "Oslo"]


def test_nothing_to_approve() -> None:
    ended = states("Turin")
    assert (ended["approve"], ended["publish"], ended["report"]) == ("skipped", "skipped", "success")


def test_report_runs_after_a_failure() -> None:
    ended = states("Lima", "Atlantis")
    assert (ended["publish"], ended["report"], ended["run"]) == ("upstream_failed", "success", "failed")
    assert Report.model_validate_json(Path("report.json").read_text()).published == []
