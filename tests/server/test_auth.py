"""Which callers a server accepts: with a token, and without one as long as none exists."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from flowkit.errors import ConfigError
from flowkit.server.addresses import Address
from flowkit.server.auth import CACHE_SEC, MAX_CACHED, Authenticator
from flowkit.server.errors import Unauthorized
from flowkit.server.token_store import TokenStore
from flowkit.server.tokens import Right
from flowkit.testing import memory_database

LOCAL = Address(host="127.0.0.1", port=8080)
FLOWS = frozenset({Right.FLOWS})
PUBLIC = Address(host="0.0.0.0", port=8080)


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def tokens() -> TokenStore:
    """An empty store."""
    return TokenStore(memory_database())


def test_port_has_16_bits() -> None:
    with pytest.raises(
        ConfigError, match=r"the port of \[::1\]:70000 is 70000; it must be .* from 0 to 65535"
    ):
        Address(host="::1", port=70_000)


async def test_token_names_the_caller(tokens: TokenStore) -> None:
    token, text = await tokens.create(actor=7, rights={Right.FLOWS})
    for scheme in ("Bearer", "bearer"):
        caller = await Authenticator(tokens).find_caller(f"{scheme} {text}")
        assert (caller.actor, caller.rights, caller.token_id) == (7, FLOWS, token.token_id)
        assert (caller.is_operator, str(caller)) == (False, "7")
    _, text = await tokens.create(rights={Right.OPERATOR})
    operator = await Authenticator(tokens).find_caller(f"Bearer {text}")
    assert (operator.is_operator, operator.actor, str(operator)) == (True, None, "operator")


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (None, "the call has no token"),
        ("", "must read 'Bearer'"),
        ("Basic Zm9vOmJhcg==", "must read 'Bearer'"),
        ("Bearer", "the token is unknown"),
        ("Bearer fk_0000000000000000_" + "A" * 43, "the token is unknown"),
    ],
)
async def test_other_headers_are_unauthorized(tokens: TokenStore, header: str | None, problem: str) -> None:
    await tokens.create(rights={Right.OPERATOR})
    with pytest.raises(Unauthorized, match=problem) as caught:
        await Authenticator(tokens, open_without_tokens=True).find_caller(header)
    assert (caught.value.status, caught.value.headers) == (
        401,
        ((b"www-authenticate", b'Bearer realm="flowkit"'),),
    )


async def test_revoked_token_is_accepted_for_the_time_of_the_cache_only(tokens: TokenStore) -> None:
    clock = Clock()
    authenticator = Authenticator(tokens, clock=clock)
    token, text = await tokens.create(rights={Right.OPERATOR})
    await authenticator.find_caller(f"Bearer {text}")
    await tokens.revoke(token.token_id)
    clock.now = CACHE_SEC - 0.1
    await authenticator.find_caller(f"Bearer {text}")
    clock.now = CACHE_SEC
    with pytest.raises(Unauthorized, match=f"token {token.token_id} is revoked; create another one"):
        await authenticator.find_caller(f"Bearer {text}")


async def test_expired_token_is_refused_even_from_the_cache(
    tokens: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    authenticator = Authenticator(tokens)
    _, text = await tokens.create(rights={Right.OPERATOR}, expires_in_sec=60)
    await authenticator.find_caller(f"Bearer {text}")
    later = datetime.now(UTC) + timedelta(seconds=61)
    monkeypatch.setattr("flowkit.server.auth.time.time", later.timestamp)
    with pytest.raises(Unauthorized, match="is expired"):
        await authenticator.find_caller(f"Bearer {text}")


async def test_cache_is_bounded(tokens: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkit.server.auth.MAX_CACHED", 2)
    authenticator = Authenticator(tokens)
    for actor in range(4):
        _, text = await tokens.create(actor=actor, rights={Right.FLOWS})
        await authenticator.find_caller(f"Bearer {text}")
        assert len(authenticator._cached) <= 2
    assert MAX_CACHED == 1_000


async def test_calls_without_a_token_act_as_operator_until_the_first_token_exists(tokens: TokenStore) -> None:
    clock = Clock()
    authenticator = await Authenticator.for_addresses(tokens, [LOCAL])
    authenticator._clock = clock
    caller = await authenticator.find_caller(None)
    assert (caller.is_operator, caller.actor, caller.token_id) == (True, None, None)
    token, _ = await tokens.create(rights={Right.OPERATOR})
    await tokens.revoke(token.token_id)
    clock.now = CACHE_SEC
    with pytest.raises(Unauthorized, match="the call has no token; send the header"):
        await authenticator.find_caller(None)


async def test_address_that_other_machines_reach_needs_a_valid_token(tokens: TokenStore) -> None:
    token, _ = await tokens.create(rights={Right.OPERATOR})
    await tokens.revoke(token.token_id)
    with pytest.raises(
        ConfigError, match=r"listen on 0\.0\.0\.0:8080, .* create one with `flowkit token create`"
    ):
        await Authenticator.for_addresses(tokens, [LOCAL, PUBLIC])
    await tokens.create(rights={Right.OPERATOR})
    with pytest.raises(Unauthorized):
        await (await Authenticator.for_addresses(tokens, [PUBLIC])).find_caller(None)
