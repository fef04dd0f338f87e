"""Audit a folder of Markdown pages: count words, find broken links, pack an archive, write a report."""

import asyncio
import html
import re
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from pydantic import BaseModel, Field

from flowkit import Flow, cel
from flowkit.worker import BatchFailure, BatchResult, FinalizeResult, RunContext, role

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
ROW = "<tr><td>{page}<td>{words}<td>{sentence:.1f}</tr>"
PAGE = """<!doctype html>
<title>Site audit</title>
<h1>{found} pages, {words:,} words, {broken} broken links</h1>
<p>Archive: {archive}. List of broken links: {listed}.</p>
<table><tr><th>page<th>words<th>words in a sentence</tr>
{rows}
</table>
"""


class Params(BaseModel, extra="forbid"):
    folder: str = Field(min_length=1)
    out: str = Field("audit", min_length=1)
    pause_sec: float = Field(0, ge=0)


class Text(BaseModel):
    page: str
    words: int
    prose: str
    links: list[str]


class Broken(BaseModel):
    page: str
    broken: list[str]


class Score(BaseModel):
    page: str
    words: int
    sentence: float


@role("surveyor", inline=True)
async def survey(_: object, ctx: RunContext) -> dict[str, int]:
    """Count the pages, in the engine: the node takes milliseconds. Set a variable that the report reads."""
    folder = ctx.params_as(Params).folder
    found = len(await asyncio.to_thread(pages, folder))
    if not found:
        raise BatchFailure(f"no Markdown page in {folder}", reason_code="no_pages", permanent=True)
    await ctx.vars.set("pages.found", found)
    return {"pages": found}


@role("reader", key="page")
def read(folder: str) -> Iterator[Text]:
    """Read the pages, each as a batch, and yield their prose and links. The name of a page is the uid."""
    for page, path in pages(folder).items():
        prose = CODE.sub("", path.read_text(encoding="utf-8"))
        yield Text(page=page, words=len(prose.split()), prose=prose, links=LINK.findall(prose))


async def count(results: AsyncIterator[Broken]) -> FinalizeResult:
    """Add the broken links to a variable, exactly once."""
    broken = sum([len(each.broken) async for each in results])
    return FinalizeResult(metrics={"broken_links": broken}, vars={"incr": {"links.broken": broken}})


@role("checker", finalize=count)
def check(text: Text, *, folder: Path) -> Broken:
    """Find the links of a page whose file or heading does not exist, while the pages are still being read."""
    broken = [link for link in text.links if "://" not in link and not is_target(folder / text.page, link)]
    return Broken(page=text.page, broken=broken)


@role("readability")
async def measure(text: Text) -> Score:
    """Return the average number of words in a sentence of a page. An external worker runs this role."""
    prose = "\n".join(line for line in text.prose.splitlines() if not line.startswith(("|", "#")))
    sentences = [part for part in re.split(r"[.!?:](?:\s|$)", prose) if part.split()]
    return Score(page=text.page, words=text.words, sentence=len(prose.split()) / max(len(sentences), 1))


@role("archiver")
async def pack(given: Params, ctx: RunContext) -> BatchResult:
    """Pack all pages into an archive, under another name until it is complete.

    `pause_sec` spares the disk, and lets the deadline pass.
    """
    part = create(given.out) / f".{ctx.task_id}-{ctx.attempt_epoch}.zip"
    ctx.register_temp_path(part)
    with zipfile.ZipFile(part, "w") as archive:
        for page, path in pages(given.folder).items():
            archive.write(path, page)
            await ctx.cancellable(asyncio.sleep(given.pause_sec))
    path = part.rename(part.with_name("pages.zip"))
    return BatchResult(success=True, artifacts_ref={"path": str(path)})


@role("lister", collects=True)
def write_list(pages: list[Broken], *, out: str) -> FinalizeResult:
    """Write the broken links of all pages, also of those that an earlier attempt has processed."""
    lines = sorted(f"{each.page}: {link}\n" for each in pages for link in each.broken)
    return FinalizeResult(artifacts_ref=write(out, "broken-links.txt", "".join(lines)))


@role("reporter", collects=True)
def report(
    scores: list[Score], *, out: str, words: int, found: int, broken: int, archive: str, listed: str
) -> FinalizeResult:
    """Write the rows of all pages as a page for the browser, whatever became of the archive."""
    scores.sort(key=lambda score: score.sentence, reverse=True)
    rows = "\n".join(ROW.format(**{**dict(score), "page": html.escape(score.page)}) for score in scores)
    text = PAGE.format(found=found, words=words, broken=broken, archive=archive, listed=listed, rows=rows)
    return FinalizeResult(metrics={"pages": len(scores)}, artifacts_ref=write(out, "report.html", text))


def pages(folder: str) -> dict[str, Path]:
    """Return the Markdown pages of a folder by name, which is the path below the folder, in its order."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(Path(folder).rglob("*.md"))}


def is_target(page: Path, link: str) -> bool:
    """Return whether a relative link leads to a file, and to a heading in it."""
    path, _, anchor = link.partition("#")
    file = page.parent / path if path else page
    if not anchor or file.suffix != ".md":
        return file.exists()
    headings = HEADING.findall(file.read_text(encoding="utf-8")) if file.exists() else []
    return anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def create(out: str) -> Path:
    """Return the folder for the results, and create it."""
    Path(out).mkdir(parents=True, exist_ok=True)
    return Path(out)


def write(out: str, name: str, text: str) -> dict[str, str]:
    """Write a result, and return the reference to it."""
    path = create(out) / name
    path.write_text(text, encoding="utf-8")
    return {"path": str(path)}


flow = Flow("site audit", params=Params)
surveyed = flow.node("survey", survey)
texts = flow.node("read", read).after(surveyed).from_params("folder").max_ahead(20)
links = flow.node("check", check).pulls(texts, streaming=True).from_params("folder").retry(3, backoff_sec=1)
scores = flow.external("score", "readability", Text, Score).pulls(texts)
packed = flow.node("pack", pack).after(surveyed).from_params("folder", "out", "pause_sec")
packed.deadline(30).allow_failure()
totals = flow.function("totals", "metrics.aggregate", node_id="read").after(texts)
listed = flow.node("list", write_list).pulls(links).when("vars.links.broken > 0").from_params("out")
page = flow.node("report", report).pulls(scores).after(links, packed, totals, listed).gate("all_done")
page.from_params("out").input(found=cel("vars.pages.found"), words=cel("nodes.read.stats.words"))
page.input(broken=cel("vars.links.broken"), archive=cel("nodes.pack.status"), listed=cel("nodes.list.status"))
