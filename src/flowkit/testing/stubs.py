"""Stand-ins for handlers, in one line."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from flowkit.activities.json_types import JsonType
from flowkit.activities.typed import ItemBatch
from flowkit.worker import Batch, BatchResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from flowkit.worker import RunContext


def stub(
    role: str,
    result: Any = None,
    *,
    yields: Iterable[Any] | None = None,
    fails: BaseException | type[BaseException] | None = None,
    times: int | None = None,
) -> Stub:
    """Return a handler for `role` that stands in for the one of a worker, or for an external worker.

    `result` is what each batch returns: a dict or a Pydantic model, or a function that gets the item of the batch and
    returns it, as a plain or a coroutine function. With `yields`, the node is a source of these batches. With `fails`,
    the first `times` batches fail with this error, or all of them without `times`.

        stub("pricer", {"euros": 4})
        stub("pricer", lambda item: {"euros": PRICES[item["item"]]})
        stub("pricer", {"euros": 4}, fails=ConnectionError("the shop does not respond"), times=1)
        stub("orders", yields=[{"item": "tea"}, {"item": "pot"}])
    """
    return Stub(role, result, None if yields is None else list(yields), fails, times)


class Stub(RoleHandler):
    """A handler that `stub` makes."""

    def __init__(
        self,
        role: str,
        result: Any,
        batches: list[Any] | None,
        error: BaseException | type[BaseException] | None,
        times: int | None,
    ) -> None:
        self.role = role
        self.calls: list[Any] = []
        """The items of all batches that it has processed or failed, in order."""
        self._result: Any = (
            result if callable(result) else _constant(_result.from_meta(_result.to_meta(result)))
        )
        self._batches = batches
        self._error = error
        self._left = times

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield the batches of a source, with their places as uids. Otherwise, yield the input as one batch."""
        if self._batches is None:
            yield Batch(payload=loaded or {})
            return
        for place, given in enumerate(self._batches):
            yield Batch.model_construct(batch_uid=str(place), payload=_result.to_meta(given))

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the result, or fail."""
        item = item_of(batch)
        self.calls.append(item)
        if self._error is not None and self._left != 0:
            self._left = None if self._left is None else self._left - 1
            raise self._error
        if self._batches is not None:
            return BatchResult.model_construct(success=True, metrics=batch.payload)
        found = self._result(item)
        if inspect.isawaitable(found):
            found = await found
        return BatchResult.model_construct(
            success=True, metrics={} if found is None else _result.to_meta(found)
        )


def item_of(batch: Batch) -> Any:
    """Return what a batch is about: what another node has stored, the items of a map, or the input of the node."""
    given = batch.payload
    if isinstance(batch, ItemBatch):
        return given["items"][0]
    for name in ("meta", "items", "input_inline"):
        if name in given and given.keys() & _AROUND:
            return given[name]
    return given


_AROUND = {"from_node", "first", "input_ref"}
"""Keys of payloads that hold an item, or several."""

_result = JsonType(Any, "a stub")


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda item: value
