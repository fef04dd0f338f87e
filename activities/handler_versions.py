"""Versions of inline handlers, by which the registry shows that an engine and a worker run different code."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from flowkit.activities.handlers import RoleHandler
from flowkit.adapters.worker_registry import HostedHandler
from flowkit.hashing import stable_hash

if TYPE_CHECKING:
    from collections.abc import Mapping

_HASH_CHARS = 12


def hosted_handlers(handlers: Mapping[str, RoleHandler], *, in_engine: bool) -> tuple[HostedHandler, ...]:
    """Return the inline handlers of a process, which engines and workers can both run."""
    return tuple(
        HostedHandler(role=role, version=version_of(handler), engine=in_engine)
        for role, handler in sorted(handlers.items())
        if handler.inline
    )


def version_of(handler: RoleHandler) -> str:
    """Return `handler_version`, or a hash of the source of the handler's class and of the classes that it inherits."""
    if handler.handler_version:
        return str(handler.handler_version)
    classes = [each for each in type(handler).__mro__ if each not in RoleHandler.__mro__]
    return stable_hash([_source(each) for each in classes])[:_HASH_CHARS]


def _source(kind: type) -> str:
    """Return the source of a class, or its name if there is none, as in an interactive session."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return f"{kind.__module__}.{kind.__qualname__}"
