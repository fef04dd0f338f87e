"""A flow as a FlowKit task: its graph, the ids of its runs, and what MongoDB says about its latest run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from flowkit.gateway.destinations import parse_destination
from flowkit.gateway.models import FlowNode, MessageStatus
from flowkit.gateway.status import RUN_FIELDS, read_run, renew
from flowkit.models import NodeStatus as TaskNodeStatus
from flowkit.models import OnNodeFailure
from flowkit.models.ownership import OwnerKind
from flowkit.server.tokens import JOB_ROLE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from flowkit.gateway.models import FlowData
    from flowkit.gateway.status import FlowRun
    from flowkit.gateway.store import FlowStore

ROLE: Final = JOB_ROLE
"""The role of the nodes of a flow."""

RESULT_UID: Final = "result"
"""The batch in which the node of a job stores its result."""

GRACE_SEC: Final = 60.0
"""How much longer than the timeout of its job an attempt may take, for the exchange with the supervisor."""

_DEPLOYMENT_CHARS: Final = 8
_SCHEME: Final = re.compile(r"mycelium:|[a-z]+://", re.IGNORECASE)
_BACKOFF: Final = {"backoff_sec": 1.0, "backoff_coefficient": 2.0, "max_backoff_sec": 60.0}


def all_nodes(flow: FlowData) -> list[FlowNode]:
    """Return the nodes of a flow, with one for each job that has none."""
    given = {node.id for node in flow.nodes}
    return [*flow.nodes, *(FlowNode(id=job) for job in dict.fromkeys(flow.jobs) if job not in given)]


def task_graph(flow: Mapping[str, Any], jobs: Mapping[int, Mapping[str, Any]], run: int) -> dict[str, Any]:
    """Return the graph of the task that runs a flow. `jobs` are its jobs by id, and `run` is the number of the run."""
    graph = {
        "name": f"flow {flow['context_id']}:{flow['id']}",
        "on_node_failure": OnNodeFailure(flow["on_failure"]).value,
        "nodes": [task_node(flow, FlowNode(**node), jobs[node["id"]], run) for node in flow["nodes"]],
    }
    if flow.get("execution_timeout") is not None:
        graph["deadline_sec"] = flow["execution_timeout"]
    return graph


def task_node(flow: Mapping[str, Any], node: FlowNode, job: Mapping[str, Any], run: int) -> dict[str, Any]:
    """Return the node of a task that runs a job. It holds ids only; the handler reads the rest when it runs."""
    return {
        "node_id": str(node.id),
        "type": ROLE,
        "depends_on": [*dict.fromkeys(map(str, node.depends))],
        "prerequisites": [*dict.fromkeys(node.prerequisites)],
        **job_limits(job),
        "io": {"input_inline": node_ids(flow, node.id, run)},
    }


def job_limits(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits of the node that runs a job."""
    return {
        "timeout_sec": job["timeout"] + GRACE_SEC,
        "retry_policy": {"max": job["retries"], **_BACKOFF},
    }


def node_ids(flow: Mapping[str, Any], job_id: int, run: int) -> dict[str, int]:
    """Return the input of the node that runs a job in a run of a flow."""
    return {
        "context_id": flow["context_id"],
        "caller_id": flow["caller_id"],
        "flow_id": flow["id"],
        "run": run,
        "job_id": job_id,
    }


def new_task_id(flow: Mapping[str, Any], run: int, deployment: str) -> str:
    """Return the id of the task of a run of a flow, such as `flow:1f2e3d4c:3:40/1`.

    It begins with that of the database, because deployments that share a namespace have flows with the same
    ids. No other task can have an id of this form.
    """
    return f"{OwnerKind.FLOW}:{deployment[:_DEPLOYMENT_CHARS]}:{flow['context_id']}:{flow['id']}/{run}"


def run_id(flow: Mapping[str, Any], run_seq: int = 0) -> str | None:
    """Return the id of the latest run: that of its task, with a number if a retry has run the task again.

    `run_seq` is that of the task document.
    """
    task_id: str | None = flow["task_id"]
    number = max(flow.get("run_seq") or 0, run_seq)
    return task_id if task_id is None or number <= 1 else f"{task_id}.{number}"


def transport_id(
    flow: Mapping[str, Any], job: Mapping[str, Any], run: int, generation: int, retry: int
) -> str:
    """Return the id under which a supervisor knows a job.

    It stays the same when an attempt is lost, so that a supervisor that honours ids runs the job once. A retry after a
    failure, and another run, flow or deployment, has an id of its own: a supervisor would return the old result.
    """
    _, deployment, _ = flow["task_id"].split(":", 2)
    first = run == 1 and job.get("flow_id") == flow["id"]
    which = "" if first else f"@{flow['id']}.{run}"
    retried = f"/{generation}.{retry}" if generation or retry else ""
    return f"{deployment}:{flow['context_id']}:{flow['caller_id']}:{job['id']}{which}{retried}"


def dispatch_id(task_id: str, node_id: str, generation: int, retry: int) -> str:
    """Return the id of the dispatch of an attempt. Attempts that were lost have the same."""
    return f"{task_id}:{node_id}:{generation}.{retry}"


ABANDONED: Final = {"outcome": "abandoned", "status": MessageStatus.ERROR.value, "open_until": None}
"""The fields of a dispatch for whose supervisor no attempt waits any more."""


def address_of(runner: Mapping[str, Any]) -> str:
    """Return the address of a runner's supervisor: its public key, or else its address."""
    if runner["pubkey"]:
        return f"mycelium:{runner['pubkey']}"
    return _with_scheme(runner["address"])


def addresses_of(runner: Mapping[str, Any]) -> list[str]:
    """Return the addresses of a runner in one spelling, by which a node that names an address finds its runner."""
    return [*map(canonical_address, filter(None, (runner["pubkey"], runner["address"])))]


def canonical_address(address: str) -> str:
    """Return an address in one spelling, or as it is if it names no supervisor."""
    try:
        return parse_destination(_with_scheme(address)).key
    except ValueError:
        return address


def _with_scheme(address: str) -> str:
    return address if _SCHEME.match(address) else f"mycelium:{address}"


class LatestRun:
    """The latest run of a flow, as MongoDB describes it."""

    def __init__(self, flow: Mapping[str, Any], run: FlowRun | None, run_seq: int = 0) -> None:
        self.flow = flow
        self.nodes = [FlowNode(**node) for node in flow["nodes"]]
        """Without those that the flow got too late for its run, which has ended: they run when the flow
        starts again."""
        if run is not None and run.status.closed and run.nodes:
            self.nodes = [node for node in self.nodes if node.id in run.nodes]
        self.run = run
        """None if the flow has not started since it was created."""
        self.id = None if run is None else run_id(flow, run_seq)


async def read_latest(
    store: FlowStore,
    flow: Mapping[str, Any],
    choose: Callable[[Sequence[Mapping[str, Any]]], Collection[int]] | None = None,
) -> LatestRun | None:
    """Return the latest run of a flow; None if its task has no document.

    `choose` returns the jobs whose dispatches to include, of the nodes of the task document: by default those that run.
    """
    if flow["task_id"] is None:
        return LatestRun(flow, None)
    task = await store.task(flow["task_id"], _FIELDS)
    if task is None:
        return None
    if reopens(flow, task["run_seq"]):
        task = {**task, "status": "queued", "reason": None, "finished_at": None}
    jobs = (choose or _begun)(task["graph"]["nodes"])
    dispatches: Sequence[Mapping[str, Any]] = ()
    if jobs:
        dispatches = await store.dispatches(flow["task_id"], jobs)
    run = read_run(task, dispatches)
    return LatestRun(flow, renew(run, _renewed(flow, run, task["run_seq"])), task["run_seq"])


def _renewed(flow: Mapping[str, Any], run: FlowRun, run_seq: int) -> dict[int, int]:
    """Return the generations that a retry of a flow has started, by id of the job; none if it has not started the run.

    A retry that has not noted its run yet, or was interrupted before, has noted what it is about to start.
    """
    noted: Mapping[str, Any] = flow
    if run_seq > (flow.get("run_seq") or 0):
        noted = {} if run.status.closed else flow.get("retrying") or {}
    return dict(noted.get("renewed") or ()) if run_seq <= (noted.get("run_seq") or 0) else {}


def reopens(flow: Mapping[str, Any], run_seq: int) -> bool:
    """Return whether a retry of a flow has been accepted whose run the task does not show yet. `run_seq` is its own."""
    return run_seq < (flow.get("run_seq") or 0)


_FIELDS: Final = (*RUN_FIELDS, "run_seq")


def _begun(nodes: Iterable[Mapping[str, Any]]) -> list[int]:
    return [int(node["node_id"]) for node in nodes if TaskNodeStatus(node["status"]).begun]
