"""A handle of each driver that another thread's loop uses through RemoteDatabase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit import CoordinatorConfig
from flowkit.adapters.remote_database import RemoteDatabase
from flowkit.coordinator.hosting import HandlerThread, HostedRoles
from flowkit.worker import RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Stamper(RoleHandler):
    """An inline handler."""

    role = "stamper"
    inline = True


async def test_other_loop_writes_and_reads_documents(db: Any) -> None:
    remote: Any = RemoteDatabase(db)
    remote.bind()

    async def use() -> AsyncIterator[Any]:
        await remote.numbers.insert_many([{"_id": n} for n in (3, 1, 2)])
        await remote.numbers.create_index("_id")
        yield [row["_id"] async for row in remote["numbers"].find({}).sort("_id", -1).limit(2)]
        yield [row["_id"] async for row in remote.numbers.find({"_id": {"$lt": 2}})]
        yield await remote.numbers.find_one({"_id": 3})

    async def used() -> list[Any]:
        return [each async for each in use()]

    thread = await HandlerThread.started()
    try:
        assert await thread.portal.run(used()) == [[3, 2], [1], {"_id": 3}]
    finally:
        await thread.stop()


async def test_roles_with_an_own_loop_register_and_leave(db: Any) -> None:
    hosted = HostedRoles(
        db=db, cfg=CoordinatorConfig(), handlers={"stamper": Stamper()}, clock=None, own_loop=True
    )
    await hosted.open("default")
    row = await db.worker_registry.find_one({})
    assert (row["type"], row["status"]) == ("stamper", "online")
    await hosted.stop()
    assert (await db.worker_registry.find_one({}))["status"] == "offline"
    await hosted.stop()
