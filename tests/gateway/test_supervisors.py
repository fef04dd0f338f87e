"""Calls of supervisors over real sockets: what they return, and what they do wrong."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import aiohttp
import pytest

from flowkit.core import instruments
from flowkit.gateway import transports
from flowkit.gateway.delivery import (
    JobState,
    LateReply,
    RemoteSupervisors,
    WireJob,
    describe_late,
    mask,
)
from flowkit.gateway.destinations import Destination, parse_destination
from flowkit.gateway.http_client import AllowedNetworks
from flowkit.gateway.transports import (
    BadReply,
    ReplyTimeout,
    SupervisorNotAllowed,
    Unreachable,
)
from flowkit.testing.supervisor import Misbehavior, MyceliumNode, Received, Supervisor
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, wait_seconds
from tests.unit.measured import measuring

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.gateway.delivery import JobOutcome

SECRET = "a-secret-of-a-runner"
HERE = AllowedNetworks.parse("loopback")
QUICK: dict[str, Any] = {"margin_sec": 0.0, "poll_sec": (0.01, 0.05), "request_sec": 2.0, "slow_sec": 0.1}


def job(payload: str = "hello", id: str = "3:11:501", **fields: Any) -> WireJob:
    """Return a job for the executor `echo`."""
    given = {"executor": "echo", "timeout": 5, "env_vars": {}, **fields}
    times: dict[str, Any] = dict.fromkeys(("created_at", "updated_at"), "2026-05-04T09:30:00Z")
    return WireJob(id=id, caller_id="11", context_id="3", payload=payload, runner="echo", **times, **given)


class Side:
    """The calls of a supervisor that listens."""

    def __init__(
        self,
        calls: RemoteSupervisors,
        supervisor: Supervisor,
        to: Destination,
        node: MyceliumNode | None = None,
    ) -> None:
        self.calls, self.supervisor, self.to = calls, supervisor, to
        self._node = node
        self.states: list[JobState] = []

    async def run(self, job: WireJob, timeout_sec: float = 5.0, secret: str = SECRET) -> JobOutcome:
        """Run a job, and note its states."""

        async def note(state: JobState) -> None:
            self.states.append(state)

        return await self.calls.run(self.to, job, secret, timeout_sec=timeout_sec, on_state=note)

    @property
    def node(self) -> MyceliumNode:
        """The Mycelium node of the caller."""
        assert self._node is not None
        return self._node


@asynccontextmanager
async def over_http(sync_sec: float = 60.0, slow_sec: float = 0.1, **options: Any) -> AsyncIterator[Side]:
    """Yield a supervisor that is called over HTTP."""
    async with (
        Supervisor(secrets=[SECRET], **options) as supervisor,
        RemoteSupervisors(sync_sec=sync_sec, networks=HERE, **{**QUICK, "slow_sec": slow_sec}) as calls,
    ):
        yield Side(calls, supervisor, parse_destination(supervisor.url))


@asynccontextmanager
async def over_mycelium(
    sync_sec: float = 60.0, node: dict[str, bool] | None = None, **options: Any
) -> AsyncIterator[Side]:
    """Yield a supervisor that is called through two Mycelium nodes. `node` are the options of ours."""
    network: dict[str, MyceliumNode] = {}
    ours, theirs = MyceliumNode(network, **(node or {})), MyceliumNode(network)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(ours)
        await stack.enter_async_context(theirs)
        supervisor = await stack.enter_async_context(Supervisor(secrets=[SECRET], node=theirs, **options))
        calls = RemoteSupervisors(mycelium_url=ours.url, sync_sec=sync_sec, **QUICK)
        await stack.enter_async_context(calls)
        yield Side(calls, supervisor, parse_destination(f"mycelium:{theirs.key}"), ours)


def with_own_messages(**options: Any) -> Any:
    """Return a supervisor that is called through two Mycelium nodes, and replies with messages of its own."""
    return over_mycelium(own_messages=True, **options)


BOTH = pytest.mark.parametrize("side", [over_http, over_mycelium], ids=["http", "mycelium"])
EVERY = pytest.mark.parametrize(
    "side", [over_http, over_mycelium, with_own_messages], ids=["http", "mycelium", "own_messages"]
)


# --- destinations -----------------------------------------------------------------------------------------------


def test_destinations() -> None:
    assert parse_destination("http://10.0.0.8:3030", topic="t") == Destination(
        "http", "http://10.0.0.8:3030", "t"
    )
    assert parse_destination("mycelium:" + "ab" * 32).kind == "mycelium"
    assert parse_destination("mycelium:56d:524::7").address == "56d:524::7"
    assert str(parse_destination("https://user:word@host:1/a?key=1")) == "https://host:1"


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "http://", "http://h:99999", "http://h:0", "mycelium:xyz", "ftp://h"),
        *(
            "http://2130706433/",
            "http://127.1/",
            "http://0x7f.1/",
            "http://h\r\nHost:x/",
            "http://u:pa/ss@h/",
            "http://h%/",
            "http://[]@",
        ),
    ],
)
def test_other_texts_are_no_destination(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_destination(text)


# --- forms of calls ---------------------------------------------------------------------------------------------


@EVERY
async def test_a_short_job_is_one_call(side: Any) -> None:
    async with side() as used:
        outcome = await used.run(job("env:REGION", env_vars={"REGION": "eu"}))
        assert (outcome.success, outcome.text, outcome.logs) == (True, "eu", "echo 3:11:501\n")
        [request] = used.supervisor.requests
        assert request["method"] == "job.run"
        assert request["params"][0]["job"] == job("env:REGION", env_vars={"REGION": "eu"}).model_dump()
        failed = await used.run(job("fail:no", id="3:11:502"))
        assert (failed.success, failed.text) == (False, "no")


@BOTH
@pytest.mark.parametrize("names", ["old", "new"])
async def test_a_long_job_is_created_started_and_polled(side: Any, names: str) -> None:
    async with side(sync_sec=0.0, names=names) as used:
        outcome = await used.run(job("sleep:0.1"))
        assert (outcome.success, outcome.text, outcome.logs) == (True, "sleep:0.1", "echo 3:11:501\n")
        assert used.states == [JobState.DISPATCHED, JobState.RUNNING]
        failed = await used.run(job("fail:no", id="3:11:502"))
        assert (failed.success, failed.text) == (False, "no")
        methods = [each["method"] for each in used.supervisor.requests]
        assert ("jobs.create" in methods) and methods.count("jobs.create") == (1 if names == "new" else 2)


@pytest.mark.parametrize("listens", [True, False])
async def test_a_job_counts_as_running_only_while_its_supervisor_has_it(listens: bool) -> None:
    async with over_http(slow_sec=0.5) as used:
        used.supervisor.misbehave("*", *[Misbehavior.DISCONNECT] * 20)
        if not listens:
            await used.supervisor.close()
        with measuring() as measured, pytest.raises(Unreachable):
            await used.run(job(), timeout_sec=1.2)
        assert measured.counted(instruments.FAILED_DELIVERIES) == {(Unreachable.code,): 1}
        assert used.states == []


async def test_a_supervisor_that_knows_only_job_run_gets_long_jobs_so() -> None:
    async with over_http(sync_sec=0.0, names="run") as used:
        assert (await used.run(job())).success
        assert (await used.run(job(id="3:11:502"))).success
        methods = [each["method"] for each in used.supervisor.requests]
        assert methods == ["jobs.create", "create_job", "job.run", "job.run"]


async def test_a_short_job_that_takes_long_counts_as_running() -> None:
    async with over_http() as used:
        await used.run(job("sleep:0.3"))
        assert used.states == [JobState.RUNNING]


async def test_python_scripts_run_in_a_process() -> None:
    async with over_http() as used:
        script = "import os, sys; print(os.environ['A']); print('note', file=sys.stderr)"
        outcome = await used.run(job(script, executor="python", env_vars={"A": "1"}), 30.0)
        assert (outcome.text, outcome.logs) == ("1\n", "note\n")
        failed = await used.run(job("raise ValueError('bad')", id="2", executor="python"), 30.0)
        assert (failed.success, failed.text) == (False, "ValueError: bad")


async def test_more_jobs_at_once_than_a_client_has_connections_by_default() -> None:
    async with over_http() as used:
        jobs = range(aiohttp.TCPConnector().limit + 1)
        found = await asyncio.gather(*(used.run(job("sleep:0.1", id=f"{n}"), 20.0) for n in jobs))
        assert {each.success for each in found} == {True}


async def test_ping_and_stop() -> None:
    async with over_http() as used:
        assert await used.calls.ping(used.to, secret=SECRET) == ["python", "echo"]
        running = asyncio.create_task(used.run(job("sleep:60")))

        async def begun() -> bool:
            return bool(used.supervisor.executions)

        await eventually(begun)
        await used.calls.stop(used.to, "3:11:501", SECRET)
        assert (await running).text == "stopped"
        await used.supervisor.close()
        with pytest.raises(Unreachable):
            await used.calls.ping(used.to, secret=SECRET)
        await used.calls.stop(used.to, "3:11:501", SECRET)


async def test_a_supervisor_cannot_guess_the_ids_of_other_requests() -> None:
    async with over_http() as used:
        await asyncio.gather(*(used.run(job(id=f"{n}")) for n in range(20)))
        ids = [each["id"].partition(".")[0] for each in used.supervisor.requests]
        assert len({id[:8] for id in ids}) == len({id[-8:] for id in ids}) == 20


# --- misbehavior ------------------------------------------------------------------------------------------------


@EVERY
async def test_text_that_cannot_be_stored_is_no_reply(side: Any) -> None:
    async with side() as made:
        with pytest.raises(BadReply, match="is not JSON: unexpected end of hex escape"):
            await made.run(job("half of a pair: \ud800"), timeout_sec=1.0)


@BOTH
@pytest.mark.parametrize("how", [Misbehavior.NO_JSON, Misbehavior.NO_OUTCOME])
async def test_a_reply_without_an_outcome_is_rejected(side: Any, how: Misbehavior) -> None:
    async with side() as used:
        used.supervisor.misbehave("3:11:501", how)
        with pytest.raises(BadReply) as raised:
            await used.run(job())
        assert SECRET not in str(raised.value)


async def test_a_reply_to_another_request_is_rejected() -> None:
    async with over_http() as used:
        used.supervisor.misbehave("3:11:501", Misbehavior.OTHER_REQUEST)
        with pytest.raises(BadReply, match="for another request"):
            await used.run(job())


async def test_a_supervisor_that_never_replies_times_out() -> None:
    async with over_http() as used:
        used.supervisor.misbehave("3:11:501", Misbehavior.HANG)
        with pytest.raises(ReplyTimeout):
            await used.run(job(), 0.2)


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        (Misbehavior.HUGE, "8,000,000 bytes"),
        (Misbehavior.ENDLESS, "8,000,000 bytes"),
        (Misbehavior.COMPRESSED, "compressed"),
    ],
)
async def test_a_huge_reply_is_rejected(how: Misbehavior, problem: str) -> None:
    async with over_http() as used:
        used.supervisor.misbehave("3:11:501", how)
        with pytest.raises(BadReply, match=problem):
            await used.run(job())


async def test_a_huge_message_is_rejected() -> None:
    async with over_mycelium() as used:
        used.supervisor.misbehave("3:11:501", Misbehavior.HUGE)
        with pytest.raises(BadReply, match="8,000,000 bytes"):
            await used.run(job())


async def test_a_reply_that_trickles_times_out() -> None:
    async with over_http() as used:
        used.supervisor.misbehave("3:11:501", Misbehavior.TRICKLE)
        with pytest.raises(ReplyTimeout):
            await used.run(job(), 0.3)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(status: int) -> None:
    async with over_http() as used, Supervisor() as other:
        used.supervisor.redirect_to, used.supervisor.redirect_status = f"{other.url}/?token=1", status
        used.supervisor.misbehave("3:11:501", Misbehavior.REDIRECT)
        with pytest.raises(BadReply, match=f"{status}.*final address") as raised:
            await used.run(job())
        assert "token" not in str(raised.value)
        assert not other.requests


async def test_a_redirect_of_a_mycelium_node_is_not_followed() -> None:
    network: dict[str, MyceliumNode] = {}
    async with MyceliumNode(network) as node, MyceliumNode(network) as other, over_http() as used:
        node.redirect_to = f"{other.url}/rpc"
        async with RemoteSupervisors(mycelium_url=node.url, **QUICK) as calls:
            behind = Side(calls, used.supervisor, parse_destination(f"mycelium:{other.key}"))
            with pytest.raises(BadReply, match=r"the Mycelium node at .* redirects"):
                await behind.run(job())
        assert await other.pop() is None


async def test_cookies_are_not_kept() -> None:
    async with over_http() as used:
        used.supervisor.misbehave("1", Misbehavior.COOKIES)
        named = parse_destination(used.supervisor.url.replace("127.0.0.1", "localhost"))
        for id in ("1", "2"):
            assert (await Side(used.calls, used.supervisor, named).run(job(id=id))).success
        assert used.supervisor.cookies == []


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with over_http() as used, Supervisor() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        assert (await used.run(job())).success
        assert not proxy.requests


# --- addresses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["run", "ping"])
async def test_an_address_that_is_not_allowed_is_not_called(method: str) -> None:
    async with over_http() as used, RemoteSupervisors(**QUICK) as strict:
        calls = Side(strict, used.supervisor, used.to)
        with pytest.raises(SupervisorNotAllowed, match=r"127\.0\.0\.1 .*FLOWKIT_SUPERVISOR_NETWORKS"):
            await (calls.run(job()) if method == "run" else strict.ping(used.to, secret=SECRET))
        assert not used.supervisor.requests


async def test_a_name_that_leads_to_addresses_that_are_not_allowed_is_not_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with over_http() as used, RemoteSupervisors(**QUICK) as strict:
        port = used.supervisor.port
        found = [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::ffff:127.0.0.1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]

        async def resolve(*given: Any, **options: Any) -> Any:
            return found

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        named = parse_destination(f"http://supervisor.example:{port}")
        with pytest.raises(SupervisorNotAllowed, match="FLOWKIT_SUPERVISOR_NETWORKS"):
            await Side(strict, used.supervisor, named).run(job())
        assert (await Side(used.calls, used.supervisor, named).run(job())).success


@pytest.mark.parametrize(
    "how", [Misbehavior.DISCONNECT, Misbehavior.RUN_THEN_DISCONNECT, Misbehavior.STATUS_500]
)
@pytest.mark.parametrize("sync_sec", [60.0, 0.0])
async def test_a_job_is_delivered_until_there_is_a_reply(how: Misbehavior, sync_sec: float) -> None:
    async with over_http(sync_sec=sync_sec) as used:
        used.supervisor.misbehave("3:11:501", how)
        assert (await used.run(job())).success
        assert used.supervisor.executions == {"3:11:501": 1}


async def test_a_supervisor_that_rejects_a_job_fails_it() -> None:
    async with over_http(sync_sec=0.0) as used:
        other = await used.run(job(), secret="another-secret")
        assert (other.success, other.text) == (False, "the secret is wrong")
        used.supervisor.misbehave("3:11:501", Misbehavior.ERROR)
        assert (await used.run(job())).text == "it went wrong"


async def test_a_job_is_delivered_again_to_a_supervisor_that_has_forgotten_it() -> None:
    async with over_http(sync_sec=0.0) as used:
        running = asyncio.create_task(used.run(job("sleep:0.3")))

        async def begun() -> bool:
            return bool(used.supervisor.executions)

        await eventually(begun)
        used.supervisor.jobs.clear()
        assert (await running).success
        assert used.supervisor.executions == {"3:11:501": 2}


async def test_a_supervisor_that_starts_late_is_reached() -> None:
    async with over_http() as used:
        await used.supervisor.close()
        running = asyncio.create_task(used.run(job()))
        await wait_seconds(0.1)
        await used.supervisor.listen()
        assert (await running).success


async def test_a_supervisor_that_is_gone_is_unreachable() -> None:
    async with over_http() as used:
        await used.supervisor.close()
        with pytest.raises(Unreachable):
            await used.run(job(), 0.3)


async def test_a_job_that_does_not_end_times_out() -> None:
    async with over_http(sync_sec=0.0) as used:
        with pytest.raises(ReplyTimeout, match="3:11:501"):
            await used.run(job("sleep:60"), 0.3)


async def test_of_a_late_reply_only_status_size_and_digest_are_kept() -> None:
    late: asyncio.Queue[LateReply] = asyncio.Queue()

    async def note(job_id: str, reply: LateReply) -> None:
        late.put_nowait(reply)

    async with over_mycelium() as used:
        used.calls.on_late = note
        used.supervisor.misbehave("3:11:501", Misbehavior.TWICE)
        assert (await used.run(job(f"it is {SECRET}"))).text == "it is (hidden)"
        kept = await asyncio.wait_for(late.get(), EVENT_TIMEOUT_SEC)
        assert (kept.status, len(kept.sha256)) == ("result", 64)
        assert kept.bytes > len(SECRET)


async def late_replies(*, says_errors: bool) -> None:
    """Run jobs whose replies come in time, twice, after the wait of the node, and too late."""
    late: asyncio.Queue[str] = asyncio.Queue()

    async def note(job_id: str, reply: LateReply) -> None:
        late.put_nowait(job_id)

    async with over_mycelium(node={"says_errors": says_errors}, late_sec=1.3) as used:
        used.calls.on_late = note
        for id, how in (
            ("twice", Misbehavior.TWICE),
            ("late", Misbehavior.LATE),
            ("in time", Misbehavior.LATE),
        ):
            used.supervisor.misbehave(id, how)
        assert (await used.run(job(id="twice"))).success
        assert await asyncio.wait_for(late.get(), EVENT_TIMEOUT_SEC) == "twice"
        in_time = asyncio.create_task(used.run(job(id="in time"), 1.9))
        with pytest.raises(ReplyTimeout):
            await used.run(job(id="late"), 1.0)
        assert await asyncio.wait_for(late.get(), EVENT_TIMEOUT_SEC) == "late"
        assert (await in_time).success


async def test_late_and_second_replies_are_reported_and_applied_only_in_time() -> None:
    await asyncio.gather(late_replies(says_errors=False), late_replies(says_errors=True))


async def test_messages_of_others_stay_in_the_inbox() -> None:
    async with over_mycelium() as used:
        network: dict[str, MyceliumNode] = {}
        async with MyceliumNode(network) as node, RemoteSupervisors(mycelium_url=node.url, **QUICK) as calls:
            for payload in (b"\xff", b'{"id": "of another process", "result": 1}'):
                node.deliver(Received("1", node, None, payload))
            gone = parse_destination("mycelium:" + "ab" * 32)
            with pytest.raises(ReplyTimeout):
                await Side(calls, used.supervisor, gone).run(job(), 1.0)
            assert await node.pop() is not None


NODES = pytest.mark.parametrize("node", [{}, {"removes_shown": True}], ids=["documented", "removes_shown"])


@NODES
async def test_messages_of_others_before_a_reply_do_not_delay_it(node: dict[str, bool]) -> None:
    async with with_own_messages(node=node) as used:
        for topic in (None, "chat"):
            used.node.send(used.node, topic, b"hello")
        found = await asyncio.gather(*(used.run(job(id=f"{n}")) for n in range(5)))
        assert {each.success for each in found} == {True}
        assert [await used.node.pop(topic=topic) for topic in (None, "chat")] != [None, None]


async def test_processes_that_share_a_node_leave_each_other_their_replies() -> None:
    async with with_own_messages() as used, RemoteSupervisors(mycelium_url=used.node.url, **QUICK) as other:
        sides = [used, Side(other, used.supervisor, used.to)]
        jobs = [side.run(job("sleep:0.1", id=f"{n}")) for n, side in enumerate(sides * 10)]
        assert {each.success for each in await asyncio.gather(*jobs)} == {True}
        await eventually(used.node.is_empty)


async def test_a_request_that_begins_while_the_inbox_is_read_does_not_wait_for_the_next_idle_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transports, "_IDLE_LOOK_SEC", 60.0)
    async with with_own_messages() as used:
        looks, begun = asyncio.Event(), asyncio.Event()
        pop, seen = used.node.pop, used.supervisor.requests

        async def slow_pop(*, topic: str | None = None, wait_sec: float = 0.0, peek: bool = False) -> Any:
            if topic is not None and peek and not used.calls._transports["mycelium"]._pending:
                looks.set()
                await begun.wait()
            return await pop(topic=topic, wait_sec=wait_sec, peek=peek)

        async def second() -> bool:
            return len(seen) == 2

        used.node.pop = slow_pop
        assert (await used.run(job())).success
        await asyncio.wait_for(looks.wait(), EVENT_TIMEOUT_SEC)
        running = asyncio.create_task(used.run(job("sleep:0.2", id="2")))
        await eventually(second)
        begun.set()
        assert (await running).success


async def test_a_request_for_a_busy_supervisor_of_the_same_node_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transports, "_FOREIGN_SEC", 0.0)
    async with with_own_messages() as used:
        request = json.dumps({"jsonrpc": "2.0", "id": "1.other", "method": "job.run", "params": []})
        used.node.send(used.node, used.to.topic, request.encode())
        with pytest.raises(ReplyTimeout):
            await used.run(job(), 0.5)
        found = await used.node.pop(topic=used.to.topic)
        assert found is not None
        assert found.payload == request.encode()


async def test_a_reply_arrives_while_a_late_one_cannot_be_stored() -> None:
    async with with_own_messages() as used:
        arrived = asyncio.Event()

        async def hang(job_id: str, reply: str) -> None:
            arrived.set()
            await asyncio.Event().wait()

        used.calls.on_late = hang
        used.supervisor.misbehave("twice", Misbehavior.TWICE)
        assert (await used.run(job(id="twice"))).success
        await asyncio.wait_for(arrived.wait(), EVENT_TIMEOUT_SEC)
        assert (await used.run(job())).success


async def test_a_process_that_seemed_to_have_ended_keeps_its_next_replies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transports, "_FOREIGN_SEC", 0.1)
    async with with_own_messages() as used:
        reply = json.dumps({"jsonrpc": "2.0", "id": "1.other", "result": {"success": "done"}})
        used.node.send(used.node, used.to.topic, reply.encode())
        assert (await used.run(job())).success
        assert caplog.text.count("no one takes a message") == 1
        monkeypatch.setattr(transports, "_FOREIGN_SEC", 60.0)
        assert (await used.run(job(id="2"))).success
        used.node.send(used.node, used.to.topic, reply.encode())
        with pytest.raises(ReplyTimeout):
            await used.run(job(id="3"), 0.5)
        found = await used.node.pop(topic=used.to.topic)
        assert found is not None
        assert found.payload == reply.encode()


async def test_messages_that_no_one_takes_do_not_block_the_topic(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transports, "_FOREIGN_SEC", 0.5)
    async with with_own_messages() as used:
        for n in range(50):
            reply = {"jsonrpc": "2.0", "id": f"{n}.ended", "result": {"success": SECRET}}
            used.node.send(used.node, used.to.topic, json.dumps(reply).encode())
        used.node.send(used.node, used.to.topic, b"x" * 9_000_000)
        assert (await used.run(job(), 20.0)).success
        await eventually(used.node.is_empty)
    assert caplog.text.count("no one takes a message with the topic 'supervisor.rpc'") == 51
    assert SECRET not in caplog.text


# --- secrets ----------------------------------------------------------------------------------------------------


def test_a_secret_is_masked_however_it_is_spelled() -> None:
    secret = 'a "b" \u00e9\\?'
    texts = [secret, json.dumps({"e": secret}), repr([secret]), f"http://h/?key={quote(secret, safe='')}"]
    assert [mask(text, ("", secret)) for text in texts] == [
        "(hidden)",
        '{"e": "(hidden)"}',
        "['(hidden)']",
        "http://h/?key=(hidden)",
    ]


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (b'{"id": "1", "result": null}', "result"),
        (b'{"id": "1", "result": null, "error": {"code": 1}}', "error"),
        (b"[1]", "malformed"),
        (b"\xff", "malformed"),
        (b'{"id": "1"}', "malformed"),
    ],
)
def test_a_late_reply_is_described_without_its_text(reply: bytes, status: str) -> None:
    expected = LateReply(status=status, bytes=len(reply), sha256=hashlib.sha256(reply).hexdigest())
    assert describe_late(reply) == expected


async def test_credentials_of_a_url_are_masked() -> None:
    async with over_http() as used:
        with_password = parse_destination(
            used.supervisor.url.replace("//", "//user:to%20ken@") + "/?key=word"
        )
        outcome = await Side(used.calls, used.supervisor, with_password).run(job("fail:bad to ken, to%20ken"))
        assert outcome.text == "bad (hidden), (hidden)"
        await used.supervisor.close()
        with pytest.raises(Unreachable) as raised:
            await used.calls.ping(with_password, secret=SECRET)
        assert not any(part in str(raised.value) for part in ("user", "ken", "word"))


async def test_secrets_are_masked_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with over_http() as used:
        used.supervisor.misbehave("3:11:501", Misbehavior.TELLS_SECRET, Misbehavior.DISCONNECT)
        outcome = await used.run(job())
        assert outcome.text == "the secret is (hidden)"
        assert (await used.run(job())).success
        assert not (await used.run(job(id="2"), secret="wrong")).success
    assert SECRET not in caplog.text
