"""Bearer tokens of the HTTP server: the collection `tokens`, which holds hashes and never the tokens themselves.

A token reads `fk_<id>_<secret>`. Its secret has 256 random bits, so a fast hash suffices: the secret cannot be guessed
from its SHA-256, however many hashes an attacker computes.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from typing import TYPE_CHECKING, Any

from pymongo import ASCENDING

from flowkit.adapters.entries import utc
from flowkit.adapters.mongo import Database, durable, ensure_index, moment, translate_errors
from flowkit.errors import ConfigError
from flowkit.server.tokens import MAX_ACTOR, Right, Token
from flowkit.text import shown

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_NOTE_CHARS = 200
MAX_NAME_CHARS = 200
"""Longest name of a role or function that a token may use."""

_SECRET_BYTES = 32
_TOKEN = re.compile(r"fk_(?P<id>[0-9a-f]{16})_[A-Za-z0-9_-]{43}")


class TokenStore:
    """The collection `tokens`. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._rows = durable(db).tokens

    @translate_errors
    async def prepare(self) -> None:
        """Create the index by which tokens are listed."""
        await ensure_index(self._rows, [("created_at", ASCENDING)], "ix_tokens_created")

    @translate_errors
    async def create(
        self,
        *,
        actor: int | None = None,
        rights: Collection[Right],
        roles: Collection[str] | None = None,
        note: str = "",
        expires_in_sec: float | None = None,
    ) -> tuple[Token, str]:
        """Store a new token. Return it with its text, which cannot be read again.

        Raise ConfigError if it is invalid.
        """
        _check_new(actor, rights, note)
        _check_roles(rights, roles)
        now = round(time.time(), 3)  # MongoDB stores milliseconds
        row: dict[str, Any] = {
            "_id": secrets.token_hex(8),
            "actor": actor,
            "rights": sorted(rights),
            "roles": None if roles is None else sorted(roles),
            "note": note,
            "created_at": moment(now),
            "expires_at": None if expires_in_sec is None else moment(now + expires_in_sec),
            "revoked_at": None,
        }
        text = f"fk_{row['_id']}_{secrets.token_urlsafe(_SECRET_BYTES)}"
        await self._rows.insert_one({**row, "sha256": _hash(text)})
        return _from_row(row), text

    @translate_errors
    async def find(self, text: str) -> Token | None:
        """Return the token with this text, whether or not it is still valid; None if there is none."""
        parts = _TOKEN.fullmatch(text)
        if parts is None:
            return None
        row = await self._rows.find_one({"_id": parts["id"]})
        if row is None or not hmac.compare_digest(row["sha256"], _hash(text)):
            return None
        return _from_row(row)

    @translate_errors
    async def list_tokens(self) -> list[Token]:
        """Return all tokens, oldest first, with those that have expired or are revoked."""
        return [_from_row(row) async for row in self._rows.find({}).sort("created_at", ASCENDING)]

    @translate_errors
    async def revoke(self, token_id: str) -> Token | None:
        """Revoke a token, and return it as it was before; None if there is none with this id."""
        row = await self._rows.find_one({"_id": token_id})
        if row is None:
            return None
        fresh = {"_id": token_id, "revoked_at": None}
        await self._rows.update_one(fresh, {"$set": {"revoked_at": moment(time.time())}})
        return _from_row(row)

    @translate_errors
    async def exists(self) -> bool:
        """Return whether a token was ever created, even if it has expired or is revoked."""
        return await self._rows.find_one({}, {"_id": 1}) is not None

    async def any_active(self, right: Right | None = None) -> bool:
        """Return whether there is a valid token, and with `right`, one that has this right."""
        now = moment(time.time())
        return any(
            token.refusal(now) is None and (right is None or right in token.rights)
            for token in await self.list_tokens()
        )


def _check_new(actor: int | None, rights: Collection[Right], note: str) -> None:
    if actor is not None and not (type(actor) is int and 0 <= actor <= MAX_ACTOR):
        raise ConfigError(f"actor is {shown(actor)}; it must be a whole number from 0 to {MAX_ACTOR:,}")
    if not rights:
        raise ConfigError(f"rights are empty; choose from {', '.join(Right)}")
    if actor is None and Right.OPERATOR not in rights:
        raise ConfigError(
            f"a token without an actor needs the right {Right.OPERATOR}; name an actor, or add the right"
        )
    if len(note) > MAX_NOTE_CHARS:
        raise ConfigError(f"note has {len(note):,} characters; it may have up to {MAX_NOTE_CHARS}")


def _check_roles(rights: Collection[Right], roles: Collection[str] | None) -> None:
    if roles is None:
        return
    if not roles:
        raise ConfigError("roles are empty; name at least one role or coordinator function, or pass None")
    for name in roles:
        if not (0 < len(name) <= MAX_NAME_CHARS and name.isprintable()):
            raise ConfigError(
                f"a role is {shown(name)}; it must be the name of a role or a coordinator function, of 1 to "
                f"{MAX_NAME_CHARS} printable characters"
            )
    if Right.OPERATOR in rights:
        raise ConfigError("an operator may use every role; name no roles, or leave out the right operator")
    if Right.ADMISSION not in rights:
        raise ConfigError(
            "roles limit the graphs of a token with the right admission; add `--right admission`, or name no roles"
        )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _from_row(row: dict[str, Any]) -> Token:
    return Token(
        token_id=row["_id"],
        actor=row["actor"],
        rights=frozenset(right for right in Right if right in row["rights"]),
        roles=None if row["roles"] is None else frozenset(row["roles"]),
        note=row["note"],
        created_at=utc(row["created_at"]),
        expires_at=row["expires_at"] and utc(row["expires_at"]),
        revoked_at=row["revoked_at"] and utc(row["revoked_at"]),
    )
