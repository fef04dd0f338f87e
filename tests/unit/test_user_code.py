"""Whatever user code raises, wherever, is one failed attempt with its own text; only a stop of the process passes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.unit.handler_runs import call, node, outcomes

from flowkit.activities.process_pool import ProcessPool
from flowkit.adapters.vars.sensitive import Detector
from flowkit.attempt.failures import describe_raised, failure
from flowkit.core import user_code
from flowkit.core.user_code import (
    Contained,
    UserCodeError,
    contain_tasks,
    contained,
    current_frames,
    error_text,
    place_of,
    warn_of_blocked_loops,
)
from flowkit.errors import AdapterError
from flowkit.limits import LAST_ERROR_CHARS
from flowkit.masks import AttemptMask
from flowkit.models import NodeState
from flowkit.testing import run_graph
from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler
from flowkit.workflows.retry import note_failure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from flowkit.worker.context import RunContext

NEVER_AGAIN = {"retry_policy": {"max": 0}}


class Panic(BaseException):
    """An error as native extensions raise it."""


class Unreadable(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        exit_process()
        return ""


class Unpicklable(ValueError):
    """An error that can be pickled but not unpickled."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code} {text}")


def exit_process() -> None:
    """Exit, as a command line parser does."""
    sys.exit(3)


def raises(create: Callable[[], BaseException]) -> Callable[[], None]:
    """Return a function that raises a new error."""

    def fail() -> None:
        raise create()

    return fail


def recurse() -> None:
    """Recurse without end."""
    recurse()


ERRORS: dict[str, tuple[Callable[[], None], str]] = {
    "exit": (exit_process, "unexpected_error: SystemExit: 3"),
    "interrupt": (
        raises(lambda: KeyboardInterrupt("by hand")),
        "unexpected_error: KeyboardInterrupt: by hand",
    ),
    "panic": (raises(lambda: Panic("index out of bounds")), "unexpected_error: Panic: index out of bounds"),
    "generator exit": (raises(lambda: GeneratorExit("odd")), "unexpected_error: GeneratorExit: odd"),
    "group": (
        raises(lambda: BaseExceptionGroup("two", [SystemExit(4), KeyError("k")])),
        r"unexpected_error: BaseExceptionGroup: two \(2 sub-exceptions\): SystemExit: 4",
    ),
    "unreadable": (raises(lambda: Unreadable()), "unexpected_error: Unreadable: its message cannot be read"),
    "unpicklable": (raises(lambda: Unpicklable(7, "days")), "bad_input: (ValueError: )?Unpicklable: 7 days"),
    "recursion": (recurse, "unexpected_error: RecursionError: maximum recursion depth exceeded"),
    "memory": (raises(lambda: MemoryError("too much")), "unexpected_error: MemoryError: too much"),
    "cancel": (
        raises(lambda: asyncio.CancelledError()),
        "cancelled_by_worker: the (handler|function) raised CancelledError although FlowKit did not cancel it",
    ),
    "stop iteration": (
        raises(lambda: StopIteration("end")),
        r"unexpected_error: RuntimeError: .* raised StopIteration",
    ),
    "stop async iteration": (
        raises(lambda: StopAsyncIteration("end")),
        r"unexpected_error: (StopAsyncIteration: end|RuntimeError: .* raised StopAsyncIteration)",
    ),
}
"""What user code raises, by name, and the beginning of the error of its node."""


class RaisingRole(RoleHandler):
    """Raises an error in a hook; the id of the node names both."""

    def raise_in(self, hook: str, run: str) -> None:
        """Raise the error if the node's id says so."""
        where, _, error = run.partition(" ")
        if where == hook:
            ERRORS[error][0]()


class Raising(RaisingRole):
    """Raises in coroutines."""

    role = "raising"

    async def init(self, info: dict[str, Any]) -> None:
        self.raise_in("init", info["node_id"])

    async def load_input(self, ref: Any, inline: Any, ctx: RunContext) -> Any:
        self.raise_in("load_input", ctx.node_id)
        return ctx.node_id

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        self.raise_in("iter_batches", loaded)
        yield Batch(batch_uid="b0")
        self.raise_in("iter_batches_later", loaded)

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        self.raise_in("process_batch", ctx.node_id)
        return BatchResult(success=True)

    async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        self.raise_in("finalize", ctx.node_id)
        return None


class RaisingPlainly(RaisingRole):
    """Raises in plain functions, which run on threads."""

    role = "raising_plainly"

    def init(self, info: dict[str, Any]) -> None:
        self.raise_in("init", info["node_id"])

    def load_input(self, ref: Any, inline: Any, ctx: RunContext) -> Any:
        self.raise_in("load_input", ctx.node_id)
        return ctx.node_id

    def iter_batches(self, loaded: Any) -> Iterator[Batch]:
        self.raise_in("iter_batches", loaded)
        yield Batch(batch_uid="b0")
        self.raise_in("iter_batches_later", loaded)

    def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        self.raise_in("process_batch", ctx.node_id)
        return BatchResult(success=True)

    def finalize(self, ctx: RunContext) -> FinalizeResult | None:
        self.raise_in("finalize", ctx.node_id)
        return None


class RaisingElsewhere(RaisingRole):
    """Raises in code that the hook starts, or that FlowKit calls beside the hooks."""

    role = "raising_elsewhere"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        async def fail(where: str) -> None:
            await asyncio.to_thread(lambda: None)
            self.raise_in(where, ctx.node_id)

        await asyncio.create_task(fail("task"))
        await asyncio.gather(fail("gather"))
        await ctx.cancellable(fail("cancellable"))
        await asyncio.to_thread(self.raise_in, "thread", ctx.node_id)
        if ctx.node_id.startswith("classify_error"):
            raise LookupError("of the batch")
        return BatchResult(success=True)

    def classify_error(self, exc: BaseException) -> tuple[str, bool]:
        if str(exc) == "of the batch":
            ERRORS["panic"][0]()
        return super().classify_error(exc)


HOOKS = ["init", "load_input", "iter_batches", "iter_batches_later", "process_batch", "finalize"]


async def assert_each_fails_once(handler: RoleHandler, where: str, errors: list[str]) -> None:
    """Run a node for each error, and check that its only attempt fails with the text and the place of the error."""
    nodes = [node(f"{where} {error}", handler.role, **NEVER_AGAIN) for error in errors]
    found = await outcomes([handler], *nodes)
    for error in errors:
        status, attempts, text = found[f"{where} {error}"]
        assert (status, attempts) == ("failed", 1)
        assert re.match(ERRORS[error][1], text), text
        if "Stop" not in text and "Cancelled" not in text:
            assert re.search(
                r", at tests/unit/test_user_code\.py:\d+ in (raises\.fail|exit_process|recurse)", text
            )


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", [Raising, RaisingPlainly])
async def test_error_of_a_hook_is_one_failed_attempt(kind: type[RaisingRole], hook: str) -> None:
    await assert_each_fails_once(kind(), hook, [*ERRORS])


@pytest.mark.parametrize("where", ["task", "gather", "cancellable", "thread"])
async def test_error_in_a_task_or_thread_of_a_hook_is_one_failed_attempt(where: str) -> None:
    await assert_each_fails_once(RaisingElsewhere(), where, ["exit", "interrupt", "panic"])


async def test_task_that_nobody_awaits_does_not_end_the_loop() -> None:
    class Starting(RoleHandler):
        role = "starting"

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            async def leave() -> None:
                sys.exit(5)

            started = asyncio.create_task(leave())
            await asyncio.wait([started])
            assert isinstance(started.exception(), UserCodeError)
            return BatchResult(success=True)

    run = await run_graph({"nodes": [node("a", "starting")]}, Starting())
    assert run.status == "finished"


async def test_attempt_whose_code_cancels_its_own_task_fails_instead_of_starting_again_for_ever() -> None:
    class Cancelling(RoleHandler):
        role = "cancelling"

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            await cancel_itself("")
            return BatchResult(success=True)

    async def cancel_itself(task_id: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.Event().wait()

    nodes = [
        node("a", "cancelling", **NEVER_AGAIN),
        {"node_id": "b", "type": "coordinator_fn", "io": {"fn": "leave"}, **NEVER_AGAIN},
    ]
    graph = {"nodes": nodes, "on_node_failure": "continue"}
    run = await asyncio.wait_for(run_graph(graph, Cancelling(), functions={"leave": cancel_itself}), 20)
    for each in run.nodes.values():
        assert str(each.error).startswith("cancelled_by_worker: the user's code cancelled its own task")


async def test_error_of_classify_error_leaves_the_error_that_it_was_called_for() -> None:
    found = await outcomes([RaisingElsewhere()], node("classify_error", "raising_elsewhere", **NEVER_AGAIN))
    assert found["classify_error"][2].startswith(
        "unexpected_error: LookupError: of the batch, at tests/unit/"
    )


async def test_errors_of_clean_up_callbacks_and_generators_do_not_replace_the_outcome() -> None:
    class Leaving(RoleHandler):
        role = "leaving"

        async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
            yield Batch(batch_uid="b0")

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            ctx.on_cleanup(exit_process)
            ctx.on_cleanup(raises(lambda: Panic("late")))
            return BatchResult(success=True)

    run = await run_graph({"nodes": [node("a", "leaving")]}, Leaving())
    assert run.status == "finished"


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "plain"])
async def test_error_of_a_function_is_one_failed_attempt(plain: bool) -> None:
    def fail_plainly(task_id: str, error: str) -> None:
        ERRORS[error][0]()

    async def fail(task_id: str, error: str) -> None:
        ERRORS[error][0]()

    nodes = [call(error, "fail", args={"error": error}, **NEVER_AGAIN) for error in ERRORS]
    found = await outcomes([], *nodes, fail=fail_plainly if plain else fail)
    for error, (status, attempts, text) in found.items():
        expected = ERRORS[error][1].replace("bad_input", "unexpected_error")
        assert (status, attempts, bool(re.match(expected, text))) == ("failed", 1, True), text


@pytest.mark.slow
async def test_error_of_a_batch_in_a_process_is_one_failed_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    pool = ProcessPool({"raising": RaisingPlainly()}, processes=1)
    try:
        for error, (_, expected) in ERRORS.items():
            ctx: Any = SimpleNamespace(
                **dict.fromkeys(["task_id", "worker_id", "input_inline", "input_ref"], None),
                **dict.fromkeys(["attempt_epoch", "generation", "failures"], 1),
                params={},
                kv={},
                batch=Batch(),
                mask=AttemptMask(),
                scheduled_at=None,
                node_id=f"process_batch {error}",
                failed_nodes=[],
                cancel_flag=asyncio.Event(),
            )
            with pytest.raises((Exception, asyncio.CancelledError)) as caught:
                await pool.process("raising", Batch(batch_uid="b0"), ctx)
            if error == "cancel":
                assert isinstance(caught.value, asyncio.CancelledError)
                continue
            _, _, text = expected.partition(": ")
            assert re.match(text.replace("RuntimeError: .* raised ", ""), error_text(caught.value))
            assert place_of(caught.value).startswith("tests/unit/test_user_code.py:")
    finally:
        await pool.close()


def test_error_of_a_detector_is_an_adapter_error() -> None:
    def detect(path: str, value: Any) -> bool:
        sys.exit(1)

    with pytest.raises(AdapterError, match="the detector of sensitive values raised SystemExit"):
        Detector(detect).hits([("a", "b")])


# --- what passes ------------------------------------------------------------------------------------------------


STOPPED = """
import asyncio, os, signal, sys
from flowkit.testing import run_graph
from flowkit.worker import BatchResult, RoleHandler
class Busy(RoleHandler):
    role = "busy"
    async def process_batch(self, batch, ctx):
        os.kill(os.getpid(), signal.SIGTERM)
        while True: pass
signal.signal(signal.SIGTERM, lambda *given: sys.exit(9))
asyncio.run(run_graph({"nodes": [{"node_id": "a", "type": "busy"}]}, Busy()))
"""


@pytest.mark.slow
def test_signal_handler_of_the_process_still_ends_it_in_the_middle_of_a_hook() -> None:
    ended = subprocess.run([sys.executable, "-c", STOPPED], timeout=EVENT_TIMEOUT_SEC, check=False)
    assert ended.returncode == 9


FORKED = """
import asyncio, os, sys
from flowkit.testing import run_graph
from flowkit.worker import Batch, BatchResult, RoleHandler
def fork(how):
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (4 if how == "exit" else how == "raise"), (how, code)
        return False
    if how == "exit": sys.exit(4)
    if how == "raise": raise ValueError
    return True
class Async(RoleHandler):
    role = "async"
    async def iter_batches(self, loaded):
        for how in ("exit", "raise", "return", "await"): yield Batch(batch_uid=how)
    async def process_batch(self, batch, ctx):
        if fork(batch.batch_uid) and batch.batch_uid == "await":
            await asyncio.sleep(0)
        return BatchResult(success=True)
class Plain(Async):
    role = "plain"
    def process_batch(self, batch, ctx):
        fork(batch.batch_uid)
        return BatchResult(success=True)
nodes = [{"node_id": role, "type": role} for role in ("async", "plain")]
run = asyncio.run(run_graph({"nodes": nodes}, Async(), Plain()))
print(run.status)
"""


@pytest.mark.slow
def test_process_that_user_code_forks_ends_where_it_leaves_user_code() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKED], timeout=EVENT_TIMEOUT_SEC, check=False, capture_output=True, text=True
    )
    assert ended.stdout == "finished\n", ended.stderr


def test_interrupt_passes_with_the_default_handler_on_the_main_thread_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt() -> None:
        with contained:
            raise KeyboardInterrupt

    raised: list[BaseException] = []

    def on_thread() -> None:
        try:
            interrupt()
        except UserCodeError as error:
            raised.append(error.error)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        thread = threading.Thread(target=on_thread)
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [type(error) for error in raised] == [KeyboardInterrupt]


def test_closing_a_coroutine_is_no_error_of_its_user_code() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("closed")

    async def outer() -> None:
        try:
            await Contained(wait())
        except Exception:
            ended.append("failed")
            raise

    loop = asyncio.new_event_loop()
    work = outer()
    asyncio._set_running_loop(loop)
    try:
        work.send(None)
        work.close()
    finally:
        asyncio._set_running_loop(None)
        loop.close()
    assert ended == ["closed"]


# --- texts and places ---------------------------------------------------------------------------------------------


def caught(function: Callable[[], Any]) -> BaseException:
    """Return the error that a function raises."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - any error of the test
        return error
    raise AssertionError("nothing was raised")


def test_text_of_an_error_has_its_type_and_the_first_error_of_a_group() -> None:
    assert error_text(KeyError("source")) == "KeyError: 'source'"
    assert error_text(Unreadable()) == "Unreadable: its message cannot be read"
    group = ExceptionGroup("two", [ExceptionGroup("inner", [KeyError("k")]), ValueError("v")])
    assert error_text(group) == "ExceptionGroup: two (2 sub-exceptions): KeyError: 'k'"


def test_place_is_the_innermost_line_of_the_users_own_code() -> None:
    def parse() -> Any:
        return json.loads("{")

    assert re.fullmatch(r"tests/unit/test_user_code\.py:\d+ in test_place\w+\.parse", place_of(caught(parse)))


def test_place_of_a_handler_in_an_installed_package_is_in_that_package(tmp_path: Any) -> None:
    def load(path: str, name: str, source: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": name}
        code = compile(source, str(tmp_path / "site-packages" / path), "exec")
        exec(code, names)  # noqa: S102 - a module in a package that is not installed
        return names

    framework = load("web/app.py", "web.app", "def get(url):\n    raise OSError(url)")
    installed = load("shop/orders/jobs.py", "shop.orders.jobs", "def run(get):\n    get('/x')")

    def own() -> None:
        framework["get"]("/y")

    assert place_of(caught(own)).endswith("own")
    error = caught(lambda: installed["run"](framework["get"]))
    error.__traceback__ = error.__traceback__.tb_next.tb_next if error.__traceback__ else None  # type: ignore[union-attr]
    assert place_of(error) == "shop/orders/jobs.py:2 in run"


def test_error_that_touches_no_code_of_a_user_has_no_place() -> None:
    assert place_of(ValueError("never raised")) == ""


def test_place_survives_the_longest_text_code_and_worker() -> None:
    def fail() -> None:
        raise ValueError("x" * 5_000)

    state = NodeState()
    found = failure("c" * 200, describe_raised(caught(fail), advice="a" * 150), permanent=False)
    note_failure(state, found.code, found.message, f" (worker {'w' * 200}, version {'v' * 60})")
    assert state.last_error is not None
    assert len(state.last_error) <= LAST_ERROR_CHARS
    assert "…, at tests/unit/test_user_code.py:" in state.last_error
    assert "; aaa" in state.last_error


# --- blocked loops ------------------------------------------------------------------------------------------------


class Blocking(RoleHandler):
    """Blocks the loop in the hook that the node's id names, for two batches."""

    role = "blocking"

    def __init__(self, block: Callable[[], None]) -> None:
        self._block = block

    async def load_input(self, ref: Any, inline: Any, ctx: RunContext) -> Any:
        return ctx.node_id

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        yield Batch(batch_uid="b0")
        if loaded == "iter_batches":
            self._block()
        yield Batch(batch_uid="b1")

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        async def block() -> None:
            self._block()

        if ctx.node_id == "process_batch":
            self._block()
        if ctx.node_id == "task":
            await asyncio.gather(block())
        return BatchResult(success=True)


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        ("process_batch", "Blocking.process_batch"),
        ("iter_batches", "Blocking.iter_batches"),
        ("task", "Blocking.process_batch.<locals>.block"),
    ],
)
async def test_hook_that_blocked_the_loop_is_named_once(
    hook: str, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "BLOCKED_SEC", 0.2)
    never = threading.Event()

    def block() -> None:
        never.wait(0.3)

    await run_graph({"nodes": [node(hook, "blocking")]}, Blocking(block))
    warnings = [each for each in caplog.records if each.__dict__.get("event") == "worker.loop.blocked"]
    # A busy machine may keep other code from running as long.
    [warning] = [
        each for each in warnings if each.getMessage().startswith(f"{name} of node {hook!r} of task ")
    ]
    assert re.search(r"has blocked the event loop for \d+\.\d", warning.getMessage())


def test_hook_that_still_blocks_the_loop_is_named_with_its_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "BLOCKED_SEC", 0.0)
    begun, ended = threading.Event(), threading.Event()

    async def stay() -> None:
        begun.set()
        ended.wait(EVENT_TIMEOUT_SEC)

    async def attempt() -> None:
        contain_tasks("node 'a' of task t")
        await Contained(stay())

    running = threading.Thread(target=lambda: asyncio.run(attempt()))
    running.start()
    begun.wait(EVENT_TIMEOUT_SEC)
    warn_of_blocked_loops()
    ended.set()
    running.join()
    [warning] = [record for record in caplog.records if record.__dict__.get("event") == "worker.loop.blocked"]
    assert re.search(
        r"stay of node 'a' of task t has blocked .* s, at tests/unit/test_user_code\.py:\d+ in test_\w+\.stay: ",
        warning.getMessage(),
    )


COLLECTS_IN_EVERY_CALL = """
import gc, sys, threading, time
from flowkit.core.user_code import current_frames

class LetsOthersRun:
    def __del__(self):
        time.sleep(0)

def start_threads():
    while True:
        started = threading.Thread(target=int)
        started.start()
        started.join()

for _ in range(2):
    threading.Thread(target=start_threads, daemon=True).start()
gc.set_threshold(1)
for _ in range(1_000):
    cycle = [LetsOthersRun()]
    cycle.append(cycle)
    del cycle
    current_frames()
assert gc.isenabled()
"""


def test_a_look_at_what_threads_run_does_not_stop_the_process_if_garbage_is_collected_meanwhile() -> None:
    """With `sys._current_frames` alone, Python 3.11 stops within a second."""
    subprocess.run([sys.executable, "-c", COLLECTS_IN_EVERY_CALL], check=True, timeout=EVENT_TIMEOUT_SEC)
    assert threading.get_ident() in current_frames()
