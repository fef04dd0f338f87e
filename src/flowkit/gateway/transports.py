"""The ways to a supervisor: JSON-RPC over HTTP, and over Mycelium. What comes back is not trusted."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import aiohttp
from pydantic_core import from_json

from flowkit import reason_codes
from flowkit.gateway.destinations import Destination
from flowkit.gateway.http_client import AddressNotAllowed, UnusableResponse, read_body
from flowkit.text import printed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

SYNC_SEC: Final = 60.0
"""Up to this timeout, `job.run` waits for the job. Longer jobs are created, started and polled."""
MAX_REPLY: Final = 8_000_000
"""Largest reply of a supervisor, in bytes."""
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

_logger = logging.getLogger("flowkit.gateway")


class SupervisorError(Exception):
    """A supervisor has not returned the outcome of a job."""

    code: ClassVar[str]


class Unreachable(SupervisorError):
    """The supervisor cannot be reached, or breaks connections."""

    code = reason_codes.SUPERVISOR_UNREACHABLE


class ReplyTimeout(SupervisorError):
    """The supervisor does not reply in time."""

    code = reason_codes.SUPERVISOR_TIMEOUT


class SupervisorNotAllowed(SupervisorError):
    """The address of the supervisor is not allowed."""

    code = reason_codes.SUPERVISOR_NOT_ALLOWED


class BadReply(SupervisorError):
    """The supervisor returns something that is no reply to the request."""

    code = reason_codes.BAD_REPLY


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

        `on_sent` is called when the supervisor has been reached, if the transport learns that before the reply. Raise
        Unreachable, ReplyTimeout or BadReply.
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
            raise ReplyTimeout(f"{side} has not replied within {wait_sec:.0f} s") from None
        except UnusableResponse as error:
            raise BadReply(f"{side} {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _connection_error(side, error) from None
        if response.status >= 500:
            raise Unreachable(f"{side} returns the status {response.status}")
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
    return Unreachable(f"no reply from {side} ({type(error).__name__})")


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

    A supervisor replies with `pushMessageReply`, and `pushMessage` returns the reply, or with a message of
    its own. That one arrives in the inbox of the node, as late replies do. One loop reads the inbox for all
    requests of the process: by the topics of its requests, and the first message of all. Processes share
    the inbox, so it takes only replies to this process. It leaves other messages to their readers, but
    removes one with a topic of its own that no one takes, because the API shows no message behind it.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        process: str,
        on_late: Callable[[str, bytes], Coroutine[Any, Any, None]],
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

        Only messages that have waited behind the first one are removed so: once there is none with the
        topic, a process that had seemed to have ended may send requests, and get replies.
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
            raise ReplyTimeout(f"the supervisor at {to} has not replied within {wait_sec:.0f} s") from None
        finally:
            ending = asyncio.create_task(_end_soon(push))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            del self._pending[request["id"]]

    async def _push(self, to: Destination, request: dict[str, Any], wait_sec: float) -> None:
        """Send a message, and wait for the reply. Deliver it if there is one in time."""
        kind = "pk" if to.is_public_key else "ip"
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
        response = await self._http.request(self._node, call, wait_sec)
        if not isinstance(response, dict):
            raise BadReply(f"the Mycelium node at {self._node} returns no JSON-RPC response to {method}")
        error = response.get("error")
        if isinstance(error, dict) and error.get("code") not in {204, 408}:
            raise Unreachable(f"the Mycelium node at {self._node} rejects {method}")
        return response.get("result")

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
        """Take the first message with a topic, or of all, if it is for this process.

        Return whether there may be more.
        """
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

        The supervisor that shares the node may be busy, but the caller of a request gives up after a
        minute. Of a process that has ended, one reply is enough to know that: it may have left many.
        """
        now, reader = time.monotonic(), _process_of(message) or message.sender
        message_id, since = self._heads.get(topic, ("", now))
        self._heads[topic] = message.id, since if message_id == message.id else now
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
            late = asyncio.create_task(self._on_late(request_id, reply))
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
