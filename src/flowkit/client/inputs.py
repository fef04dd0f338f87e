"""Graphs and params that callers give: as JSON, checked, and as the input of a workflow."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flowkit.activities.params_checks import ParamsChecks
from flowkit.adapters.role_contracts import RoleContracts
from flowkit.adapters.tasks.stored_graphs import StoredGraphs, pack_task
from flowkit.attempt.pollers import bridged_problems
from flowkit.errors import FlowKitError
from flowkit.graph.contracts import data_edges
from flowkit.graph.params import complete_params
from flowkit.graph.submission import convert_to_json, is_large, validate_input
from flowkit.graph.validation import raise_if, unknown_function
from flowkit.text import names, printed
from flowkit.workflows.state_codec import input_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from flowkit.client.workflows import TaskWorkflows
    from flowkit.graph.contracts import DataEdge
    from flowkit.models import StoredGraph


_logger = logging.getLogger("flowkit.client")

_WARNINGS = 1_000
"""The number of logged warnings that a client remembers."""
_CONTRACTS_SEC = 1.0
"""How long a submission or a rerun waits for what the workers announce about their roles."""
_SOURCES = 20
"""For how many nodes a rerun compares a stored batch with the type of the results."""


class TaskInputs:
    """The graphs and params of new tasks, and of tasks that start again."""

    def __init__(self, workflows: TaskWorkflows, *, max_nodes: int, external_roles: Collection[str]) -> None:
        self._workflows = workflows
        self._max_nodes = max_nodes
        self._external_roles = frozenset(external_roles)
        self._warned: set[str] = set()
        """The warnings about graphs that were logged."""
        self._params = ParamsChecks()
        self._contracts = RoleContracts(workflows.database, workflows.queue)

    async def convert(
        self,
        task_id: str,
        params: dict[str, Any],
        graph: dict[str, Any],
        functions: Collection[str] | None,
    ) -> tuple[dict[str, Any], tuple[DataEdge, ...]]:
        """Return graph and params as JSON values, with default values, and the edges over which data flows.

        Raise GraphError if they are invalid.
        """
        own_params = {} if params is None else convert_to_json("params", params)
        given = {"params": own_params, "graph": convert_to_json("graph", graph)}
        given["params"] = await asyncio.to_thread(complete_params, given["graph"], own_params)
        edges = await asyncio.to_thread(self.check, task_id, given, functions)
        await self._params.check(given["graph"], given["params"])
        return given, edges

    def check(
        self, task_id: str, given: dict[str, Any], functions: Collection[str] | None
    ) -> tuple[DataEdge, ...]:
        """Return the edges over which data flows. Raise GraphError if the input of a task is invalid."""
        graph = validate_input(task_id, given, max_nodes=self._max_nodes, external_roles=self._external_roles)
        self._warn(task_id, graph.warnings)
        if functions is not None:
            problems = [unknown_function(node, functions) for node in given["graph"]["nodes"]]
            raise_if([problem for problem in problems if problem])
        return data_edges(graph)

    async def warn_of_contracts(self, task_id: str, edges: tuple[DataEdge, ...]) -> None:
        """Warn of edges between roles whose announced types do not fit. Call it when MongoDB has just responded."""
        with suppress(FlowKitError, TimeoutError):
            async with asyncio.timeout(_CONTRACTS_SEC):
                self._warn(task_id, await self._contracts.warnings(edges))

    async def notes_of_stored(self, task_id: str, sources: Mapping[str, str]) -> list[str]:
        """Return a note about each node whose stored batches have fields that the type of its results lacks now.

        The nodes that read them would get the defaults of the other fields. `sources` are the roles of the nodes.
        """
        notes = []
        with suppress(FlowKitError, TimeoutError):
            async with asyncio.timeout(_CONTRACTS_SEC):
                for node_id, role in [*sources.items()][:_SOURCES]:
                    meta = await self._workflows.catalog.any_meta(task_id, node_id)
                    if meta and (fields := await self._contracts.unknown_fields(role, meta)):
                        notes.append(
                            f"the stored batches of node {printed(node_id)} have {names(fields)}, which the results of "
                            f"role {printed(role)} lack now, so the nodes that read them do not get it: run "
                            f"{printed(node_id)} again as well, or let the type read the old name"
                        )
        return notes

    def _warn(self, task_id: str, warnings: Iterable[str]) -> None:
        """Log each warning once, because many tasks have the same graph."""
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                _logger.warning("task %s: %s", task_id, warning)
        if len(self._warned) > _WARNINGS:
            self._warned.clear()

    async def checked_input(
        self, task_id: str, given: dict[str, Any], *, schedule_id: str = ""
    ) -> dict[str, Any]:
        """Return the input of the workflow. If graph and params are too large for it, store them and refer to them.

        Raise GraphError if the graph may not have a role that a bridge serves now.
        """
        raise_if(await bridged_problems(self._workflows.temporal, self._workflows.queue, given["graph"]))
        if not is_large(given):
            return given
        return input_of(await self.store(task_id, given, schedule_id=schedule_id))

    async def store(self, task_id: str, given: dict[str, Any], **more: str) -> StoredGraph:
        """Store graph and params, and return the reference to them."""
        content = await asyncio.to_thread(pack_task, given)
        owner = {
            "namespace_id": await self._workflows.namespace.id(),
            "database_id": await self._workflows.deployment(),
        }
        return await StoredGraphs(self._workflows.database).put(task_id, content, **owner, **more)
