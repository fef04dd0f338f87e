"""What processes have announced about the typed roles: each start of one has its own version of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.integration.chaos.plans import TYPED_ROLES
from tests.integration.chaos.typed import VERSION_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator


async def announced(db: Any) -> tuple[int, list[str]]:
    """Return the number of contracts that the rows of workers and engines hold, and what is wrong with them."""
    rows = [row async for row in db.worker_registry.find({"handlers": {"$exists": True}})]
    digests = {each["digest"] for row in rows for each in row.get("contracts") or ()}
    return len(digests), [problem for row in rows for problem in row_problems(row)]


def row_problems(row: dict[str, Any]) -> Iterator[str]:
    """Yield the typed roles whose row has no contract, or that of another version than the process has."""
    contracts = {each["digest"]: each for each in row.get("contracts") or ()}
    for each in row["handlers"]:
        if each["role"] not in TYPED_ROLES:
            continue
        contract = contracts.get(each.get("contract"))
        if contract is None:
            yield f"worker {row['worker_id']} announces no contract of role {each['role']}"
        elif (found := json.loads(contract["output"]).get(VERSION_KEY)) != each["version"]:
            yield f"worker {row['worker_id']} announces {found} of role {each['role']} {each['version']}"
