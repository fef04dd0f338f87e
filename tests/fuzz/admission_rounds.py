"""Random rounds of operations at one deployment: what comes of each round must be an outcome of the reference."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tests.admission.events import requested
from tests.fuzz.admission_process import BROKEN, DELAYED, REFUSED
from tests.fuzz.admission_reference import (
    AGAIN,
    BANDS,
    OPEN,
    RUNS,
    WAITS,
    Cancel,
    Caps,
    Crowd,
    Entry,
    Exact,
    Expire,
    Hidden,
    Judge,
    Limit,
    Move,
    Operation,
    Outcome,
    Own,
    Queue,
    Report,
    Run,
    Seen,
    Submit,
    Way,
    cap_problems,
    difference,
    event_problems,
    outcomes,
    way_after,
)
from tests.fuzz.admission_site import ACTORS, DEAF
from tests.integration.harness import eventually, wait_seconds

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from temporalio.client import WorkflowExecution
    from tests.fuzz.admission_site import Site

LIMITS_SEC: Final = 2.0
"""After this time, every process uses the limits that were set."""
SETTLE_SEC: Final = 20.0
"""How long the queue may take to do what it must, on a busy machine and without faults."""
FAULTY_SETTLE_SEC: Final = 60.0
USERS: Final = (
    ("default", str(ACTORS[0])),
    ("default", str(ACTORS[1])),
    ("default", "dora"),
    ("shop", str(ACTORS[0])),
    ("shop", "emil"),
)
MARKS = [REFUSED, DELAYED, BROKEN]
"""Parts of the ids of tasks whose starts fail."""
DOORS: Final = ("http", "kafka", "python")
ACCEPTED: Final = "accepted"
NORMAL: Final = BANDS.index("normal")
CROWD: Final = 24
"""How many requests a crowd submits at the same time."""
_MOST_OPEN: Final = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """An operation, and how it is done."""

    operation: Operation
    door: str
    actor: str | None = None
    """The user whose token is used over HTTP; None for the operator."""
    times: int = 1
    """How often a record is sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What came of an act: its answer, if it is known, and how often it may have been done."""

    answer: str | None
    tries: int = 1

    @property
    def may_repeat(self) -> bool:
        """Whether the act may have an effect once more. A request that was accepted stays so."""
        return self.tries > 1 and self.answer != ACCEPTED


class Rounds:
    """The rounds at one deployment, and what is known of its queue."""

    def __init__(self, site: Site, chance: random.Random, name: str) -> None:
        self.site = site
        self.chance = chance
        self._name = name
        self._numbers = 0
        self._caps = Caps()
        self._beliefs = {Queue(self._caps)}
        """The queues that agree with all that was seen."""
        self._ended: dict[str, Entry] = {}
        self.ways: dict[str, Way] = {}
        """What is certain about each request."""
        self.borrowed: set[str] = set()
        """Tasks whose ids are those of tasks of the other deployment."""
        self._tasks: set[str] = set()
        self._active_since: dict[str, int] = {}
        self._submitted: dict[str, Act] = {}
        self._scripts: dict[str, str] = {}
        """Those of executions that were submitted with keys."""
        self._crowded: set[str] = set()
        """Requests of which it is not known whether they arrived before those of other bands."""
        self._terminated: set[str] = set()
        self._valid: dict[int, list[Caps]] = {}
        self.number = 0
        self.others: Rounds | None = None
        """Those at the other deployment, whose tasks have ids that this one cannot use."""

    @property
    def _queue(self) -> Queue:
        return min(self._beliefs, key=lambda each: sorted((e.id, e.arrival) for e in each.entries))

    async def begin(self) -> None:
        """Set the first limits."""
        await self.site.set_limits(self._caps)
        await wait_seconds(LIMITS_SEC + 0.2)

    # --- one round

    async def play(self, kind: str, *, faulty: bool) -> None:
        """Play a random round, and wait until the queue is as the reference says.

        Raise AssertionError if it never is.
        """
        if kind == "stale":
            await self._play_stale()
        elif kind == "key":
            await self._play_key()
        else:
            await self._play(self._planned(kind, faulty=faulty), faulty=faulty, crowd=kind == "crowd")

    async def _play(
        self, chains: Sequence[Sequence[Act]], *, faulty: bool = False, crowd: bool = False
    ) -> None:
        self.number += 1
        self._valid[self.number] = [
            self._caps,
            *(act.operation.caps for chain in chains for act in chain if isinstance(act.operation, Limit)),
        ]
        self._bring_back({id for chain in chains for act in chain if (id := id_of(act.operation))})
        done = await asyncio.gather(*(self._do_all(chain) for chain in chains))
        if any(act.door == "early" or is_sent_again(act) for chain in chains for act in chain):
            await self.site.until_read()
        operations: list[list[Operation]] = [[act.operation for act in chain] for chain in chains]
        repeated: list[list[Operation]] = [
            [act.operation]
            for chain, results in zip(chains, done, strict=True)
            for act, result in zip(chain, results, strict=True)
            if result.may_repeat and isinstance(act.operation, Submit)
        ]
        flat = [result.answer for results in done for result in results]
        answers = {number: answer for number, answer in enumerate(flat) if answer is not None}
        acts = [act for chain in chains for act in chain]
        self.site.journal.counts.update(f"{type(act.operation).__name__} {act.door}" for act in acts)
        self.site.journal.counts.update(f"answer {answer}" for answer in answers.values())
        judge: Judge
        if crowd:
            judge = Crowd(self._queue, [each for chain in operations for each in chain], answers)
        else:
            shown = [*operations, *repeated]
            judge = Exact(self._outcomes(shown, answers) or self._outcomes(shown, {}), answers)
        await self._settle(judge, operations, answers, faulty=faulty)
        self._note_ways([operation for chain in operations for operation in chain])
        self._forget_ended()

    def _outcomes(self, chains: Sequence[Sequence[Operation]], answers: Mapping[int, str]) -> set[Outcome]:
        return {each for queue in self._beliefs for each in outcomes(queue, chains, answers)}

    async def _play_stale(self) -> None:
        """Submit requests that expire if they wait for a second."""
        usual = self._caps
        await self._play([[Act(operation=Limit(caps=replace(usual, stale_sec=1.0)), door="http")]])
        new = [replace(self._new(faulty=False, door=door), times=1) for door in ("http", "kafka")]
        expiring = [
            [each, Act(operation=Expire(id=id_of(each.operation) or ""), door="clock")] for each in new
        ]
        await self._play(expiring)
        await self._play([[Act(operation=Limit(caps=usual), door="http")]])

    async def _play_key(self) -> None:
        """Submit with an idempotency key, twice at the same time, and once more with another body."""
        user = self.chance.choice(USERS)
        self._numbers += 1
        key = f"key-{self._name}-{self._numbers}"
        wanted = Submit(id=key, owner=("http", *user), band=NORMAL)
        if self._queue.reached(wanted.owner):
            return
        first, second = await asyncio.gather(*(self.site.submit(wanted, key=key) for _ in range(2)))
        other = await self.site.submit(replace(wanted, band=NORMAL + 1), key=key)
        if (first.status, second.status, other.status) != (200, 200, 409):
            raise AssertionError(f"{key}: {first}, {second}, {other}")
        if (
            first.body["execution_id"] != second.body["execution_id"]
            or other.code != "idempotency_key_reused"
        ):
            raise AssertionError(f"{key}: {first}, {second}, {other}")
        operation = replace(wanted, id=first.body["execution_id"])
        self._scripts[operation.id] = key
        self._submitted[operation.id] = Act(operation=operation, door="known")
        await self._play([[Act(operation=operation, door="known")]])

    def _bring_back(self, ids: set[str]) -> None:
        """Let the queues have the ended requests that operations concern."""
        for id in ids & self._ended.keys():
            entry = self._ended.pop(id)
            self._beliefs = {queue.put(entry) for queue in self._beliefs}

    def _forget_ended(self) -> None:
        """Take the requests that have ended from the queues: nothing may change them any more."""
        for queue in self._beliefs:
            self._ended |= {each.id: each for each in queue.entries if each.state not in OPEN}
        self._beliefs = {
            Queue(queue.caps, frozenset(each for each in queue.entries if each.state in OPEN))
            for queue in self._beliefs
        }

    async def _settle(
        self,
        judge: Judge,
        chains: Sequence[Sequence[Operation]],
        answers: Mapping[int, str],
        *,
        faulty: bool,
    ) -> None:
        begun = time.monotonic()
        rest = Queue(self._caps, frozenset(self._ended.values()))
        while True:
            seen = await self.site.view()
            found = judge.agreeing(seen, positions=False)
            if found:
                seen = await self.site.with_positions(seen)
                found = judge.agreeing(seen)
            problems = [*self.site.journal.problems, *difference(rest, seen), *self._unknown(seen)]
            if found and not problems:
                break
            seconds = time.monotonic() - begun
            if problems or seconds > (FAULTY_SETTLE_SEC if faulty else SETTLE_SEC):
                seen = await self.site.with_positions(seen)
                raise AssertionError(
                    self._report_of(chains, answers, seconds, [*problems, *judge.differences(seen)])
                )
            await wait_seconds(0.05)
        self.site.journal.counts["rounds"] += 1
        self._beliefs = found
        self._caps = self._queue.caps
        for id in [*(each.id for each in self._queue.of(RUNS)), *self.site.journal.started_at]:
            self._active_since.setdefault(id, self.number)

    def _unknown(self, seen: Mapping[str, Seen]) -> list[str]:
        return [
            f"nobody has submitted {id}: {shown}" for id, shown in seen.items() if id not in self._submitted
        ]

    def _report_of(
        self,
        chains: Sequence[Sequence[Operation]],
        answers: Mapping[int, str],
        seconds: float,
        problems: Sequence[str],
    ) -> str:
        entries = sorted(self._queue.entries, key=lambda each: (each.state, each.place))
        lines = [
            f"{self.site.name}, round {self.number}, {seconds:.1f} s after its operations:",
            *(f"  {each}" for each in problems),
            f"the answers are {dict(answers)}",
            f"with the limits {vars(self._caps)} and the queue",
            *(f"  {each.place} {each.id} {each.owner} {each.state}" for each in entries),
            "the operations are",
            *(f"  {operation}" for chain in chains for operation in chain),
        ]
        return "\n".join(lines)

    # --- what happens

    async def _do_all(self, chain: Sequence[Act]) -> list[Done]:
        """Do the acts of a chain one after the other."""
        return [await self._do(act) for act in chain]

    async def _do(self, act: Act) -> Done:
        site, operation = self.site, act.operation
        match operation:
            case Submit():
                return await self._submit(act, operation)
            case Report():
                await self._report(act, operation)
            case Cancel(id=id) | Hidden(id=id):
                return Done(answer=await self._cancel(act, id))
            case Move():
                return Done(answer=await self._move(operation))
            case Limit(caps=caps):
                await site.set_limits(caps)
                await wait_seconds(LIMITS_SEC + 0.2)
        return Done(answer=None)

    async def _report(self, act: Act, operation: Report) -> None:
        if operation.id in self._tasks:
            self.site.journal.released_at.setdefault(operation.id, time.time())
        if act.door == "terminate":
            self._terminated.add(operation.id)
            await self.site.terminate(operation.id)
        elif operation.id in self._tasks:
            await self.site.decide(operation.id, "approve" if operation.state == "completed" else "reject")
        else:
            if act.door == "executor":
                await self.site.until_started(operation.id)
            await self.site.report(operation.state, operation.id, act.times)

    async def _submit(self, act: Act, wanted: Submit) -> Done:
        self.site.submits(wanted.id)
        if act.door == "known":
            return Done(answer=None)
        if act.door == "kafka":
            for _ in range(act.times):
                await self.site.send_request(wanted)
            return Done(answer=None, tries=act.times)
        if act.door == "python":
            text, tries = await self.site.submit_by_call(wanted)
            return Done(answer=text if tries == 1 or text == ACCEPTED else None, tries=tries)
        answer = await self.site.submit(wanted, actor=act.actor)
        if answer.status not in (200, 409, 429):
            self.site.journal.problems.append(f"{wanted} has the answer {answer}")
        known = ACCEPTED if answer.status == 200 else "taken" if answer.status == 409 else answer.code
        certain = answer.tries == 1 or known == ACCEPTED
        return Done(answer=known if certain else None, tries=answer.tries)

    async def _move(self, operation: Move) -> str | None:
        body = {"priority": BANDS[operation.band]}
        answer = await self.site.call("PUT", f"admin/executions/{operation.id}/priority", body)
        known = {200: "moved", 404: "unknown", 409: "not_waiting"}[answer.status]
        return known if answer.tries == 1 else None

    async def _cancel(self, act: Act, id: str) -> str | None:
        site = self.site
        if act.door == "kafka":
            await site.report("cancelled", id, act.times)
            return None
        if act.door == "python":
            site.journal.released_at.setdefault(id, time.time())
            return await site.cancel_by_call(id)
        if id in self._tasks and isinstance(act.operation, Cancel):
            site.journal.released_at.setdefault(id, time.time())
        answer = await site.call("POST", f"executions/{id}/cancel", {"reason": "test"}, actor=act.actor)
        if answer.status == 404:
            return "unknown"
        if answer.tries > 1:
            return None
        if answer.status == 400:
            return answer.code
        return {"cancellation_requested": "requested"}.get(answer.body["status"], answer.body["status"])

    # --- plans

    def _planned(self, kind: str, *, faulty: bool) -> list[list[Act]]:
        match kind:
            case "fill":
                return self._fill(faulty=faulty)
            case "release":
                return self._release()
            case "crowd":
                return self._crowd(faulty=faulty)
            case "limits":
                return [[Act(operation=Limit(caps=self._other_caps()), door="http")]]
            case _:
                return self._mixed(faulty=faulty)

    def _fill(self, *, faulty: bool) -> list[list[Act]]:
        """Return submissions of a few users, one after the other."""
        users = self.chance.sample(USERS, 2)
        door = self.chance.choice(DOORS)
        count = min(self.chance.randint(5, 9), _MOST_OPEN - len(self._queue.entries))
        new = [self._new(faulty=faulty, door=door, user=self.chance.choice(users)) for _ in range(count)]
        return [[replace(act, times=1) for act in new]]

    def _release(self) -> list[list[Act]]:
        """Return ends of most of what runs, at the same time."""
        running = self._queue.of(RUNS)
        some = self.chance.sample(running, min(len(running), self.chance.randint(2, 4)))
        return [[self._end_of(each)] for each in some] or [[self._new(faulty=False)]]

    def _crowd(self, *, faulty: bool) -> list[list[Act]]:
        """Return submissions, ends of what runs, and cancels of what waits, all at the same time."""
        new = [self._new(faulty=faulty) for _ in range(CROWD)]
        twins = self.chance.sample(new, CROWD // 5)
        ends = [self._end_of(each) for each in self._queue.of(RUNS) if self.chance.random() < 0.8]
        waiting = self._queue.of(WAITS)
        cancels = self.chance.sample(waiting, len(waiting) // 5)
        acts = [*new, *twins, *ends, *(act for each in cancels for act in self._cancel_of(each))]
        self._crowded |= {id for act in new if (id := id_of(act.operation))}
        return [[act] for act in self.chance.sample(acts, len(acts))]

    def _mixed(self, *, faulty: bool) -> list[list[Act]]:
        chains: list[list[Act]] = []
        used: set[str] = set()
        for _ in range(self.chance.randint(1, 4)):
            chain = self._chain(faulty=faulty)
            if chain and not {id_of(act.operation) for act in chain} & used:
                used |= {id for act in chain if (id := id_of(act.operation))}
                chains.append(chain)
                if isinstance(chain[0].operation, Submit) and self.chance.random() < 0.3:
                    chains.append([chain[0]])
        return chains

    def _chain(self, *, faulty: bool) -> list[Act]:
        """Return one random act, or none if there is nothing to do it with."""
        running = self._queue.of(RUNS)
        waiting = [each for each in self._queue.of(WAITS) if each.id not in self._crowded]
        pick, has_room = self.chance.choice, len(self._queue.entries) < _MOST_OPEN
        plans: list[tuple[float, Callable[[], list[Act]]]] = [
            (6.0 * has_room, lambda: [self._new(faulty=faulty)]),
            (6.0 * bool(running), lambda: [self._end_of(pick(running))]),
            (1.5 * bool(waiting), lambda: [self._move_of(pick(waiting))]),
            (1.0 * bool(waiting and not faulty), lambda: self._early(pick(waiting))),
            (2.5, lambda: self._cancel_of(self._any_entry())),
            (2.0, lambda: self._again(self._any_entry(), faulty=faulty)),
            (1.0, lambda: self._stranger(self._any_entry())),
            (1.0, lambda: self._theft(self._any_entry())),
            (1.0, self._late),
        ]
        [(_, plan)] = self.chance.choices(plans, [weight for weight, _ in plans])
        return plan()

    def _move_of(self, entry: Entry) -> Act:
        band = self.chance.randrange(len(BANDS))
        return Act(operation=Move(id=entry.id, band=band), door="http")

    def _any_entry(self) -> Entry | None:
        known = sorted([*self._queue.entries, *self._ended.values()], key=lambda each: each.id)
        return self.chance.choice(known) if known else None

    def _new(self, *, faulty: bool, door: str | None = None, user: tuple[str, str] | None = None) -> Act:
        """Return a submission with a new id. Executions have the same ids at all deployments."""
        door = door or self.chance.choice(DOORS)
        user = user or self.chance.choice(USERS)
        is_task = door == "python" or (door == "http" and self.chance.random() < 0.4)
        self._numbers += 1
        mark = ""
        if is_task and self.chance.random() < 0.3:
            mark = self.chance.choice(MARKS)
        elif not is_task and self.chance.random() < 0.15:
            mark = DEAF
        prefix = f"{self.site.name}-{self._name}" if is_task else self._name
        id = f"{prefix}{mark or '-'}{self._numbers}"
        reason = "start_failed" if mark == REFUSED else None
        if is_task and (taken := self._id_of_another_task()):
            id, reason = taken, "task_id_taken"
        if is_task:
            self._tasks.add(id)
        operation = Submit(
            id=id,
            owner=(door, *user),
            band=self.chance.choice([1, 2, 2, 2, 3, 4]),
            is_task=is_task,
            start_fails=reason,
            rejects_freely=faulty,
        )
        return self._by(operation)

    def _id_of_another_task(self) -> str | None:
        """Return, now and then, the id of a task that the other deployment has started."""
        if self.others is None or self.chance.random() > 0.15:
            return None
        started = [id for id, way in self.others.ways.items() if way.is_task and way.ran]
        free = sorted(id for id in started if id not in self._submitted and id not in self.others.borrowed)
        if not free:
            return None
        id = self.chance.choice(free)
        self.borrowed.add(id)
        return id

    def _by(self, operation: Submit) -> Act:
        """Return the act of a submission: users of the HTTP API may submit with tokens of their own."""
        door, tenant, user = operation.owner
        permitted = door == "http" and tenant == "default" and user.isdigit() and operation.band >= 2
        actor = user if permitted and self.chance.random() < 0.6 else None
        times = self.chance.choice([1, 1, 2]) if door == "kafka" else 1
        act = self._submitted[operation.id] = Act(operation=operation, door=door, actor=actor, times=times)
        return act

    def _again(self, entry: Entry | None, *, faulty: bool) -> list[Act]:
        """Return the submission of a request once more."""
        if entry is None or self._submitted[entry.id].door == "known":
            return []
        act = self._submitted[entry.id]
        assert isinstance(act.operation, Submit)
        return [replace(act, operation=replace(act.operation, rejects_freely=faulty))]

    def _theft(self, entry: Entry | None) -> list[Act]:
        """Return the submission of a request with the id of another user's."""
        if entry is None:
            return []
        door, user = self.chance.choice(["http", "kafka"]), self.chance.choice(USERS)
        if entry.owner == (door, *user):
            return []
        wanted = Submit(id=entry.id, owner=(door, *user), band=2, is_task=False)
        return [Act(operation=wanted, door=door)]

    def _stranger(self, entry: Entry | None) -> list[Act]:
        """Return the call of another actor that cancels a request, which it does not see."""
        if entry is None:
            return []
        actor = self.chance.choice([str(each) for each in ACTORS])
        if entry.owner == ("http", "default", actor):
            return []
        return [Act(operation=Hidden(id=entry.id), door="http", actor=actor)]

    def _cancel_of(self, entry: Entry | None) -> list[Act]:
        if entry is None or (entry.state in AGAIN):
            return []
        doors = ["http", "kafka"] + ["python"] * (entry.is_task and entry.owner[0] == "python")
        door = self.chance.choice(doors)
        operation = Cancel(id=entry.id, confirmed=door == "kafka" or DEAF not in entry.id)
        return [
            Act(operation=operation, door=door, times=self.chance.choice([1, 2]) if door == "kafka" else 1)
        ]

    def _end_of(self, entry: Entry) -> Act:
        states = ["completed", "completed", "failed"] + ["timeout"] * (not entry.is_task)
        operation = Report(id=entry.id, state=self.chance.choice(states))
        if entry.is_task and operation.state == "failed" and self.chance.random() < 0.3:
            return Act(operation=operation, door="terminate")
        return Act(operation=operation, door="executor", times=self.chance.choice([1, 1, 2]))

    def _late(self) -> list[Act]:
        """Return the report of an execution that has ended."""
        known = [each.id for each in self._ended.values() if not each.is_task and each.state not in AGAIN]
        if not known:
            return []
        state = self.chance.choice(["completed", "failed", "timeout", "cancelled"])
        return [Act(operation=Report(id=self.chance.choice(sorted(known)), state=state), door="late")]

    def _early(self, entry: Entry) -> list[Act]:
        """Return the report of an execution that waits, which has no effect."""
        if entry.is_task:
            return []
        state = self.chance.choice(["completed", "failed", "timeout"])
        return [Act(operation=Report(id=entry.id, state=state), door="early")]

    def _other_caps(self) -> Caps:
        """Return the limits with one that appears, changes or goes."""
        caps, chance = self._caps, self.chance
        match chance.choice(["active", "per user", "per user", "user", "user", "tenant", "total", "pending"]):
            case "active":
                return replace(caps, active=chance.choice([3, 5, 8, 12]))
            case "per user":
                others = [each for each in (None, 1, 2, 3) if each != caps.active_per_user]
                return replace(caps, active_per_user=chance.choice(others))
            case "user":
                tenant, user = chance.choice(USERS)
                name = chance.choice([user, f"{tenant}/{user}"])
                return replace(caps, users=changed(caps.users, name, Own(active=chance.choice([1, 2]))))
            case "tenant":
                tenant = chance.choice(["default", "shop"])
                own = Own(active=chance.choice([1, 2, 3]), total=chance.choice([None, 12]))
                return replace(caps, tenants=changed(caps.tenants, tenant, own))
            case "total":
                return replace(caps, per_user=chance.choice([4, 8, 20]))
            case _:
                return replace(caps, pending=chance.choice([10, 20, 40]))

    def _note_ways(self, operations: Sequence[Operation]) -> None:
        """Note what is certain about the requests after a round."""
        for entry in self._queue.entries:
            self.ways[entry.id] = way_after(self.ways.get(entry.id), entry, operations)

    # --- the end

    async def drain(self) -> None:
        """End everything, then check that every user can have its slots again."""
        await self._play([[Act(operation=Cancel(id=each.id), door="http") for each in self._queue.of(WAITS)]])
        while running := self._queue.of(RUNS):
            await self._play([[self._end_of(each)] for each in running[:4]])
        # A killed process holds places until its session is lost, which a limit of five would show.
        await eventually(self._is_empty, FAULTY_SETTLE_SEC)
        caps = Caps(active=len(USERS), active_per_user=1, per_user=1, pending=len(USERS))
        await self._play([[Act(operation=Limit(caps=caps), door="http")]])
        await self._play([[self._new(faulty=False, door="kafka", user=user) for user in USERS]])
        assert len(self._queue.of(RUNS)) == len(USERS), "the reference is wrong"
        while running := self._queue.of(RUNS):
            await self._play([[self._end_of(each)] for each in running[:3]])
        await eventually(self._is_empty, FAULTY_SETTLE_SEC)

    async def _is_empty(self) -> bool:
        shown = (await self.site.call("GET", "admin/executions/queue")).body
        names = ("queue_depth", "active_count", "in_doubt", "unsent_events")
        return not shown["top_users"] and not any(shown[name] for name in names)

    async def problems(self) -> list[str]:
        """Return what is wrong with the whole run, once everything has ended."""
        found: list[str] = []

        async def look() -> bool:
            found[:] = self._event_problems()
            return not found

        with suppress(AssertionError):
            await eventually(look, SETTLE_SEC)
        runs, more = await self._runs()
        return [*found, *more, *cap_problems(runs, self._valid), *self.site.journal.problems]

    def _event_problems(self) -> list[str]:
        events = self.site.journal.events
        known = [f"{id} is unknown, and has events" for id in events.keys() - self.ways.keys()]
        return known + [
            f"{self.site.name}: {id}: {problem}; {way}; {sorted((e.at, e.kind) for e in events[id].values())}"
            for id, way in self.ways.items()
            for problem in event_problems(way, [*events[id].values()])
        ]

    async def _runs(self) -> tuple[list[Run], list[str]]:
        """Return when requests surely had their slots, and what is wrong with the workflows of tasks."""
        journal, harness = self.site.journal, self.site.harness
        runs = [
            self._run(id, begin, journal.released_at[id])
            for id, begin in journal.started_at.items()
            if id in journal.released_at
        ]
        wrong = [
            f"{self.site.name}: the command of {id} has the script {script}"
            for id, script in journal.scripts.items()
            if script not in (self._scripts.get(id, id), requested(id)["script"])
        ]
        own = {id: way for id, way in self.ways.items() if way.is_task and id not in self.borrowed}
        client = await harness.client()
        found: list[WorkflowExecution] = []

        async def look() -> bool:
            query = f"TaskQueue = '{harness.queue}'"
            found[:] = [each async for each in client.list_workflows(query)]
            return len(found) >= sum(way.ran is True for way in own.values())

        with suppress(AssertionError):
            await eventually(look, SETTLE_SEC)
        counts = Counter(each.id for each in found)
        allowed = {True: {1}, False: {0}, None: {0, 1}}
        wrong += [
            f"{self.site.name}: {counts[id]} workflows of {id}: {way}"
            for id, way in own.items()
            if counts[id] not in allowed[way.ran]
        ]
        wrong += [
            f"{self.site.name}: the workflow {id} is of no request" for id in counts.keys() - own.keys()
        ]
        runs += [
            self._run(each.id, each.start_time.timestamp(), journal.released_at[each.id])
            for each in found
            if each.id in journal.released_at and each.id in self._active_since
        ]
        return runs, wrong + await self._result_problems(own)

    async def _result_problems(self, own: Mapping[str, Way]) -> list[str]:
        """Compare each request with the document of its task."""
        ends = {"finished": "completed", "failed": "failed", "cancelled": "cancelled"}
        query = {"id": {"$in": [*own]}}
        shown = {"id": 1, "status": 1, "params": 1}
        return [
            f"{self.site.name}: the task {task} has the request {own[task['id']]}"
            async for task in self.site.harness.db.tasks.find(query, shown)
            if task["id"] not in self._terminated
            and (own[task["id"]].state != ends.get(task["status"]) or task["params"] != {"value": task["id"]})
        ]

    def _run(self, id: str, begin: float, end: float) -> Run:
        operation = self._submitted[id].operation
        assert isinstance(operation, Submit)
        return Run(id=id, owner=operation.owner, begin=begin, end=end, round=self._active_since[id])


def is_sent_again(act: Act) -> bool:
    """Return whether a record asks once more for a request, which may be queued long after it was rejected."""
    return act.door == "kafka" and isinstance(act.operation, Submit) and act.times > 1


def id_of(operation: Operation) -> str | None:
    """Return the id of the request that an operation concerns."""
    found: str | None = getattr(operation, "id", None)
    return found


def changed(own: Mapping[str, Own], name: str, other: Own) -> dict[str, Own]:
    """Return limits without those of a name, or with others if it has none."""
    rest = {key: value for key, value in own.items() if key != name}
    return rest if len(rest) < len(own) else rest | {name: other}
