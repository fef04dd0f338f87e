"""Prepares and checks the inputs of external nodes that pull, so that their workers miss no batch.

See docs/protocol.md, "Inputs that a node pulls".
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flowkit.adapters.dispatches import DispatchState, key_of
from flowkit.bridge.rules.outcomes import uid_clash, unclaimed
from flowkit.errors import FlowKitError
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from flowkit.adapters.dispatches import Dispatch, Outcome
    from flowkit.bridge.context import BridgeContext
    from flowkit.graph.input_adapters import PullArgs

_logger = logging.getLogger("flowkit.bridge")

_BEGUN = (NodeStatus.RUNNING, NodeStatus.CANCELLING)


class PulledInputs:
    """The inputs of external nodes that pull."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._inputs = context.stores.inputs

    async def prepare(self, record: Dispatch) -> Outcome | None:
        """Let a new run of a node that pulls read what earlier runs have not finished.

        Return an outcome if it cannot run.

        Late batches of earlier generations of the sources are deleted again, because the worker reads all
        that there are.
        """
        pull, attempt = record.pull, record.attempt
        assert pull is not None
        if first_epochs := attempt.source_first_epochs:
            stores = self._context.stores
            await self._context.db(
                lambda: stores.artifacts.delete_earlier_rows(attempt.task_id, first_epochs)
            )
        if record.attempt.epoch > 1:
            await self._context.db(lambda: self._inputs.release_claims(record.attempt, pull))
            await self._show_unclaimed_first(record, pull)
        return await self._find_clash(record, pull)

    async def check(self, record: Dispatch) -> Dispatch | None:
        """Store the final outcome of a run whose worker has finished. Return None while a source has not ended.

        If the worker missed batches, the outcome makes the workflow start another run, which reads the rest.
        """
        pull, outcome = record.pull, record.outcome
        assert pull is not None
        assert outcome is not None
        if not await self._sources_ended(record, pull):
            return None
        problem = await self._find_clash(record, pull) or await self._find_missed(record, pull)
        if problem is not None:
            await self._context.db(lambda: self._inputs.delete_marker(record.attempt))
        final = problem or outcome
        return await self._context.db(lambda: self._context.stores.dispatches.end(record.key, final))

    async def advance(self, record: Dispatch) -> None:
        """Let a running worker see more than the 200 oldest batches of a source (H20)."""
        if record.pull is not None and record.state is DispatchState.OPEN:
            await self._show_unclaimed_first(record, record.pull)

    async def waits_in_vain(self, record: Dispatch) -> bool:
        """Return whether a run has read all batches so far, and none of its unfinished sources is running.

        It then holds a worker that a source may need. A source whose command no worker has accepted is not running.
        """
        pull = record.pull
        if pull is None or await self._runs_or_ended(record, pull):
            return False
        return not await self._context.db(lambda: self._inputs.find_unfinished(record.attempt, pull))

    async def _runs_or_ended(self, record: Dispatch, pull: PullArgs) -> bool:
        """Return whether a source is running, or all of them have ended."""
        task_id, stores = record.attempt.task_id, self._context.stores
        states = await self._context.db(lambda: stores.tasks.node_states(task_id))
        unfinished = {name: states[name] for name in pull.from_nodes if name in states}
        unfinished = {name: state for name, state in unfinished.items() if not state[0].ended}
        begun = {
            key_of(task_id, name, epoch) for name, (status, epoch) in unfinished.items() if status in _BEGUN
        }
        records = await self._context.db(lambda: stores.dispatches.find_all(begun))
        return not unfinished or any(key not in records or _is_run(records[key]) for key in begun)

    async def _show_unclaimed_first(self, record: Dispatch, pull: PullArgs) -> None:
        at = self._context.now()
        try:
            await self._context.db(lambda: self._inputs.show_unclaimed_first(record.attempt, pull, at))
        except FlowKitError as error:
            _logger.warning("could not reorder the inputs of node %s: %s", record.attempt.node_id, error)

    async def _sources_ended(self, record: Dispatch, pull: PullArgs) -> bool:
        states = await self._context.db(
            lambda: self._context.stores.tasks.node_states(record.attempt.task_id)
        )
        return all(states[source][0].ended for source in pull.from_nodes if source in states)

    async def _find_missed(self, record: Dispatch, pull: PullArgs) -> Outcome | None:
        missing = await self._context.db(lambda: self._inputs.find_unfinished(record.attempt, pull))
        if not missing:
            return None
        count = sum(len(uids) for uids in missing.values())
        stored = self._context.stores.artifacts
        settled = await self._context.db(lambda: stored.count_settled(record.attempt))
        return unclaimed(count, next(iter(missing)), self._context.now(), settled=settled)

    async def _find_clash(self, record: Dispatch, pull: PullArgs) -> Outcome | None:
        """Return the outcome of a node whose sources share a batch uid. Rechunking makes uids unique."""
        if pull.size is not None or len(pull.from_nodes) < 2:
            return None
        sources = pull.from_nodes
        clash = await self._context.db(lambda: self._inputs.find_clashing_uid(record.attempt, sources))
        return None if clash is None else uid_clash(clash[0], clash[1], self._context.now())


def _is_run(record: Dispatch) -> bool:
    """Return whether a worker runs the attempt."""
    return record.state is DispatchState.OPEN and record.lease is not None
