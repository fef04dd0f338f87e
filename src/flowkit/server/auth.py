"""Who calls the server: the token of a request, and the callers that need none."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachetools import TTLCache

from flowkit.adapters.mongo import moment
from flowkit.errors import ConfigError
from flowkit.server.errors import Unauthorized
from flowkit.server.tokens import JOB_ROLE, Right

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flowkit.server.addresses import Address
    from flowkit.server.token_store import TokenStore
    from flowkit.server.tokens import Token

CACHE_SEC = 3.0
"""How long the server trusts a token without reading it again. A revoked token stops within this time."""

MAX_CACHED = 1_000
"""Maximum number of tokens in the cache; the one that was not used for the longest time leaves first."""

_SCHEME = "bearer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who makes a call."""

    actor: int | None
    """The actor for which the caller acts; None for an operator who acts for every actor."""
    rights: frozenset[Right]
    roles: frozenset[str] | None = None
    """The roles and coordinator functions that graphs of the caller may use; None for all but JOB_ROLE."""
    token_id: str | None = None
    """None for a caller without a token, which only a server without tokens accepts."""

    @property
    def is_operator(self) -> bool:
        """Whether the caller may do everything."""
        return Right.OPERATOR in self.rights

    def may_use(self, name: str) -> bool:
        """Return whether graphs of the caller may use a role or a coordinator function. An operator may use all."""
        if self.is_operator:
            return True
        return name != JOB_ROLE if self.roles is None else name in self.roles

    def __str__(self) -> str:
        return "operator" if self.actor is None else str(self.actor)


_LOCAL_OPERATOR = Caller(actor=None, rights=frozenset({Right.OPERATOR}))


class Authenticator:
    """Finds the caller of a request by its bearer token, with a cache of a few seconds.

    With `open_without_tokens`, calls without a token act as operator until the first token is created. Revoked and
    expired tokens count, so that revoking the last token does not open the server again.
    """

    def __init__(
        self,
        tokens: TokenStore,
        *,
        open_without_tokens: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = tokens
        self._open_without_tokens = open_without_tokens
        self._open_until = float("-inf")
        self._clock = clock
        self._cached: TTLCache[bytes, tuple[Token, Caller]] = TTLCache(MAX_CACHED, CACHE_SEC, timer=clock)

    @classmethod
    async def for_addresses(cls, tokens: TokenStore, addresses: Sequence[Address]) -> Authenticator:
        """Return the authenticator of a server that listens on `addresses`.

        Raise ConfigError if other machines can reach one of them although no valid token exists.
        """
        reachable = [str(address) for address in addresses if not address.loopback]
        if reachable and not await tokens.any_active():
            raise ConfigError(
                f"the server would listen on {', '.join(reachable)}, which other machines can reach, but there is no "
                "valid token; create one with `flowkit token create`, or listen on 127.0.0.1"
            )
        return cls(tokens, open_without_tokens=not reachable)

    async def find_caller(self, authorization: str | None) -> Caller:
        """Return the caller of a request with this `Authorization` header. Raise Unauthorized or StoreUnavailable."""
        if authorization is None:
            return await self._without_token()
        scheme, _, text = authorization.partition(" ")
        if scheme.lower() != _SCHEME:
            raise Unauthorized("the header Authorization must read 'Bearer', then a space and a token")
        return await self._with_token(text.strip())

    async def _without_token(self) -> Caller:
        if self._open_without_tokens:
            now = self._clock()
            if now < self._open_until:
                return _LOCAL_OPERATOR
            if not await self._tokens.exists():
                self._open_until = now + CACHE_SEC
                return _LOCAL_OPERATOR
            self._open_without_tokens = False
        raise Unauthorized("the call has no token; send the header 'Authorization: Bearer' with one")

    async def _with_token(self, text: str) -> Caller:
        key = hashlib.sha256(text.encode()).digest()
        if (cached := self._cached.get(key)) is not None:
            _require_valid(cached[0])
            return cached[1]
        token = await self._tokens.find(text)
        if token is None:
            raise Unauthorized("the token is unknown; create one with `flowkit token create`")
        _require_valid(token)
        caller = Caller(actor=token.actor, rights=token.rights, roles=token.roles, token_id=token.token_id)
        self._cached[key] = token, caller
        return caller


def _require_valid(token: Token) -> None:
    refusal = token.refusal(moment(time.time()))
    if refusal is not None:
        raise Unauthorized(
            f"token {token.token_id} is {refusal}; create another one with `flowkit token create`"
        )
