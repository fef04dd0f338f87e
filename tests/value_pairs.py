"""Types and values at random, with the types by which other nodes read them. The same for each seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID

from pydantic import BaseModel, RootModel

from flowkit.activities.json_types import JsonType

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Color(Enum):
    """An enum whose values are texts."""

    RED = "r"
    BLUE = "b"


class Value(BaseModel):
    """A model with the key under which FlowKit stores results that are no objects."""

    value: int


class Named(BaseModel):
    """A model with a subclass."""

    name: str
    at: datetime | None = None


class Longer(Named):
    """A result of the type Named would lose its field."""

    more: int = 1


class Box(BaseModel, Generic[T]):
    """A model whose only field is of any type."""

    value: T


class Other(BaseModel):
    """A type of which no value is."""

    none_has_this: int
    nor_this: str


@dataclass
class Point:
    """A dataclass."""

    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A value of a type, and the type of the node that reads it."""

    kind: Any
    value: Any
    reader: Any


_LEAVES: list[tuple[Any, Callable[[random.Random], Any]]] = [
    (int, lambda chance: chance.choice([0, -1, 2**53 + 1, 2**63 - 1])),
    (str, lambda chance: chance.choice(["", "a", "é\u2028😀", "null", "2026-01-31", str(UUID(int=7))])),
    (bool, lambda chance: chance.random() < 0.5),
    (float, lambda chance: chance.choice([0.0, -0.0, 1.0, 5e-324, 1.7e308, float("nan"), float("-inf")])),
    (
        datetime,
        lambda chance: chance.choice([datetime(1, 1, 1), datetime(2026, 3, 29, 1, 30, 0, 1, tzinfo=UTC)]),
    ),
    (date, lambda chance: date(2026, 1, chance.randint(1, 31))),
    (time, lambda chance: time(chance.randint(0, 23), 30, 0, 5)),
    (timedelta, lambda chance: timedelta(days=chance.choice([-400, 0, 366]), microseconds=1)),
    (Decimal, lambda chance: Decimal(chance.choice(["1.10", "-0", "1E+30"]))),
    (UUID, lambda chance: UUID(int=chance.getrandbits(128))),
    (bytes, lambda chance: chance.choice([b"", b"a", b"\xff"])),
    (Color, lambda chance: chance.choice([*Color])),
    (Value, lambda chance: Value(value=chance.randint(0, 9))),
    (
        Named,
        lambda chance: chance.choice(
            [Named(name="a"), Named(name="a", at=datetime(2026, 1, 31)), Longer(name="b")]
        ),
    ),
    (Point, lambda chance: Point(chance.choice([1.5, 2.0]))),
    (type(None), lambda chance: None),
    (str | date, lambda chance: chance.choice(["x", "2026-01-31", date(2026, 1, 31)])),
    (Value | int, lambda chance: chance.choice([3, Value(value=3)])),
]
_KEYS = ("value", "a", "meta", "items", "$ref", "x.y")


def _wrap(chance: random.Random, kind: Any, value: Any) -> tuple[Any, Any]:
    """Return a type that contains another one, and a value of it."""
    match chance.randrange(8):
        case 0:
            return list[kind], [value] * chance.randrange(3)
        case 1:
            return dict[str, kind], dict.fromkeys(chance.sample(_KEYS, chance.randrange(3)), value)
        case 2:
            return kind | None, chance.choice([value, None])
        case 3:
            return Box[kind], Box[kind].model_construct(value=value)
        case 4:
            return tuple[kind, int], (value, 1)
        case 5:
            return RootModel[kind], RootModel[kind].model_construct(root=value)
    return kind, value


def make_pairs(count: int, seed: int = 0) -> list[Pair]:
    """Return so many values, with their types and those of their readers: the same type, or a wider one."""
    chance, pairs = random.Random(seed), list[Pair]()
    for _ in range(count):
        kind, make = chance.choice(_LEAVES)
        value = make(chance)
        for _ in range(chance.randrange(3)):
            kind, value = _wrap(chance, kind, value)
        pairs.append(
            Pair(
                kind=kind, value=value, reader=chance.choice([kind, kind | None, kind | Other, Other | kind])
            )
        )
    return pairs


def are_same(given: Any, read: Any) -> bool:
    """Return whether two values are equal and of one type, or both not-a-number."""
    return type(given) is type(read) and (given == read or repr(given) == repr(read))


def is_refused(pair: Pair) -> bool:
    """Return whether a node cannot store a value, because its reader would get another one."""
    try:
        JsonType(pair.kind, "test").to_meta(pair.value)
    except ValueError:
        return True
    return False
