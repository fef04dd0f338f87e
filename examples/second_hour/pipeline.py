"""Audit a folder of Markdown pages: count words, find broken links, pack an archive, write a report."""

import asyncio
import html
import re
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from pydantic import BaseModel, Field

from flowkit import Flow, cel
from flowkit.worker import BatchFailure, FinalizeResult, RunContext, role

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PAGE = """<!doctype html><title>Site audit</title>
<h1>{pages[found]} pages, {words:,.0f} words, {links[broken]} broken links</h1>
<p>Archive: {pack}. List of broken links: {list}.</p>
<table><tr><th>page<th>words<th>words in a sentence</tr>
{rows}</table>"""


class Params(BaseModel, extra="forbid"):
    folder: str = Field(min_length=1)
    out: str = Field(default="audit", min_length=1)
    pause_sec: float = Field(default=0, ge=0)


class Prose(BaseModel):
    page: str
    words: int
    prose: str
    links: list[str]


class Broken(BaseModel):
    page: str
    links: list[str]


class Sentences(BaseModel):
    page: str
    words: int
    sentence: float


@role("surveyor", inline=True)
async def survey(_: object, ctx: RunContext) -> None:
    """Count the pages, in the engine: the node takes milliseconds."""
    folder = ctx.params_as(Params).folder
    found = await asyncio.to_thread(pages, folder)
    if not found:
        raise BatchFailure(f"no Markdown page in {folder}", reason_code="no_pages", permanent=True)
    await ctx.vars.set("pages.found", len(found))


@role("reader", key="page")
def read(folder: str) -> Iterator[Prose]:
    """Yield the prose and the links of each page."""
    for path in pages(folder):
        prose = CODE.sub("", path.read_text(encoding="utf-8"))
        name = path.relative_to(folder).as_posix()
        yield Prose(page=name, words=len(prose.split()), prose=prose, links=LINK.findall(prose))


def count_links(checked: list[Broken]) -> FinalizeResult:
    """Add the broken links to a variable, exactly once."""
    return FinalizeResult(vars={"incr": {"links.broken": sum(len(each.links) for each in checked)}})


@role("checker", finalize=count_links)
def check(given: Prose, ctx: RunContext) -> Broken:
    """Find broken links while the pages are still being read."""
    path = Path(ctx.params_as(Params).folder) / given.page
    return Broken(page=given.page, links=[link for link in given.links if not is_target(path, link)])


@role("readability")
def score(given: Prose) -> Sentences:
    """Measure sentences. An external worker runs this role."""
    prose = "\n".join(line for line in given.prose.splitlines() if not line.startswith(("|", "#")))
    sentences = sum(bool(part.split()) for part in re.split(r"[.!?:](?:\s|$)", prose))
    return Sentences(page=given.page, words=given.words, sentence=len(prose.split()) / max(sentences, 1))


@role("archiver")
async def pack(_: object, ctx: RunContext) -> str:
    """Pack all pages under another name, and rename the archive when it is complete."""
    params, file = ctx.params_as(Params), output(ctx, "pages.zip")
    part = file.with_name(f".{ctx.task_id}-{ctx.attempt_epoch}.zip")
    ctx.register_temp_path(str(part))
    with zipfile.ZipFile(part, "w") as archive:
        for path in pages(params.folder):
            archive.write(path, path.relative_to(params.folder).as_posix())
            await ctx.cancellable(asyncio.sleep(params.pause_sec))
    return str(part.rename(file))


async def write_list(listed: AsyncIterator[Broken], ctx: RunContext) -> FinalizeResult:
    """Write the links of all pages, also of those that an earlier attempt has processed."""
    lines = [f"{each.page}: {link}\n" async for each in listed for link in each.links]
    return write(output(ctx, "broken-links.txt"), "".join(sorted(lines)))


@role("lister", finalize=write_list)
def list_broken(given: Broken) -> Broken:
    """Keep the links of a page for the list."""
    return given


async def write_report(scores: AsyncIterator[Sentences], ctx: RunContext) -> FinalizeResult:
    """Write the rows of all pages as a page for the browser, whatever became of the archive."""
    ranked = sorted([row async for row in scores], key=lambda row: row.sentence, reverse=True)
    rows = "\n".join(
        f"<tr><td>{html.escape(row.page)}<td>{row.words}<td>{row.sentence:.1f}" for row in ranked
    )
    text = PAGE.format(**(ctx.input_inline or {}), **await ctx.vars(), rows=rows)
    return write(output(ctx, "report.html"), text)


@role("reporter", finalize=write_report)
def report(row: Sentences) -> Sentences:
    """Keep the row of a page for the report."""
    return row


def pages(folder: str) -> list[Path]:
    """Return the Markdown pages of a folder, in the order of their names."""
    return sorted(Path(folder).rglob("*.md"))


def is_target(page: Path, link: str) -> bool:
    """Return whether a link leads to another site, or to a file, and to a heading in it."""
    path, _, anchor = link.partition("#")
    file = page.parent / path if path else page
    if "://" in link or not anchor or file.suffix != ".md":
        return "://" in link or file.exists()
    headings = HEADING.findall(file.read_text(encoding="utf-8")) if file.exists() else []
    return anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def output(ctx: RunContext, name: str) -> Path:
    """Return a path in the folder for the results, and create the folder."""
    folder = Path(ctx.params_as(Params).out)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def write(file: Path, text: str) -> FinalizeResult:
    """Write a result."""
    file.write_text(text, encoding="utf-8")
    return FinalizeResult(artifacts_ref={"path": str(file)})


audit = Flow("site audit", params=Params)
surveyed = audit.node("survey", survey)
prose = audit.node("read", read).after(surveyed).input(folder=cel("params.folder")).max_ahead(20)
checked = audit.node("check", check).pulls(prose, streaming="first_batch").retry(3, backoff_sec=1)
scores = audit.external("score", "readability", Prose, Sentences).pulls(prose)
packed = audit.node("pack", pack).after(surveyed).deadline(30).allow_failure()
totals = audit.function("totals", "metrics.aggregate", node_id="read").after(prose)
listed = audit.node("list", list_broken).pulls(checked).when("vars.links.broken > 0")
last = audit.node("report", report).pulls(scores).after(checked, packed, totals, listed).gate("all_done")
last.input(words=cel("nodes.read.stats.words"), pack=cel("nodes.pack.status"), list=cel("nodes.list.status"))
