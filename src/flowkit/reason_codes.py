"""Reason codes: the codes of errors, of ended attempts and of ended tasks; docs/errors.md describes each.

They are plain strings and no enumeration, because handlers return codes of their own. Histories and documents contain
them, so never change a value.
"""

from __future__ import annotations

from typing import Final

# --- errors of FlowKit --------------------------------------------------------------------------------------------

FLOWKIT_ERROR: Final = "flowkit_error"
INVALID_GRAPH: Final = "invalid_graph"
CONDITIONS_TOO_LARGE: Final = "conditions_too_large"
INVALID_CONFIG: Final = "invalid_config"
REMOVED: Final = "removed"
MONGO_UNAVAILABLE: Final = "mongo_unavailable"
MONGO_DENIED: Final = "mongo_denied"
MONGO_REFUSED: Final = "mongo_refused"
DOCUMENT_TOO_LARGE: Final = "document_too_large"
KAFKA_UNAVAILABLE: Final = "kafka_unavailable"
KAFKA_SEND_UNCERTAIN: Final = "kafka_send_uncertain"
COMMAND_TOO_LARGE: Final = "command_too_large"
TEMPORAL_UNAVAILABLE: Final = "temporal_unavailable"
FENCED: Final = "fenced"
EPOCH_TAKEN: Final = "epoch_taken"
ACTION_REJECTED: Final = "action_rejected"
ADMISSION_REJECTED: Final = "admission_rejected"
TASK_ID_TAKEN: Final = "task_id_taken"
CANCEL_PENDING: Final = "cancel_pending"
ROLE_HELD: Final = "role_held"
WRONG_DATABASE: Final = "wrong_database"
BAD_INPUT_ARGS: Final = "bad_input_args"
BAD_CONDITION: Final = "bad_condition"
TOO_MANY_FAILED_BATCHES: Final = "too_many_failed_batches"
BAD_EXPRESSION: Final = "bad_expression"
ADAPTER_ERROR: Final = "adapter_error"
BATCH_TOO_LARGE: Final = "batch_too_large"
BAD_METRICS: Final = "bad_metrics"
BAD_VARS: Final = "bad_vars"
BAD_BATCH_UID: Final = "bad_batch_uid"
TASK_STILL_OPEN: Final = "task_still_open"
UNKNOWN_TASK: Final = "unknown_task"
TASK_FAILED: Final = "task_failed"
TASK_CANCELLED: Final = "task_cancelled"

LOCAL_SERVER: Final = "local_server"
FOLDER_IN_USE: Final = "folder_in_use"
FOLDER_NOT_WRITABLE: Final = "folder_not_writable"
DISK_FULL: Final = "disk_full"
PORT_IN_USE: Final = "port_in_use"
INSTALL_FAILED: Final = "install_failed"
PROGRAM_MISSING: Final = "program_missing"
NO_NETWORK: Final = "no_network"
WRONG_HASH: Final = "wrong_hash"
SERVER_NOT_READY: Final = "server_not_ready"
PROCESS_MISUSED: Final = "process_misused"
SERVER_ENDED: Final = "server_ended"

# --- ends of attempts ---------------------------------------------------------------------------------------------

BAD_INPUT: Final = "bad_input"
BAD_INPUT_ADAPTER: Final = "bad_input_adapter"
SCHEMA_MISMATCH: Final = "schema_mismatch"
"""Never raised by FlowKit. The default of `permanent_on` contains it for handlers to use."""
ERROR: Final = "error"
"""The code of a handler's result with `success=False` and no code."""
UNEXPECTED_ERROR: Final = "unexpected_error"
TIMEOUT: Final = "timeout"
DEADLINE_EXCEEDED: Final = "deadline_exceeded"
HEARTBEAT_TIMEOUT: Final = "heartbeat_timeout"
CANCELLED_BY_WORKER: Final = "cancelled_by_worker"
CANCEL_REFUSED: Final = "cancel_refused"
DISPATCH_LOST: Final = "dispatch_lost"
UNCLAIMED_BATCHES: Final = "unclaimed_batches"
BATCH_UID_CLASH: Final = "batch_uid_clash"
DUPLICATE_UID: Final = "duplicate_uid"
STALE_EPOCH: Final = "stale_epoch"
BRIDGE_STOPPING: Final = "bridge_stopping"
LEASE_LOST: Final = "lease_lost"
WORKER_LOST: Final = "worker_lost"
WORKER_PROCESS_DIED: Final = "worker_process_died"
WORKER_SHUTDOWN: Final = "worker_shutdown"
YIELDED: Final = "yielded"
UPSTREAM_FAILED: Final = "upstream_failed"
"""The code of a node that a batch has started and whose parents failed later. The skip reason has the same name."""
NOT_LOCAL: Final = "not_local"
INTERRUPTED: Final = "interrupted"
"""The code and the cancel reason of an attempt that a pause has stopped."""
RERUN_OUTDATED: Final = "rerun_outdated"
REJECTED: Final = "rejected"
"""The code of an approval that a person, or its deadline, has rejected."""
FAILED_BY_USER: Final = "failed_by_user"
"""The code of a node that an operator has failed."""
VERSION_PINNED: Final = "version_pinned"

# --- jobs of flows --------------------------------------------------------------------------------------------------

JOB_FAILED: Final = "job_failed"
NO_RUNNER: Final = "no_runner"
SUPERVISOR_UNREACHABLE: Final = "supervisor_unreachable"
SUPERVISOR_TIMEOUT: Final = "supervisor_timeout"
SUPERVISOR_NOT_ALLOWED: Final = "supervisor_not_allowed"
BAD_REPLY: Final = "bad_reply"

GATEWAY_UNAVAILABLE: Final = "gateway_unavailable"
CALL_FAILED: Final = "call_failed"

# --- requests for admission -------------------------------------------------------------------------------------------

QUEUE_FULL: Final = "queue_full"
USER_LIMIT: Final = "user_limit"
TENANT_LIMIT: Final = "tenant_limit"
STALE: Final = "stale"
START_FAILED: Final = "start_failed"

# --- ends of tasks ------------------------------------------------------------------------------------------------

TERMINATED: Final = "terminated"
TIMED_OUT: Final = "timed_out"
LOST: Final = "lost"
"""Temporal no longer knows the workflow of the task, or the workflow ended without closing the document."""

USER_REQUEST: Final = "user_request"
"""The cancel reason of a request without a reason."""
DB_FLAG: Final = "db_flag"
"""The cancel reason for a direct write to the document that contains no reason."""
DEADLINE: Final = "deadline"
"""The cancel reason of a node or a task that has exceeded its deadline."""
SILENCE: Final = "silence"
"""The cancel reason of a node whose attempt sent no heartbeat for `heartbeat_hard_sec`."""
HARD_FAIL: Final = "hard_fail"
"""The cancel reason of a task with a failed node. A colon and the reason code of the node follow."""
