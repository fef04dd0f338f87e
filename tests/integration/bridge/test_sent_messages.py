"""Everything that the bridge sends is valid for workers, whatever workers and graphs contain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flowkit.testing import Misbehavior
from flowkit.testing.external import Malformed
from flowkit.testing.external.protocol import Incoming, SignalPayload, StartPayload, read
from tests.integration.bridge.checks import NO_RETRY, records_of
from tests.integration.bridge.gates import Gate
from tests.integration.harness import node

if TYPE_CHECKING:
    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server

ODD_INPUT: dict[str, Any] = {
    "größe": "\u2028 \U0001f600 \x7f",
    "deep": [{"": [None, 1e300, -0.5, 2**53]}],
    "empty": {},
}

STORABLE_OR_NOT = (Malformed.nul_character, Malformed.huge_integer, Malformed.huge)
"""Events that the bridge can read: they store a batch or end the attempt."""

UNREADABLE = tuple(kind for kind in Malformed if kind not in STORABLE_OR_NOT)


async def test_every_sent_record_is_valid(external: ExternalTasks) -> None:
    """H1: starts, redispatches, cancels of stale epochs and queries, while the status topic contains
    malformed records.
    """
    await external.served_engine()
    stale = Misbehavior(silence=True)
    silent = await external.external(Gate().handler, misbehavior=stale, lease_ttl_sec=1.0)
    for kind in UNREADABLE:
        await silent.send_malformed(kind)
    task_id = await external.create(node("n", external.role, inline=ODD_INPUT, retry_policy=NO_RETRY))
    await silent.wait_for("cancel_requested", epoch=1)
    await silent.kill()
    gate = Gate()
    gate.open()
    worker = await external.external(gate.handler)
    assert (await external.result(task_id)).status == "finished"
    assert worker.runs[-1].input_inline == ODD_INPUT
    topics = external.topics
    commands = await messages(external, topics["topic_cmd_fmt"].format(type=external.role))
    assert {command.payload["cmd"] for command in commands} == {"TASK_START"}
    assert [StartPayload.model_validate(each.payload).input_inline for each in commands] == (
        [ODD_INPUT] * len(commands)
    )
    signals = await messages(external, topics["topic_signals"])
    assert {SignalPayload.model_validate(each.payload).reason for each in signals} == {"stale_epoch"}
    queries = await messages(external, topics["topic_query"])
    assert {query.payload["query"] for query in queries} == {"TASK_DISCOVER"}
    for message in (*commands, *signals, *queries):
        assert (message.role, message.task_id, message.step_type) == ("coordinator", task_id, external.role)


async def messages(external: ExternalTasks, topic: str) -> list[Incoming]:
    """Return the messages of a topic, parsed as workers parse them."""
    found = [read(value) for value in await records_of(external, topic)]
    assert found
    return found
