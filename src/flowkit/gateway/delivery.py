"""The delivery of jobs to supervisors, by JSON-RPC.

A job is delivered until the supervisor replies, with the same id each time: a supervisor that knows the id returns the
result. What a supervisor returns is not trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets as random
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
from cachetools import FIFOCache, TTLCache
from pydantic import BaseModel, ConfigDict
from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

from flowkit.core.instruments import FAILED_DELIVERIES
from flowkit.gateway import DEFAULT_MYCELIUM_URL
from flowkit.gateway.http_client import DEFAULT_ALLOWED, AllowedNetworks, guarded_connector, open_session
from flowkit.gateway.transports import (
    SYNC_SEC,
    BadReply,
    HttpTransport,
    MyceliumTransport,
    ReplyTimeout,
    SupervisorError,
    SupervisorNotAllowed,
    Transport,
    Unreachable,
)
from flowkit.masks import hide
from flowkit.validation.json_keys import load_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    from tenacity import RetryCallState

    from flowkit.gateway.destinations import Destination

_UNKNOWN_METHOD: Final = -32601
_REMEMBERED: Final = 10_000
_FAMILY_SEC: Final = 600.0
_DELIVERIES: Final = 3
"""How often a job is delivered again to a supervisor that no longer knows it."""

_logger = logging.getLogger("flowkit.gateway")


class JobState(StrEnum):
    """What a supervisor says about a job that it has not ended."""

    DISPATCHED = "dispatched"
    RUNNING = "running"


class WireJob(BaseModel):
    """A job in the form in which a supervisor receives it."""

    model_config = ConfigDict(frozen=True)

    id: str
    caller_id: str
    context_id: str
    payload: str
    executor: str
    runner: str
    timeout: float
    env_vars: dict[str, str]
    created_at: str
    updated_at: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutcome:
    """How a supervisor has ended a job."""

    success: bool
    text: str
    """The result, or the error."""
    logs: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of a supervisor to one request."""

    result: Any = None
    error: str | None = None
    unknown_method: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorMethods:
    """The names of a supervisor's methods."""

    create: str
    start: str
    status: str
    result: str
    logs: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LateReply:
    """What is kept of a reply that came too late, or twice."""

    status: str
    """`result`, `error` or `malformed`."""
    bytes: int
    sha256: str
    """The digest of the reply, by which it can be compared with the log of the supervisor."""


FAMILIES: Final = (
    SupervisorMethods(
        create="jobs.create", start="job.start", status="job.status", result="job.result", logs="job.logs"
    ),
    SupervisorMethods(
        create="create_job", start="start_job", status="get_job", result="get_job", logs="get_job_logs"
    ),
)
"""The names that supervisors use. One that knows none of them has only `job.run`."""

STOPS: Final = ("job.stop", "stop_job", "job.cancel")

_RUNNING: Final = frozenset({"started", "running"})
_WAITING: Final = frozenset({"dispatched", "pending", "created", "queued", "waiting", *_RUNNING})
_SUCCEEDED: Final = frozenset({"finished", "completed", "success"})


class RemoteSupervisors:
    """Calls supervisors. Use it as an asynchronous context manager, which owns the connections."""

    def __init__(
        self,
        *,
        mycelium_url: str = DEFAULT_MYCELIUM_URL,
        networks: AllowedNetworks = DEFAULT_ALLOWED,
        sync_sec: float = SYNC_SEC,
        request_sec: float = 30.0,
        poll_sec: tuple[float, float] = (0.05, 2.0),
        slow_sec: float = 1.0,
        margin_sec: float = 2.0,
    ) -> None:
        """Prepare the calls.

        Supervisors at URLs have addresses in `networks`; those behind the Mycelium node at `mycelium_url` may have any.
        A job has `margin_sec` more than its timeout, so that the supervisor can reply that it has ended the job.
        `request_sec` bounds each request but `job.run`. `poll_sec` is the first and the longest interval between two
        requests for the status of a job. A job whose `job.run` takes longer than `slow_sec` counts as running.
        """
        self._mycelium_url = mycelium_url
        self._networks = networks
        self._sync_sec = sync_sec
        self._request_sec = request_sec
        self._poll_sec = poll_sec
        self._slow_sec = slow_sec
        self._margin_sec = margin_sec
        self._process = random.token_hex(8)
        self._transports: dict[str, Transport] = {}
        self._families: TTLCache[Destination, Sequence[SupervisorMethods]] = TTLCache(
            _REMEMBERED, _FAMILY_SEC
        )
        self._jobs: FIFOCache[str, tuple[str, Sequence[str]]] = FIFOCache(_REMEMBERED)
        """The jobs of the latest requests, by id of the request, and the secrets that replies may repeat."""
        self.on_late: Callable[[str, LateReply], Awaitable[None]] | None = None
        """Called with the id of a job and what is kept of a reply that came too late, or twice."""

    async def __aenter__(self) -> Self:
        for kind in (Unreachable, ReplyTimeout, SupervisorNotAllowed, BadReply):
            FAILED_DELIVERIES.add(
                kind.code, amount=0
            )  # So that Prometheus sees the first one as an increase.
        to_node = open_session(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60))
        self._transports = {
            "http": HttpTransport(open_session(connector=guarded_connector(self._networks))),
            "mycelium": MyceliumTransport(to_node, self._mycelium_url, self._process, self._late),
        }
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for transport in self._transports.values():
            await transport.close()

    async def run(
        self,
        to: Destination,
        job: WireJob,
        secret: str,
        *,
        timeout_sec: float,
        on_state: Callable[[JobState], Awaitable[None]],
    ) -> JobOutcome:
        """Run a job at a supervisor, and return its outcome. Wait for it a little longer than `timeout_sec`.

        `on_state` is called when the supervisor has accepted the job, and when it has started it. Raise a
        SupervisorError. Neither its text nor the outcome contains the secret, or credentials of the URL.
        """
        secrets = (secret, *to.credentials)
        deadline = time.monotonic() + timeout_sec + self._margin_sec
        work = _Delivery(self, to, job, secret, deadline, on_state)
        try:
            if timeout_sec <= self._sync_sec:
                outcome = await work.run_and_wait(self._slow_sec)
            else:
                outcome = await work.create_and_poll(self._slow_sec, self._poll_sec)
        except SupervisorError as error:
            FAILED_DELIVERIES.add(error.code)
            raise type(error)(mask(str(error), secrets)) from None
        return JobOutcome(
            success=outcome.success,
            text=mask(outcome.text, secrets),
            logs=None if outcome.logs is None else mask(outcome.logs, secrets),
        )

    async def stop(self, to: Destination, job_id: str, secret: str) -> None:
        """Stop a job, if the supervisor knows a method to do so. Take at most two seconds, and raise nothing."""
        with contextlib.suppress(SupervisorError, TimeoutError):
            async with asyncio.timeout(2.0):
                for name in STOPS:
                    reply = await self.ask(to, name, {"secret": secret, "job_id": job_id}, job_id, 2.0)
                    if not reply.unknown_method:
                        return

    async def ping(self, to: Destination, *, secret: str) -> list[str]:
        """Return the runners of a supervisor. Raise a SupervisorError if it does not return any list."""
        secrets = (secret, *to.credentials)
        reply = await self.ask(to, "list_runners", {"secret": secret}, "", 5.0)
        if reply.error is not None:
            raise BadReply(mask(f"the supervisor at {to} rejects list_runners: {reply.error}", secrets))
        if not isinstance(reply.result, list):
            raise BadReply(f"the supervisor at {to} returns no list of runners")
        return [mask(str(each), secrets) for each in reply.result[:1_000]]

    async def ask(
        self,
        to: Destination,
        method: str,
        params: dict[str, Any],
        job_id: str,
        wait_sec: float | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> Reply:
        """Send one request, and return the reply to it. Raise a SupervisorError if there is none.

        No supervisor can guess the ids of requests to others, to which it could otherwise reply over Mycelium.
        """
        request_id = f"{random.token_hex(16)}.{self._process}"
        self._jobs[request_id] = job_id, (params["secret"], *to.credentials)
        request = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": [params]}
        wait = self._request_sec if wait_sec is None else wait_sec
        response = await self._transports[to.kind].request(to, request, wait, on_sent)
        return _read_reply(response, request_id, to)

    def families(self, to: Destination) -> Sequence[SupervisorMethods]:
        """Return the names that a supervisor may use: all, unless it is known which; none if it has only `job.run`."""
        return self._families.get(to, FAMILIES)

    def remember(self, to: Destination, names: SupervisorMethods | None) -> None:
        """Note which names a supervisor uses, for some minutes."""
        self._families[to] = () if names is None else (names,)

    async def _late(self, request_id: str, reply: bytes) -> None:
        if request_id not in self._jobs:
            _logger.warning("a reply to no request of the latest %d was dropped", _REMEMBERED)
            return
        job_id, _ = self._jobs[request_id]
        if self.on_late is not None and job_id:
            await self.on_late(job_id, describe_late(reply))


_ANSWERS: Final = ("error", "result")
"""The members of a reply, of which the first one counts that is not null."""


def describe_late(reply: bytes) -> LateReply:
    """Return what is kept of a reply that came too late. It is not applied, and its text may contain any secret."""
    status = "malformed"
    with contextlib.suppress(ValueError):
        found = load_json(reply, strict=True)
        if isinstance(found, dict):
            given = [name for name in _ANSWERS if found.get(name) is not None]
            status = next((name for name in (*given, *reversed(_ANSWERS)) if name in found), status)
    return LateReply(status=status, bytes=len(reply), sha256=hashlib.sha256(reply).hexdigest())


def mask(text: str, secrets: Sequence[str]) -> str:
    """Return a text without secrets that a supervisor may have repeated, in the spellings of `flowkit.masks`."""
    return hide(text, secrets, shortest=1)


def _read_reply(response: Any, request_id: str, to: Destination) -> Reply:
    """Return a reply. Raise BadReply if it is not one to the request with this id."""
    if not isinstance(response, dict) or ("result" in response) == (response.get("error") is not None):
        raise BadReply(f"the reply of the supervisor at {to} is no JSON-RPC response")
    if response.get("id") != request_id:
        raise BadReply(f"the reply of the supervisor at {to} is for another request")
    error = response.get("error")
    if error is None:
        return Reply(result=response["result"])
    code = error.get("code") if isinstance(error, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return Reply(error=str(message), unknown_method=code == _UNKNOWN_METHOD)


def _outcome_of(reply: Reply, to: Destination) -> JobOutcome:
    """Return the outcome in the reply to `job.run` or `job.result`. Raise BadReply if it has none."""
    if reply.error is not None:
        return JobOutcome(success=False, text=reply.error)
    result = reply.result
    if isinstance(result, dict):
        logs = result.get("logs")
        shown_logs = logs if isinstance(logs, str) else None
        for name, success in (("success", True), ("error", False)):
            if isinstance(result.get(name), str):
                return JobOutcome(success=success, text=result[name], logs=shown_logs)
    raise BadReply(f"the reply of the supervisor at {to} has neither success nor error")


class _Sent:
    """Whether a request is at its supervisor, and how often it was sent."""

    def __init__(self) -> None:
        self.at_supervisor = asyncio.Event()
        self.number = 0

    def begin(self) -> None:
        """Note that the request was sent."""
        self.number += 1
        self.at_supervisor.set()

    def leave(self, state: RetryCallState) -> None:
        """Note that there was no reply, and that the request will be sent again."""
        self.at_supervisor.clear()


@dataclass(slots=True)
class _Delivery:
    """One job on its way."""

    supervisors: RemoteSupervisors
    to: Destination
    job: WireJob
    secret: str
    deadline: float
    on_state: Callable[[JobState], Awaitable[None]]

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    async def run_and_wait(self, slow_sec: float) -> JobOutcome:
        """Call `job.run`. The job counts as running when the supervisor has had it for `slow_sec`."""
        sent = _Sent()
        slow = asyncio.create_task(self._report_later(sent, slow_sec))
        try:
            reply = await self._ask("job.run", self._whole_job(), sent)
        finally:
            slow.cancel()
            await asyncio.wait([slow])
        return _outcome_of(reply, self.to)

    async def _report_later(self, sent: _Sent, seconds: float) -> None:
        """Report the job as running when it was sent, and the connection has held so long."""
        number = 0
        while not (sent.at_supervisor.is_set() and number == sent.number):
            await sent.at_supervisor.wait()
            number = sent.number
            await asyncio.sleep(seconds)
        await self.on_state(JobState.RUNNING)

    async def create_and_poll(self, slow_sec: float, poll_sec: tuple[float, float]) -> JobOutcome:
        """Create and start the job, and ask for its status until it has ended."""
        try:
            names = await self._start()
            if names is None:
                return await self.run_and_wait(slow_sec)
            await self.on_state(JobState.DISPATCHED)
            status = await self._wait(names, poll_sec)
        except _Refused as error:
            return JobOutcome(success=False, text=str(error))
        outcome = await self._outcome(names, status)
        return JobOutcome(
            success=outcome.success, text=outcome.text, logs=await self._logs(names) or outcome.logs
        )

    async def _start(self) -> SupervisorMethods | None:
        """Create and start the job. Return the names that the supervisor knows; None if it has only `job.run`."""
        for each in self.supervisors.families(self.to):
            created = await self._ask(each.create, self._whole_job())
            if created.unknown_method:
                continue
            _raise_refused(created)
            started = await self._ask(each.start, self._job_id())
            if not started.unknown_method:
                _raise_refused(started)
            self.supervisors.remember(self.to, each)
            return each
        self.supervisors.remember(self.to, None)
        return None

    async def _wait(self, names: SupervisorMethods, poll_sec: tuple[float, float]) -> str:
        """Return the status of the job at its end."""
        pause, longest = poll_sec
        running, deliveries = False, _DELIVERIES
        while True:
            reply = await self._ask(names.status, self._job_id())
            if reply.error is not None and deliveries:
                deliveries -= 1
                await self._start()
                continue
            status = _status_of(reply, self.to)
            if status in _RUNNING and not running:
                running = True
                await self.on_state(JobState.RUNNING)
            if status not in _WAITING:
                return status
            if not self.left:
                raise ReplyTimeout(
                    f"job {self.job.id} has not ended within its timeout of {self.job.timeout:.0f} s"
                )
            await asyncio.sleep(min(pause, self.left))
            pause = min(pause * 1.5, longest)

    async def _outcome(self, names: SupervisorMethods, status: str) -> JobOutcome:
        reply = await self._ask(names.result, self._job_id())
        result = reply.result
        if isinstance(result, dict) and names.result == names.status:
            text = result.get("result") if status in _SUCCEEDED else result.get("error")
            return JobOutcome(success=status in _SUCCEEDED, text=text if isinstance(text, str) else status)
        return _outcome_of(reply, self.to)

    async def _logs(self, names: SupervisorMethods) -> str | None:
        """Return the log of the job, if the supervisor has one."""
        with contextlib.suppress(SupervisorError):
            reply = await self.supervisors.ask(self.to, names.logs, self._job_id(), self.job.id)
            found = "\n".join(map(str, reply.result)) if isinstance(reply.result, list) else reply.result
            return found if isinstance(found, str) else None
        return None

    async def _ask(
        self,
        method: str,
        params: dict[str, Any],
        sent: _Sent | None = None,
    ) -> Reply:
        """Send a request until there is a reply, or the time of the job is over. The pauses between double up to 5 s.

        With `sent`, which notes when the request is at the supervisor, the reply may take all the time of the job.
        """
        again = (Unreachable,) if sent else (Unreachable, ReplyTimeout)
        tries = AsyncRetrying(
            retry=retry_if_exception_type(again),
            wait=wait_exponential(multiplier=0.1, max=5.0),
            stop=lambda state: self.left <= state.upcoming_sleep,  # no time would be left for a reply
            before_sleep=sent.leave if sent else None,
            reraise=True,
        )
        return await tries(self._ask_once, method, params, sent)

    async def _ask_once(self, method: str, params: dict[str, Any], sent: _Sent | None) -> Reply:
        wait_sec, on_sent = (self.left or 0.001, sent.begin) if sent else (None, None)
        return await self.supervisors.ask(self.to, method, params, self.job.id, wait_sec, on_sent)

    def _whole_job(self) -> dict[str, Any]:
        return {"secret": self.secret, "job": self.job.model_dump()}

    def _job_id(self) -> dict[str, Any]:
        return {"secret": self.secret, "job_id": self.job.id}


class _Refused(Exception):
    """A supervisor does not accept a job."""


def _raise_refused(reply: Reply) -> None:
    """Raise _Refused if a supervisor replies with an error that it does not accept a job."""
    error = reply.error
    if error is None and isinstance(reply.result, dict):
        error = reply.result.get("error")
    if error is not None:
        raise _Refused(str(error))


def _status_of(reply: Reply, to: Destination) -> str:
    """Return the status of a job, in lower case. Raise BadReply if the reply has none."""
    if reply.error is not None:
        raise BadReply(f"the supervisor at {to} rejects the request for the status: {reply.error}")
    status = reply.result.get("status") if isinstance(reply.result, dict) else reply.result
    if not isinstance(status, str):
        raise BadReply(f"the reply of the supervisor at {to} has no status")
    return status.lower()
