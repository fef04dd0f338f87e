"""The messages that a worker sends: their fields in the documented order, their topics, keys and ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flowkit.testing.external.protocol import Fields, Incoming, compact, jsonable, new_id, stable_hash

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.testing.external.runs import Run
    from flowkit.testing.external.settings import Clock, ExternalSettings

FINAL_UID = "__final__"
TERMINAL = frozenset({"TASK_DONE", "TASK_FAILED", "CANCELLED"})


@dataclass(frozen=True)
class Outgoing:
    """A message before it is sent."""

    topic: str
    key: str | None
    message: Fields

    @property
    def kind(self) -> str:
        """The kind of an event, announcement or reply."""
        payload = self.message["payload"]
        return str(payload.get("kind") or payload.get("reply"))

    @property
    def value(self) -> bytes:
        """The record's value."""
        return compact(self.message)


@dataclass(frozen=True)
class MessageBuilder:
    """Builds the messages of one worker."""

    worker_id: str
    settings: ExternalSettings
    clock: Clock
    epoch_shift: Callable[[], int] = int
    """Returns a number that is added to the epoch of every event; see `Misbehavior.epoch_shift`."""
    new_corr_id: Callable[[], str] = new_id

    def accepted(self, run: Run) -> Outgoing:
        """Return TASK_ACCEPTED."""
        return self._event(run, "TASK_ACCEPTED", "acc", {"lease": run.lease_id}, self._lease(run))

    def heartbeat(self, run: Run, role: str) -> Outgoing:
        """Return TASK_HEARTBEAT for the status topic of `role`, which differs from the run's role after H15."""
        interval = max(1, self.settings.hb_interval_ms)
        bucket = {"t": self.clock.now_ms() // interval}
        beat = self._event(run, "TASK_HEARTBEAT", "hb", bucket, self._lease(run))
        message = {**beat.message, "step_type": role}
        return replace(beat, topic=self.settings.topic_status(role), message=message)

    def batch_ok(self, run: Run, uid: str, metrics: Fields, ref: Fields | None) -> Outgoing:
        """Return BATCH_OK."""
        fields = {"batch_uid": uid, "metrics": metrics, "artifacts_ref": ref}
        return self._event(run, "BATCH_OK", "bok", {"uid": uid}, fields)

    def batch_failed(self, run: Run, uid: str, failure: Fields) -> Outgoing:
        """Return BATCH_FAILED; `failure` has `reason_code`, `permanent` and `error`."""
        fields = {"batch_uid": uid, **failure, "artifacts_ref": {"batch_uid": uid}}
        return self._event(run, "BATCH_FAILED", "bf", {"uid": uid}, fields)

    def done(self, run: Run, metrics: Fields, ref: Fields | None) -> Outgoing:
        """Return TASK_DONE."""
        own = {"task_id": run.task_id, "node_id": run.node_id}
        fields = {"metrics": metrics, "artifacts_ref": ref or own, "final_uid": FINAL_UID}
        return self._event(run, "TASK_DONE", "td", {}, fields)

    def failed(self, run: Run, failure: Fields) -> Outgoing:
        """Return TASK_FAILED; `failure` has `reason_code`, `permanent` and `error`."""
        hashed = {"r": failure["reason_code"], "p": failure["permanent"]}
        return self._event(run, "TASK_FAILED", "tf", hashed, failure)

    def cancelled(self, run: Run) -> Outgoing:
        """Return CANCELLED."""
        return self._event(run, "CANCELLED", "c", {}, {"reason": "cancelled"})

    def online(self, roles: list[str], resume: Fields | None, *, first: bool) -> Outgoing:
        """Return WORKER_ONLINE. Only the first announcement contains `capabilities` and `resume`."""
        payload: Fields = {"kind": "WORKER_ONLINE", "worker_id": self.worker_id, "type": ",".join(roles)}
        if first:
            payload["capabilities"] = {"roles": list(roles)}
        payload |= {"version": self.settings.worker_version, "capacity": {"tasks": 1}}
        if first:
            payload["resume"] = resume
        return self._announce(payload)

    def offline(self) -> Outgoing:
        """Return WORKER_OFFLINE."""
        return self._announce({"kind": "WORKER_OFFLINE", "worker_id": self.worker_id})

    def snapshot(self, query: Incoming, run: Run | None, *, complete: bool) -> Outgoing:
        """Return the reply to TASK_DISCOVER. `run` is the worker's run of that node, or None."""
        hashed = {"snap": query.task_id, "n": query.node_id, "e": query.attempt_epoch, "w": self.worker_id}
        payload = self._held(run) if run else _not_held(complete)
        envelope = _envelope(
            "reply", query.corr_id, stable_hash(hashed), _place(query, query.attempt_epoch), payload
        )
        return Outgoing(self.settings.topic_reply, query.task_id, {**envelope, "ts_ms": self.clock.now_ms()})

    def _held(self, run: Run) -> Fields:
        deadline = self.clock.now_ms() + self.settings.lease_ttl_ms
        return {
            "reply": "TASK_SNAPSHOT",
            "worker_id": self.worker_id,
            "run_state": "cancelling" if run.cancel_flag.is_set() else "running",
            "attempt_epoch": run.attempt_epoch,
            "lease": {"worker_id": self.worker_id, "lease_id": run.lease_id, "deadline_ts_ms": deadline},
            "progress": {},
            "artifacts": None,
        }

    def _lease(self, run: Run) -> Fields:
        deadline = self.clock.now_ms() + self.settings.lease_ttl_ms
        return {"lease_id": run.lease_id, "lease_deadline_ts_ms": deadline}

    def _event(self, run: Run, kind: str, short: str, hashed: Fields, fields: Fields) -> Outgoing:
        epoch = run.attempt_epoch + self.epoch_shift()
        dedup = stable_hash({short: run.task_id, "n": run.node_id, "e": epoch, **hashed})
        payload = jsonable({"kind": kind, "worker_id": self.worker_id, **fields})
        envelope = _envelope("event", self.new_corr_id(), dedup, _place(run, epoch), payload)
        topic = self.settings.topic_status(run.step_type)
        message = {**envelope, "ts_ms": self.clock.now_ms()}
        return Outgoing(topic, f"{run.task_id}:{run.node_id}", message)

    def _announce(self, payload: Fields) -> Outgoing:
        now = self.clock.now_ms()
        dedup = stable_hash({"announce": payload["kind"], "worker": self.worker_id, "ts_ms": now})
        everywhere = {"task_id": "*", "node_id": "*", "step_type": "*", "attempt_epoch": 0}
        envelope = _envelope("event", self.new_corr_id(), dedup, everywhere, payload)
        return Outgoing(self.settings.topic_worker_announce, None, {**envelope, "ts_ms": now})


def _not_held(complete: bool) -> Fields:
    return {
        "reply": "TASK_SNAPSHOT",
        "worker_id": None,
        "run_state": "idle",
        "attempt_epoch": 0,
        "lease": None,
        "progress": None,
        "artifacts": {"complete": True} if complete else None,
    }


def _place(source: Run | Incoming, epoch: int) -> Fields:
    return {
        "task_id": source.task_id,
        "node_id": source.node_id,
        "step_type": source.step_type,
        "attempt_epoch": epoch,
    }


def _envelope(msg_type: str, corr_id: str, dedup: str, place: Fields, payload: Fields) -> Fields:
    """Return an envelope in the order of the protocol. The caller fills `ts_ms`."""
    return {
        "v": 1,
        "msg_type": msg_type,
        "role": "worker",
        "corr_id": corr_id,
        "dedup_id": dedup,
        **place,
        "ts_ms": 0,
        "payload": payload,
        "target_worker_id": None,
    }
