"""The compose stack, as far as it can be judged without a container engine: shape, order, and what it shares with us."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from flowkit.cli.loading import load_handlers
from flowkit.local.temporal import DYNAMIC_CONFIG
from flowkit.workflows.endings import SEARCH_ATTRIBUTES

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
DYNAMIC_CONFIG_FILE = ROOT / "deploy/temporal/dynamicconfig.yaml"
LINKS = ("activities", "adapters", "bridge", "workflows")


def loaded(file: Path) -> Any:
    """What a YAML file holds."""
    return YAML(typ="safe").load(file.read_text(encoding="utf-8"))


STACK = loaded(COMPOSE)
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
ONE_SHOTS = {
    name for name, service in SERVICES.items() if service["restart"] == "no" or ":" in service["restart"]
}


def conditions() -> list[tuple[str, str, str]]:
    """Who waits for whom until what."""
    return [
        (name, other, wait["condition"])
        for name, service in SERVICES.items()
        for other, wait in service.get("depends_on", {}).items()
    ]


def test_the_file_fits_the_compose_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(COMPOSE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_servers_dynamic_config_is_that_of_the_development_server() -> None:
    values = loaded(DYNAMIC_CONFIG_FILE)
    assert {key: [entry["value"] for entry in entries] for key, entries in values.items()} == {
        key: [value] for key, value in DYNAMIC_CONFIG.items()
    }
    assert not any("constraints" in entry for entries in values.values() for entry in entries)


def test_the_server_reads_that_file() -> None:
    temporal = SERVICES["temporal"]
    source, target, mode = temporal["volumes"][0].split(":")
    assert ROOT / source == DYNAMIC_CONFIG_FILE
    assert (target, mode) == (temporal["environment"]["DYNAMIC_CONFIG_FILE_PATH"], "ro")


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_a_health_check_or_is_a_one_shot(name: str) -> None:
    service = SERVICES[name]
    if name in ONE_SHOTS:
        assert "healthcheck" not in service
        assert "ports" not in service
    else:
        assert service["healthcheck"]["test"][0] == "CMD"
        assert service["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", sorted(ONE_SHOTS))
def test_a_one_shot_is_waited_for_or_runs_on_demand(name: str) -> None:
    awaited = {other for _, other, _ in conditions()}
    assert name in awaited or SERVICES[name]["profiles"]


@pytest.mark.parametrize(("name", "other", "condition"), conditions())
def test_a_service_waits_for_health_and_for_the_end_of_one_shots(
    name: str, other: str, condition: str
) -> None:
    wanted = "service_completed_successfully" if other in ONE_SHOTS else "service_healthy"
    assert (name, condition) == (name, wanted)


def test_all_ports_are_those_of_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_volumes_are_named_and_mounted_files_exist() -> None:
    mounted = [volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])]
    files = {source for source in mounted if source.startswith("./")}
    assert set(mounted) - files == set(STACK["volumes"])
    assert all((ROOT / source).is_file() for source in files)


def test_the_workers_handlers_load_and_their_queues_are_checked() -> None:
    worker = SERVICES["worker"]
    handlers = [argument for argument in worker["command"] if ":" in argument]
    queue = worker["environment"]["FLOWKIT_QUEUE"]
    checked = worker["healthcheck"]["test"][4:]
    assert checked == [f"{queue}.{role}" for role in load_handlers(handlers)]
    assert SERVICES["engine"]["healthcheck"]["test"][4:] == [queue]


def test_the_namespace_gets_the_search_attributes_that_are_filled() -> None:
    script = (ROOT / "deploy/temporal/namespace.sh").read_text(encoding="utf-8")
    assert all(f"--name {name} --type Keyword" in script for name in SEARCH_ATTRIBUTES)


@pytest.mark.parametrize("name", ["namespace.sh", "schema.sh"])
def test_a_set_up_script_is_a_valid_shell_script(name: str) -> None:
    subprocess.run(["sh", "-n", str(ROOT / "deploy/temporal" / name)], check=True)


def test_the_image_gets_both_ends_of_the_links() -> None:
    copied = copied_into_image()
    allowed = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"
    }
    assert {"src", *LINKS} <= copied
    assert {path.split("/")[0] for path in copied} == allowed
    assert all((ROOT / path).exists() for path in copied)
    assert {link.name for link in (ROOT / "src/flowkit").iterdir() if link.is_symlink()} == set(LINKS)


def copied_into_image() -> set[str]:
    """What the Dockerfile takes from the build context."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    return {path for paths in copies for path in paths}


def test_the_image_does_not_run_as_root() -> None:
    assert "\nUSER flowkit\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
