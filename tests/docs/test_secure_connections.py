"""The settings of `howto/secure-connections.md` on real connections: TLS ends right before the tests' servers."""

from __future__ import annotations

import asyncio
import os
import ssl
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import trustme
from tests.docs.pages import DOCS, blocks
from tests.integration.world import CEILING, FLOWKIT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from flowkit.local import Stack

pytestmark = pytest.mark.server

PAGE = DOCS / "howto" / "secure-connections.md"
BOTH_HAVE_ANSWERED, NO_ANSWER = 4, 3
"""Exit codes of the question for a task that is not there."""


@dataclass(frozen=True, kw_only=True)
class Authority:
    """Who has signed the certificates of servers and clients here."""

    ca: trustme.CA
    folder: Path

    def hand_out(self) -> None:
        """The files that the page names."""
        client = self.ca.issue_cert("client@example.com")
        self.ca.cert_pem.write_to_path(str(self.folder / "ca.pem"))
        client.private_key_pem.write_to_path(str(self.folder / "client.key"))
        for part in client.cert_chain_pems:
            part.write_to_path(str(self.folder / "client.pem"), append=True)
        (self.folder / "api-key.txt").write_text("key", encoding="utf-8")

    def server(self, *, asks_clients: bool) -> ssl.SSLContext:
        """TLS for the addresses of the page, and for the one behind them."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["h2"])
        self.ca.issue_cert("temporal.example.com", "mongo.example.com", "127.0.0.1").configure_cert(context)
        if asks_clients:
            context.verify_mode = ssl.CERT_REQUIRED
            self.ca.configure_trust(context)
        return context


@asynccontextmanager
async def tls_before(address: str, context: ssl.SSLContext) -> AsyncIterator[str]:
    """The address of a TLS server that passes everything on to a plain one."""
    host, _, port = address.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, behind_writer), copy(behind_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Everything until one side hangs up."""
    with suppress(OSError):
        while part := await reader.read(65_536):
            writer.write(part)
            await writer.drain()
    writer.close()


def write_files(folder: Path, instead: dict[str, str]) -> None:
    """The files of the page, with addresses that exist."""
    for block in blocks(PAGE):
        if name := block.marks.get("file"):
            text = block.text
            for written, real in instead.items():
                text = text.replace(written, real)
            (folder / name).write_text(text, encoding="utf-8")


async def ask(folder: Path, settings: str, environment: dict[str, str]) -> tuple[int | None, str]:
    """How `flowkit status nothing-there` ends under the settings of one of the page's files."""
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", f". ./{settings}; exec {FLOWKIT} status nothing-there"),
        cwd=folder,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await asyncio.wait_for(process.communicate(), CEILING)
    return process.returncode, printed.decode()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """One of this test's own, whose files lie in its folder."""
    made = Authority(ca=trustme.CA(), folder=tmp_path)
    made.hand_out()
    return made


def plain(stack: Stack) -> dict[str, str]:
    """An environment that knows nothing of Temporal yet."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TEMPORAL_")}
    return {**kept, "MONGO_URL": stack.mongo_url}


@pytest.mark.parametrize("settings", ["mtls.sh", "profile.sh"])
async def test_a_server_that_asks_for_certificates_is_reached(
    settings: str, stack: Stack, authority: Authority
) -> None:
    async with tls_before(stack.temporal_address, authority.server(asks_clients=True)) as address:
        write_files(authority.folder, {"temporal.example.com:7233": address})
        code, printed = await ask(authority.folder, settings, plain(stack))
        assert code == BOTH_HAVE_ANSWERED, printed


async def test_an_api_key_turns_tls_on(stack: Stack, authority: Authority) -> None:
    async with tls_before(stack.temporal_address, authority.server(asks_clients=False)) as address:
        instead = {"eu-central-1.aws.api.temporal.io:7233": address, "shop.a1b2c": "default"}
        write_files(authority.folder, instead)
        trusted = {**plain(stack), "TEMPORAL_TLS_SERVER_CA_CERT_PATH": "ca.pem"}
        code, _ = await ask(authority.folder, "cloud.sh", trusted)
        assert code == BOTH_HAVE_ANSWERED


async def test_without_the_certificate_nobody_answers(stack: Stack, authority: Authority) -> None:
    async with tls_before(stack.temporal_address, authority.server(asks_clients=True)) as address:
        write_files(authority.folder, {"temporal.example.com:7233": address})
        (authority.folder / "mtls.sh").write_text(
            f"export TEMPORAL_ADDRESS={address} TEMPORAL_TLS_SERVER_CA_CERT_PATH=ca.pem\n", encoding="utf-8"
        )
        code, printed = await ask(authority.folder, "mtls.sh", plain(stack))
        assert (code, address in printed) == (NO_ANSWER, True)


async def test_mongodb_behind_tls_is_reached(stack: Stack, authority: Authority) -> None:
    mongo = stack.mongo_url.removeprefix("mongodb://").partition("/")[0]
    async with tls_before(mongo, authority.server(asks_clients=False)) as address:
        write_files(authority.folder, {"mongo.example.com:27017": address})
        environment = {**plain(stack), "TEMPORAL_ADDRESS": stack.temporal_address}
        code, printed = await ask(authority.folder, "mongodb.sh", environment)
        assert (code, "MongoDB" in printed) == (BOTH_HAVE_ANSWERED, False), printed
