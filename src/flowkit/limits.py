"""Every size limit in one place; docs/limits.md repeats this table.

All sizes are bytes of UTF-8 JSON unless the name says otherwise. They keep a task far away from the hard limits of
Temporal (2 MB a payload, 50 MB a history) and MongoDB (16 MB a document).
"""

from __future__ import annotations

import re

TASK_INPUT_BYTES = 1_000_000
"""Graph and params of one task together."""

DOCUMENT_LEVELS = 100
"""Levels of nesting of a document in MongoDB: the document itself is the first, each object or list in it another."""

DOCUMENT_BYTES = 16_777_216
"""BSON size of a document in MongoDB."""

NODE_IO_BYTES = 64_000
"""`io` of one node."""

MAX_NODES = 5_000
"""Nodes of one graph (`CoordinatorConfig.max_nodes` changes it)."""

MAX_RETRIES = 10_000
"""`retry_policy.max` of one node."""

REASON_CODE_CHARS = 100
"""A reason code; longer ones are cut."""

LAST_ERROR_CHARS = 2_000
"""`last_error` of a node; longer texts are cut."""

CARRIED_STATE_BYTES = 1_000_000
"""What a task carries into its next run besides graph and params; longer error texts are cut there."""

REPORT_BYTES = 1_000_000
"""One write of the workflow to its task's document, and the result of the query `status`."""

PAYLOAD_BYTES = 1_900_000
"""What no payload of FlowKit exceeds; Temporal refuses those of 2 MB."""

STATUS_CHANGES = 100
"""Entries of `status_history`: the first ten and the latest ones; those between are counted."""

BATCH_META_BYTES = 8_000_000
"""BSON size of one batch's metrics, which become the artifact's `meta`."""

VARS_KEYS = 256
"""Paths that one operation on a task's variables names."""

VARS_DEPTH = 14
"""Segments of a variable's path, below `coordinator.vars`."""

VARS_PATH_CHARS = 512
"""A variable's path, with `coordinator.vars.` before it."""

VARS_SEGMENT_CHARS = 128
"""One segment of a variable's path."""

VARS_VALUE_BYTES = 65_536
"""One value that is a text (as UTF-8) or bytes."""

VARS_BYTES = 1_000_000
"""BSON size of all variables of a task."""

ACTIVATION_INPUT_BYTES = 1_000_000
"""Inputs of attempts scheduled in one workflow task."""

ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""A role; it becomes part of a task queue's name and of a Kafka topic's."""

ID_CHARS = 200
"""Longest node id and task id."""

CANCEL_REASON_CHARS = 1_000
"""The reason of a cancel; longer ones are cut."""

LIST_TASKS = 10_000
"""Tasks that one call of `list_tasks` returns."""
