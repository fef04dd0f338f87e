"""Random tasks whose nodes run on external workers, on a native worker, or in the engine."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from tests.integration.chaos.plans import Drawing, NodePlan, TaskPlan
from tests.integration.chaos.tasks import drawn_task, place_of

EXTERNAL_ROLES = ("indexer", "enricher")
NATIVE_ROLE = "reader"
CHUNK = 2


class ExternalDrawing(Drawing):
    """Draws nodes of which most have external roles.

    External workers do not change the uids of pulled batches, so uids are unique within a task. A node that pulls
    batches from several sources, of which some pull themselves, therefore splits them into chunks, whose uids are unique.
    """

    letter = "x"
    most_nodes = 7

    def _sources(self) -> list[str]:
        """Return sources. Some are coordinator functions, which have a complete marker but no batches."""
        sources = super()._sources()
        calls = [node.node_id for node in self._above if node.call]
        if calls and self._chance.random() < 0.3:
            chosen = self._chance.choice(calls)
            return [*sources[:2], chosen]
        return sources

    def _uid_format(self) -> str:
        return f"{self._own['key']}-{super()._uid_format()}"

    def _puller(self, sources: list[str]) -> NodePlan:
        plan = _after_sources(super()._puller(sources))
        again = [node for node in self._above if node.node_id in sources and node.sources]
        if not plan.external or plan.chunk or len(sources) < 2 or not again:
            return plan
        self._sizes[plan.node_id] *= CHUNK
        return replace(plan, chunk=CHUNK)

    def _executor(self) -> dict[str, Any]:
        role = self._chance.choice((*EXTERNAL_ROLES, *EXTERNAL_ROLES, NATIVE_ROLE))
        return {"role": role, "external": role in EXTERNAL_ROLES}


def _after_sources(plan: NodePlan) -> NodePlan:
    """Let an external node whose `finalize` always fails start after its sources, so that it has read all batches then.

    A worker may call `finalize` before it has read the last batches of a running source (H19). If that fails, the
    attempt has failed, and nothing reads the rest.
    """
    return replace(plan, parents=plan.sources, fan_in="all") if plan.needs_all_sources else plan


@lru_cache(maxsize=4096)
def external_task_plan(seed: int, number: int) -> TaskPlan:
    """Return the task with this number."""
    return drawn_task(seed, number, ExternalDrawing)


def external_node_plan(node_id: str) -> NodePlan:
    """Return the plan of a node."""
    seed, number, place = place_of(node_id)
    plan_of = large_task_plan if node_id.startswith(LargeDrawing.letter) else external_task_plan
    return plan_of(seed, number).nodes[place]


class LargeDrawing(ExternalDrawing):
    """Draws tasks of six nodes."""

    letter = "y"
    fewest_nodes = most_nodes = 6


@lru_cache(maxsize=4096)
def large_task_plan(seed: int, number: int) -> TaskPlan:
    """Return the task with this number in a run of many tasks, each with six nodes."""
    return drawn_task(seed, number, LargeDrawing)
