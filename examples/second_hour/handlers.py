"""Audit a folder of Markdown pages: count words, find broken links, pack an archive, write a report."""

from __future__ import annotations

import asyncio
import html
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import Iterator

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
ROW = "<tr><td>{page}<td>{words}<td>{sentence:.1f}</tr>"
PAGE = """<!doctype html>
<title>Site audit</title>
<h1>{pages} pages, {words:,} words, {broken} broken links</h1>
<p>Archive: {archive}. List of broken links: {listed}.</p>
<table><tr><th>page<th>words<th>words in a sentence</tr>
{rows}
</table>
"""


class Survey(RoleHandler):
    """Counts the pages, in the engine: the node takes milliseconds."""

    role = "surveyor"
    inline = True

    def load_input(self, input_ref: Any, input_inline: Any, ctx: RunContext) -> dict[str, Any]:
        """List the folder on a thread."""
        return {"pages": [name(path, ctx.params["folder"]) for path in pages(ctx.params["folder"])]}

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Set a variable that the report reads."""
        count = len(batch.payload["pages"])
        if not count:
            error = f"no Markdown page in {ctx.params['folder']}"
            return BatchResult(success=False, permanent=True, reason_code="no_pages", error=error)
        await ctx.vars.set("pages.found", count)
        return BatchResult(success=True, metrics={"pages": count})


class Read(RoleHandler):
    """Reads the pages, each as a batch."""

    role = "reader"

    def iter_batches(self, loaded: Any) -> Iterator[Batch]:
        """Yield a batch for each page; its name is the uid."""
        folder = loaded["input_ref"]["folder"]
        for path in pages(folder):
            page = name(path, folder)
            yield Batch(batch_uid=page, payload={"page": page, "path": str(path)})

    def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the prose and the links of a page."""
        text = Path(batch.payload["path"]).read_text(encoding="utf-8")
        prose = CODE.sub("", text)
        metrics = {
            "page": batch.payload["page"],
            "words": len(prose.split()),
            "prose": prose,
            "links": LINK.findall(prose),
        }
        return BatchResult(success=True, metrics=metrics)


class Check(RoleHandler):
    """Finds broken links while the pages are still being read."""

    role = "checker"

    def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the links of a page whose file or heading does not exist."""
        meta = batch.payload["meta"]
        page = Path(ctx.params["folder"]) / meta["page"]
        broken = [link for link in meta["links"] if "://" not in link and not is_target(page, link)]
        return BatchResult(success=True, metrics={"page": meta["page"], "broken": broken})

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        """Add the broken links to a variable, exactly once."""
        broken = sum([len(each["meta"]["broken"]) async for each in ctx.artifacts.partials()])
        return FinalizeResult(metrics={"broken_links": broken}, vars={"incr": {"links.broken": broken}})


class Readability(RoleHandler):
    """Measures sentences. An external worker runs this role."""

    role = "readability"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the average number of words in a sentence of a page."""
        meta = batch.payload["meta"]
        prose = "\n".join(line for line in meta["prose"].splitlines() if not line.startswith(("|", "#")))
        sentences = [part for part in re.split(r"[.!?:](?:\s|$)", prose) if part.split()]
        metrics = {
            "page": meta["page"],
            "words": meta["words"],
            "sentence": len(prose.split()) / max(len(sentences), 1),
        }
        return BatchResult(success=True, metrics=metrics)


class Pack(RoleHandler):
    """Packs all pages into an archive; `pause_sec` spares the disk, and lets the deadline pass."""

    role = "archiver"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Write the archive under another name, and rename it when it is complete."""
        folder, out = ctx.params["folder"], results(ctx.input_inline)
        part = out / f".{ctx.task_id}-{ctx.attempt_epoch}.zip"
        ctx.register_temp_path(str(part))
        with zipfile.ZipFile(part, "w") as archive:
            for path in pages(folder):
                archive.write(path, name(path, folder))
                await ctx.cancellable(asyncio.sleep(ctx.params.get("pause_sec", 0)))
        part.rename(out / "pages.zip")
        return BatchResult(success=True, artifacts_ref={"path": str(out / "pages.zip")})


class ListBroken(RoleHandler):
    """Writes the list of broken links."""

    role = "lister"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the lines of a page."""
        meta = batch.payload["meta"]
        return BatchResult(
            success=True, metrics={"lines": [f"{meta['page']}: {link}" for link in meta["broken"]]}
        )

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        """Write the lines of all pages, also of those that an earlier attempt has processed."""
        lines = [line async for each in ctx.artifacts.partials() for line in each["meta"]["lines"]]
        file = results(ctx.input_inline) / "broken-links.txt"
        file.write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")
        return FinalizeResult(artifacts_ref={"path": str(file)})


class Report(RoleHandler):
    """Writes the report, whatever became of the archive."""

    role = "reporter"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the row of a page."""
        return BatchResult(success=True, metrics=batch.payload["meta"])

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        """Write the rows of all pages as a page for the browser."""
        given, found = ctx.input_inline or {}, await ctx.vars()
        rows = [each["meta"] async for each in ctx.artifacts.partials()]
        rows.sort(key=lambda row: row["sentence"], reverse=True)
        text = PAGE.format(
            pages=found["pages"]["found"],
            words=int(given["words"]),
            broken=found["links"]["broken"],
            archive=given["archive"],
            listed=given["broken_links"],
            rows="\n".join(ROW.format(**{**row, "page": html.escape(row["page"])}) for row in rows),
        )
        file = results(given) / "report.html"
        file.write_text(text, encoding="utf-8")
        return FinalizeResult(metrics={"pages": len(rows)}, artifacts_ref={"path": str(file)})


def pages(folder: str) -> list[Path]:
    """Return the Markdown pages of a folder, in the order of their names."""
    return sorted(Path(folder).rglob("*.md"))


def name(path: Path, folder: str) -> str:
    """Return the name of a page: its path below the folder."""
    return path.relative_to(folder).as_posix()


def is_target(page: Path, link: str) -> bool:
    """Return whether a relative link leads to a file, and to a heading in it."""
    path, _, anchor = link.partition("#")
    file = page.parent / path if path else page
    if not anchor or file.suffix != ".md":
        return file.exists()
    headings = HEADING.findall(file.read_text(encoding="utf-8")) if file.exists() else []
    return anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def results(input_inline: dict[str, Any] | None) -> Path:
    """Return the folder for the results, and create it."""
    folder = Path((input_inline or {})["out"])
    folder.mkdir(parents=True, exist_ok=True)
    return folder
