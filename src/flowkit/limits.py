"""Size limits of FlowKit; docs/limits.md describes them for users.

Sizes are bytes of UTF-8 JSON unless the name or the text says otherwise. They keep a task well below the hard limits
of Temporal (2 MB per payload, 50 MB per history) and MongoDB (16 MB per document).
"""

from __future__ import annotations

import re

TASK_INPUT_BYTES = 1_000_000
"""Largest graph and params together in the input of a workflow. `create_task` stores larger ones in MongoDB."""

INPUT_NODES = 5_000
"""Largest number of nodes that `create_task` passes in the input of a workflow. It stores larger graphs in MongoDB."""

INPUT_PARAMS_BYTES = 250_000
"""Largest params that `create_task` passes in the input of a workflow. It stores larger ones in MongoDB,
with the graph.

They would be in the history and several times in the memory of the engine.
"""

TASK_DOCUMENT_BYTES = 12_000_000
"""Largest BSON size of a task document that `create_task` accepts, including the state that its nodes will have."""

NODE_STATE_BYTES = 450
"""BSON size of the state that FlowKit stores for a node in the task document, as counted for TASK_DOCUMENT_BYTES."""

STORED_PART_BYTES = 1_000_000
"""Largest part of a stored graph. Each part is the result of one activity, which Temporal limits to 2 MB."""

LARGE_DOCUMENT_BYTES = 250_000
"""BSON size of a task document from which concurrent attempts wait for each other to share their writes."""

FILE_BYTES = 64_000_000
"""Largest JSON or YAML file that a command reads."""

YAML_VALUES = 2_000_000
"""Most values of a YAML text. An alias counts as what it stands for."""

YAML_LEVELS = 200
"""Most levels of nesting of a YAML text, as of a JSON text."""

DOCUMENT_LEVELS = 100
"""Nesting levels of a MongoDB document. The document itself is the first; each nested object or list adds one."""

DOCUMENT_BYTES = 16_777_216
"""Largest BSON size of a MongoDB document."""

NODE_IO_BYTES = 64_000
"""Largest `io` of one node."""

MAX_NODES = 20_000
"""Maximum number of nodes in a graph; `CoordinatorConfig.max_nodes` overrides it."""

EXTERNAL_NODES = 5_000
"""Maximum number of nodes in a graph with external roles, whose workers read the task document twice a second."""

MAX_RETRIES = 10_000
"""Largest `retry_policy.max` of a node."""

CONDITION_CHARS = 2_000
"""Longest expression in the `when` of a node or of an edge."""

CONDITIONS_BYTES = 512_000
"""Largest text of all expressions of a graph together, in bytes of UTF-8. Equal expressions count once."""

SCHEDULE_EXPRESSIONS = 100
"""Largest number of expressions in the params of a schedule."""

SCHEDULE_HISTORY = 500
"""Most nominal times that one call returns of the history of a schedule."""

BACKFILL_TIMES = 10_000
"""Largest number of nominal times of a backfill."""

BACKFILL_ACTIVE = 100
"""Largest number of tasks of a backfill that run at once."""

CONDITION_VALUES_BYTES = 1_000_000
"""Largest values that one condition reads, together."""

EXPRESSION_VALUE_BYTES = 64_000
"""Largest value of one expression in the input of a node, in bytes of JSON."""

EXPRESSION_VALUES_BYTES = 1_000_000
"""Largest values of all expressions of one node together, in bytes of JSON."""

CONDITION_SEC = 2.0
"""Most processor time that the evaluation of one condition may take, in seconds."""

CONDITIONS_SEC = 60.0
"""Most time that the evaluation of conditions which become due together may take, in seconds."""

PARAMS_SCHEMA_SEC = 0.5
PARAMS_SCHEMA_SEC_PER_MB = 3.0
"""Most processor time for the check of params against `params_schema`, in seconds, and the time added for
each MB of both.

An engine, whose processor may be slower than that of the client, allows one and a half times as much.
"""

MAX_PARALLEL = 1_000
"""Largest `parallel` of a node: the number of its shards that run at the same time."""

FAILED_BATCHES_NODES = 200
"""How many of the nodes that have set batches aside the result of a task names."""

BATCH_TRIES = 100
"""Largest number of tries of a batch, before a node sets it aside."""

MAX_QUARANTINE = 100_000
"""Largest number of batches that a node may be allowed to set aside."""

MAP_BATCH_SIZE = 10_000
"""Largest `batch_size` of a node with `map`."""

MAP_BYTES = 16_000_000
"""Largest list of items of a node with `map`, in bytes of JSON."""

PREREQUISITES = 50
"""Maximum number of prerequisites of a node."""

PREREQUISITE_CHARS = 200
"""Longest prerequisite of a node."""

APPROVAL_TEXT_CHARS = 2_000
"""Longest text of an approval."""

FAILED_NODES = 20
"""Maximum number of failures that a node started by `routing.on_failure` receives."""

REASON_CODE_CHARS = 100
"""Longest reason code; longer ones are truncated."""

LAST_ERROR_CHARS = 2_000
"""Longest `last_error` of a node; longer texts are truncated."""

ATTEMPT_LOG_BYTES = 1_048_576
"""Most bytes of the lines that are kept of one attempt: half for its first lines, half for its last ones."""

LOG_LINE_BYTES = 16_384
"""Longest line that is kept; a longer one keeps its beginning and its end."""

CARRIED_STATE_BYTES = 1_000_000
"""Largest state, besides graph and params, that a task hands over to its next run; error texts are truncated to fit."""

REPORT_BYTES = 1_000_000
"""Largest write of the workflow to its task document, and largest result of the query `status`."""

HANDLED_FAILURES_BYTES = 500_000
"""Largest list of node ids in `handled_failures`; the result counts the omitted ones."""

SOURCES_BYTES = 400_000
"""Largest list of the nodes from which one node pulls artifacts."""

STATUS_CHANGES = 100
"""Maximum number of entries in `status_history`: the first ten and the latest. FlowKit counts dropped entries."""

BATCH_META_BYTES = 8_000_000
"""Largest BSON size of the metrics of one batch, which become the `meta` of its artifact."""

BATCH_UID_CHARS = 500
"""Longest uid of a batch."""

METRICS_LEVELS = 98
"""Nesting levels of metrics and of an `artifacts_ref`: DOCUMENT_LEVELS without the two above them in a
dispatch record."""

VARS_KEYS = 256
"""Maximum number of paths in one operation on a task's variables."""

VARS_DEPTH = 14
"""Maximum number of segments in a variable's path below `coordinator.vars`."""

VARS_PATH_CHARS = 512
"""Longest path of a variable, including the prefix `coordinator.vars.`."""

VARS_SEGMENT_CHARS = 128
"""Longest segment of a variable's path."""

VARS_VALUE_BYTES = 65_536
"""Largest value that is a text, measured as UTF-8, or bytes."""

VARS_BYTES = 1_000_000
"""Largest BSON size of all variables of a task together."""

ACTIVATION_INPUT_BYTES = 1_000_000
"""Largest input of all attempts that one workflow task schedules together."""

ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Pattern of a role, which becomes part of the names of a task queue and a Kafka topic."""

VERSION_CHARS = 60
"""Longest version of a handler, which may become part of the name of a task queue."""

ID_CHARS = 200
"""Longest node id or task id."""

CANCEL_REASON_CHARS = 1_000
"""Longest reason of a cancel request; longer ones are truncated."""

ACTION_NAMES_CHARS = 2_000
"""Longest names of an action together in the audit, in characters; longer ones are left out."""

ACTION_TEXT_CHARS = 500
"""Longest `reason` and `by` of an action on a running task."""

ACTION_SCOPES = 50
"""Maximum number of scopes that are paused at once."""

ACTION_AFFECTED = 1_000
"""Maximum number of nodes that the result of an action lists; a note says how many more there are."""

ACTION_INPUT_BYTES = 256_000
"""Largest value of one field of an action, such as the batches with which an operator completes a node."""

ACTION_BATCHES = 1_000
"""Maximum number of batches with which an operator completes a node."""

CHANGED_NODES_BYTES = 200_000
"""Largest fields of nodes that actions have changed in one task, together."""

GRAPH_CHANGE_BYTES = 500_000
"""Largest list of new nodes, of edges, or of changed fields, in one change of the graph of a running task."""

APPLIED_ACTIONS = 200
"""Maximum number of applied actions that a task keeps, the latest ones."""

ACTION_RESULTS_BYTES = 100_000
"""Largest results of actions that a task keeps for repeated requests, together; the latest ones."""

ADMITTED_TASK_BYTES = 4_000_000
"""Largest graph and params together of a task that waits for admission."""

USER_CHARS = 200
"""Longest user and tenant of a request for admission."""

LIST_TASKS = 10_000
"""Maximum number of tasks that one call of `list_tasks` returns."""

KAFKA_RECORD_BYTES = 4_000_000
"""Largest value of a record from Kafka, after decompression. External workers send at most about 1 MiB."""

ANNOUNCEMENT_BYTES = 16_000
"""Largest announcement of an external worker whose capabilities and capacity FlowKit stores."""

LARGEST_EPOCH = 2**31 - 1
"""Largest epoch of an attempt."""
