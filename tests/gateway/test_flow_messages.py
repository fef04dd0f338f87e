"""Messages that clients store: two calls with one id at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

from flowkit.gateway import models
from flowkit.gateway.service import Gateway
from flowkit.gateway.store import FlowStore
from flowkit.server.auth import Caller
from flowkit.server.rpc import AlreadyExists, Call
from flowkit.server.tokens import Right
from flowkit.testing import memory_database
from tests.unit.event_loop import let_other_tasks_run

OPERATOR = Call(caller=Caller(actor=None, rights=frozenset({Right.OPERATOR})))


class SlowStore(FlowStore):
    """A store in which other calls come between a read and what follows it."""

    async def load(self, collection: str, id: int | str) -> dict[str, Any] | None:
        """Return an entity."""
        found = await super().load(collection, id)
        await let_other_tasks_run()
        return found


async def test_one_of_two_messages_with_the_same_id_is_stored_and_the_other_is_rejected() -> None:
    store = SlowStore(memory_database())
    nothing: Any = None
    gateway = Gateway(store, nothing, nothing, nothing)
    await gateway.context_create(OPERATOR, models.ContextCreate(context=models.ContextData(id=3)))

    async def create(text: str) -> models.Message:
        message = models.MessageData(id=1, caller_id=11, context_id=3, message=text)
        return await gateway.message_create(OPERATOR, models.MessageCreate(context_id=3, message=message))

    found = await asyncio.gather(*map(create, ("first", "second")), return_exceptions=True)
    assert sum(isinstance(each, AlreadyExists) for each in found) == 1
    [made] = [each for each in found if isinstance(each, models.Message)]
    own = models.ByMessage(context_id=3, caller_id=11, id=1)
    assert await gateway.message_load(OPERATOR, own) == made
