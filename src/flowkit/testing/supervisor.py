"""A supervisor to try the gateway with and to test it: it runs jobs over HTTP or behind Mycelium, and can misbehave.

    python -m flowkit.testing.supervisor --port 3030 --secret tell-nobody

It needs the extra `server`. Its executors are `python`, which runs the script in a process of its own, and
`echo`, which understands the scripts `sleep:SECONDS`, `fail:TEXT`, `env:NAME`, and returns any other
script.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import os
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

TOPIC: Final = "supervisor.rpc"
HOST: Final = "127.0.0.1"

Message = dict[str, Any]


class Misbehavior(StrEnum):
    """What a supervisor does wrong with one delivery of a job."""

    ERROR = "error"
    """It reports the job as failed."""
    HANG = "hang"
    """It never replies."""
    DISCONNECT = "disconnect"
    """It breaks the connection, and does not run the job."""
    RUN_THEN_DISCONNECT = "run_then_disconnect"
    """It runs the job, and breaks the connection before the reply."""
    OTHER_REQUEST = "other_request"
    """It replies to another request."""
    NO_JSON = "no_json"
    NO_OUTCOME = "no_outcome"
    """It replies with neither success nor error."""
    HUGE = "huge"
    """It replies with more than a caller accepts."""
    ENDLESS = "endless"
    """Its reply never ends. Only over HTTP, like the next four."""
    TRICKLE = "trickle"
    """It sends a byte of its reply now and then, for ever."""
    COMPRESSED = "compressed"
    """It compresses a reply that is huge."""
    REDIRECT = "redirect"
    """It redirects the request to `redirect_to`."""
    COOKIES = "cookies"
    """It replies, and sets a cookie."""
    STATUS_500 = "status_500"
    TWICE = "twice"
    """It replies twice. Only over Mycelium."""
    LATE = "late"
    """It replies, but only after `late_sec`. Only over Mycelium."""
    TELLS_SECRET = "tells_secret"
    """Its error contains the secret."""


@dataclass
class KnownJob:
    """A job that a supervisor has received."""

    job: Message
    task: asyncio.Task[Message] | None = None
    logs: str = ""

    @property
    def status(self) -> str:
        """The status of the job, by the names of the runner."""
        if self.task is None:
            return "created"
        if not self.task.done():
            return "started"
        return "finished" if "success" in self.task.result() else "error"


@dataclass
class Supervisor:
    """A supervisor. As an asynchronous context manager, it listens until the end of the block."""

    secrets: Sequence[str] = ()
    """The secrets that it accepts. Empty for any."""
    names: str = "both"
    """The names of methods that it knows: `old`, `new`, `both`, or `run` for `job.run` only."""
    honours_ids: bool = True
    """Whether it returns the result of a job whose id it knows, in place of running it again."""
    port: int = 0
    """Port to listen on; 0 for any free one."""
    node: MyceliumNode | None = None
    """The Mycelium node from which it takes requests, too."""
    plan: dict[str, list[Misbehavior | None]] = field(default_factory=dict)
    """What it does wrong with the next deliveries of a job, by id of the job. `*` is for all jobs without a plan."""
    own_messages: bool = False
    """Whether it replies over Mycelium with messages of its own, and not with `pushMessageReply`."""
    late_sec: float = 1.0
    redirect_to: str = ""
    redirect_status: int = 307
    runners: tuple[str, ...] = ("python", "echo")
    jobs: dict[str, KnownJob] = field(default_factory=dict)
    executions: Counter[str] = field(default_factory=Counter)
    """How often each job was run, by id."""
    requests: list[Message] = field(default_factory=list)
    """All requests, in order."""
    cookies: list[str] = field(default_factory=list)
    """The cookies of all requests over HTTP."""
    _runner: web.AppRunner | None = None
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{HOST}:{self.port}"

    async def __aenter__(self) -> Self:
        await self.listen()
        if self.node is not None:
            self._start(self._serve_node(self.node))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
        tasks = [*self._tasks, *(each.task for each in self.jobs.values() if each.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def listen(self) -> None:
        """Listen, always on the same port."""
        app = web.Application(client_max_size=8_000_000)
        app.router.add_post("/", self._post)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop to listen and break all connections. Jobs continue."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def misbehave(self, job_id: str, *how: Misbehavior | None) -> None:
        """Do something wrong with the next deliveries of a job; None does nothing wrong."""
        self.plan[job_id] = [*how]

    # --- HTTP

    async def _post(self, request: web.Request) -> web.StreamResponse:
        message = await request.json()
        self.cookies += [*request.cookies]
        how = self._next_misbehavior(message)
        match how:
            case Misbehavior.ENDLESS | Misbehavior.TRICKLE:
                return await _never_end(request, quick=how is Misbehavior.ENDLESS)
            case Misbehavior.REDIRECT:
                return web.Response(status=self.redirect_status, headers={"Location": self.redirect_to})
            case Misbehavior.HANG:
                await asyncio.Event().wait()
            case Misbehavior.STATUS_500:
                return web.Response(status=500)
            case Misbehavior.DISCONNECT | Misbehavior.RUN_THEN_DISCONNECT:
                if how is Misbehavior.RUN_THEN_DISCONNECT:
                    await self._handle(message)
                if request.transport is not None:
                    request.transport.abort()
                return web.Response()
        return _response(_spoiled(await self._handle(message, how), how), how)

    def _next_misbehavior(self, message: Message) -> Misbehavior | None:
        """Return what to do wrong with a request that delivers a job."""
        job = (_params(message).get("job") or {}).get("id")
        if job is None:
            return None
        planned = self.plan.get(job, self.plan.get("*", []))
        return planned.pop(0) if planned else None

    # --- Mycelium

    async def _serve_node(self, node: MyceliumNode) -> None:
        """Take requests from the inbox of a node, and reply to them."""
        while True:
            received = await node.pop(topic=TOPIC, wait_sec=60.0)
            if received is not None:
                self._start(self._reply_to(node, received))

    async def _reply_to(self, node: MyceliumNode, received: Received) -> None:
        message = json.loads(received.payload)
        how = self._next_misbehavior(message)
        if how in {Misbehavior.HANG, Misbehavior.DISCONNECT, Misbehavior.STATUS_500}:
            return
        reply = _spoiled(await self._handle(message, how), how)
        if how is Misbehavior.RUN_THEN_DISCONNECT:
            return
        if how is Misbehavior.LATE:
            await asyncio.sleep(self.late_sec)
        for _ in range(1 + (how is Misbehavior.TWICE)):
            if self.own_messages:
                node.send(received.source, TOPIC, reply.encode())
            else:
                node.reply(received, reply.encode())

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- requests

    async def _handle(self, message: Message, how: Misbehavior | None = None) -> Message:
        """Return the response to a request."""
        self.requests.append(message)
        name, params = message["method"], _params(message)
        method = self._methods().get(name)
        if method is None:
            return _error(message, -32601, "Method not found")
        if self.secrets and name != "list_runners" and params.get("secret") not in self.secrets:
            return _error(message, -32000, "the secret is wrong")
        if how is Misbehavior.ERROR:
            return _result(message, {"error": "it went wrong"})
        if how is Misbehavior.TELLS_SECRET:
            return _result(message, {"error": f"the secret is {params.get('secret')}"})
        if "job_id" in params and params["job_id"] not in self.jobs:
            return _error(message, -32000, f"unknown job {params['job_id']}")
        found = method(params)
        return _result(message, await found if asyncio.iscoroutine(found) else found)

    def _methods(self) -> dict[str, Callable[[Message], Any]]:
        always = {"list_runners": lambda params: [*self.runners], "job.run": self._run}
        old = {
            "jobs.create": self._create,
            "jobs.list": lambda params: [each.job for each in self.jobs.values()],
            "job.start": self._start_job,
            "job.status": lambda params: self.jobs[params["job_id"]].status,
            "job.result": self._wait_for_result,
            "job.logs": lambda params: self.jobs[params["job_id"]].logs,
            "job.stop": self._stop_job,
        }
        new = {
            "create_job": self._create,
            "list_jobs": old["jobs.list"],
            "start_job": self._start_job,
            "get_job": self._get_job,
            "get_job_logs": old["job.logs"],
            "stop_job": self._stop_job,
        }
        chosen = {"old": old, "new": new, "both": {**old, **new}, "run": {}}[self.names]
        return {**always, **chosen}

    def _create(self, params: Message) -> str:
        job = params["job"]
        if job["id"] not in self.jobs or not self.honours_ids:
            self.jobs[job["id"]] = KnownJob(job)
        id: str = job["id"]
        return id

    def _start_job(self, params: Message) -> bool:
        known = self.jobs[params["job_id"]]
        if known.task is None:
            known.task = asyncio.create_task(self._execute(known))
        return True

    async def _run(self, params: Message) -> Message:
        self._create(params)
        self._start_job({"job_id": params["job"]["id"]})
        return await self._wait_for_result({"job_id": params["job"]["id"]})

    async def _wait_for_result(self, params: Message) -> Message:
        known = self.jobs[params["job_id"]]
        assert known.task is not None
        with contextlib.suppress(asyncio.CancelledError):
            return {**await asyncio.shield(known.task), "logs": known.logs}
        return {"error": "stopped"}

    async def _get_job(self, params: Message) -> Message:
        known = self.jobs[params["job_id"]]
        status = {"created": "Pending", "started": "Running", "finished": "Completed", "error": "Failed"}
        ended = known.task.result() if known.task is not None and known.task.done() else {}
        return {
            **known.job,
            "status": status[known.status],
            "result": ended.get("success"),
            "error": ended.get("error"),
        }

    def _stop_job(self, params: Message) -> bool:
        known = self.jobs.get(params["job_id"])
        if known is None or known.task is None:
            return False
        return known.task.cancel()

    # --- execution

    async def _execute(self, known: KnownJob) -> Message:
        """Run a job, and return `{"success": …}` or `{"error": …}`."""
        job = known.job
        self.executions[job["id"]] += 1
        if job["executor"] == "python":
            return await _run_python(known)
        known.logs = f"echo {job['id']}\n"
        return await _run_echo(job["payload"], job["env_vars"])


async def _run_python(known: KnownJob) -> Message:
    """Run the script of a job in a process of its own."""
    job = known.job
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", job["payload"]),
        env={**os.environ, **job["env_vars"]},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(job["timeout"]):
            out, err = await process.communicate()
    except TimeoutError:
        return {"error": f"the job has not ended within {job['timeout']} s"}
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    known.logs = err.decode(errors="replace")
    if process.returncode:
        return {"error": known.logs.strip().rpartition("\n")[2] or f"exit code {process.returncode}"}
    return {"success": out.decode(errors="replace")}


async def _run_echo(script: str, env_vars: dict[str, str]) -> Message:
    what, _, value = script.partition(":")
    if what == "sleep":
        await asyncio.sleep(float(value))
    if what == "fail":
        return {"error": value}
    return {"success": env_vars.get(value, "") if what == "env" else script}


def _response(text: str, how: Misbehavior | None) -> web.Response:
    """Return the response with the text of a reply."""
    if how is Misbehavior.COMPRESSED:
        return web.Response(body=gzip.compress(text.encode()), headers={"Content-Encoding": "gzip"})
    response = web.Response(text=text, content_type="application/json")
    if how is Misbehavior.COOKIES:
        response.set_cookie("tenant", "another")
    return response


async def _never_end(request: web.Request, *, quick: bool) -> web.StreamResponse:
    """Send parts of a reply until the caller has gone."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x" * 100_000 if quick else b"x")
        await asyncio.sleep(0.0 if quick else 0.02)


def _params(message: Message) -> Message:
    params = message.get("params")
    return (params[0] if isinstance(params, list) and params else params) or {}


def _result(message: Message, result: Any) -> Message:
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def _error(message: Message, code: int, text: str) -> Message:
    return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": code, "message": text}}


def _spoiled(reply: Message, how: Misbehavior | None) -> str:
    """Return the text of a reply, spoiled if the supervisor misbehaves so."""
    match how:
        case Misbehavior.NO_JSON:
            return "<html>"
        case Misbehavior.HUGE | Misbehavior.COMPRESSED:
            return json.dumps({**reply, "result": {"success": "x" * 9_000_000}})
        case Misbehavior.OTHER_REQUEST:
            reply = {**reply, "id": "another"}
        case Misbehavior.NO_OUTCOME:
            reply = {**reply, "result": {"done": True}}
    return json.dumps(reply)


# --- Mycelium ---------------------------------------------------------------------------------------------------


@dataclass
class Received:
    """A message in the inbox of a node."""

    id: str
    source: MyceliumNode
    topic: str | None
    payload: bytes
    is_reply: bool = False


class MyceliumNode:
    """A stand-in for a Mycelium node: its HTTP API, and messages between the nodes of one process.

    `says_errors` chooses between the two ways in which nodes report that there is no message or no reply: the errors
    204 and 408 of the written API, or a result without a payload. A node that `removes_shown` removes messages that are
    read by topic even if they are only looked at, as Mycelium 0.7 does.
    """

    def __init__(
        self, network: dict[str, MyceliumNode], *, says_errors: bool = False, removes_shown: bool = False
    ) -> None:
        self.key = os.urandom(32).hex()
        self.says_errors = says_errors
        self.removes_shown = removes_shown
        self.port = 0
        self.states: dict[str, str] = {}
        self.redirect_to = ""
        """Where calls of the API are redirected to, if it is not empty."""
        self._network = network
        self._inbox: deque[Received] = deque()
        self._arrived = asyncio.Event()
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._runner: web.AppRunner | None = None
        network[self.key] = self

    @property
    def url(self) -> str:
        """The address of the API."""
        return f"http://{HOST}:{self.port}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=16_000_000)
        app.router.add_post("/rpc", self._post)
        # A reply to a caller that has gone stays in the inbox.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _post(self, request: web.Request) -> web.Response:
        if self.redirect_to:
            return web.Response(status=307, headers={"Location": self.redirect_to})
        call = await request.json()
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "pushMessage": self._push_message,
            "popMessage": self._pop_message,
            "getMessageInfo": self._get_message_info,
        }
        method = methods.get(call["method"])
        if method is None:
            return web.json_response(_error(call, -32601, "Method not found"))
        found = await method(*call["params"])
        if isinstance(found, int):
            return web.json_response(_error(call, found, "no message"))
        return web.json_response(_result(call, found))

    async def _push_message(self, message: Message, reply_timeout: float | None = None) -> Message | int:
        id = os.urandom(8).hex()
        topic = base64.b64decode(message["topic"]).decode() if message.get("topic") else None
        to = self._network.get(message["dst"].get("pk", ""))
        self.states[id] = "pending" if to is None else "received"
        if to is not None:
            to.deliver(Received(id, self, topic, base64.b64decode(message["payload"])))
        if reply_timeout is None:
            return {"id": id}
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[id] = future
        try:
            async with asyncio.timeout(reply_timeout):
                payload = await future
        except TimeoutError:
            return 408 if self.says_errors else {"id": id}
        finally:
            del self._waiting[id]
        return {"id": id, "payload": base64.b64encode(payload).decode()}

    async def _pop_message(
        self, peek: bool = False, wait_sec: float = 0.0, topic: str | None = None
    ) -> Message | int | None:
        wanted = base64.b64decode(topic).decode() if topic else None
        stays = peek and not (wanted and self.removes_shown)
        found = await self.pop(topic=wanted, wait_sec=wait_sec, peek=stays)
        if found is None:
            return 204 if self.says_errors else None
        payload = base64.b64encode(found.payload).decode()
        return {"id": found.id, "srcPk": found.source.key, "dstPk": self.key, "payload": payload}

    async def _get_message_info(self, id: str) -> Message:
        return {"state": self.states.get(id, "aborted")}

    async def pop(
        self, *, topic: str | None = None, wait_sec: float = 0.0, peek: bool = False
    ) -> Received | None:
        """Return the next message with a topic, or of any topic; None if there is none in time."""
        deadline = time.monotonic() + wait_sec
        while True:
            for message in self._inbox:
                if topic is None or message.topic == topic:
                    if not peek:
                        self._inbox.remove(message)
                    return message
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._arrived.wait()

    async def is_empty(self) -> bool:
        """Return whether the inbox has no message."""
        return not self._inbox

    def deliver(self, message: Received) -> None:
        """Receive a message."""
        waiting = self._waiting.get(message.id) if message.is_reply else None
        if waiting is not None and not waiting.done():
            waiting.set_result(message.payload)
            return
        self._inbox.append(message)
        self._arrived.set()

    def send(self, to: MyceliumNode, topic: str | None, payload: bytes) -> None:
        """Send a message."""
        to.deliver(Received(os.urandom(8).hex(), self, topic, payload))

    def reply(self, to: Received, payload: bytes) -> None:
        """Reply to a message."""
        to.source.deliver(Received(to.id, self, None, payload, is_reply=True))


# --- the command ------------------------------------------------------------------------------------------------


def main(
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port to listen on.")] = 3030,
    secret: Annotated[
        list[str] | None,
        typer.Option(help="Secret to accept. Can be repeated. Without one, any is accepted."),
    ] = None,
    names: Annotated[
        str, typer.Option(help="Names of methods: old, new, both, or run for job.run only.")
    ] = "both",
) -> None:
    """Run a supervisor on this machine until Ctrl-C, to try the gateway with."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(port, secret or [], names))


async def _serve(port: int, secrets: list[str], names: str) -> None:
    async with Supervisor(secrets=secrets, names=names, port=port) as supervisor:
        typer.echo(f"supervisor runs jobs at {supervisor.url}; stop it with Ctrl-C")
        await asyncio.Event().wait()


if __name__ == "__main__":
    typer.run(main)
