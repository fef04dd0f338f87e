"""Which attempt starts next when a task has reached its limit of attempts in flight."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.property_examples import examples

from flowkit.workflows.slots import Slots

ROLES = "abcd"


def test_free_slots_are_assigned_immediately() -> None:
    slots = Slots(limit=3, window=2)
    assert [slots.try_acquire(role) for role in "aaab"] == [True, True, False, True]
    assert not slots.try_acquire("b")
    assert (slots.in_use, slots.in_use_by("a"), slots.in_use_by("b")) == (3, 2, 1)


def test_waiting_roles_get_free_slots_in_turn_and_their_nodes_in_order() -> None:
    slots = Slots(limit=1, window=5)
    assert slots.try_acquire("a")
    for ticket, role in enumerate("aaabbc"):
        slots.enqueue(role, ticket)
    holders, order = deque("a"), []
    while holders:
        (granted,) = slots.release(holders.popleft()) or (None,)
        if granted is not None:
            order.append(granted)
            holders.append("aaabbc"[granted])
    assert order == [0, 3, 5, 1, 4, 2]


def test_role_with_a_full_window_does_not_delay_the_others() -> None:
    slots = Slots(limit=3, window=1)
    assert slots.try_acquire("a")
    slots.enqueue("a", 0)
    assert slots.try_acquire("b")
    assert slots.try_acquire("c")
    slots.enqueue("d", 1)
    assert slots.release("b") == [1]
    assert slots.release("a") == [0]


def test_node_that_stops_waiting_gets_no_slot() -> None:
    slots = Slots(limit=1, window=1)
    assert slots.try_acquire("a")
    slots.enqueue("a", 0)
    slots.enqueue("a", 1)
    assert slots.cancel_wait("a", 0)
    assert slots.release("a") == [1]
    assert not slots.cancel_wait("a", 1)
    assert not slots.cancel_wait("zzz", 7)
    assert slots.release("a") == []
    assert slots.in_use == 0


class SlotUsers:
    """Nodes that request, take and release slots, as the nodes of a task do."""

    def __init__(self, limit: int, window: int) -> None:
        self.slots = Slots(limit=limit, window=window)
        self.limit, self.window = limit, window
        self.running: list[tuple[str, int]] = []
        self.waiting: dict[int, str] = {}
        self.granted: list[int] = []
        self.tickets = 0

    def arrive(self, role: str) -> None:
        """Let a node request a slot."""
        self.tickets += 1
        if self.slots.try_acquire(role):
            self.running.append((role, self.tickets))
        else:
            self.slots.enqueue(role, self.tickets)
            self.waiting[self.tickets] = role
        self.check()

    def leave(self, pick: int) -> None:
        """Let a waiting node give up."""
        if self.waiting:
            ticket = sorted(self.waiting)[pick % len(self.waiting)]
            assert self.slots.cancel_wait(self.waiting.pop(ticket), ticket)
        self.check()

    def finish(self, pick: int) -> None:
        """End a running node."""
        if self.running:
            role, _ = self.running.pop(pick % len(self.running))
            for ticket in self.slots.release(role):
                self.granted.append(ticket)
                self.running.append((self.waiting.pop(ticket), ticket))
        self.check()

    def check(self) -> None:
        """Check that no limit is exceeded, and that no slot is free while a waiting node may have it."""
        taken = Counter(role for role, _ in self.running)
        assert self.slots.in_use == len(self.running) <= self.limit
        assert all(self.slots.in_use_by(role) == taken[role] <= self.window for role in ROLES)
        if len(self.running) < self.limit:
            assert all(taken[role] == self.window for role in self.waiting.values())


MOVES = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", "finish", "leave"]), st.integers(0, 50)), max_size=120
)


@settings(max_examples=examples(80))
@given(limit=st.integers(1, 6), window=st.integers(1, 4), moves=MOVES)
def test_limits_hold_no_slot_is_wasted_and_every_waiting_node_gets_a_slot(
    limit: int, window: int, moves: list[tuple[str, int]]
) -> None:
    users = SlotUsers(limit, window)
    for move, pick in moves:
        match move:
            case "arrive":
                users.arrive(ROLES[pick % len(ROLES)])
            case "finish":
                users.finish(pick)
            case _:
                users.leave(pick)
    while users.running:
        users.finish(0)
    assert users.waiting == {}


@settings(max_examples=examples(40))
@given(
    limit=st.integers(1, 5),
    number_of_users=st.integers(5, 40),
    picks=st.lists(st.integers(0, 50), max_size=60),
)
def test_no_role_waits_while_another_one_gets_two_slots(
    limit: int, number_of_users: int, picks: list[int]
) -> None:
    """While every window has room, the waiting roles take turns, however many nodes each has."""
    users = SlotUsers(limit, 1_000)
    for role in "a" * number_of_users + "b" * 5 + "c" * 5:
        users.arrive(role)
    for pick in picks:
        waited = set(users.waiting.values())
        before = dict(users.waiting)
        for _ in waited:
            users.finish(pick)
        if len(waited) > 1 and all(list(before.values()).count(role) > 1 for role in waited):
            latest = [before[ticket] for ticket in users.granted[-len(waited) :] if ticket in before]
            assert len(set(latest)) == len(latest)
