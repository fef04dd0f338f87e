"""Errors that the server returns as JSON, and what it logs about errors that nobody expected."""

from __future__ import annotations

import logging
import secrets
import traceback
from typing import TYPE_CHECKING

from flowkit.core.utils import dumps

if TYPE_CHECKING:
    from collections.abc import Iterator

_logger = logging.getLogger("flowkit.server")


class HttpError(Exception):
    """An error with an HTTP status and a JSON body, which has the form of the errors of the command line."""

    def __init__(
        self, status: int, code: str, message: str, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers

    @property
    def body(self) -> bytes:
        """The JSON body."""
        return dumps({"error": {"code": self.code, "message": str(self)}})


class Unauthorized(HttpError):
    """The call has no token, or one that is not valid: HTTP 401."""

    def __init__(self, message: str) -> None:
        super().__init__(401, "unauthorized", message, ((b"www-authenticate", b'Bearer realm="flowkit"'),))


def log_unexpected(error: BaseException, where: str) -> str:
    """Log where an unexpected error was raised, and return the reference under which the log has it.

    The log has the types of the error and of its causes, and the lines of code, but no messages: they may quote
    parameters of the call.
    """
    reference = secrets.token_hex(6)
    frames = "".join(_describe_chain(error))
    _logger.error("unexpected error %s in %s:\n%s", reference, where, frames.rstrip())
    return reference


def _describe_chain(error: BaseException | None) -> Iterator[str]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield f"{type(error).__module__}.{type(error).__qualname__}\n"
        yield from traceback.format_tb(error.__traceback__)
        error = error.__cause__ or error.__context__
