"""Stand-ins for handlers, in one line."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from flowkit.worker import Batch, BatchResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from flowkit.worker import RunContext

_MISSING: Any = object()


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
        self._result: Any = result if callable(result) else _constant(_to_json(result or {}))
        self._batches = batches
        self._error = error
        self._left = times

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield the batches of a source, with their places as uids. Otherwise, yield the input as one batch."""
        if self._batches is None:
            yield Batch(payload=loaded or {})
            return
        for place, given in enumerate(self._batches):
            yield Batch(batch_uid=str(place), payload=_to_json(given))

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the result, or fail."""
        item = item_of(batch)
        self.calls.append(item)
        if self._error is not None and self._left != 0:
            self._left = None if self._left is None else self._left - 1
            raise self._error
        found = item if self._batches is not None else self._result(item)
        if inspect.isawaitable(found):
            found = await found
        return BatchResult(success=True, metrics=_to_json(found))


def item_of(batch: Batch) -> Any:
    """Return what a batch is about: what another node has stored, the item of a map, or the input of the node."""
    given = batch.payload
    if "from_node" in given:
        return given["items"] if "items" in given else given["meta"]
    return given["input_inline"] if given.keys() == {"input_ref", "input_inline"} else given


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda item: value


def _to_json(value: Any) -> dict[str, Any]:
    """Return a result as it is stored: what is no object becomes `{"value": …}`."""
    found = TypeAdapter(type(value)).dump_python(value, mode="json") if value is not None else {}
    return found if isinstance(found, dict) else {"value": found}
