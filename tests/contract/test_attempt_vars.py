"""Variables that a handler changes while its attempt runs: each change counts once, and only for the
current attempt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from pymongo.errors import AutoReconnect
from tests.contract.builders import AT, RUN, TASK, attempt, begun, record, shown, stored, stored_node
from tests.contract.variables import held, hold, refused, unchanged

from flowkit.activities.context import TaskVariables
from flowkit.adapters.tasks.attempts import NumberedWrite
from flowkit.adapters.tasks.store import TaskStore
from flowkit.adapters.vars import changes
from flowkit.adapters.vars.store import Variables
from flowkit.errors import Fenced
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.usefixtures("open_task")


async def running(tasks: TaskStore, epoch: int = 1) -> TaskVariables:
    """Begin an attempt and return its view of the variables."""
    await begun(tasks, attempt(epoch=epoch))
    return TaskVariables(tasks, attempt(epoch=epoch), RUN)


async def test_handler_changes_and_reads_variables(db: Any, tasks: TaskStore) -> None:
    variables = await running(tasks)
    assert await variables() == {}
    await variables.set("routing.sla", "gold")
    await variables.set({"routing.tier": 2, "counts": {"done": 0}})
    await variables.merge({"routing": {"tier": 3}, "tags": ["a"]})
    assert await variables() == {
        "routing": {"sla": "gold", "tier": 3},
        "counts": {"done": 0},
        "tags": ["a"],
    }
    found = [await variables.get(path, "none") for path in ("routing.sla", "counts", "routing.sla.x", "x.y")]
    assert found == ["gold", {"done": 0}, "none", "none"]
    assert await held(db) == await variables()


async def test_null_is_a_value_and_no_missing_variable(tasks: TaskStore) -> None:
    variables = await running(tasks)
    await variables.set("a", None)
    assert [await variables.get("a", 1), await variables.get("b")] == [None, None]


async def test_concurrent_calls_run_in_the_order_of_the_calls(db: Any, tasks: TaskStore) -> None:
    variables = await running(tasks)
    sets = [variables.set("n", n) for n in range(20)]
    *_, seen = await asyncio.gather(*sets, variables.get("n"))
    assert seen == await variables.get("n") == 19


async def test_invalid_changes_name_the_path_and_write_nothing(db: Any, tasks: TaskStore) -> None:
    await hold(db, {"sla": "gold"})
    variables = await running(tasks)
    anything: Any = variables
    async with unchanged(db):
        await refused(variables.set("sla.level", 1), "sla.level")
        await refused(variables.set("a.$b", 1), "a.$b")
        await refused(variables.merge({"a.b": 1}))
        await refused(variables.set("token", "AKIAIOSFODNN7EXAMPLE", block_sensitive=True))
        for call in (anything.set("a"), anything.set({"a": 1}, 2), anything.set(7, 1), anything.merge(7)):
            await refused(call)
        await refused(variables.get("a..b"))
    await variables.set("sla", "silver")
    assert await held(db) == {"sla": "silver"}


# --- lost replies and late writes -----------------------------------------------------------------------------------


class LostReply:
    """A database whose first update of `tasks` happens, but whose reply is lost. `after` runs before the repetition."""

    def __init__(self, db: Any, after: Callable[[], Awaitable[None]]) -> None:
        self._db = db
        self._after = [after]
        self.tasks = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db if name == "artifacts" else self._db.tasks, name)

    async def update_one(self, *args: Any, **options: Any) -> Any:
        """Update a document."""
        done = await self._db.tasks.update_one(*args, **options)
        if self._after:
            await self._after.pop()()
            raise AutoReconnect("the connection is lost")
        return done


async def test_write_that_is_repeated_after_a_lost_reply_overwrites_nobody(db: Any, tasks: TaskStore) -> None:
    async def change_meanwhile() -> None:
        await db.tasks.update_one({"id": TASK}, {"$set": {"coordinator.vars.a": "by another program"}})

    await begun(tasks, attempt())
    losing: Any = LostReply(db, change_meanwhile)
    variables = TaskVariables(TaskStore(losing), attempt(), RUN)
    await variables.set("a", "mine")
    assert await held(db) == {"a": "by another program"}
    await variables.set("b", 1)
    assert await held(db) == {"a": "by another program", "b": 1}


def numbered(sequence: int, epoch: int = 1) -> NumberedWrite:
    """Return the write with this number of an attempt."""
    return NumberedWrite(attempt=attempt(epoch=epoch), run_id=RUN, sequence=sequence)


async def test_late_write_does_not_overwrite_a_later_one_of_its_attempt(db: Any, tasks: TaskStore) -> None:
    await begun(tasks, attempt())
    variables = Variables(tasks)
    for sequence in (2, 1, 2):
        await variables.write(TASK, changes.setting({"n": sequence}), numbered(sequence))
    assert await held(db) == {"n": 2}
    bound = (await stored(db))["coordinator"]["vars_bytes"]
    assert bound == changes.size({"n": 2}) - changes.size({})


async def test_first_write_of_an_attempt_follows_all_writes_of_earlier_ones(
    db: Any, tasks: TaskStore
) -> None:
    await begun(tasks, attempt())
    await Variables(tasks).write(TASK, changes.setting({"n": 1}), numbered(1_000))
    await (await running(tasks, epoch=2)).set("n", 2)
    assert await held(db) == {"n": 2}


# --- outdated attempts ----------------------------------------------------------------------------------------------


async def retried(tasks: TaskStore) -> None:
    await begun(tasks, attempt(epoch=2))


async def reset(tasks: TaskStore) -> None:
    await begun(tasks, attempt(epoch=2), run="run-2")


async def finished(tasks: TaskStore) -> None:
    await tasks.attempts.finish(attempt(), RUN, AT)


async def waiting(tasks: TaskStore) -> None:
    await tasks.record(record(shown("a", NodeStatus.DEFERRED, epoch=1)))


@pytest.mark.parametrize("outdate", [retried, reset, finished, waiting])
async def test_outdated_attempt_is_fenced(
    db: Any, tasks: TaskStore, outdate: Callable[[TaskStore], Awaitable[None]]
) -> None:
    variables = await running(tasks)
    await variables.set("n", 1)
    await outdate(tasks)
    async with unchanged(db):
        with pytest.raises(Fenced, match="attempt 1 of node 'a' has ended or was replaced"):
            await variables.set("n", 2)


async def test_node_that_is_being_cancelled_can_still_change_variables(db: Any, tasks: TaskStore) -> None:
    variables = await running(tasks)
    await tasks.record(record(shown("a", NodeStatus.CANCELLING, epoch=1), cancel="enough"))
    assert (await stored_node(db))["status"] == "cancelling"
    await variables.set("progress", 7)
    assert await held(db) == {"progress": 7}
