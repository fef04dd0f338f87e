"""Products register themselves by entry points, and the core works without them."""

from __future__ import annotations

from functools import partial
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.product_code import needs_product

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
    monkeypatch.setattr(products, "find_spec", lambda name: None)


@pytest.mark.parametrize("module", ["flowkit.gone.product", "flowkit.graph.gone"])
def test_an_entry_point_without_its_code_does_not_count(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [EntryPoint("gone", f"{module}:PRODUCT", products.GROUP)]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: given)
    assert products.installed.__wrapped__() == ()


@pytest.mark.parametrize(
    ("loaded", "problem"),
    [
        (ModuleNotFoundError("No module named 'gone'", name="gone"), "needs the module 'gone'"),
        (AttributeError("no PRODUCT"), "fails to load: AttributeError: no PRODUCT"),
        ({}, "is of the type 'dict', not a Product"),
    ],
)
def test_a_product_that_cannot_be_loaded_is_named(
    loaded: Any, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register(monkeypatch, {"other.product:PRODUCT": loaded})
    assert run(["--help"]) == 2
    assert f"the product other.product:PRODUCT {problem}: repair or uninstall" in capsys.readouterr().err


def test_two_products_of_one_name_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, {each: products.Product(name="same") for each in ("one:PRODUCT", "two:PRODUCT")})
    with pytest.raises(ConfigError, match="the name 'same': one:PRODUCT and two:PRODUCT; uninstall one"):
        products.installed()


def test_graphviz_is_that_of_the_first_product_that_has_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    has, lacks = tmp_path / "graphviz.js", tmp_path / "gone.js"
    has.touch()
    known = [products.Product(name=path.name, graphviz=partial(Path, path)) for path in (lacks, has)]
    monkeypatch.setattr(products, "installed", lambda: (products.Product(name="a"), *known))
    assert products.graphviz() == has
    has.unlink()
    assert products.graphviz() is None


def register(monkeypatch: pytest.MonkeyPatch, loaded: dict[str, Any]) -> None:
    """Let these be the entry points of products, with what they load or raise."""

    def load(entry: EntryPoint) -> Any:
        if isinstance(loaded[entry.value], Exception):
            raise loaded[entry.value]
        return loaded[entry.value]

    monkeypatch.setattr(EntryPoint, "load", load)
    entries = [EntryPoint("any", value, products.GROUP) for value in loaded]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    monkeypatch.setattr(products, "installed", products.installed.__wrapped__)


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
def test_a_product_whose_code_is_there_needs_a_new_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a checkout that has got new code since it was installed."""
    monkeypatch.setattr(products, "find_spec", find_spec)
    assert run(["token", "list"]) == 2
    assert "is not registered, because this installation" in (shown := capsys.readouterr().err)
    assert "run pip install -e '.[server]' in the checkout" in shown


@needs_product("admission")
@pytest.mark.usefixtures("no_products")
def test_an_engine_warns_of_a_product_that_is_not_registered_although_its_code_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert products.on_closed(memory_database()) == []
    assert caplog.messages == []
    monkeypatch.setattr(products, "find_spec", lambda name: find_spec(name) if "admission" in name else None)
    assert products.on_closed(memory_database()) == []
    [message] = caplog.messages
    assert message.startswith("the product 'admission' is not registered, because this installation")


@pytest.mark.usefixtures("no_products")
def test_the_command_line_works_without_products(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert " engine " in shown
    assert " gateway " not in shown
