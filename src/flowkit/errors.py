"""The errors that FlowKit raises.

The first line of a class's docstring is its default message.

* FlowKitError
    + GraphError (also ValueError)
        + ConditionsTooLarge
    + ChecksBusy                retryable
    + ConfigError (also ValueError)
    + Removed (also AttributeError)
    + StoreUnavailable          retryable
        + StoreDenied           retryable
    + StoreRefused
        + StoreTooLarge
    + KafkaUnavailable          retryable
    + SendUncertain
    + CommandTooLarge
    + Fenced
    + EpochTaken
    + ActionRejected
    + ActionUnanswered (also TimeoutError)
    + AdmissionRejected
    + TaskIdTaken
    + RerunOutdated
    + WrongDeployment
    + UnknownTask (also LookupError)
    + TaskFailed
    + TaskCancelled
    + TaskStillOpen (also TimeoutError)
    + BadInput
    + BadCondition
    + BadExpression
    + AdapterError
        + BadVars
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from flowkit import reason_codes


class FlowKitError(Exception):
    """An error in FlowKit."""

    retryable: ClassVar[bool] = False
    """Whether the same call may succeed later without changes."""

    code: ClassVar[str] = reason_codes.FLOWKIT_ERROR
    """The reason code, which Temporal's Web UI shows as the type of the error."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip().partition("\n")[0])


class GraphError(FlowKitError, ValueError):
    """A graph, its params or its task id is invalid; `problems` lists the reasons."""

    code = reason_codes.INVALID_GRAPH

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        shown = problems[:10]
        if len(problems) > len(shown):
            shown.append("and more")
        super().__init__("; ".join(shown))


class ConditionsTooLarge(GraphError):
    """The expressions of all conditions of a graph together are too large."""

    code = reason_codes.CONDITIONS_TOO_LARGE


class ChecksBusy(FlowKitError):
    """The check of params against graph.params_schema did not get a processor in time."""

    retryable = True
    code = reason_codes.CHECKS_BUSY


class ConfigError(FlowKitError, ValueError):
    """A setting or an argument is unknown or has a value that is not allowed."""

    code = reason_codes.INVALID_CONFIG


class Removed(FlowKitError, AttributeError):
    """FlowKit no longer has this attribute; the message names its replacement."""

    code = reason_codes.REMOVED


class StoreUnavailable(FlowKitError):
    """MongoDB is unavailable."""

    retryable = True
    code = reason_codes.MONGO_UNAVAILABLE


class RoleHeld(FlowKitError):
    """The processes of the other kind, native workers or bridges, hold the lease of a role."""

    retryable = True
    code = reason_codes.ROLE_HELD


class VersionPinned(FlowKitError):
    """The task runs the role with another version of its handler (`version_policy`)."""

    code = reason_codes.VERSION_PINNED

    def __init__(self, role: str, own: str, pinned: str) -> None:
        self.pinned = pinned
        super().__init__(
            f"the task has fixed version {pinned} of the handler of role {role}, and this worker has "
            f"version {own}; a worker "
            "with that version continues"
        )


class StoreDenied(StoreUnavailable):
    """MongoDB denies access: the user cannot log in or lacks a role."""

    code = reason_codes.MONGO_DENIED


class StoreRefused(FlowKitError):
    """MongoDB rejected a write; a retry does not help."""

    code = reason_codes.MONGO_REFUSED


class DocumentUnreadable(FlowKitError):
    """A task document has not the form that this version of FlowKit writes."""

    code = reason_codes.DOCUMENT_UNREADABLE


class StoreTooLarge(StoreRefused):
    """A document would exceed MongoDB's limit of 16 MB."""

    code = reason_codes.DOCUMENT_TOO_LARGE


class KafkaUnavailable(FlowKitError):
    """Kafka does not respond, or refuses the client or what it asks for."""

    retryable = True
    code = reason_codes.KAFKA_UNAVAILABLE


class SendUncertain(FlowKitError):
    """Kafka may or may not have stored a record, so sending it again could store it twice."""

    code = reason_codes.KAFKA_SEND_UNCERTAIN


class CommandTooLarge(FlowKitError):
    """A command for an external worker is larger than Kafka accepts."""

    code = reason_codes.COMMAND_TOO_LARGE


class Fenced(FlowKitError):
    """The attempt is outdated: a newer attempt of the node has begun, or the task has ended."""

    code = reason_codes.FENCED


class EpochTaken(FlowKitError):
    """Another run has already used this epoch of the node."""

    code = reason_codes.EPOCH_TAKEN

    def __init__(self, current: int) -> None:
        self.current = current
        super().__init__(f"the node is already at epoch {current}")


class RejectionCause(StrEnum):
    """Why a task rejects an action."""

    NOT_ALLOWED = "not_allowed"
    """The task, or a node of it, is in a state in which the action is not allowed, or the cause is not known."""
    INVALID = "invalid"
    """The input of the action is not valid."""
    UNKNOWN = "unknown"
    """The task has no such node, scope, batch or prerequisite."""
    ALREADY_SATISFIED = "already_satisfied"
    """The prerequisite is satisfied already."""
    OUTDATED = "outdated"
    """The task does not have the revision that the action expects."""
    BUSY = "busy"
    """The task is not ready for the action yet; the same action may be allowed later."""
    ENDED = "ended"
    """The task has ended or is ending."""
    TAKEN = "taken"
    """The task has a node with the id of a node that the action would add."""


class ActionRejected(FlowKitError):
    """The task does not allow this action; the message says why, and what is allowed."""

    code = reason_codes.ACTION_REJECTED

    def __init__(
        self, message: str | None = None, cause: RejectionCause = RejectionCause.NOT_ALLOWED
    ) -> None:
        self.cause = cause
        """Why the task rejects the action, for programs."""
        super().__init__(message)


class ActionUnanswered(FlowKitError, TimeoutError):
    """No engine has applied the action within the timeout of the call, and it may still be applied; or no engine has
    answered its preview, which changes nothing.
    """

    code = reason_codes.ACTION_UNANSWERED

    def __init__(self, task_id: str, action: str, timeout: float, *, preview: bool = False) -> None:
        self.task_id = task_id
        text = (
            f"no engine has answered within {timeout:g} s what {action} would change in task {task_id!r}; nothing has "
            "changed: check that an engine runs, and try again"
            if preview
            else f"no engine has applied {action} to task {task_id!r} within {timeout:g} s, and it may be applied "
            "later; check that an engine runs, and look at the task before you repeat the action"
        )
        super().__init__(text)


class AdmissionRejected(FlowKitError):
    """The admission queue has no place for the request; the message says which limit is reached."""

    code = reason_codes.ADMISSION_REJECTED

    def __init__(self, message: str, reason: str, retry_after_sec: float | None) -> None:
        later = "" if retry_after_sec is None else f"; try again in {retry_after_sec:g} s"
        super().__init__(f"{message} ({reason}){later}")
        self.reason = reason
        """The reason code: `queue_full`, `user_limit` or `tenant_limit`."""
        self.retry_after_sec = retry_after_sec


class TaskIdTaken(FlowKitError):
    """Another task, or the request of another user, has already used this id; choose a new one."""

    code = reason_codes.TASK_ID_TAKEN


class RerunOutdated(FlowKitError):
    """The run that a rerun continues is no longer the latest one of the task."""

    code = reason_codes.RERUN_OUTDATED

    def __init__(self, task_id: str, run_seq: int) -> None:
        super().__init__(
            f"task {task_id!r} is not at run {run_seq} any more: another rerun has started meanwhile, "
            "or its document is "
            "gone; look at the task, and repeat the rerun if it is still needed"
        )


class WrongDeployment(FlowKitError):
    """The worker uses a different database than the engine that opened the task."""

    code = reason_codes.WRONG_DATABASE


class BadInput(FlowKitError):
    """A node's input adapter or its arguments are invalid."""

    code = reason_codes.BAD_INPUT_ARGS

    def __init__(self, message: str, code: str = reason_codes.BAD_INPUT_ARGS) -> None:
        self.reason_code = code
        super().__init__(message)


class BadCondition(FlowKitError):
    """A condition (`when`) is not a valid expression, or cannot be evaluated."""

    code = reason_codes.BAD_CONDITION


class BadExpression(FlowKitError):
    """An expression (`$cel`) in the input of a node cannot be evaluated, or its value cannot be used."""

    code = reason_codes.BAD_EXPRESSION


class AdapterError(FlowKitError):
    """A coordinator function cannot perform the operation; a retry does not help."""

    code = reason_codes.ADAPTER_ERROR


class BadVars(AdapterError):
    """The variables that `finalize` returned cannot be changed as it requests."""

    code = reason_codes.BAD_VARS


class UnknownTask(FlowKitError, LookupError):
    """No task has this id, or Temporal has no workflow for it."""

    code = reason_codes.UNKNOWN_TASK

    def __init__(self, task_id: str, message: str | None = None) -> None:
        self.task_id = task_id
        super().__init__(message or f"there is no task {task_id!r}")


class TaskFailed(FlowKitError):
    """The task whose result was requested has failed."""

    code = reason_codes.TASK_FAILED

    def __init__(self, task_id: str, reason: str, cause: str = reason_codes.TASK_FAILED) -> None:
        self.task_id = task_id
        self.reason = reason
        self.cause = cause
        """`task_failed`, `invalid_graph`, `task_id_taken`, `terminated` or `timed_out`; or why a task that waited for
        admission has not started: `stale` or `start_failed`."""
        super().__init__(f"task {task_id!r} failed: {reason}")


class TaskCancelled(FlowKitError):
    """The task whose result was requested was cancelled."""

    code = reason_codes.TASK_CANCELLED

    def __init__(self, task_id: str, reason: str | None = None) -> None:
        self.task_id = task_id
        self.reason = reason
        super().__init__(f"task {task_id!r} was cancelled" + (f": {reason}" if reason else ""))


class TaskStillOpen(FlowKitError, TimeoutError):
    """The task did not end within the timeout of the call. The task continues."""

    code = reason_codes.TASK_STILL_OPEN

    def __init__(self, task_id: str, timeout: float) -> None:
        self.task_id = task_id
        super().__init__(f"task {task_id!r} did not end within {timeout:g} s; it continues")
