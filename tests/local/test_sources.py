"""The sources of server programs: their order, limits and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.local.processes import create_program

from flowkit.errors import ConfigError
from flowkit.local.errors import InstallFailed
from flowkit.local.mongo import mongo_program
from flowkit.local.sources import Program, Source, allowed_sources, select_program
from flowkit.local.temporal import temporal_program

if TYPE_CHECKING:
    from pathlib import Path

ALL = tuple(Source)


def program_from(source: Source) -> Program:
    """Return a program from this source."""
    return Program(source=source, description="there", install=lambda: "it")


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("", ALL),
        ("cache", (Source.CACHE,)),
        (" download, path ,", (Source.DOWNLOAD, Source.PATH)),
        ("container,container", (Source.CONTAINER,)),
    ],
)
def test_the_environment_variable_limits_and_orders_the_sources(
    text: str, order: tuple[Source, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWKIT_SERVERS", text)
    assert allowed_sources() == order


def test_an_unknown_source_is_an_error_that_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWKIT_SERVERS", "path,brew")
    with pytest.raises(ConfigError, match="'brew'; choose from path, container, cache, download"):
        allowed_sources()


@pytest.mark.parametrize("there", [Source.CONTAINER, Source.DOWNLOAD])
def test_the_first_source_with_the_program_is_used(there: Source) -> None:
    finders = {source: lambda: None for source in Source} | {there: lambda: program_from(there)}
    assert select_program("server", finders, ALL).source is there


def test_the_error_names_the_sources_without_the_program() -> None:
    with pytest.raises(
        InstallFailed, match="no server found in FLOWKIT_SERVERS=path,cache; unset FLOWKIT_SERVERS"
    ):
        select_program("server", dict.fromkeys(Source, lambda: None), [Source.PATH, Source.CACHE])


def test_path_comes_first_and_download_last(empty_path: Path) -> None:
    assert temporal_program(ALL).source is Source.DOWNLOAD
    assert mongo_program(ALL).source is Source.DOWNLOAD
    assert mongo_program(ALL).requires == ("java", "javac", "mvn")
    temporal, mongod = create_program(empty_path / "temporal"), create_program(empty_path / "mongod")
    assert (temporal_program(ALL).source, temporal_program(ALL).install()) == (Source.PATH, temporal)
    assert (mongo_program(ALL).source, mongo_program(ALL).description) == (Source.PATH, mongod)


def test_flowkit_temporal_bin_takes_precedence_over_path(
    empty_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_program(empty_path / "temporal")
    named = create_program(tmp_path / "mine" / "my-temporal")
    monkeypatch.setenv("FLOWKIT_TEMPORAL_BIN", named)
    assert temporal_program(ALL).install() == named
