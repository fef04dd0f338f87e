"""A Prometheus of a test: it scrapes processes every second, and evaluates the alerts without their delays."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ruamel.yaml import YAML

from flowkit.local.ports import free_port
from flowkit.local.process_guard import guarded
from tests.observability.programs import program

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = Path(__file__).parents[2] / "deploy/observability"
_YAML = YAML(typ="safe")


def without_delays(rules: dict[str, Any]) -> dict[str, Any]:
    """Return the alerts with none that waits before it fires."""
    groups = [
        {**group, "rules": [{**rule, "for": "0s"} for rule in group["rules"]]} for group in rules["groups"]
    ]
    return {"groups": groups}


class Prometheus:
    """A server with the rules of the deployment, which scrapes `targets`: ports by the name of the job."""

    def __init__(self, folder: Path, targets: Mapping[str, list[int]]) -> None:
        self._folder = folder
        self._address = f"http://127.0.0.1:{free_port()}"
        jobs = [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
            for job, ports in targets.items()
        ]
        every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        rules = without_delays(_YAML.load((FOLDER / "rules.yml").read_text(encoding="utf-8")))
        (folder / "rules.yml").write_text(json.dumps(rules), encoding="utf-8")  # JSON is YAML
        config = {"global": every, "rule_files": ["rules.yml"], "scrape_configs": jobs}
        (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")

    def __enter__(self) -> Self:
        command = [
            program("prometheus"),
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self._address.removeprefix('http://')}",
        ]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                guarded(command), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # the guard ends the server
        self._process.wait()

    def is_ready(self) -> bool:
        """Return whether the server responds. Fail if it has exited."""
        assert self._process.poll() is None, (self._folder / "prometheus.log").read_text(encoding="utf-8")
        try:
            with urllib.request.urlopen(f"{self._address}/-/ready"):
                return True
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of a request to the API. Fail with the error of Prometheus, if it has one."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self._address}/api/v1/{path}?{query}") as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as refused:
            raise AssertionError(refused.read().decode()) from refused

    def values(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return the present value of an expression for each set of labels. Fail if Prometheus cannot evaluate it."""
        found = self.get("query", query=expression)["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def firing(self) -> dict[str, dict[str, Any]]:
        """Return the alerts that fire, by name."""
        alerts = self.get("alerts")["alerts"]
        return {each["labels"]["alertname"]: each for each in alerts if each["state"] == "firing"}
