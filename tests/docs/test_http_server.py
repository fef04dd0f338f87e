"""docs/http-server.md names every limit, right and error of the server."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import DOCS

from flowkit.server import app, auth, connection, errors, rights, rpc, serving, token_store
from flowkit.server.protocols import ClientLimits
from flowkit.server.tokens import Right

LIMITS = ClientLimits()
PAGE = (DOCS / "http-server.md").read_text(encoding="utf-8")


def test_every_error_of_json_rpc_is_described() -> None:
    kinds = [kind for kind in vars(rpc).values() if isinstance(kind, type) and issubclass(kind, rpc.RpcError)]
    assert len(kinds) >= 14
    assert [kind for kind in kinds if f"| {kind.code} | `{kind.name}` |" not in PAGE] == []


def test_every_error_of_http_is_described() -> None:
    sources = [module.__file__ or "" for module in (app, errors, rights, rpc)]
    text = "".join(Path(path).read_text(encoding="utf-8") for path in sources)
    codes = re.findall(r"[( ](?:40\d|41\d|50\d),\s+\"([a-z_]+)\"", text)
    assert {"unauthorized", "permission_denied", "body_too_large", "too_many_connections"} <= {*codes}
    assert {code for code in codes if f"`{code}`" not in PAGE} == set()


def test_limits_and_rights_have_the_described_values() -> None:
    described = (
        f"{app.BODY_LIMIT:,} bytes",
        f"| {app.BODY_SEC:g} s | status 408",
        f"from its beginning | {LIMITS.header_sec:g} s |",
        f"| time to read a response, or a WebSocket message | {LIMITS.read_sec:g} s |",
        f"WebSocket connections included | {app.MAX_CALLS} | status 503",
        f"| of them with the same token | {app.MAX_CALLS_OF_TOKEN} | status 503",
        f"| connections | {LIMITS.connections} |",
        f"| WebSocket connections | {rpc.MAX_CONNECTIONS} |",
        f"| concurrent calls of a WebSocket connection | {connection.MAX_CONCURRENT_CALLS} |",
        f"| calls in a JSON-RPC batch | {rpc.MAX_BATCH} |",
        f"| responses of a batch | {rpc.BATCH_BYTES:,} bytes |",
        f"| result of a JSON-RPC call | {rpc.RESULT_BYTES:,} bytes |",
        *(f"| `{right}` |" for right in Right),
        f"with up to {token_store.MAX_NAME_CHARS} characters, and can be repeated",
    )
    assert [text for text in described if text not in PAGE] == []
    assert (auth.CACHE_SEC, serving.STOP_SEC) == (3, 10)
