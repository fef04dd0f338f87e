"""Delete ended tasks step by step, except those that Temporal still runs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from temporalio.client import ScheduleActionStartWorkflow
from temporalio.common import SearchAttributeKey
from temporalio.service import RPCError, RPCStatusCode

from flowkit import products
from flowkit.adapters.backfills import BackfillStore
from flowkit.adapters.tasks.purge import BELONGINGS, Purge
from flowkit.attempt.workflows import WorkflowState, look_up
from flowkit.cli import output
from flowkit.cli.errors import add_remedy
from flowkit.cli.servers import servers
from flowkit.connection import Namespace, TemporalUnavailable
from flowkit.core.loops import gather_some
from flowkit.models import TaskStatus, temporal_names
from flowkit.schedules.nominal_times import look
from flowkit.text import count_of
from flowkit.workflows.state_codec import is_stored, stored_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from temporalio.client import Client

    from flowkit.cli.options import DeploymentOptions

_SHOWN = 10
_ALL = {status.value for status in TaskStatus if status.closed}
_SCHEDULED_BY = SearchAttributeKey.for_keyword(temporal_names.SCHEDULED_BY_ID)
_NOMINAL = SearchAttributeKey.for_datetime(temporal_names.SCHEDULED_START_TIME)
_CONCURRENT = 10
"""Number of schedules that are read at once."""
SETTLES = timedelta(minutes=1)
"""How long a task that has started may be missing in Temporal's list, and how far its nominal time may be ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PurgeOptions:
    """Which tasks to delete."""

    older_than_sec: float
    """Minimum number of seconds since the end of the task."""
    statuses: tuple[str, ...]
    dry_run: bool = False


@dataclass(kw_only=True, slots=True)
class Purged:
    """What `purge` deleted, or would delete in a dry run."""

    dry_run: bool
    rows: Counter[str] = field(default_factory=Counter)
    """Number of documents by collection."""
    backfills: int = 0
    """Number of backfills."""
    backfill_rows: int = 0
    """Number of their nominal times."""
    running: list[str] = field(default_factory=list)
    """Ids of tasks that were kept because Temporal still runs them."""

    def as_json(self) -> dict[str, Any]:
        """Return the JSON document of `--json`."""
        rows = {name: self.rows[name] for name in list_collections()}
        return {
            "dry_run": self.dry_run,
            "tasks": self.rows["tasks"],
            "rows": rows,
            "backfills": self.backfills,
            "backfill_runs": self.backfill_rows,
            "running": self.running,
        }

    def lines(self) -> list[str]:
        """Return the lines that the command prints."""
        verb = "would delete" if self.dry_run else "deleted"
        lines = [f"{verb} {count_of(self.rows['tasks'], 'task')}"]
        lines += [f"  {name}: {self.rows[name]:,}" for name in list_collections() if self.rows[name]]
        if self.backfills:
            times = count_of(self.backfill_rows, "nominal time")
            lines.append(f"{verb} {count_of(self.backfills, 'backfill')} with {times}")
        if self.running:
            some = ", ".join(self.running[:_SHOWN]) + (", …" if len(self.running) > _SHOWN else "")
            lines.append(f"kept {count_of(len(self.running), 'task')} still running in Temporal: {some}")
        return lines


def list_collections() -> tuple[str, ...]:
    """Return the collections of the core and of products whose rows belong to tasks."""
    return (*BELONGINGS, *products.belongings())


async def purge_tasks(where: DeploymentOptions, options: PurgeOptions, *, quiet: bool) -> Purged:
    """Delete the tasks in steps and return the counts; each step deletes its tasks completely.

    Print the progress unless `quiet`.
    """
    purged = Purged(dry_run=options.dry_run)
    before = time.time() - options.older_than_sec
    async with servers(where) as both:
        namespace_id = await require_namespace(both.temporal)
        purge = Purge(
            both.db,
            before=before,
            statuses=options.statuses,
            namespace_id=namespace_id,
            collections=list_collections(),
        )
        async for task_ids in purge.steps():
            running = await _find_running(both.temporal, task_ids)
            purged.running += running
            ended = [task_id for task_id in task_ids if task_id not in running]
            purged.rows += Counter(await (purge.count(ended) if options.dry_run else purge.remove(ended)))
            if not (quiet or options.dry_run):
                output.note(f"deleted {count_of(purged.rows['tasks'], 'task')} so far")
        if kept := await _find_graphs(both.temporal, await purge.schedules()):
            remove = purge.count_graphs if options.dry_run else purge.remove_graphs
            purged.rows["stored_graphs"] += await remove(kept)
        if {*options.statuses} == _ALL:  # Backfills have other statuses.
            await _purge_backfills(BackfillStore(both.db), purged, before, namespace_id)
    return purged


async def _purge_backfills(store: BackfillStore, purged: Purged, before: float, namespace_id: str) -> None:
    ended = await store.ended_before(before, namespace_id)
    purged.backfills = len(ended)
    purged.backfill_rows = await (store.count_rows(ended) if purged.dry_run else store.remove(ended))


@dataclass(frozen=True, slots=True)
class GraphUse:
    """Which stored graph a schedule uses."""

    graph_id: str = ""
    """Empty if it uses none."""
    since: datetime | None = None
    """The last change of the schedule: tasks of later times begin with this graph. None if there is no schedule."""


async def _find_use(client: Client, schedule_id: str) -> GraphUse:
    try:
        description = await look(client.get_schedule_handle(schedule_id))
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        return GraphUse()
    action, info = description.schedule.action, description.info
    since = info.last_updated_at or info.created_at
    if not isinstance(action, ScheduleActionStartWorkflow) or not action.args:
        return GraphUse(since=since)
    given = (await client.data_converter.decode(list(action.args)))[0]
    return GraphUse(stored_in(given).graph_id if is_stored(given) else "", since)


def graphs_to_keep(
    uses: Mapping[str, GraphUse], running: Iterable[tuple[str | None, datetime | None]], now: datetime
) -> dict[str, str]:
    """Return by name the stored graphs that schedules use, of those that need no other one of theirs.

    `running` has the schedule and the nominal time of each running task. One of a time before the last change of its
    schedule may begin with an earlier graph, and so may one that is not listed yet.
    """
    nominal = defaultdict[str | None, list[datetime | None]](list)
    for name, at in running:
        nominal[name].append(at)
    return {
        name: use.graph_id for name, use in uses.items() if not _needs_others(use.since, nominal[name], now)
    }


def _needs_others(since: datetime | None, nominal: Sequence[datetime | None], now: datetime) -> bool:
    if since is None:
        return bool(nominal)
    settled = since + SETTLES
    return now < settled or any(at is None or at < settled for at in nominal)


async def _find_graphs(client: Client, names: Sequence[str]) -> dict[str, str]:
    """Return the stored graph of each of these schedules that needs no other one.

    Temporal's queries cannot quote each name, so the names of the running tasks are compared here.
    """
    found = await gather_some(lambda name: _find_use(client, name), names, _CONCURRENT)
    uses = dict(zip(names, found, strict=True))
    if not uses:
        return {}
    query = f"ExecutionStatus = 'Running' AND {temporal_names.SCHEDULED_BY_ID} IS NOT NULL"
    attributes = [each.typed_search_attributes async for each in client.list_workflows(query)]
    running = [(each.get(_SCHEDULED_BY), each.get(_NOMINAL)) for each in attributes]
    return graphs_to_keep(uses, running, datetime.now(UTC))


async def require_namespace(client: Client) -> str:
    """Return the id of the client's namespace. Raise TemporalUnavailable if the server does not report it."""
    if found := await Namespace(client).id():
        return found
    problem = TemporalUnavailable(f"Temporal did not return the id of namespace {client.namespace!r}")
    raise add_remedy(problem, "use credentials with permission to describe the namespace")


async def _find_running(client: Client, task_ids: Sequence[str]) -> list[str]:
    found = await asyncio.gather(*(look_up(client, task_id) for task_id in task_ids))
    return [
        task_id for task_id, each in zip(task_ids, found, strict=True) if each.state is WorkflowState.OPEN
    ]
