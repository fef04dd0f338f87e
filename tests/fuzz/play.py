"""Plays one random task against the scheduler and the model, and compares them after every event."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.fuzz.adapter import Subject
from tests.fuzz.model import CANCELLED, FAILED, FINISHED, SKIPPED, USER, End, Model
from tests.fuzz.time_limits import DEADLINE_EXCEEDED, TimeLimits
from tests.fuzz.wiring import wiring_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection

    from tests.fuzz.model import Edge
    from tests.fuzz.plans import Plan

TASK_FAILED, TASK_CANCELLED = "task_failed", "task_cancelled"
_ENDS = [End(FINISHED)] * 12 + [End(FAILED)] * 5 + [End(CANCELLED)]


class Difference(AssertionError):
    """The scheduler and the model differ."""


class Play:
    """One task. The plan decides the graph, `chance` what happens."""

    def __init__(self, plan: Plan, chance: random.Random) -> None:
        self._plan, self._chance = plan, chance
        self.history: list[str] = []
        self.counts: Counter[str] = Counter()
        """Number of events, by kind."""
        self._running: set[str] = set()
        self._waiting: set[str] = set()
        """Nodes that wait for a retry."""
        self._started: set[str] = set()
        """Nodes that had an attempt."""
        self._first_lost: set[str] = set()
        """The failures that the first event with unhandled failures left unhandled."""
        self._due: list[Edge] = []
        """Conditions whose results are not known."""
        self._written_by_caller: set[str] = set()
        """The nodes that the last event itself ended as it says; the workflow writes them without the scheduler."""
        self._continued = False
        self._cancel_after = chance.randint(0, 20) if chance.random() < 0.15 else None
        self._functions = {step.name for step in plan.steps if step.function}
        self._has_deadlines = plan.deadline is not None or any(step.deadline for step in plan.steps)
        self._limits = TimeLimits(plan)
        self.model = Model(wiring_of(plan))
        self._subject = Subject(plan)

    def run(self) -> str:
        """Play until the task has ended. Return its status."""
        with self._subject.clock.installed():
            return self._run()

    def _run(self) -> str:
        self._check(before=())
        while self.model.open():
            if self._cancel_after is not None and len(self.history) >= self._cancel_after:
                return self._stop(TASK_CANCELLED, CANCELLED)
            if self._subject.is_overdue or (self._subject.hard_failure and self._chance.random() < 0.7):
                break
            if self._has_deadlines and self._chance.random() < 0.4:
                self._pass_time()
            else:
                self._move()
        if self._subject.hard_failure or (self._subject.is_overdue and self.model.open()):
            return self._stop(TASK_FAILED, FAILED)
        return FAILED if self._subject.failures else FINISHED

    def _move(self) -> None:
        """Let one thing happen."""
        before, drawn = set(self.model.facts.ends), self._chance.random()
        idle = sorted(set(self.model.open()) - self._started)
        if drawn < 0.06 and not self._limits.stopping:
            self._rebuild()
        elif drawn < 0.09 and idle:
            self._end(self._chance.choice(idle), End(SKIPPED, USER))
        elif self._due and (drawn < 0.4 or not self._running | self._waiting):
            self._evaluate()
        elif self._running | self._waiting:
            self._act()
        else:
            raise Difference("nothing can run, although nodes are open")
        self._check(before)

    def _pass_time(self) -> None:
        """Let time pass, and let the timer fire for each deadline, sometimes late."""
        clock, is_late = self._subject.clock, self._chance.random() < 0.15
        until = clock.now + self._chance.choice([0.0, 0.25, 0.5, 0.5, 1.0, 2.0])
        while (at := self._limits.next(self.model.open())) is not None and at <= until and not is_late:
            clock.now = max(at, clock.now)
            self._fire_timers()
            if self._limits.is_overdue:
                return
        clock.now = until
        self._note("time", f"passes until {until:g}")
        if not is_late:
            self._fire_timers()

    def _fire_timers(self) -> None:
        before = set(self.model.facts.ends)
        self._note("timer", f"at {self._subject.clock.now:g}")
        self._subject.fire_timers()
        for name in self._limits.pass_until(self._subject.clock.now, self.model.open(), self._running):
            self._note("deadline", name)
            self._waiting.discard(name)
            self._end_model(name, End(FAILED, DEADLINE_EXCEEDED))
        self._check(before)

    def _act(self) -> None:
        """Let something happen to a node."""
        moves: list[tuple[int, Callable[[str], None], Collection[str]]] = [
            (6, self._end, self._running),
            (1, self._retry, self._running - self._limits.stopping),
            (2, self._again, self._waiting),
            (3, self._stream, self._running - self._functions),
            (self._chance.choice([0, 0, 1]), self._late, self.model.facts.ends),
            (self._chance.choice([0, 1]), self._stream, self._ended_attempts()),
        ]
        possible = [(weight, act, sorted(names)) for weight, act, names in moves if names]
        [(_, act, names)] = self._chance.choices(possible, [weight for weight, _, _ in possible])
        act(self._chance.choice(names))

    def _evaluate(self) -> None:
        """Report the results of some conditions together."""
        group = self._chance.sample(self._due, self._chance.randint(1, len(self._due)))
        for condition in group:
            self._note(f"condition {self.model.verdict(condition)}", " -> ".join(dict.fromkeys(condition)))
            self._due.remove(condition)
        self.counts["group of conditions"] += len(group) > 1
        self._subject.evaluated(group)
        self.model.evaluate(group)

    def _note(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        self.history.append(f"{kind} {what}")

    def _end(self, name: str, end: End | None = None) -> None:
        end = end or self._chance.choice(_ENDS)
        self._note(f"{end.status} after its deadline" if name in self._limits.stopping else end.status, name)
        self._running.discard(name)
        self._waiting.discard(name)
        self._subject.end(name, end)
        self._end_model(name, End(FAILED, DEADLINE_EXCEEDED) if name in self._limits.stopping else end)
        self._limits.stopping.discard(name)

    def _end_model(self, name: str, end: End) -> None:
        self.model.end(name, end)
        if self.model.facts.ends[name] == end:
            self._written_by_caller.add(name)

    def _ended_attempts(self) -> set[str]:
        """Return the ended nodes whose batches may be reported late."""
        ended = self._started & self.model.facts.ends.keys()
        return {name for name in ended - self._functions if self.model.facts.ends[name].status != SKIPPED}

    def _late(self, name: str) -> None:
        """Report the end of a node that has ended."""
        end = self._chance.choice(_ENDS)
        self._note("late end", f"{name}: {end.status}")
        self._subject.end(name, end)

    def _retry(self, name: str) -> None:
        self._note("retry", name)
        self._running.remove(name)
        self._waiting.add(name)
        self._subject.retry(name)

    def _stream(self, name: str) -> None:
        """Report a batch, perhaps not for the first time."""
        self._note("late batch" if name in self.model.facts.ends else "batch", name)
        _same("first batch", self._subject.stream(name), name not in self.model.facts.streamed)
        self.model.stream(name)

    def _again(self, name: str) -> None:
        self._note("next attempt", name)
        self._waiting.remove(name)
        self._running.add(name)
        self._subject.run_again(name)

    def _rebuild(self) -> None:
        """Continue as new, sometimes late. The next run starts all open nodes again whose gates are open."""
        self._subject.clock.now += self._chance.choice([0, 0, 0, 4])
        self._note("continue as new", f"at {self._subject.clock.now:g}")
        self._continued = True
        self._running.clear()
        self._waiting.clear()
        self._due.clear()
        self._subject.rebuild()

    def _stop(self, reason: str, status: str) -> str:
        before = set(self.model.facts.ends)
        self._note("stop", reason)
        self._subject.stop(reason)
        self.model.stop(self._started, reason)
        self._running.clear()
        self._waiting.clear()
        self._due.clear()
        self._limits.stopping.clear()
        self._check(before, stopped=True)
        return status

    def _check(self, before: Collection[str], *, stopped: bool = False) -> None:
        """Compare everything that the scheduler says with the model. Nodes in `before` had ended before the event."""
        self._check_ends()
        ended = self.model.facts.ends.keys() - before
        _same("nodes to write", self._subject.take_changed(), ended - self._written_by_caller)
        self._written_by_caller.clear()
        self._check_ready()
        self._check_due()
        self._check_deadlines()
        self._check_failures(stopped=stopped)
        _same("done", self._subject.done, not self.model.open())

    def _check_ends(self) -> None:
        actual, expected = self._subject.ends(), self.model.facts.ends
        for name in self._plan.order:
            _same(f"end of {name}", actual.get(name), expected.get(name))

    def _check_ready(self) -> None:
        ready = self._subject.start_ready()
        if twice := (self._running | self._waiting) & set(ready):
            raise Difference(f"started twice: {twice}")
        self._started |= set(ready)
        self._running |= set(ready)
        startable = self.model.startable()
        _same("started and open", self._running | self._waiting, startable)
        self._limits.begin(startable, self._subject.clock.now)

    def _check_deadlines(self) -> None:
        _same("deadlines", self._subject.deadlines(), self._limits.begun(self.model.open()))
        _same("nodes to stop", self._subject.stopping(), self._limits.stopping)
        _same("exceeded deadline of the task", self._subject.is_overdue, self._limits.is_overdue)

    def _check_due(self) -> None:
        due, new = self.model.due(), self._subject.take_due()
        if wrong := {each for each in new if each in self._due or each not in due}:
            raise Difference(f"conditions that are not due: {wrong}")
        self._due += new
        if missing := due - set(self._due):
            raise Difference(f"conditions that are due and not evaluated: {missing}")

    def _check_failures(self, *, stopped: bool) -> None:
        failed, handled = self.model.failed(), self.model.is_handled
        lost = {name for name in failed if handled(name) is False}
        _same("failures", self._subject.failures, [n for n in self._plan.order if n in lost])
        good = {name for name in failed if handled(name)}
        _same("handled failures", self._subject.handled_failures, [n for n in self._plan.order if n in good])
        self._first_lost = self._first_lost or lost
        hard = self._subject.hard_failure
        if stopped:
            return
        if hard is None:
            _same("failures that stop the task", set(), set() if self._plan.continues else lost)
        elif self._plan.continues or hard not in (lost if self._continued else self._first_lost):
            raise Difference(
                f"{hard} stops the task, which has the failures {lost}, first {self._first_lost}"
            )


def _same(what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise Difference(f"{what}: {actual} should be {expected}")
