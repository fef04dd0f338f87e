"""Every size limit in one place; docs/limits.md repeats this table.

All sizes are bytes of UTF-8 JSON unless the name says otherwise. They keep a task far away from the hard limits of
Temporal (2 MB a payload, 50 MB a history) and MongoDB (16 MB a document).
"""

from __future__ import annotations

import re

TASK_INPUT_BYTES = 1_000_000
"""Graph and params of one task together."""

NODE_IO_BYTES = 64_000
"""`io` of one node."""

MAX_NODES = 5_000
"""Nodes of one graph (`CoordinatorConfig.max_nodes` changes it)."""

REASON_CODE_CHARS = 100
"""A reason code; longer ones are cut."""

LAST_ERROR_CHARS = 2_000
"""`last_error` of a node; longer texts are cut."""

CLOSE_ERRORS_CHARS = 200_000
"""All error texts that the close of a task carries together."""

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
"""BSON size of all variables of a task; looked at by operations that bring more than VARS_UNCHECKED_BYTES."""

VARS_UNCHECKED_BYTES = 1_000
"""BSON size of an operation that is too small to be worth a look at what is there already."""

ACTIVATION_INPUT_BYTES = 1_000_000
"""Inputs of attempts scheduled in one workflow task."""

ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""A role; it becomes part of a task queue's name and of a Kafka topic's."""

ID_CHARS = 200
"""Longest node id and task id."""
