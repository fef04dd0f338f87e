"""The gateway and the admission queue on the command line, and in the plan of `flowkit up`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from flowkit import products, server
from flowkit.cli.app import run
from flowkit.cli.up.monitor import create_rows
from flowkit.cli.up.plan import Ports, UpOptions, make_plan
from flowkit.cli.up.processes import create_processes
from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_the_products_of_flowkit_register_commands_processes_and_calls() -> None:
    found = {each.name: each for each in products.installed()}
    commands = [name for each in found.values() for name in each.commands]
    assert sorted(commands) == sorted(products.EXTRAS) == ["admission", "gateway", "token", "ui"]
    assert [*products.processes()] == ["gateway", "admission", "page"]
    assert [name for name, each in found.items() if each.on_closed] == ["admission"]


def test_ports_follow_those_of_the_servers() -> None:
    assert Ports.from_base(5000).products == {"gateway": (5005, 5006), "admission": (5007,), "page": (5008,)}
    assert Ports.from_base(None).products == {"gateway": (9652, 9653), "admission": (9654,), "page": (9655,)}


@pytest.mark.parametrize("product", ["gateway", "admission"])
def test_gateway_and_admission_start_only_if_they_are_wanted(product: str) -> None:
    assert product not in make_plan(UpOptions(), {}).parts
    wanted = UpOptions(products=(product,))
    assert product in make_plan(wanted, {}).parts
    assert make_plan(UpOptions(only=(product,)), {}).uses_temporal
    with pytest.raises(ConfigError, match=f"--{product} is given, but this command starts no {product}"):
        make_plan(replace(wanted, only=("engine",)), {})


@pytest.mark.parametrize(("given", "networks"), [(None, "loopback,private,public"), ("private", "private")])
def test_supervisors_of_the_gateway_may_run_on_this_machine_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, networks: str
) -> None:
    if given is None:
        monkeypatch.delenv("FLOWKIT_SUPERVISOR_NETWORKS", raising=False)
    else:
        monkeypatch.setenv("FLOWKIT_SUPERVISOR_NETWORKS", given)
    [gateway] = create_processes(make_plan(UpOptions(only=("gateway",)), {}), tmp_path).products
    assert gateway.command()[-2:] == ["--supervisor-networks", networks]


def test_the_process_of_the_admission_queue_uses_the_servers_and_the_queue_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"TEMPORAL_ADDRESS": "t:1", "MONGO_URL": "mongodb://m"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    plan = make_plan(UpOptions(products=("admission",), queue="q", verbose=True), environment)
    processes = create_processes(plan, tmp_path)
    [process] = processes.products
    assert process.command()[-5:] == ["admission", "run", "--verbose", "--port", "9654"]
    assert {**environment, "FLOWKIT_QUEUE": "q"}.items() <= process.environment().items()
    process.summary = "admission starts requests of queue q"
    [row] = [row for row, found in create_rows(plan, processes) if found is process]
    assert (row.name, row.detail) == ("admission", "starts requests of queue q")


@pytest.mark.parametrize(
    ("arguments", "missing", "reported"),
    [
        (
            ["gateway"],
            "starlette",
            "the gateway needs starlette: run pip install 'flowkit-temporal[gateway]'",
        ),
        (["gateway"], "aiohttp", "the gateway needs aiohttp: run pip install 'flowkit-temporal[gateway]'"),
        (
            ["admission", "run"],
            "prometheus_client",
            "the HTTP API of admission needs prometheus_client: run pip install 'flowkit-temporal[admission]'",
        ),
    ],
)
def test_server_without_its_packages_says_how_to_install_them(
    arguments: list[str],
    missing: str,
    reported: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None if name == missing else find_spec(name))
    assert run(arguments) == 2
    assert reported in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--admission"], ["--only", "admission"], ["--gateway"]])
def test_up_names_the_extra_of_a_product_before_anything_starts(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name))
    monkeypatch.setattr("flowkit.cli.up.run.run", lambda plan: pytest.fail("it starts"))
    assert run(["up", *arguments]) == 2
    extra = "gateway" if "--gateway" in arguments else "admission"
    assert f"needs uvicorn: run pip install 'flowkit-temporal[{extra}]'" in capsys.readouterr().err


def test_the_client_of_the_gateway_names_its_extra() -> None:
    program = "import sys; sys.modules['aiohttp'] = None; import flowkit.gateway.client"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: GatewayClient needs aiohttp: run pip install 'flowkit-temporal[gateway]'"
    )


def test_the_client_of_the_admission_queue_needs_no_extra() -> None:
    hidden = "import sys; sys.modules |= dict.fromkeys(['starlette', 'uvicorn', 'websockets', 'prometheus_client'])"
    program = f"{hidden}; from flowkit.admission.client import AdmissionClient"
    subprocess.run([sys.executable, "-c", program], check=True)
