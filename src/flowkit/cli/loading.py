"""Load the handlers, functions and settings that the command line names."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit import limits
from flowkit.activities.handlers import RoleHandler, misspelled_hook, types_problem, unfit_hook
from flowkit.cli.errors import add_remedy
from flowkit.config import CoordinatorConfig, WorkerConfig
from flowkit.core.user_code import (
    contained,
    error_text,
    is_missing_variable,
    original,
    place_of,
    shorten_path,
)
from flowkit.errors import ConfigError
from flowkit.flow import Flow
from flowkit.text import did_you_mean, one_line, truncate
from flowkit.validation.arguments import require

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

C = TypeVar("C")

_HANDLER_REMEDY = (
    "name a subclass of flowkit.worker.RoleHandler, an instance of one, or a function decorated with "
    "@flowkit.worker.role"
)


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
        raise add_remedy(
            ConfigError(f"there is no file {path!r}"), "pass an existing JSON or YAML file to --config"
        )


def load_handlers(names: list[str]) -> dict[str, RoleHandler]:
    """Return handlers by role; instantiate a class without arguments, and take those of a flow.

    Raise ConfigError if a name is invalid.
    """
    handlers: dict[str, RoleHandler] = {}
    sources: dict[str, tuple[str, object]] = {}
    for name in names:
        for handler, given in _load_named_handlers(name):
            known, other = sources.setdefault(handler.role, (name, given))
            if other is not given:
                problem = ConfigError(f"{known} and {name} both handle role {handler.role!r}")
                raise add_remedy(problem, "pass only one of them, or start another worker for the other one")
            handlers.setdefault(handler.role, handler)
    return handlers


_FLOW_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_flow_name(name: str) -> bool:
    """Return whether an argument for a graph has the form module:flow and is no file."""
    return _FLOW_NAME.fullmatch(name) is not None and not Path(name).exists()


_PYTHON_FILE = re.compile(r"(?:\./)?(.+)\.py(?::(\w+))?")


def is_python_file(name: str) -> bool:
    """Return whether an argument names a Python file, such as `pipeline.py` or `pipeline.py:flow`."""
    return _PYTHON_FILE.fullmatch(name) is not None


def refuse_python_file(name: str) -> None:
    """Raise ConfigError, which says how to name what it contains, for an argument that names a Python file."""
    if (match := _PYTHON_FILE.fullmatch(name)) is not None:
        problem = ConfigError(f"{name!r} names a Python file")
        raise add_remedy(problem, f"name its module: {match[1].replace('/', '.')}:{match[2] or 'flow'}")


def module_exists(name: str) -> bool:
    """Return whether the top-level package of module:name can be found. Nothing is imported."""
    look_in_current_folder()
    return importlib.util.find_spec(name.partition(":")[0].partition(".")[0]) is not None


def load_flow(name: str) -> Flow[Any]:
    """Return the flow that module:flow names. What the module prints goes to stderr.

    Raise ConfigError if it is no flow.
    """
    with redirect_stdout(sys.stderr):
        found = _load(name)
    if isinstance(found, Flow):
        return found
    problem = ConfigError(f"{name} is {_describe_kind(found)}, not a Flow")
    flows = _list_flows(importlib.import_module(_split(name)[0]))
    raise add_remedy(problem, f"the flows of the module are {', '.join(flows)}" if flows else _FLOW_REMEDY)


_FLOW_REMEDY = "name an instance of flowkit.Flow that the module creates"


def load_flow_parts(names: list[str]) -> tuple[dict[str, Any], dict[str, RoleHandler]]:
    """Return what an engine runs of these flows: their functions by name, and their inline handlers by role.

    Raise ConfigError if a name is invalid.
    """
    functions: dict[str, Any] = {}
    handlers: dict[str, RoleHandler] = {}
    for name in names:
        flow = load_flow(name)
        for function, value in flow.functions.items():
            if functions.setdefault(function, value) is not value:
                problem = ConfigError(f"{name} and another flow have different functions {function!r}")
                raise add_remedy(problem, "rename one of them, or start another engine for its flow")
        handlers |= {role: each for role, each in flow.handlers.items() if each.inline}
    return functions, handlers


def find_flows(names: list[str]) -> dict[str, Flow[Any]]:
    """Return the flows among names of handlers and flows. The process that loads a name reports what is wrong with it.

    A name such as `Handler` is that of a class, and is not loaded.
    """
    flows: dict[str, Flow[Any]] = {}
    for name in names:
        attribute = name.partition(":")[2]
        if attribute[:1].isupper() and not attribute.isupper():
            continue
        with suppress(ConfigError), redirect_stdout(sys.stderr):
            found = _load(name)
            flows |= {name: found} if isinstance(found, Flow) else {}
    return flows


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


def _load_named_handlers(name: str) -> list[tuple[RoleHandler, object]]:
    """Return the handlers that a name gives, each with what is equal only if two names give the same handler."""
    found = _load(name)
    if not isinstance(found, Flow):
        return [(_check_handler(name, found), object())]
    if not found.handlers:
        problem = ConfigError(f"{name} is a flow without handlers")
        raise add_remedy(problem, "add them with flow.node, or start a worker for other handlers")
    given = {node.spec.kind: node.handler for node in found.nodes.values() if node.handler is not None}
    return [
        (_check_handler(f"{name} (role {role})", each), given[role]) for role, each in found.handlers.items()
    ]


def _check_handler(name: str, found: Any) -> RoleHandler:
    handler = _make_instance(name, found) if isinstance(found, type) else found
    if not isinstance(handler, RoleHandler):
        problem = ConfigError(f"{name} is {_describe_kind(handler)}, not a handler")
        raise add_remedy(problem, _HANDLER_REMEDY)
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
        raise add_remedy(problem, _HANDLER_REMEDY)
    try:
        with contained:
            return kind()
    except Exception as error:
        problem = ConfigError(f"{name} cannot be created without arguments: {_format_error(error)}")
        raise add_remedy(
            problem, "create an instance in the module and pass it as module:instance"
        ) from error


def _split(name: str) -> tuple[str, str]:
    refuse_python_file(name)
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


def _explain_missing(name: str, error: ModuleNotFoundError) -> ConfigError:
    missing = error.name or ""
    if name == missing or name.startswith(f"{missing}."):
        problem = ConfigError(f"module {missing!r} was not found")
        return add_remedy(problem, "run flowkit in the folder that contains it, or set PYTHONPATH")
    problem = ConfigError(f"module {name!r} imports {missing!r}, which is not installed")
    return add_remedy(problem, "install it where flowkit is installed")


def _suggest_instead(module: ModuleType, attribute: str) -> str:
    """Return a remedy that suggests a similar name, or lists the flows and handlers of the module."""
    own = [name for name, value in vars(module).items() if _is_own_handler(module, value)]
    listed = {"its flows are": _list_flows(module), "its handlers are": own}
    shown = "; ".join(f"{what} {', '.join(names)}" for what, names in listed.items() if names)
    return did_you_mean(attribute, dir(module), otherwise=shown or "correct the name after the colon")


def _list_flows(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, Flow)]


def _is_own_handler(module: ModuleType, value: object) -> bool:
    if isinstance(value, RoleHandler):
        return type(value).__module__ == module.__name__
    return isinstance(value, type) and issubclass(value, RoleHandler) and value.__module__ == module.__name__


def _describe_kind(value: object) -> str:
    if isinstance(value, (RoleHandler, type)):
        return "a handler" if isinstance(value, RoleHandler) or issubclass(value, RoleHandler) else "a class"
    return "None" if value is None else f"of type {type(value).__name__}"


def _format_error(error: BaseException) -> str:
    place = place_of(error)
    return f"{truncate(one_line(error_text(error)), 300)}{place and f', at {place}'}"
