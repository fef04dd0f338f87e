"""The settings of `howto/secure-connections.md`, on real servers behind TLS proxies."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import trustme
from tests.docs.pages import DOCS, blocks
from tests.fork_server import fork_server
from tests.integration.harness import EVENT_TIMEOUT_SEC

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from flowkit.local import Stack

pytestmark = pytest.mark.server

PAGE = DOCS / "howto" / "secure-connections.md"
BOTH_RESPONDED, NOT_REACHED = 4, 3
"""Exit codes of `flowkit status` for an unknown task."""


@dataclass(frozen=True, kw_only=True)
class Authority:
    """The certificate authority of the servers and clients in these tests."""

    ca: trustme.CA
    folder: Path

    def write_files(self) -> None:
        """Write the certificate and key files that the page names."""
        client = self.ca.issue_cert("client@example.com")
        self.ca.cert_pem.write_to_path(str(self.folder / "ca.pem"))
        client.private_key_pem.write_to_path(str(self.folder / "client.key"))
        for part in client.cert_chain_pems:
            part.write_to_path(str(self.folder / "client.pem"), append=True)
        (self.folder / "api-key.txt").write_text("key", encoding="utf-8")

    def server(self, *, require_client_certificate: bool) -> ssl.SSLContext:
        """Return a TLS context for the addresses on the page, and for 127.0.0.1."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["h2"])
        self.ca.issue_cert("temporal.example.com", "mongo.example.com", "127.0.0.1").configure_cert(context)
        if require_client_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
            self.ca.configure_trust(context)
        return context


@asynccontextmanager
async def tls_proxy(address: str, context: ssl.SSLContext) -> AsyncIterator[str]:
    """Run a TLS proxy in front of a plain server; yields its address."""
    host, _, port = address.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy everything until one side closes the connection."""
    with suppress(OSError):
        while part := await reader.read(65_536):
            writer.write(part)
            await writer.drain()
    writer.close()


def write_page_files(folder: Path, replacements: dict[str, str]) -> None:
    """Write the files of the page, with real addresses."""
    for block in blocks(PAGE):
        if name := block.marks.get("file"):
            text = block.text
            for written, real in replacements.items():
                text = text.replace(written, real)
            (folder / name).write_text(text, encoding="utf-8")


async def run_status(folder: Path, settings: str, environment: dict[str, str]) -> tuple[int, str]:
    """Run `flowkit status nothing-there` with a settings file of the page; returns exit code and output."""
    variables = await asyncio.to_thread(sourced, folder, settings, environment)
    status = ["status", "nothing-there"]
    code, out, err = await asyncio.to_thread(fork_server().run, status, folder, variables, EVENT_TIMEOUT_SEC)
    return code, out + err


def sourced(folder: Path, settings: str, environment: dict[str, str]) -> dict[str, str]:
    """Return the variables of a shell that has run a settings file."""
    shell = ["bash", "-c", f". ./{settings}; env -0"]
    done = subprocess.run(shell, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(each.split("=", 1) for each in done.stdout.split("\0") if each)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Create a certificate authority with its files in the test's folder."""
    created = Authority(ca=trustme.CA(), folder=tmp_path)
    created.write_files()
    return created


def environment_without_temporal(stack: Stack) -> dict[str, str]:
    """Return an environment without the variables of Temporal."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TEMPORAL_")}
    return {**kept, "MONGO_URL": stack.mongo_url}


@pytest.mark.parametrize("settings", ["mtls.sh", "profile.sh"])
async def test_server_that_requires_client_certificates_is_reached(
    settings: str, stack: Stack, authority: Authority
) -> None:
    async with tls_proxy(
        stack.temporal_address, authority.server(require_client_certificate=True)
    ) as address:
        write_page_files(authority.folder, {"temporal.example.com:7233": address})
        code, printed = await run_status(authority.folder, settings, environment_without_temporal(stack))
        assert code == BOTH_RESPONDED, printed


async def test_api_key_turns_tls_on(stack: Stack, authority: Authority) -> None:
    async with tls_proxy(
        stack.temporal_address, authority.server(require_client_certificate=False)
    ) as address:
        replacements = {"eu-central-1.aws.api.temporal.io:7233": address, "shop.a1b2c": "default"}
        write_page_files(authority.folder, replacements)
        trusted = {**environment_without_temporal(stack), "TEMPORAL_TLS_SERVER_CA_CERT_PATH": "ca.pem"}
        code, _ = await run_status(authority.folder, "cloud.sh", trusted)
        assert code == BOTH_RESPONDED


async def test_server_is_not_reached_without_the_client_certificate(
    stack: Stack, authority: Authority
) -> None:
    async with tls_proxy(
        stack.temporal_address, authority.server(require_client_certificate=True)
    ) as address:
        write_page_files(authority.folder, {"temporal.example.com:7233": address})
        (authority.folder / "mtls.sh").write_text(
            f"export TEMPORAL_ADDRESS={address} TEMPORAL_TLS_SERVER_CA_CERT_PATH=ca.pem\n", encoding="utf-8"
        )
        code, printed = await run_status(authority.folder, "mtls.sh", environment_without_temporal(stack))
        assert (code, address in printed) == (NOT_REACHED, True)


async def test_mongodb_with_tls_is_reached(stack: Stack, authority: Authority) -> None:
    mongo = stack.mongo_url.removeprefix("mongodb://").partition("/")[0]
    async with tls_proxy(mongo, authority.server(require_client_certificate=False)) as address:
        write_page_files(authority.folder, {"mongo.example.com:27017": address})
        environment = {**environment_without_temporal(stack), "TEMPORAL_ADDRESS": stack.temporal_address}
        code, printed = await run_status(authority.folder, "mongodb.sh", environment)
        assert (code, "MongoDB" in printed) == (BOTH_RESPONDED, False), printed
