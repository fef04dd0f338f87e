"""Products register themselves by entry points, and the core works without them."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, cast

import pytest

from flowkit import Admission, products
from flowkit.adapters.tasks.store import TaskStore
from flowkit.cli.app import run
from flowkit.client import TaskClient
from flowkit.errors import ConfigError
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from temporalio.client import Client

GRAPH = {"nodes": [{"node_id": "a", "type": "x"}]}


@pytest.fixture
def no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no product be installed."""
    monkeypatch.setattr(products, "installed", tuple)


@pytest.mark.parametrize("module", ["flowkit.gone.product", "flowkit.graph.gone"])
def test_an_entry_point_without_its_code_does_not_count(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [EntryPoint("gone", f"{module}:PRODUCT", products.GROUP)]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: given)
    assert products.installed.__wrapped__() == ()


def test_a_product_that_misses_another_module_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(entry: EntryPoint) -> Any:
        raise ModuleNotFoundError("No module named 'aiohttp'", name="aiohttp")

    monkeypatch.setattr(EntryPoint, "load", load)
    with pytest.raises(ModuleNotFoundError, match="aiohttp"):
        products.installed.__wrapped__()


@pytest.mark.usefixtures("no_products")
async def test_a_task_that_is_to_wait_needs_the_admission_queue() -> None:
    tasks = TaskClient(cast("Client", object()), TaskStore(memory_database()), queue="q")
    with pytest.raises(
        ConfigError, match=r"the admission queue is not installed: .*flowkit-temporal\[admission\]"
    ):
        await tasks.submit_task(Admission(user_id="dora"), params={}, graph=GRAPH)
    assert await tasks.find_pending("t") is None


@pytest.mark.usefixtures("no_products")
@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["gateway"], "`flowkit gateway` is not installed: run pip install 'flowkit-temporal[gateway]'"),
        (["token", "list"], "`flowkit token` is not installed: run pip install 'flowkit-temporal[server]'"),
        (
            ["up", "--admission"],
            "the process 'admission' is not installed: run pip install 'flowkit-temporal[admission]'",
        ),
        (["up", "--only", "gateway"], "the process 'gateway' is not installed"),
        (["nothing"], "No such command"),
    ],
)
def test_commands_of_a_missing_product_name_its_extra(
    arguments: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert reported in capsys.readouterr().err


@pytest.mark.usefixtures("no_products")
def test_the_command_line_works_without_products(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert " engine " in shown
    assert " gateway " not in shown
