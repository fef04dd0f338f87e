"""Run the pipeline of eight nodes without servers, as its users would."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import second_hour
from flowkit.cli.loading import load_handlers
from flowkit.errors import GraphError
from flowkit.models import ENGINE_TYPES
from second_hour.pipeline import flow, measure

if TYPE_CHECKING:
    from flowkit.testing import GraphRun


async def audit(folder: Path, **params: Any) -> GraphRun:
    """Run the flow over a folder, with the handler of the role that an external worker runs."""
    given: Any = {"folder": str(folder), "out": str(folder / "out"), **params}
    return await flow.test(given, measure)


async def test_report_counts_pages_words_and_broken_links(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One\n\nSee [two](b.md#two). [Gone](c.md).\n", encoding="utf-8")
    (tmp_path / "b.md").write_text("# Two\n\nBack to [one](a.md#won).\n", encoding="utf-8")
    run = await audit(tmp_path)
    run.assert_finished()
    assert run.vars == {"pages": {"found": 2}, "links": {"broken": 2}}
    assert (tmp_path / "out/broken-links.txt").read_text(encoding="utf-8") == "a.md: c.md\nb.md: a.md#won\n"
    report = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "2 pages, 10 words, 2 broken links" in report
    assert "Archive: finished. List of broken links: finished." in report


async def test_report_runs_without_a_list_and_without_an_archive(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One\n", encoding="utf-8")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/pages.zip").mkdir()
    run = await audit(tmp_path)
    run.assert_finished()
    run.node("list").assert_skipped("condition")
    run.node("pack").assert_failed(error="IsADirectoryError")
    assert "Archive: failed. List of broken links: skipped." in (tmp_path / "out/report.html").read_text(
        encoding="utf-8"
    )


async def test_folder_without_pages_fails_at_once(tmp_path: Path) -> None:
    run = await audit(tmp_path)
    assert run.status == "failed"
    assert run.reason == f"node 'survey' failed: no_pages: no Markdown page in {tmp_path}"


async def test_params_must_match_their_schema(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"params\.pause_sec is 'long'; it must be a number"):
        await audit(tmp_path, pause_sec="long")


def test_commands_of_the_readme_run_every_role() -> None:
    text = (Path(second_hour.__file__).parent / "README.md").read_text(encoding="utf-8")
    named = ["second_hour.pipeline:flow", "second_hour.pipeline:measure"]
    assert [name for name in named if name not in text] == []
    roles = {node["type"] for node in flow.to_dict()["nodes"]} - set(ENGINE_TYPES)
    assert load_handlers(named).keys() == roles
