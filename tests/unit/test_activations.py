"""The jobs of a workflow run in one order, whichever engine takes over a task."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from tests.unit.measured import measuring

from flowkit.core import instruments
from flowkit.engine.activations import Activations, allow_long_workflow_tasks


class Instance:
    """Adds a timer for each job of an activation, whose number is the number of the activation."""

    def __init__(self, *, ends: bool = False) -> None:
        self.activations: list[list[str]] = []
        self.adds_timers = True
        self._ends = ends

    def run(self, activation: WorkflowActivation) -> WorkflowActivationCompletion:
        self.activations.append([str(job.WhichOneof("variant")) for job in activation.jobs])
        completion = WorkflowActivationCompletion()
        completion.successful.SetInParent()
        for _ in activation.jobs if self.adds_timers else ():
            command: Any = completion.successful.commands.add()
            command.start_timer.seq = len(self.activations)
        if self._ends:
            completion.successful.commands.add().complete_workflow_execution.SetInParent()
        completion.successful.used_internal_flags.append(len(self.activations))
        return completion


def activation(*jobs: str, events: int = 3, task: int = 1) -> WorkflowActivation:
    """Return an activation with so many events, whose latest workflow task has this number."""
    made = WorkflowActivation(run_id="run", history_length=events, history_size_bytes=task * 100)
    made.timestamp.FromSeconds(task)
    for name in jobs:
        getattr(made.jobs.add(), name).SetInParent()
    for number, job in enumerate(made.jobs):
        if job.HasField("do_update"):
            job.do_update.protocol_instance_id = f"update-{task}-{events}-{number}"
    return made


def activations_of(instance: Instance) -> Activations:
    """Return the activations of a run whose workflow tasks time out after ten seconds."""
    return Activations(instance.run, timedelta(seconds=10))


def test_updates_run_after_the_other_jobs_and_the_commands_are_merged() -> None:
    instance = Instance()
    done = activations_of(instance).run(activation("signal_workflow", "do_update", "resolve_activity"))
    assert instance.activations == [["signal_workflow", "resolve_activity"], ["do_update"]]
    assert [command.start_timer.seq for command in done.successful.commands] == [1, 1, 2]
    assert [*done.successful.used_internal_flags] == [1, 2]


def test_updates_count_by_their_outcome_but_not_in_a_replay() -> None:
    def reply(given: WorkflowActivation) -> WorkflowActivationCompletion:
        """Reject the first update, and accept the others."""
        completion = WorkflowActivationCompletion()
        completion.successful.SetInParent()
        for number, job in enumerate(given.jobs):
            response = completion.successful.commands.add().update_response
            response.protocol_instance_id = job.do_update.protocol_instance_id
            (response.accepted if number else response.rejected).SetInParent()
        return completion

    with measuring() as measured:
        for is_replayed in (True, False):
            updates = activation("do_update", "do_update", "do_update")
            for job in updates.jobs:
                job.do_update.name, job.do_update.run_validator = "hold", not is_replayed
            Activations(reply, timedelta(seconds=10)).run(updates)
    assert measured.counted(instruments.UPDATES) == {("hold", "rejected"): 1, ("hold", "accepted"): 2}


@pytest.mark.parametrize(
    ("events", "size", "is_replaying", "count"),
    [(40_960, 0, False, 0), (40_961, 0, False, 1), (3, 42_000_000, False, 1), (51_000, 0, True, 0)],
)
def test_workflow_tasks_of_histories_near_the_limits_count(
    events: int, size: int, is_replaying: bool, count: int
) -> None:
    given = activation("fire_timer", events=events)
    given.history_size_bytes, given.is_replaying = size, is_replaying
    with measuring() as measured:
        activations_of(Instance()).run(given)
    assert sum(measured.counted(instruments.LONG_HISTORIES).values()) == count


def test_an_activation_of_one_kind_of_jobs_is_not_split() -> None:
    for jobs in (["do_update", "do_update"], ["fire_timer", "resolve_activity"]):
        instance = Instance()
        activations_of(instance).run(activation(*jobs))
        assert instance.activations == [jobs]


def test_updates_do_not_run_in_a_run_that_has_ended() -> None:
    instance = Instance(ends=True)
    activations_of(instance).run(activation("do_update", "fire_timer"))
    assert instance.activations == [["fire_timer"]]


def test_events_that_a_query_brings_wait_for_their_workflow_task() -> None:
    instance = Instance()
    activations = activations_of(instance)
    activations.run(activation("initialize_workflow"))
    ahead = activations.run(activation("resolve_activity", events=11))
    assert len(ahead.successful.commands) == 0
    activations.run(activation("query_workflow", events=11))
    activations.run(activation("signal_workflow", events=12))
    activations.run(activation("query_workflow", events=12))
    activations.run(activation("do_update", "fire_timer", events=14, task=2))
    assert instance.activations == [
        ["initialize_workflow"],
        [],
        ["query_workflow"],
        [],
        ["query_workflow"],
        ["resolve_activity", "signal_workflow", "fire_timer"],
        ["do_update"],
    ]


def test_a_local_activity_that_ends_within_a_workflow_task_does_not_wait() -> None:
    instance = Instance()
    activations = activations_of(instance)
    activations.run(activation("initialize_workflow"))
    activations.run(activation("resolve_activity"))
    activations.run(activation("remove_from_cache"))
    assert instance.activations == [["initialize_workflow"], ["resolve_activity"], ["remove_from_cache"]]


class Local(Instance):
    """Starts a local activity for each signal, whose number is the number of the activation."""

    def __init__(self, *, limit_sec: int = 60) -> None:
        super().__init__()
        self._limit_sec = limit_sec

    def run(self, activation: WorkflowActivation) -> WorkflowActivationCompletion:
        completion = super().run(activation)
        for job in activation.jobs:
            if job.HasField("signal_workflow"):
                started = completion.successful.commands.add().schedule_local_activity
                started.seq = len(self.activations)
                started.schedule_to_close_timeout.FromSeconds(self._limit_sec)
        return completion


def end_of(number: int) -> WorkflowActivation:
    """Return an activation in which a local activity ends."""
    made = activation("resolve_activity")
    made.jobs[0].resolve_activity.seq, made.jobs[0].resolve_activity.is_local = number, True
    return made


def test_updates_wait_while_a_local_activity_runs() -> None:
    """A replay has the update together with the signal, because it knows no heartbeats of workflow tasks."""
    live, replayed = Local(), Local()
    activations = activations_of(live)
    for each in (activation("signal_workflow"), activation("do_update"), end_of(1), activation("do_update")):
        activations.run(each)
    assert live.activations == [["signal_workflow"], [], ["resolve_activity"], ["do_update"], ["do_update"]]
    activations = activations_of(replayed)
    for each in (activation("signal_workflow", "do_update"), end_of(1), activation("do_update")):
        activations.run(each)
    assert replayed.activations == [each for each in live.activations if each]


def test_an_update_that_comes_again_while_it_waits_runs_once() -> None:
    """A server that has lost what it has sent repeats an update that a client has sent again."""
    live = Local()
    activations = activations_of(live)
    update = activation("do_update")
    for each in (activation("signal_workflow"), update, update, end_of(1)):
        activations.run(each)
    assert live.activations == [["signal_workflow"], [], [], ["resolve_activity"], ["do_update"]]


def query(number: int) -> WorkflowActivation:
    """Return an activation with a query that has come with a workflow task."""
    made = activation("query_workflow")
    made.jobs[0].query_workflow.query_id = str(number)
    return made


def test_queries_wait_while_a_local_activity_runs_and_are_answered_with_what_follows_its_end() -> None:
    """A workflow task that an answer completes meanwhile would end before the activity, which no replay knows."""
    instance = Local()
    activations = activations_of(instance)
    activations.run(activation("signal_workflow"))
    assert len(activations.run(query(1)).successful.commands) == 0
    assert len(activations.run(end_of(1)).successful.commands) == 2, "that of the workflow, and the answer"
    assert instance.activations == [["signal_workflow"], [], ["resolve_activity"], ["query_workflow"]]
    assert len(activations.run(query(2)).successful.commands) == 1


def test_a_query_of_an_earlier_workflow_task_has_no_answer() -> None:
    """The server sends it again with the next one."""
    instance = Local()
    activations = activations_of(instance)
    activations.run(activation("signal_workflow"))
    activations.run(query(1))
    ended = end_of(1)
    ended.history_length += 3
    ended.timestamp.FromSeconds(2)
    assert len(activations.run(ended).successful.commands) == 1


def legacy_query() -> WorkflowActivation:
    """Return an activation with a query that has come without a workflow task."""
    asked = query(1)
    asked.jobs[0].query_workflow.query_id = "legacy_query"
    return asked


def test_a_query_without_a_workflow_task_is_answered_at_once() -> None:
    activations = activations_of(Local())
    activations.run(activation("signal_workflow"))
    assert len(activations.run(legacy_query()).successful.commands) == 1


def test_a_workflow_task_fails_if_the_events_before_it_may_belong_to_another_engine() -> None:
    activations = activations_of(Instance())
    activations.run(activation("signal_workflow", task=1))
    activations.run(legacy_query())
    assert activations.run(activation("signal_workflow", events=7, task=11)).HasField("failed")


def ended_activity(number: int, *, events: int) -> WorkflowActivation:
    """Return an activation eleven seconds later, with the end of an activity."""
    made = activation("resolve_activity", events=events, task=12)
    ended = made.jobs[0].resolve_activity
    ended.seq = number
    ended.result.completed.SetInParent()
    return made


def ended_timer(number: int, *, events: int) -> WorkflowActivation:
    """Return an activation eleven seconds later, in which a timer fires."""
    made = activation("fire_timer", events=events, task=12)
    made.jobs[0].fire_timer.seq = number
    return made


@pytest.mark.parametrize(
    ("followed", "fails"),
    [
        (activation("signal_workflow", events=7, task=10), False),  # the workflow task cannot have timed out
        (ended_timer(1, events=7), False),  # only a completed workflow task has started the timer
        (ended_timer(2, events=7), True),
        (ended_timer(2, events=8), False),  # the history has the start of the timer
        (ended_activity(1, events=8), True),
        (ended_activity(1, events=9), False),
    ],
)
def test_a_workflow_task_fails_only_if_nothing_shows_whose_the_events_before_it_were(
    followed: WorkflowActivation, fails: bool
) -> None:
    activations = activations_of(Instance())
    activations.run(activation("signal_workflow", task=1))
    activations.run(legacy_query())
    assert activations.run(followed).HasField("failed") is fails


def test_a_workflow_task_does_not_fail_if_the_events_before_it_led_to_no_command() -> None:
    """As if a task is watched while its nodes run for minutes, and one of them ends."""
    instance = Instance()
    activations = activations_of(instance)
    activations.run(activation("notify_has_patch", task=1))
    instance.adds_timers = False
    activations.run(activation("signal_workflow", events=7, task=2))
    activations.run(legacy_query())
    assert activations.run(activation("signal_workflow", events=11, task=20)).HasField("successful")


@pytest.mark.parametrize(
    ("timers", "last", "is_replayed", "fails"),
    [
        ((False, False), ("do_update", "signal_workflow"), False, True),
        ((True, False), ("do_update", "signal_workflow"), False, False),  # a replay divides the first two
        ((False, True), ("do_update", "signal_workflow"), False, False),
        (
            (False, False),
            ("signal_workflow",),
            False,
            False,
        ),  # the event caused the workflow task, and is before it
        ((False, False), ("do_update",), False, False),
        (
            (False, False),
            ("do_update", "signal_workflow"),
            True,
            False,
        ),  # what was replayed is divided already
    ],
)
def test_a_workflow_task_fails_if_a_replay_may_take_the_one_before_for_its_heartbeat(
    timers: tuple[bool, bool], last: tuple[str, ...], is_replayed: bool, fails: bool
) -> None:
    instance = Instance()
    activations = activations_of(instance)
    for number, adds_timers in enumerate(timers):
        instance.adds_timers = adds_timers
        before = activation("signal_workflow", events=7 + 5 * number, task=2 + number)
        before.is_replaying = is_replayed
        activations.run(before)
    assert activations.run(activation(*last, events=17, task=4)).HasField("failed") is fails


def test_a_replay_for_a_query_does_not_know_what_comes_next() -> None:
    instance = Instance()
    instance.adds_timers = False
    activations = activations_of(instance)
    for number in range(2):
        before = activation("signal_workflow", events=7 + 5 * number, task=2 + number)
        before.is_replaying = True
        activations.run(before)
    activations.run(legacy_query())
    last = activation("do_update", "signal_workflow", events=17, task=4)
    assert activations.run(last).HasField("failed")


@pytest.mark.parametrize(
    ("jobs", "commands"),
    [
        (("do_update",), ["update_response"]),
        (("do_update", "signal_workflow"), ["modify_workflow_properties", "update_response"]),
        (("do_update", "fire_timer"), ["start_timer", "update_response"]),
    ],
)
def test_an_acceptance_is_not_the_first_command_of_a_workflow_task_with_events(
    jobs: tuple[str, ...], commands: list[str]
) -> None:
    def accept(given: WorkflowActivation) -> WorkflowActivationCompletion:
        completion = WorkflowActivationCompletion()
        completion.successful.SetInParent()
        for job in given.jobs:
            if job.HasField("do_update"):
                completion.successful.commands.add().update_response.accepted.SetInParent()
            elif job.HasField("fire_timer"):
                completion.successful.commands.add().start_timer.seq = 1
        return completion

    done = Activations(accept, timedelta(seconds=10)).run(activation(*jobs))
    assert [str(each.WhichOneof("variant")) for each in done.successful.commands] == commands


def test_the_end_of_a_local_activity_is_a_command_before_an_acceptance() -> None:
    """Also if it began in an earlier workflow task, which a replay does not know: the server was slow meanwhile."""

    def local(given: WorkflowActivation) -> WorkflowActivationCompletion:
        completion = WorkflowActivationCompletion()
        completion.successful.SetInParent()
        for job in given.jobs:
            if job.HasField("initialize_workflow"):
                completion.successful.commands.add().schedule_local_activity.seq = 1
            elif job.HasField("do_update"):
                completion.successful.commands.add().update_response.accepted.SetInParent()
        return completion

    activations = Activations(local, timedelta(seconds=10))
    activations.run(activation("initialize_workflow"))
    last = activation("resolve_activity", "signal_workflow", "do_update", events=9, task=2)
    last.jobs[0].resolve_activity.seq, last.jobs[0].resolve_activity.is_local = 1, True
    commands = activations.run(last).successful.commands
    assert [str(each.WhichOneof("variant")) for each in commands] == ["update_response"]


def test_rejected_updates_between_events_do_not_end_a_silence() -> None:
    instance = Instance()
    instance.adds_timers = False
    activations = activations_of(instance)
    for number, jobs in enumerate((["signal_workflow"], ["signal_workflow"], ["do_update"], ["do_update"])):
        activations.run(activation(*jobs, events=7 + 5 * number, task=2 + number))
    assert activations.run(activation("do_update", "fire_timer", events=30, task=9)).HasField("failed")


@pytest.mark.parametrize("what", ["no query", "an update", "a replay", "a later query"])
def test_events_that_no_query_can_have_brought_are_of_this_engine(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    activations = activations_of(Instance())
    first = activation("do_update" if what == "an update" else "signal_workflow", task=1)
    first.is_replaying = what == "a replay"
    activations.run(first)
    if what == "a later query":
        now = time.monotonic()
        monkeypatch.setattr("flowkit.engine.activations.time.monotonic", lambda: now + 60)
    if what != "no query":
        activations.run(legacy_query())
    assert activations.run(activation("signal_workflow", events=7, task=12)).HasField("successful")


# --- long workflow tasks ------------------------------------------------------------------------------------------


class Blocked:
    """A running workflow, as the SDK has it, whose activation lasts until it is released."""

    def __init__(self, workflow_type: str) -> None:
        self._info = SimpleNamespace(
            workflow_type=workflow_type, workflow_id="w", task_timeout=timedelta(seconds=0)
        )
        self.released = threading.Event()

    def get_info(self) -> Any:
        return self._info

    def activate(self, activation: object) -> object:
        self.released.wait()
        return activation


async def activate_with_timeout(workflow: Blocked) -> object:
    """Run an activation as the SDK does, with a timeout, and release it after the timeout."""
    worker: Any = SimpleNamespace(_workflow_task_executor=ThreadPoolExecutor(1))
    allow_long_workflow_tasks(SimpleNamespace(_workflow_worker=worker))  # type: ignore[arg-type]  # a stand-in
    loop = asyncio.get_running_loop()
    activation = loop.run_in_executor(worker._workflow_task_executor, workflow.activate, "done")
    loop.call_later(0.1, workflow.released.set)
    try:
        return await asyncio.wait_for(activation, 0.01)
    finally:
        workflow.released.set()
        worker._workflow_task_executor.shutdown()


@pytest.mark.parametrize("workflow_type", ["Task", "Backfill"])
async def test_sdk_waits_for_the_end_of_an_own_activation_and_the_log_tells_the_operator(
    workflow_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await activate_with_timeout(Blocked(workflow_type)) == "done"
    assert re.search(r"workflow w took \d+ s for one step", caplog.text)


async def test_sdk_gives_up_a_blocked_workflow_of_the_user() -> None:
    with pytest.raises(TimeoutError):
        await activate_with_timeout(Blocked("Order"))
