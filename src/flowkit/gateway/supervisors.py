"""Calls of supervisors, by JSON-RPC over HTTP or Mycelium.

A job is delivered until the supervisor replies, with the same id each time: a supervisor that knows the id returns the
result. What a supervisor returns is not trusted.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import logging
import math
import re
import secrets as random
import time
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, Self
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json
from yarl import URL

from flowkit import reason_codes
from flowkit.gateway.http_client import (
    DEFAULT_ALLOWED,
    AddressNotAllowed,
    AllowedNetworks,
    UnusableResponse,
    guarded_connector,
    open_session,
    read_body,
)
from flowkit.text import printed, shown_address, truncate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from types import TracebackType

SYNC_SEC: Final = 60.0
"""Up to this timeout, `job.run` waits for the job. Longer jobs are created, started and polled."""
MAX_REPLY: Final = 8_000_000
"""Largest reply of a supervisor, in bytes."""
DEFAULT_TOPIC: Final = "supervisor.rpc"
DEFAULT_MYCELIUM_URL: Final = "http://127.0.0.1:8990"
_UNKNOWN_METHOD: Final = -32601
_REMEMBERED: Final = 10_000
_FAMILY_SEC: Final = 600.0
_LATE_CHARS: Final = 10_000
_LOOK_SEC: Final = 0.1
"""How often the inbox of a Mycelium node is read while a request waits for a reply."""
_IDLE_LOOK_SEC: Final = 1.0
_SECOND_SEC: Final = 1.0
"""How long a second reply is waited for after one that came as a message of its own."""
_FOREIGN_SEC: Final = 5.0
"""How long a message of others, which is no request, may be the first one with a topic of this process.

A process looks each second at least, so that only one that has ended, or hangs, leaves its replies so long.
"""
_LATE_AT_ONCE: Final = 100
"""How many late replies are reported at the same time. Further ones are dropped."""
_DELIVERIES: Final = 3
"""How often a job is delivered again to a supervisor that no longer knows it."""

_logger = logging.getLogger("flowkit.gateway")


class JobState(StrEnum):
    """What a supervisor says about a job that it has not ended."""

    DISPATCHED = "dispatched"
    RUNNING = "running"


class SupervisorError(Exception):
    """A supervisor has not returned the outcome of a job."""

    code: ClassVar[str]


class SupervisorUnreachable(SupervisorError):
    """The supervisor cannot be reached, or breaks connections."""

    code = reason_codes.SUPERVISOR_UNREACHABLE


class SupervisorTimeout(SupervisorError):
    """The supervisor does not reply in time."""

    code = reason_codes.SUPERVISOR_TIMEOUT


class SupervisorNotAllowed(SupervisorError):
    """The address of the supervisor is not allowed."""

    code = reason_codes.SUPERVISOR_NOT_ALLOWED


class BadReply(SupervisorError):
    """The supervisor returns something that is no reply to the request."""

    code = reason_codes.BAD_REPLY


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a supervisor is."""

    kind: str
    """`http` or `mycelium`."""
    address: str
    """A URL, or the public key or IPv6 address of a Mycelium node, in lower case."""
    topic: str = DEFAULT_TOPIC

    @property
    def key(self) -> str:
        """The address in one spelling, whichever it was given in. Paths that differ in a slash at the end are the same."""
        if self.kind != "http":
            return f"{self.kind}:{self.address}"
        url = URL(self.address).with_fragment(None)
        host = _canonical_host((url.host or "").rstrip("."))
        return str(url.with_host(host).with_port(url.port).with_path(url.path.rstrip("/"), keep_query=True))

    @property
    def credentials(self) -> tuple[str, ...]:
        """The password of the URL, or a user without one, which is a token."""
        if self.kind != "http":
            return ()
        url = URL(self.address)
        return tuple(filter(None, (url.password or url.user, url.raw_password or url.raw_user)))

    def __str__(self) -> str:
        return shown_address(self.address) if self.kind == "http" else f"mycelium:{self.address}"


_PUBLIC_KEY: Final = re.compile(r"[0-9a-fA-F]{64}")
_NUMERIC_HOST: Final = re.compile(r"[0-9.]+|0[xX].*")


def parse_destination(text: str, *, topic: str = DEFAULT_TOPIC) -> Destination:
    """Return the destination that `http(s)://…` or `mycelium:…` names. Raise ValueError for any other text."""
    scheme, _, rest = text.partition(":")
    scheme = scheme.lower()
    if scheme in {"http", "https"}:
        if not _has_host(text):
            raise ValueError("must be a URL with a host, such as http://10.0.0.8:3030")
        return Destination("http", text, topic)
    if scheme == "mycelium" and (_PUBLIC_KEY.fullmatch(rest) or _is_address(rest, ipaddress.IPv6Address)):
        return Destination("mycelium", _canonical_host(rest), topic)
    raise ValueError("must be http://…, https://…, or mycelium: with a public key or an IPv6 address")


def _has_host(text: str) -> bool:
    """Return whether a URL has a host and a port, and not an IPv4 address in an unusual form, such as 127.1."""
    try:
        url = URL(text)
        host, port = url.host, url.port
        url.with_host(host or "")
    except (ValueError, IndexError):  # yarl finds no host where a bracket is left open
        return False
    if not host or not port or any(char.isspace() for char in text):
        return False
    return not _NUMERIC_HOST.fullmatch(host) or _is_address(host, ipaddress.IPv4Address)


def _canonical_host(text: str) -> str:
    """Return a name, a key or an IP address in lower case, and IPv6 in its shortest form."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text.lower()


def _is_address(text: str, kind: Callable[[str], object]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


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


class Transport(Protocol):
    """Carries requests to supervisors."""

    async def request(
        self,
        to: Destination,
        request: dict[str, Any],
        wait_sec: float,
        on_sent: Callable[[], None] | None = None,
    ) -> Any:
        """Return what the supervisor replies to a request, as parsed JSON.

        `on_sent` is called when the supervisor has been reached, if the transport learns that before the reply. Raise SupervisorUnreachable, SupervisorTimeout or BadReply.
        """

    async def close(self) -> None:
        """End what runs in the background."""


class HttpTransport:
    """Sends requests to a supervisor's URL."""

    def __init__(self, session: aiohttp.ClientSession, whose: str = "supervisor") -> None:
        """Own a session. Errors say that they are of `whose` side."""
        self._session = session
        self._whose = whose

    async def request(
        self,
        to: Destination,
        request: dict[str, Any],
        wait_sec: float,
        on_sent: Callable[[], None] | None = None,
    ) -> Any:
        """Return the parsed body of the response."""
        side = f"the {self._whose} at {to}"
        timeout = aiohttp.ClientTimeout(total=wait_sec)
        try:
            async with self._session.post(
                to.address, json=request, timeout=timeout, trace_request_ctx=on_sent
            ) as response:
                body = await read_body(response, MAX_REPLY)
        except TimeoutError:
            raise SupervisorTimeout(f"{side} has not replied within {wait_sec:.0f} s") from None
        except UnusableResponse as error:
            raise BadReply(f"{side} {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _connection_error(side, error) from None
        if response.status >= 500:
            raise SupervisorUnreachable(f"{side} returns the status {response.status}")
        return _parse(body, side)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


def _parse(body: bytes, side: str) -> Any:
    try:
        return from_json(body)  # it refuses half of a surrogate pair, which nothing could store
    except ValueError as error:
        raise BadReply(f"the reply of {side} is not JSON: {error}") from None


def _connection_error(side: str, error: Exception) -> SupervisorError:
    """Return why there is no connection, without the text of `error`, which could contain credentials of a URL."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else None
    if isinstance(cause, AddressNotAllowed):
        return SupervisorNotAllowed(f"{side} is not called: {cause.reason}")
    return SupervisorUnreachable(f"no reply from {side} ({type(error).__name__})")


@dataclass(frozen=True, slots=True)
class InboxMessage:
    """A message in the inbox of a Mycelium node."""

    id: str
    payload: bytes
    sender: str

    @property
    def is_request(self) -> bool:
        """Whether the message is a JSON-RPC request."""
        return "method" in self._content()

    @property
    def request_id(self) -> str:
        """The id of the request to which the message replies; empty if it is no reply."""
        content = self._content()
        id = None if "method" in content else content.get("id")
        return id if isinstance(id, str) else ""

    def _content(self) -> dict[str, Any]:
        """Return the JSON object in the message; an empty one if it has none."""
        try:
            found = json.loads(self.payload)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class MyceliumTransport:
    """Sends requests through a Mycelium node.

    A supervisor replies with `pushMessageReply`, and `pushMessage` returns the reply, or with a message of its own. That one
    arrives in the inbox of the node, as late replies do. One loop reads the inbox for all requests of the process: by the
    topics of its requests, and the first message of all. Processes share the inbox, so it takes only replies to this
    process. It leaves other messages to their readers, but removes one with a topic of its own that no one takes, because
    the API shows no message behind it.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        process: str,
        on_late: Callable[[str, str], Coroutine[Any, Any, None]],
    ) -> None:
        """Prepare the calls. The ids of all requests of this process, and of no other, end with `process`.

        `on_late` is called with the id of a request and the reply that came too late, or twice.
        """
        self._http = HttpTransport(session, "Mycelium node")
        self._node = Destination("http", url.rstrip("/") + "/rpc")
        self._process = process
        self._on_late = on_late
        self._pending: dict[str, asyncio.Future[bytes]] = {}
        self._topics: dict[str, float] = {}
        """The topics of the latest requests, and until when to read them."""
        self._heads: dict[str, tuple[str, float]] = {}
        """The first message of each topic if it is of others, and since when it is the first."""
        self._gone: dict[str, dict[str, float]] = {}
        """By topic, processes and senders whose messages no one takes, and until when to remove these at once.

        Only messages that have waited behind the first one are removed so: once there is none with the topic, a process that
        had seemed to have ended may send requests, and get replies.
        """
        self._asked = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._late: set[asyncio.Task[None]] = set()

    async def request(
        self,
        to: Destination,
        request: dict[str, Any],
        wait_sec: float,
        on_sent: Callable[[], None] | None = None,
    ) -> Any:
        """Return the reply to a request, parsed."""
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[request["id"]] = reply
        self._read_for(to.topic, wait_sec + SYNC_SEC)
        push = asyncio.create_task(self._push(to, request, wait_sec))
        ways: tuple[asyncio.Future[Any], ...] = (push, reply)
        try:
            async with asyncio.timeout(wait_sec):
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                if not reply.done():
                    push.result()
                return _parse(await reply, f"the supervisor at {to}")
        except TimeoutError:
            raise SupervisorTimeout(
                f"the supervisor at {to} has not replied within {wait_sec:.0f} s"
            ) from None
        finally:
            ending = asyncio.create_task(_end_soon(push))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            del self._pending[request["id"]]

    async def _push(self, to: Destination, request: dict[str, Any], wait_sec: float) -> None:
        """Send a message, and wait for the reply. Deliver it if there is one in time."""
        kind = "pk" if _PUBLIC_KEY.fullmatch(to.address) else "ip"
        message = {
            "dst": {kind: to.address},
            "topic": _encode(to.topic.encode()),
            "payload": _encode(json.dumps(request).encode()),
        }
        found = await self._call("pushMessage", [message, max(1, math.ceil(wait_sec))], wait_sec + 5.0)
        if (payload := _payload(found)) is not None:
            self._deliver(request["id"], payload)

    async def _call(self, method: str, params: Sequence[Any], wait_sec: float) -> Any:
        """Return the result of a method of the node; None for the errors that mean that there is no message."""
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        found = await self._http.request(self._node, call, wait_sec)
        if not isinstance(found, dict):
            raise BadReply(f"the Mycelium node at {self._node} returns no JSON-RPC response to {method}")
        error = found.get("error")
        if isinstance(error, dict) and error.get("code") not in {204, 408}:
            raise SupervisorUnreachable(f"the Mycelium node at {self._node} rejects {method}")
        return found.get("result")

    def _read_for(self, topic: str, seconds: float) -> None:
        """Read the messages with a topic for some time."""
        self._topics[topic] = max(self._topics.get(topic, 0.0), time.monotonic() + seconds)
        if len(self._pending) == 1:
            self._asked.set()
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read_inbox())

    async def _read_inbox(self) -> None:
        """Take the replies to this process until no request was open for a while.

        No call waits at the node for a message: while one does, the node may serve no other call.
        """
        while True:
            now = time.monotonic()
            self._topics = {topic: until for topic, until in self._topics.items() if now < until}
            self._heads = {topic: head for topic, head in self._heads.items() if topic in self._topics}
            self._gone = {topic: readers for topic, readers in self._gone.items() if topic in self._topics}
            if not self._topics:
                return
            self._asked.clear()
            pause = _LOOK_SEC if self._pending else _IDLE_LOOK_SEC
            try:
                if any([await self._take_next(topic) for topic in (*self._topics, None)]):
                    continue
            except SupervisorError as error:
                _logger.debug("the inbox cannot be read: %s", error)
                pause = _IDLE_LOOK_SEC
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._asked.wait()

    async def _take_next(self, topic: str | None) -> bool:
        """Take the first message with a topic, or of all, if it is for this process. Return whether there may be more."""
        first = await self._pop(topic, peek=True)
        if first is None:
            self._gone.pop(topic or "", None)
            return False
        if self._is_own(first):
            self._deliver(first.request_id, first.payload)
        elif topic is None or not self._is_abandoned(topic, first):
            return False
        else:
            _logger.warning(
                "no one takes a message with the topic %s from the inbox; it is dropped", printed(topic)
            )
        removed = await self._pop(topic, peek=False)
        # A node that removes a message when it shows it removes the next one now.
        if removed is not None and removed.id != first.id:
            self._take_removed(removed)
        return bool(first.id)

    def _take_removed(self, message: InboxMessage) -> None:
        if self._is_own(message):
            self._deliver(message.request_id, message.payload)
        else:
            _logger.warning(
                "the Mycelium node has removed a message that is not for this process; it is dropped"
            )

    async def _pop(self, topic: str | None, *, peek: bool) -> InboxMessage | None:
        """Return the first message with a topic, or of all, and remove it unless `peek`. A huge one has no payload."""
        params = [peek, 0] if topic is None else [peek, 0, _encode(topic.encode())]
        try:
            found = await self._call("popMessage", params, 10.0)
        except BadReply:
            return InboxMessage("", b"", "")
        if not isinstance(found, dict):
            return None
        return InboxMessage(str(found.get("id")), _payload(found) or b"", str(found.get("srcPk")))

    def _is_own(self, message: InboxMessage) -> bool:
        return _process_of(message) == self._process

    def _is_abandoned(self, topic: str, message: InboxMessage) -> bool:
        """Return whether the reader of a message does not take it.

        The supervisor that shares the node may be busy, but the caller of a request gives up after a minute. Of a process
        that has ended, one reply is enough to know that: it may have left many.
        """
        now, reader = time.monotonic(), _process_of(message) or message.sender
        id, since = self._heads.get(topic, ("", now))
        self._heads[topic] = message.id, since if id == message.id else now
        gone = self._gone.setdefault(topic, {})
        if now < gone.get(reader, 0.0):
            return True
        if now < self._heads[topic][1] + (SYNC_SEC if message.is_request else _FOREIGN_SEC):
            return False
        del self._heads[topic]
        if reader and not message.is_request:
            gone[reader] = now + SYNC_SEC
        return True

    def _deliver(self, request_id: str, reply: bytes) -> None:
        pending = self._pending.get(request_id)
        if pending is not None and not pending.done():
            pending.set_result(reply)
        elif len(self._late) < _LATE_AT_ONCE:  # storing one may be slow, and the other replies do not wait
            late = asyncio.create_task(self._on_late(request_id, reply.decode(errors="replace")))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
        else:
            _logger.warning("%d late replies are not stored yet; another one is dropped", _LATE_AT_ONCE)

    async def close(self) -> None:
        """Stop reading the inbox, and close all connections."""
        tasks = [*self._ending, *self._late, *([self._reader] if self._reader else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()


async def _end_soon(push: asyncio.Task[None]) -> None:
    """End a call of `pushMessage` that may still return a second reply."""
    try:
        await asyncio.wait([push], timeout=_SECOND_SEC)
    finally:
        push.cancel()
        await asyncio.gather(push, return_exceptions=True)


def _process_of(message: InboxMessage) -> str:
    """Return the process to whose request a message replies; empty if it is no reply to one of a gateway."""
    _, _, process = message.request_id.partition(".")
    return process


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _payload(message: Any) -> bytes | None:
    """Return the payload of a message of Mycelium; None if it has none, as a message that only has an id."""
    encoded = message.get("payload") if isinstance(message, dict) else None
    if not isinstance(encoded, str):
        return None
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:
        return None


# --- jobs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The names of a supervisor's methods."""

    create: str
    start: str
    status: str
    result: str
    logs: str


FAMILIES: Final = (
    Names(create="jobs.create", start="job.start", status="job.status", result="job.result", logs="job.logs"),
    Names(create="create_job", start="start_job", status="get_job", result="get_job", logs="get_job_logs"),
)
"""The names that supervisors use. One that knows none of them has only `job.run`."""

STOPS: Final = ("job.stop", "stop_job", "job.cancel")

_RUNNING: Final = frozenset({"started", "running"})
_WAITING: Final = frozenset({"dispatched", "pending", "created", "queued", "waiting", *_RUNNING})
_SUCCEEDED: Final = frozenset({"finished", "completed", "success"})


class Supervisors:
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
        self._families: OrderedDict[Destination, tuple[float, Names | None]] = OrderedDict()
        self._jobs: OrderedDict[str, tuple[str, Sequence[str]]] = OrderedDict()
        """The jobs of the latest requests, by id of the request, and the secrets that replies may repeat."""
        self.on_late: Callable[[str, str], Awaitable[None]] | None = None
        """Called with the id of a job and a reply that came too late, or twice."""

    async def __aenter__(self) -> Self:
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
        id = f"{random.token_hex(16)}.{self._process}"
        self._jobs[id] = job_id, (params["secret"], *to.credentials)
        while len(self._jobs) > _REMEMBERED:
            self._jobs.popitem(last=False)
        request = {"jsonrpc": "2.0", "id": id, "method": method, "params": [params]}
        wait = self._request_sec if wait_sec is None else wait_sec
        found = await self._transports[to.kind].request(to, request, wait, on_sent)
        return _read_reply(found, id, to)

    def family(self, to: Destination) -> tuple[bool, Names | None]:
        """Return whether it is known which names a supervisor uses, and these."""
        at, names = self._families.get(to, (0.0, None))
        return time.monotonic() < at + _FAMILY_SEC and at > 0.0, names

    def remember(self, to: Destination, names: Names | None) -> None:
        """Note which names a supervisor uses, for some minutes."""
        self._families[to] = (time.monotonic(), names)
        while len(self._families) > _REMEMBERED:
            self._families.popitem(last=False)

    async def _late(self, id: str, reply: str) -> None:
        if id not in self._jobs:
            _logger.warning("a reply to no request of the latest %d was dropped", _REMEMBERED)
            return
        job_id, secrets = self._jobs[id]
        if self.on_late is not None and job_id:
            await self.on_late(job_id, truncate(mask(reply, secrets), _LATE_CHARS))


def mask(text: str, secrets: Sequence[str]) -> str:
    """Return a text without secrets that a supervisor may have repeated, as they are or inside of JSON, `repr` or URLs."""
    for secret in filter(None, secrets):
        spellings = {
            secret,
            json.dumps(secret)[1:-1],
            repr(secret)[1:-1],
            quote(secret, safe="", errors="replace"),
        }
        for each in sorted(spellings, key=len, reverse=True):
            text = text.replace(each, "***")
    return text


def _read_reply(found: Any, id: str, to: Destination) -> Reply:
    """Return a reply. Raise BadReply if it is not one to the request with this id."""
    if not isinstance(found, dict) or ("result" in found) == (found.get("error") is not None):
        raise BadReply(f"the reply of the supervisor at {to} is no JSON-RPC response")
    if found.get("id") != id:
        raise BadReply(f"the reply of the supervisor at {to} is for another request")
    error = found.get("error")
    if error is None:
        return Reply(result=found["result"])
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


@dataclass(slots=True)
class _Delivery:
    """One job on its way."""

    supervisors: Supervisors
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
            reply = await self._ask("job.run", self._whole_job(), self.left, sent)
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

    async def _start(self) -> Names | None:
        """Create and start the job. Return the names that the supervisor knows; None if it has only `job.run`."""
        known, names = self.supervisors.family(self.to)
        for each in ([names] if names else []) if known else FAMILIES:
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

    async def _wait(self, names: Names, poll_sec: tuple[float, float]) -> str:
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
                raise SupervisorTimeout(
                    f"job {self.job.id} has not ended within its timeout of {self.job.timeout:.0f} s"
                )
            await asyncio.sleep(min(pause, self.left))
            pause = min(pause * 1.5, longest)

    async def _outcome(self, names: Names, status: str) -> JobOutcome:
        reply = await self._ask(names.result, self._job_id())
        result = reply.result
        if isinstance(result, dict) and names.result == names.status:
            text = result.get("result") if status in _SUCCEEDED else result.get("error")
            return JobOutcome(success=status in _SUCCEEDED, text=text if isinstance(text, str) else status)
        return _outcome_of(reply, self.to)

    async def _logs(self, names: Names) -> str | None:
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
        wait_sec: float | None = None,
        sent: _Sent | None = None,
    ) -> Reply:
        """Send a request until there is a reply, or the time of the job is over. The pauses between double up to 5 s.

        `sent` notes when the request is at the supervisor.
        """
        pause, sent = 0.1, sent or _Sent()
        while True:
            try:
                return await self.supervisors.ask(self.to, method, params, self.job.id, wait_sec, sent.begin)
            except SupervisorTimeout:
                if wait_sec is not None or not self.left:
                    raise
            except SupervisorUnreachable:
                if self.left <= pause:  # no time would be left for a reply
                    raise
            sent.at_supervisor.clear()
            await asyncio.sleep(min(pause, self.left))
            pause = min(pause * 2, 5.0)
            wait_sec = None if wait_sec is None else self.left or 0.001

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
