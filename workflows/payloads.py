"""Convert records to the payloads that the workflow sends to its activities. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from flowkit.models import AttemptInput, CloseTask, EvaluateConditions, NodeRecord, RecordTask

_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (AttemptInput, RecordTask, CloseTask, NodeRecord, EvaluateConditions)
}


def without_defaults(
    record: AttemptInput | RecordTask | CloseTask | NodeRecord | EvaluateConditions,
) -> dict[str, Any]:
    """Return `record` as a dict without its default values.

    This keeps payloads small, because the server, the worker and every replay read them.
    """
    payload: dict[str, Any] = _ADAPTERS[type(record)].dump_python(record, exclude_defaults=True)
    return payload
