"""The alerts: promtool accepts them, each one fires when it should, and its runbook exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from flowkit.cli.up.plan import Ports
from tests.observability.programs import program

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/observability/rules.yml"
CASES = Path(__file__).with_name("rules_test.yml")


def loaded(file: Path) -> Any:
    """Return the content of a YAML file."""
    return YAML(typ="safe").load(file.read_text(encoding="utf-8"))


ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in loaded(RULES)["groups"] for rule in group["rules"]
}


def promtool(*arguments: str) -> None:
    """Run promtool, which prints what is wrong."""
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", "--lint-fatal", str(RULES))


@pytest.mark.parametrize("name", ["prometheus.yml", "local.yml"])
def test_prometheus_accepts_the_configuration(name: str) -> None:
    promtool("check", "config", "--lint-fatal", str(RULES.with_name(name)))


def test_the_local_configuration_has_the_ports_of_flowkit_up() -> None:
    text = RULES.with_name("local.yml").read_text(encoding="utf-8")
    found = re.findall(r"job_name: flowkit-(\w+)\n.*targets: \[\"127\.0\.0\.1:(\d+)\"\]", text)
    names = {"worker": "worker-1"}
    assert [(name, int(port)) for name, port in found] == [
        (name, Ports().health_port(names.get(name, name)))
        for name in ("engine", "bridge", "gateway", "admission", "page", "worker")
    ]


def test_each_alert_fires_when_it_should() -> None:
    promtool("test", "rules", str(CASES))


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    samples = [
        sample["labels"]
        for case in loaded(CASES)["tests"]
        for check in case["promql_expr_test"]
        for sample in check["exp_samples"]
    ]
    assert set(re.findall(r'alertname="(\w+)"', "\n".join(samples))) == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_alert_has_a_severity_texts_and_a_runbook(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert anchor == name.lower()
    assert f"\n### {name}\n" in (ROOT / page).read_text(encoding="utf-8")
