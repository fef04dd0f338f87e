"""A process of the admission queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flowkit.admission.process import AdmissionProcess, AdmissionSettings
from flowkit.attempt.background import Health
from flowkit.server import serving
from flowkit.testing import memory_database


class FailedServer:
    """An HTTP server that ends on its own."""

    bound = (SimpleNamespace(port=8080),)

    async def wait_stopped(self) -> None:
        """End with an error."""
        raise OSError("the port is gone")

    async def stop(self) -> None:
        """Stop."""

    def health(self) -> Health:
        """Return that it does not run."""
        return Health(running=False, loops=())


async def test_a_process_ends_with_the_error_of_its_http_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(*given: object, **more: object) -> FailedServer:
        return FailedServer()

    monkeypatch.setattr(serving, "serve", serve)
    client: Any = None
    settings = AdmissionSettings(queue="q", addresses=[("127.0.0.1", 8080)], dispatches=False)
    process = AdmissionProcess(db=memory_database(), client=client, settings=settings)
    await process.start()
    with pytest.raises(OSError, match="the port is gone"):
        await process.wait_stopped()
    assert not process.health().ok
    await process.stop()
