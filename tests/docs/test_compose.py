"""The compose stack, as far as it can be checked without a container engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from flowkit.cli.loading import load_handlers
from flowkit.local.kafka import SETTINGS, VERSION
from flowkit.local.temporal import DYNAMIC_CONFIG
from flowkit.models.temporal_names import SEARCH_ATTRIBUTES

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
DYNAMIC_CONFIG_FILE = ROOT / "deploy/temporal/dynamicconfig.yaml"
OBSERVABILITY = ROOT / "deploy/observability"
LINKS = ("activities", "adapters", "bridge", "workflows")


def loaded(file: Path) -> Any:
    """Return the content of a YAML file."""
    return YAML(typ="safe").load(file.read_text(encoding="utf-8"))


STACK = loaded(COMPOSE)
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
ONE_SHOTS = {
    name for name, service in SERVICES.items() if service["restart"] == "no" or ":" in service["restart"]
}


def conditions() -> list[tuple[str, str, str]]:
    """Return service, dependency and condition of every `depends_on`."""
    return [
        (name, other, wait["condition"])
        for name, service in SERVICES.items()
        for other, wait in service.get("depends_on", {}).items()
    ]


def test_compose_file_is_valid() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(COMPOSE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dynamic_config_is_that_of_the_development_server() -> None:
    values = loaded(DYNAMIC_CONFIG_FILE)
    assert {key: [entry["value"] for entry in entries] for key, entries in values.items()} == {
        key: [value] for key, value in DYNAMIC_CONFIG.items()
    }
    assert not any("constraints" in entry for entries in values.values() for entry in entries)


def test_temporal_reads_the_dynamic_config() -> None:
    temporal = SERVICES["temporal"]
    source, target, mode = temporal["volumes"][0].split(":")
    assert ROOT / source == DYNAMIC_CONFIG_FILE
    assert (target, mode) == (temporal["environment"]["DYNAMIC_CONFIG_FILE_PATH"], "ro")


@pytest.mark.parametrize("name", SERVICES)
def test_service_has_a_health_check_or_runs_once(name: str) -> None:
    service = SERVICES[name]
    if name in ONE_SHOTS:
        assert "healthcheck" not in service
        assert "ports" not in service
    else:
        assert service["healthcheck"]["test"][0] == "CMD"
        assert service["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", sorted(ONE_SHOTS))
def test_one_shot_is_a_dependency_or_runs_on_demand(name: str) -> None:
    awaited = {other for _, other, _ in conditions()}
    assert name in awaited or SERVICES[name]["profiles"]


def test_kafka_starts_only_with_its_profile_and_nothing_else_needs_it() -> None:
    assert SERVICES["kafka"]["profiles"] == ["external"]
    assert [
        name for name, other, _ in conditions() if other == "kafka" and "profiles" not in SERVICES[name]
    ] == []


def test_kafka_is_the_version_of_the_local_broker_with_its_settings() -> None:
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{VERSION}"
    environment = SERVICES["kafka"]["environment"]
    shared = {f"KAFKA_{key.replace('.', '_').upper()}": str(value) for key, value in SETTINGS.items()}
    assert {key: value for key, value in environment.items() if key in shared} == {
        key: value for key, value in shared.items() if key in environment
    }


def test_images_of_the_profile_for_observability_are_pinned_and_nothing_else_needs_them() -> None:
    watching = {n: s for n, s in SERVICES.items() if s.get("profiles") == ["observability"]}
    assert set(watching) == {"prometheus", "grafana"}
    assert all(re.fullmatch(r".+:v?\d+\.\d+\.\d+", service["image"]) for service in watching.values())
    assert [name for name, other, _ in conditions() if other in watching and name not in watching] == []


def test_prometheus_reads_the_health_port_of_every_process_of_flowkit() -> None:
    jobs = {
        job["job_name"]: job["dns_sd_configs"]
        for job in loaded(OBSERVABILITY / "prometheus.yml")["scrape_configs"]
    }
    lines = (ROOT / "deploy/flowkit.env").read_text(encoding="utf-8").split()
    [port] = [line.partition("=")[2] for line in lines if line.startswith("FLOWKIT_HEALTH_PORT=")]
    assert "FLOWKIT_HEALTH_HOST=0.0.0.0" in lines
    del jobs["flowkit-admission-queue"]  # is on the port of its HTTP API
    assert {"engine", "worker", "bridge"} < {name.removeprefix("flowkit-") for name in jobs}
    for name, found in jobs.items():
        assert found == [{"names": [name.removeprefix("flowkit-")], "type": "A", "port": int(port)}]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    targets = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    dashboard = targets["./deploy/observability/grafana/dashboards/flowkit.json"]
    provisioning = OBSERVABILITY / "grafana/provisioning"
    [provider] = loaded(provisioning / "dashboards/flowkit.yml")["providers"]
    assert provider["options"]["path"] == str(Path(dashboard).parent)
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
    [source] = loaded(provisioning / "datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    interval = loaded(OBSERVABILITY / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval


@pytest.mark.parametrize(("name", "other", "condition"), conditions())
def test_service_waits_for_healthy_services_and_completed_one_shots(
    name: str, other: str, condition: str
) -> None:
    wanted = "service_completed_successfully" if other in ONE_SHOTS else "service_healthy"
    assert (name, condition) == (name, wanted)


def test_all_ports_listen_on_localhost_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_volumes_are_named_and_mounted_files_exist() -> None:
    mounted = [volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])]
    files = {source for source in mounted if source.startswith("./")}
    assert set(mounted) - files == set(STACK["volumes"])
    assert all((ROOT / source).is_file() for source in files)


@pytest.mark.parametrize("name", ["engine", "bridge", "worker", "demo-task"])
def test_environment_of_a_service_adds_to_the_variables_of_all(name: str) -> None:
    """A file is merged with the `environment:` of a service, while a merged YAML mapping would be replaced by it."""
    assert SERVICES[name]["env_file"] == "deploy/flowkit.env"
    names = {line.partition("=")[0] for line in (ROOT / SERVICES[name]["env_file"]).read_text().splitlines()}
    assert {"TEMPORAL_ADDRESS", "MONGO_URL", "FLOWKIT_QUEUE", "FLOWKIT_HEALTH_FILE"} <= names


def test_handlers_load_and_the_health_check_covers_their_roles() -> None:
    worker = SERVICES["worker"]
    handlers = [argument for argument in worker["command"] if ":" in argument]
    assert worker["healthcheck"]["test"][4:] == list(load_handlers(handlers))


def test_namespace_script_creates_all_search_attributes() -> None:
    script = (ROOT / "deploy/temporal/namespace.sh").read_text(encoding="utf-8")
    assert all(f"--name {name} --type Keyword" in script for name in SEARCH_ATTRIBUTES)


@pytest.mark.parametrize("name", ["namespace.sh", "schema.sh"])
def test_setup_script_is_a_valid_shell_script(name: str) -> None:
    subprocess.run(["sh", "-n", str(ROOT / "deploy/temporal" / name)], check=True)


def test_image_contains_links_and_their_targets() -> None:
    copied = copied_into_image()
    allowed = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"
    }
    assert {"src", *LINKS} <= copied
    assert {path.split("/")[0] for path in copied} == allowed
    assert all((ROOT / path).exists() for path in copied)
    assert {link.name for link in (ROOT / "src/flowkit").iterdir() if link.is_symlink()} == set(LINKS)


def copied_into_image() -> set[str]:
    """Return the paths that the Dockerfile copies from the build context."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    return {path for paths in copies for path in paths}


def test_image_does_not_run_as_root() -> None:
    assert "\nUSER flowkit\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
