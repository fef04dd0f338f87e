"""Find the `temporal` program, or get it."""

import asyncio
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from temporalio.testing import WorkflowEnvironment

from flowkit.local.cache import install_once
from flowkit.local.commands import program, run
from flowkit.local.errors import InstallFailed

NAME, VERSION = "temporal-cli", "v1.5.1"
MODULE = "github.com/temporalio/cli/cmd/temporal"
REMEDY = (
    "install the Temporal CLI so that `temporal` is on PATH, or name it in FLOWKIT_TEMPORAL_BIN, "
    "or install Go 1.24 or newer, or point TEMPORAL_ADDRESS at a running server"
)


def temporal_cli() -> str:
    """The path of a `temporal` program.

    Looked for in `FLOWKIT_TEMPORAL_BIN`, on PATH and in the cache, in this order; then downloaded by Temporal's SDK,
    or else built with Go, which takes minutes. An InstallFailed tells the remedy if nothing of this works.
    """
    return _named() or shutil.which("temporal") or str(install_once(NAME, VERSION, _get) / "temporal")


def _named() -> str | None:
    named = os.environ.get("FLOWKIT_TEMPORAL_BIN")
    if named and shutil.which(named) is None:
        raise InstallFailed(f"FLOWKIT_TEMPORAL_BIN names {named}, which is not a program")
    return named or None


def _get(folder: Path) -> None:
    try:
        _download(folder)
    except RuntimeError as unreachable:
        try:
            _build(folder)
        except InstallFailed as failed:
            raise InstallFailed(f"no Temporal CLI: {REMEDY}\n- {unreachable}\n- {failed}") from failed


def _download(folder: Path) -> None:
    # In a thread, because the caller's may already run an event loop.
    with ThreadPoolExecutor(max_workers=1) as elsewhere:
        elsewhere.submit(asyncio.run, _download_and_try(folder)).result()
    next(folder.glob("temporal*")).rename(folder / "temporal")


async def _download_and_try(folder: Path) -> None:
    started = await WorkflowEnvironment.start_local(
        download_dest_dir=str(folder), dev_server_download_version=VERSION
    )
    await started.shutdown()


def _build(folder: Path) -> None:
    go = program("go", remedy="it could build the Temporal CLI")
    run([go, "install", f"{MODULE}@{VERSION}"], folder=folder, env={**os.environ, "GOBIN": str(folder)})
