"""Supervisors that write down what they receive and run, and that misbehave as the seed says."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from flowkit.testing.supervisor import Misbehavior, Supervisor
from tests.integration.flow_model.records import Delivery, Execution, wire_id

if TYPE_CHECKING:
    from flowkit.testing.supervisor import KnownJob, Message

SHORT_SEC: Final = 2.0
"""Timeout of jobs that never get a reply in time."""
SYNC_SEC: Final = 50.0
POLL_SEC: Final = 90.0
"""Timeouts of jobs: up to a minute, the gateway waits for the reply to `job.run`; above, it asks for the status."""
MYCELIUM_DIGIT: Final = 3
"""Last digit of the ids of jobs whose supervisor is behind Mycelium."""

_REFUSALS: Final = (Misbehavior.DISCONNECT, Misbehavior.STATUS_500)
_INTERRUPTIONS: Final = (*_REFUSALS, Misbehavior.RUN_THEN_DISCONNECT)
"""After these, the job is sent again with the same id."""
_BAD_REPLIES: Final = (
    Misbehavior.ERROR,
    Misbehavior.TELLS_SECRET,
    Misbehavior.NO_JSON,
    Misbehavior.OTHER_REQUEST,
    Misbehavior.REDIRECT,
)
_BAD_OUTCOMES: Final = (Misbehavior.NO_OUTCOME, Misbehavior.HUGE, Misbehavior.COMPRESSED, Misbehavior.ENDLESS)
"""Bad replies to `job.run`: other replies have no outcome, and are small."""
_NO_REPLIES: Final = (Misbehavior.HANG, Misbehavior.DISCONNECT, Misbehavior.TRICKLE)
_MYCELIUM_GOOD: Final = (None, None, Misbehavior.TWICE, Misbehavior.LATE)
_MYCELIUM_BAD: Final = (Misbehavior.ERROR, Misbehavior.NO_JSON, Misbehavior.NO_OUTCOME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What goes wrong with the deliveries of one attempt, and how it ends."""

    first: tuple[Misbehavior, ...] = ()
    """With its first deliveries."""
    then: Misbehavior | None = None
    """With all further ones."""
    succeeds: bool = True


def fate(seed: int, id: str, timeout: float) -> Fate:
    """Return the fate of an attempt, always the same one for a job, a run and an attempt of it."""
    wire = wire_id(id)
    chance = random.Random(f"{seed}-{wire.job}-{wire.run}-{wire.generation}-{wire.retry}")
    fails = chance.random() < 0.25
    if wire.job % 10 == MYCELIUM_DIGIT:
        return _mycelium_fate(chance, timeout, fails=fails)
    if timeout <= SHORT_SEC:
        return Fate(then=chance.choice(_NO_REPLIES), succeeds=False)
    first = tuple(chance.choices(_INTERRUPTIONS, k=chance.choice([0, 0, 0, 1, 2])))
    if not fails:
        return Fate(first=first, then=chance.choice([None, None, Misbehavior.COOKIES]))
    bad = _BAD_REPLIES + (_BAD_OUTCOMES if timeout == SYNC_SEC and chance.random() < 0.3 else ())
    return Fate(first=first, then=chance.choice(bad), succeeds=False)


def _mycelium_fate(chance: random.Random, timeout: float, *, fails: bool) -> Fate:
    if timeout <= SHORT_SEC:
        return Fate(then=Misbehavior.HANG, succeeds=False)
    return Fate(then=chance.choice(_MYCELIUM_BAD if fails else _MYCELIUM_GOOD), succeeds=not fails)


@dataclass
class RecordingSupervisor(Supervisor):
    """A supervisor of one tenant. `seed` chooses what it does wrong; None for nothing."""

    seed: int | None = None
    deliveries: list[Delivery] = field(default_factory=list)
    journal: list[Execution] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def _next_misbehavior(self, message: Message) -> Misbehavior | None:
        given = message.get("params") or {}
        params = given[0] if isinstance(given, list) else given
        job = params.get("job")
        if job is None or message["method"] not in self._methods():
            return None
        planned = Fate() if self.seed is None else fate(self.seed, job["id"], job["timeout"])
        before = sum(each.id == job["id"] for each in self.deliveries)
        how = planned.first[before] if before < len(planned.first) else planned.then
        secret = params.get("secret")
        delivery = Delivery(
            id=job["id"],
            at=time.monotonic(),
            job=job,
            secret=secret,
            accepted=how not in _REFUSALS,
            succeeds=planned.succeeds and not job["payload"].startswith("fail:") and secret in self.secrets,
        )
        self.deliveries.append(delivery)
        return how

    async def _execute(self, known: KnownJob) -> Message:
        """Run a job. Its result is a text that no other execution has."""
        id = known.job["id"]
        execution = Execution(id=id, token=f"result {next(self._numbers)} of {id}", begun=time.monotonic())
        self.journal.append(execution)
        outcome: dict[str, Any] = await super()._execute(known)
        execution.ended = time.monotonic()
        return {"success": execution.token} if "success" in outcome else outcome
