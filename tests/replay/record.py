"""Records the histories that `test_replay.py` replays: `python -m tests.replay.record [SHAPE …]`.

Run it after an intentional change of the workflow's commands. Without names it records all shapes. It starts its
own servers and ignores those in the environment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowkit.adapters.tasks.store import TaskStore
from flowkit.local import Stack
from tests.integration.harness import ROOT, Harness
from tests.replay.poison import POISONS, poisoned
from tests.replay.scrub import scrubbed
from tests.replay.shapes import GRAPHS, RUNS_AFTER, WAYS, WORKFLOW_IDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HISTORIES = Path(__file__).parent / "histories"


@asynccontextmanager
async def recording_harness(stack: Stack) -> AsyncIterator[Harness]:
    """Yield a test environment with an engine and a worker."""
    harness = Harness(temporal=stack.temporal_address, mongo=stack.mongo_url)
    harness.queue = harness.environment["FLOWKIT_QUEUE"] = "flowkit"
    os.environ.update(stack.exports, MONGO_DATABASE=harness.database)
    harness.settings["lease_ttl_sec"] = 2
    try:
        await harness.engine()
        await harness.worker()
        yield harness
    finally:
        await harness.close()


async def histories_of(harness: Harness, name: str) -> dict[str, dict[str, Any]]:
    """Return the history of each run of a task: `name`, or `name-1`, `name-2`, … when there are several."""
    workflow_id = WORKFLOW_IDS.get(name, name)
    client, found, run_id = await harness.client(), [], await _first_run(harness, workflow_id)
    while run_id:
        history = await client.get_workflow_handle(workflow_id, run_id=run_id).fetch_history()
        found.append(history.to_json_dict())
        run_id = history.events[-1].workflow_execution_continued_as_new_event_attributes.new_execution_run_id
    if len(found) == 1:
        return {name: found[0]}
    return {f"{name}-{number}": history for number, history in enumerate(found, 1)}


async def _first_run(harness: Harness, name: str) -> str:
    execution = (await (await harness.handle(name)).describe()).raw_description.workflow_execution_info
    return execution.first_run_id or execution.execution.run_id


def clean(history: dict[str, Any], deployment: str) -> dict[str, Any]:
    """Return the history without names of this machine."""
    secrets = [str(ROOT), str(Path.home()), socket.gethostname(), deployment, deployment.partition("/")[0]]
    safe: dict[str, Any] = scrubbed(history, secrets)
    return safe


def write(name: str, history: dict[str, Any]) -> None:
    """Write one history in a format with readable diffs."""
    path = HISTORIES / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(history, indent=1, sort_keys=True) + "\n", encoding="utf-8")


async def record(stack: Stack, names: list[str]) -> dict[str, dict[str, Any]]:
    """Run each shape and return the scrubbed histories of its runs."""
    recorded: dict[str, dict[str, Any]] = {}
    async with recording_harness(stack) as harness:
        deployment = await TaskStore(harness.db).deployment()
        for name in names:
            await WAYS[name](harness, name)
            found = await histories_of(harness, name)
            recorded.update({key: clean(history, deployment) for key, history in found.items()})
    return recorded


def main(names: list[str]) -> None:
    """Record the named shapes, or all of them, and write the poisoned copies."""
    begun = time.monotonic()
    for address in ("TEMPORAL_ADDRESS", "MONGO_URL"):
        os.environ.pop(address, None)
    logging.basicConfig(level=logging.ERROR)
    suggestion = {"limit.historyCount.suggestContinueAsNew": RUNS_AFTER}
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), dynamic_config=suggestion) as stack:
        recorded = asyncio.run(record(stack, names or list(GRAPHS)))
    recorded |= {
        f"poisoned/{name}": poisoned(name, recorded)
        for name, (shape, _) in POISONS.items()
        if shape in recorded
    }
    for name, history in recorded.items():
        write(name, history)
    sys.stdout.write(f"{len(recorded)} histories in {time.monotonic() - begun:.1f} s\n")


if __name__ == "__main__":
    main(sys.argv[1:])
