"""Handlers and functions from `module:name`, as the command line names them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from flowkit.activities.handlers import RoleHandler
from flowkit.config import CoordinatorConfig
from flowkit.errors import ConfigError


def load_config(path: str | None, overrides: dict[str, Any]) -> CoordinatorConfig:
    """An engine's settings. ConfigError names the file or the setting that is wrong."""
    if path is not None and not Path(path).is_file():
        raise ConfigError(f"there is no file {path!r}")
    try:
        return CoordinatorConfig.load(path, overrides=overrides)
    except TypeError as error:
        raise ConfigError(str(error)) from None


def load_handlers(names: list[str]) -> dict[str, RoleHandler]:
    """Handlers by role. A class is called without arguments. ConfigError says what is wrong with a name."""
    handlers: dict[str, RoleHandler] = {}
    for name in names:
        found = _load(name)
        handler = found() if isinstance(found, type) else found
        if not isinstance(handler, RoleHandler):
            raise ConfigError(f"{name} is {type(handler).__name__}, not a RoleHandler")
        if not handler.role:
            raise ConfigError(f'{name} names no role: give the class an attribute role = "..."')
        if handler.role in handlers:
            raise ConfigError(f"{name}: role {handler.role!r} has a handler already")
        handlers[handler.role] = handler
    return handlers


def load_functions(pairs: list[str]) -> dict[str, Any]:
    """Coordinator functions by name, from `NAME=module:function`."""
    functions: dict[str, Any] = {}
    for pair in pairs:
        name, separator, target = pair.partition("=")
        if not separator or not name:
            raise ConfigError(f"--function {pair!r} must read NAME=module:function")
        functions[name] = _load(target)
        if not callable(functions[name]):
            raise ConfigError(f"--function {pair!r}: {target} cannot be called")
    return functions


def _load(name: str) -> Any:
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"{name!r} must read module:name, for example mypackage.handlers:MyHandler")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot import {module_name!r}: {error}; is it on PYTHONPATH?") from None
    if not hasattr(module, attribute):
        raise ConfigError(f"module {module_name!r} has no {attribute!r}")
    return getattr(module, attribute)
