"""The tenants of one deployment: an operator, and two actors that share nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit.server.token_store import TokenStore
from flowkit.server.tokens import Right

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenants:
    """Their tokens: one of the operator, and one for each right of each actor."""

    operator: str
    first: Mapping[Right, str]
    second: Mapping[Right, str]


async def create_tenants(db: Any, *, first: int, second: int) -> Tenants:
    """Create the tokens in the database of the deployment, for the actors with these numbers."""
    store = TokenStore(db)
    _, operator = await store.create(rights={Right.OPERATOR})
    rights: list[Right] = [right for right in Right if right is not Right.OPERATOR]
    of_first, of_second = [
        {right: (await store.create(actor=actor, rights={right}))[1] for right in rights}
        for actor in (first, second)
    ]
    return Tenants(operator=operator, first=of_first, second=of_second)
