"""Bearer tokens in MongoDB: only hashes are stored, and a token is found by its exact text."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from flowkit.errors import ConfigError, StoreUnavailable
from flowkit.server.token_store import MAX_NOTE_CHARS, TokenStore
from flowkit.server.tokens import MAX_ACTOR, Right
from flowkit.testing import memory_database

FLOWS = frozenset({Right.FLOWS})
OPERATOR = frozenset({Right.OPERATOR})


async def test_token_is_found_by_its_text_and_only_its_hash_is_stored(db: Any) -> None:
    store = TokenStore(db)
    await store.prepare()
    token, text = await store.create(actor=MAX_ACTOR, rights=FLOWS, note="ci")
    found = await store.find(text)
    assert found is not None
    assert (found.token_id, found.actor, found.rights, found.note) == (
        token.token_id,
        MAX_ACTOR,
        FLOWS,
        "ci",
    )
    [row] = await db.tokens.find({}).to_list(None)
    assert text.split("_", 2)[2] not in str(row)
    assert "ix_tokens_created" in await db.tokens.index_information()


async def test_other_texts_find_nothing(db: Any) -> None:
    store = TokenStore(db)
    _, text = await store.create(rights=OPERATOR)
    last = "A" if text[-1] != "A" else "E"
    for other in (text[:-1] + last, text[:-1], text + "A", text.upper(), "", "fk__", "fk_x_y", "é"):
        assert await store.find(other) is None


async def test_revoked_token_stays_in_the_list(db: Any) -> None:
    store = TokenStore(db)
    token, text = await store.create(rights=OPERATOR)
    assert await store.any_active()
    assert await store.revoke(token.token_id) == token
    again = await store.revoke(token.token_id)
    assert again is not None
    assert again.revoked_at is not None
    [listed] = await store.list_tokens()
    assert listed.refusal(datetime.now(UTC)) == "revoked"
    assert (await store.any_active(), await store.exists()) == (False, True)
    assert await store.find(text) == listed
    assert await store.revoke("0" * 16) is None


async def test_expired_token_is_not_active(db: Any) -> None:
    store = TokenStore(db)
    assert not await store.exists()
    token, _ = await store.create(rights=OPERATOR, expires_in_sec=-1)
    assert token.refusal(datetime.now(UTC)) == "expired"
    assert not await store.any_active()
    await store.create(actor=1, rights=FLOWS, expires_in_sec=60)
    assert (await store.any_active(), await store.any_active(Right.OPERATOR)) == (True, False)


async def test_unknown_rights_of_a_newer_release_are_ignored(db: Any) -> None:
    store = TokenStore(db)
    await store.create(actor=1, rights=FLOWS)
    await db.tokens.update_many({}, {"$set": {"rights": ["billing", "flows"]}})
    [token] = await store.list_tokens()
    assert token.rights == FLOWS


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"actor": -1, "rights": FLOWS},
            r"actor is -1; it must be a whole number from 0 to 4,294,967,295",
        ),
        ({"actor": MAX_ACTOR + 1, "rights": FLOWS}, "actor is 4294967296"),
        ({"actor": True, "rights": FLOWS}, "actor is True"),
        ({"actor": 1, "rights": ()}, "rights are empty; choose from operator, flows"),
        ({"rights": FLOWS}, "without an actor needs the right operator; name an actor"),
        ({"rights": OPERATOR, "note": "x" * (MAX_NOTE_CHARS + 1)}, "note has 201 characters; .* up to 200"),
    ],
)
async def test_invalid_token_is_rejected(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        await TokenStore(memory_database()).create(**given)


async def test_unreachable_database_is_reported(nowhere: Any) -> None:
    with pytest.raises(StoreUnavailable):
        await TokenStore(nowhere).exists()
