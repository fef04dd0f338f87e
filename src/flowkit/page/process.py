"""The process that serves the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowkit.attempt.background import Health
from flowkit.page.api import PageApi, page_routes
from flowkit.page.live import LiveTasks
from flowkit.page.static_files import static_routes
from flowkit.server.serving import serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.reading.state import Servers
    from flowkit.server.serving import HttpServer


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSettings:
    """How the page is served."""

    addresses: Sequence[tuple[str, int]]
    certificate: str | None = None
    key: str | None = None
    web_ui: str | None = None
    """Address of Temporal's Web UI, to which the page links; None for no links."""
    read_only: bool = False


class PageProcess:
    """Serves the page between `start` and `stop`."""

    def __init__(self, servers: Servers, settings: PageSettings) -> None:
        self._servers = servers
        self._settings = settings
        self._live = LiveTasks(servers)
        self._server: HttpServer | None = None
        self._api: PageApi | None = None

    @property
    def ports(self) -> list[int]:
        """The ports on which the page is served."""
        return [] if self._server is None else [each.port for each in self._server.bound]

    @property
    def watched(self) -> list[str]:
        """The tasks that have viewers."""
        return self._live.task_ids

    async def start(self) -> None:
        """Listen. Raise ConfigError if that is not possible."""
        settings = self._settings
        web_ui = settings.web_ui.rstrip("/") if settings.web_ui else None
        api = self._api = PageApi(self._servers, self._live, web_ui=web_ui, read_only=settings.read_only)
        await self._servers.catalog.prepare()
        self._server = await serve(
            [*static_routes(), *page_routes(api)],
            settings.addresses,
            db=self._servers.db,
            health=lambda: self.health().ok,
            certificate=settings.certificate,
            key=settings.key,
        )

    async def stop(self) -> None:
        """Accept no further calls, and end all streams."""
        server, self._server = self._server, None
        await self._live.close()
        if server is not None:
            await server.stop()
        if self._api is not None:
            await self._api.close()

    async def wait_stopped(self) -> None:
        """Wait until the server ends on its own, and raise its error."""
        if self._server is not None:
            await self._server.wait_stopped()

    def health(self) -> Health:
        """Return whether the page is served."""
        return Health(running=self._server is not None and self._server.health().ok)
