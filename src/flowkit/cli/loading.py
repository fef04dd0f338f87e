"""Load the handlers, functions and settings that the command line names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit import limits
from flowkit.activities.handlers import RoleHandler, misspelled_hook, types_problem, unfit_hook
from flowkit.cli.errors import add_remedy
from flowkit.config import CoordinatorConfig, WorkerConfig
from flowkit.core.user_code import contained, error_text, is_missing_variable, original, place_of
from flowkit.errors import ConfigError
from flowkit.text import did_you_mean, one_line, truncate
from flowkit.validation.arguments import require

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

C = TypeVar("C")


def load_config(path: str | None, overrides: dict[str, Any]) -> CoordinatorConfig:
    """Return the settings of an engine. Raise ConfigError, which names the file or the setting, if one is invalid."""
    return _load_settings(path, lambda: CoordinatorConfig.load(path, overrides=overrides))


def load_worker_config(path: str | None, overrides: dict[str, Any]) -> WorkerConfig:
    """Return the settings of a worker, or the defaults without a file.

    Raise ConfigError, which names the file or the setting, if one is invalid.
    """
    if path is None:
        return _load_settings(path, lambda: WorkerConfig(**overrides))
    return _load_settings(path, lambda: WorkerConfig.load(path, overrides=overrides))


def _load_settings(path: str | None, load: Callable[[], C]) -> C:
    if path is not None:
        check_file(path)
    try:
        return load()
    except TypeError as error:
        raise add_remedy(ConfigError(str(error)), "docs/configuration.md lists the settings") from None


def check_file(path: str) -> None:
    """Raise ConfigError if the file of `--config` does not exist."""
    if not Path(path).is_file():
        raise add_remedy(ConfigError(f"there is no file {path!r}"), "pass an existing JSON file to --config")


def load_handlers(names: list[str]) -> dict[str, RoleHandler]:
    """Return handlers by role; instantiate a class without arguments. Raise ConfigError if a name is invalid."""
    handlers: dict[str, RoleHandler] = {}
    sources: dict[str, str] = {}
    for name in names:
        handler = _load_handler(name)
        if handler.role in handlers:
            problem = ConfigError(f"{sources[handler.role]} and {name} both handle role {handler.role!r}")
            raise add_remedy(problem, "pass only one of them, or start another worker for the other one")
        handlers[handler.role], sources[handler.role] = handler, name
    return handlers


def check_names(names: list[str]) -> None:
    """Check names without importing them.

    Raise ConfigError for a name that is not module:name, or whose top-level package cannot be found.
    """
    for name in names:
        module, _ = _split(name)
        look_in_current_folder()
        top = module.partition(".")[0]
        if importlib.util.find_spec(top) is None:
            raise _explain_missing(module, ModuleNotFoundError(name=top))


def choose_roles(known: dict[str, RoleHandler], wanted: list[str]) -> list[str]:
    """Return the roles to run: the wanted ones, or all. Raise ConfigError for a role without a handler."""
    for role in wanted:
        if role not in known:
            problem = ConfigError(f"no handler serves role {role!r}")
            raise add_remedy(problem, f"the handlers serve {', '.join(sorted(known))}")
    return list(dict.fromkeys(wanted)) or list(known)


def load_functions(pairs: list[str]) -> dict[str, Any]:
    """Return coordinator functions by name, from `NAME=module:function`. Raise ConfigError if one is invalid."""
    functions: dict[str, Any] = {}
    for pair in pairs:
        name, separator, target = pair.partition("=")
        if not separator or not name:
            problem = ConfigError(f"--function {pair!r} is not NAME=module:function")
            raise add_remedy(problem, "for example --function send_report=mypackage.functions:send_report")
        functions[name] = _load(target)
        if not callable(functions[name]):
            problem = ConfigError(
                f"--function {pair!r}: {target} is {_describe_kind(functions[name])} and cannot be called"
            )
            raise add_remedy(problem, "name an `async def` function")
    return functions


def _load_handler(name: str) -> RoleHandler:
    found = _load(name)
    handler = _make_instance(name, found) if isinstance(found, type) else found
    if not isinstance(handler, RoleHandler):
        problem = ConfigError(f"{name} is {_describe_kind(handler)}, not a handler")
        raise add_remedy(problem, "name a subclass of flowkit.worker.RoleHandler, or an instance of one")
    if not handler.role:
        raise add_remedy(ConfigError(f"{name} has no role"), 'set the class attribute role = "..."')
    if not isinstance(handler.role, str) or not limits.ROLE.fullmatch(handler.role):
        problem = ConfigError(f"{name}: role {handler.role!r} cannot be a role's name")
        raise add_remedy(problem, "use 1 to 100 letters, digits, '.', '_', '-', a letter or digit first")
    require(types_problem(handler), misspelled_hook(handler), unfit_hook(handler))
    return handler


def _make_instance(name: str, kind: type[Any]) -> Any:
    """Instantiate a handler class. Any other class is refused, because its constructor may have side effects."""
    if not issubclass(kind, RoleHandler):
        problem = ConfigError(f"{name} is a class, not a handler's")
        raise add_remedy(problem, "name a subclass of flowkit.worker.RoleHandler, or an instance of one")
    try:
        with contained:
            return kind()
    except Exception as error:
        problem = ConfigError(f"{name} cannot be created without arguments: {_format_error(error)}")
        raise add_remedy(
            problem, "create an instance in the module and pass it as module:instance"
        ) from error


def _split(name: str) -> tuple[str, str]:
    module, separator, attribute = name.partition(":")
    if not separator or not module or not attribute:
        problem = ConfigError(f"{name!r} is not module:name")
        raise add_remedy(problem, "for example mypackage.handlers:MyHandler")
    return module, attribute


def look_in_current_folder() -> None:
    """Let imports find modules in the current folder, as `python -m` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def _load(name: str) -> Any:
    module_name, attribute = _split(name)
    module = _import_module(module_name)
    if not hasattr(module, attribute):
        problem = ConfigError(f"module {module_name!r} has no {attribute!r}")
        raise add_remedy(problem, _suggest_instead(module, attribute))
    return getattr(module, attribute)


def _import_module(name: str) -> ModuleType:
    look_in_current_folder()
    try:
        with contained:
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _explain_missing(name, error) from error
    except SyntaxError as error:
        where = f"{shorten_path(error.filename or '')}:{error.lineno}"
        problem = ConfigError(f"module {name!r} has a syntax error at {where}: {error.msg}")
        raise add_remedy(problem, "correct the line") from error
    except Exception as error:
        problem = ConfigError(f"module {name!r} cannot be imported: it raises {_format_error(error)}")
        raise add_remedy(problem, _suggest_correction(original(error))) from error


def _suggest_correction(error: BaseException) -> str:
    if is_missing_variable(error):
        return "set this environment variable"
    return "correct the module; --verbose shows the traceback"


def shorten_path(path: str) -> str:
    """Return a path relative to the current folder, if it is in it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _explain_missing(name: str, error: ModuleNotFoundError) -> ConfigError:
    missing = error.name or ""
    if name == missing or name.startswith(f"{missing}."):
        problem = ConfigError(f"module {missing!r} was not found")
        return add_remedy(problem, "run flowkit in the folder that contains it, or set PYTHONPATH")
    problem = ConfigError(f"module {name!r} imports {missing!r}, which is not installed")
    return add_remedy(problem, "install it where flowkit is installed")


def _suggest_instead(module: ModuleType, attribute: str) -> str:
    """Return a remedy that suggests a similar name, or lists the handlers of the module."""
    own = [name for name, value in vars(module).items() if _is_own_handler(module, value)]
    handlers = f"its handlers are {', '.join(own)}" if own else "correct the name after the colon"
    return did_you_mean(attribute, dir(module), otherwise=handlers)


def _is_own_handler(module: ModuleType, value: object) -> bool:
    if isinstance(value, RoleHandler):
        return type(value).__module__ == module.__name__
    return isinstance(value, type) and issubclass(value, RoleHandler) and value.__module__ == module.__name__


def _describe_kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def _format_error(error: BaseException) -> str:
    place = place_of(error)
    return f"{truncate(one_line(error_text(error)), 300)}{place and f', at {place}'}"
