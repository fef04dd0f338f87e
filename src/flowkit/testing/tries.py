"""Runs one typed handler on one item, without a node: `try_on` and `try_produce` of RoleHandler."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from flowkit.activities.results import Batch, BatchFailure
from flowkit.activities.role_attempt import check_result
from flowkit.adapters.metrics import UNSTORABLE, storable
from flowkit.errors import ConfigError
from flowkit.testing.context import handler_context
from flowkit.text import printed

if TYPE_CHECKING:
    from flowkit.activities.handlers import RoleHandler
    from flowkit.activities.typed import TypedHandler


async def try_item(handler: RoleHandler[Any, Any], item: Any, **context: Any) -> Any:
    """Return the result of `process` for an item. Both pass through their JSON, as between two nodes.

    Raise BatchFailure if one of them does not validate, and what the handler raises.
    """
    types = _types_of(handler)
    if types.is_source:
        raise ConfigError(f"{types.name} is a source, which receives no item: use try_produce")
    ctx = handler_context(**context)
    payload = types.item_payload(item)
    batch = Batch(batch_uid="item", payload={**payload, "meta": _stored("the item", payload["meta"])})
    try:
        with ctx.processing(batch):
            result = check_result(await _settle(handler.process_batch(batch, ctx)))
    finally:
        await ctx.release()
    if not result.success:
        code = {"reason_code": result.reason_code} if result.reason_code else {}
        raise BatchFailure(result.error or "", permanent=result.permanent, **code)
    stored = _stored("the result", result.metrics)
    return types.read_result({"batch_uid": batch.batch_uid, "meta": stored}, ctx)


async def try_source(handler: RoleHandler[Any, Any], given: Any, **context: Any) -> list[Any]:
    """Return the items that a source yields. They pass through their JSON, as to another node.

    Raise BatchFailure if the input or an item does not validate or two items have one uid, and what the handler raises.
    """
    types = _types_of(handler)
    if not types.is_source:
        raise ConfigError(f"{types.name} is not a source: use try_on")
    if given is not None:
        context["input_inline"] = types.source_input(given)
    ctx = handler_context(**context)
    items: dict[str, Any] = {}
    loaded = {"input_ref": ctx.input_ref or {}, "input_inline": ctx.input_inline or {}}
    try:
        produced = handler.iter_batches(loaded, ctx=ctx)
        async for batch in produced if hasattr(produced, "__aiter__") else _each(produced):
            if batch.batch_uid in items:
                raise BatchFailure(
                    types.describe_duplicate(items[batch.batch_uid], batch, ctx), permanent=True
                )
            items[batch.batch_uid] = _stored(f"the item {printed(batch.batch_uid)}", batch.payload)
    finally:
        await ctx.release()
    return [types.read_result({"batch_uid": uid, "meta": meta}, ctx) for uid, meta in items.items()]


def _stored(what: str, meta: dict[str, Any]) -> dict[str, Any]:
    """Return what a node stores for a `meta`. Raise BatchFailure if MongoDB cannot store it."""
    try:
        return storable(what, meta)[0]
    except UNSTORABLE as error:
        raise BatchFailure(str(error), reason_code=error.code, permanent=True) from None


def _types_of(handler: RoleHandler[Any, Any]) -> TypedHandler:
    types = handler._flowkit_types
    if types is None:
        kind = type(handler).__name__
        raise ConfigError(
            f"{kind} names no types: inherit RoleHandler[In, Out], or call process_batch yourself"
        )
    return types


async def _settle(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def _each(items: Any) -> Any:
    for item in items:
        yield item
