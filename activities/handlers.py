"""The handler interface: RoleHandler, Batch, the results, and the built-in EchoHandler (spec: RoleHandler,
EchoHandler).

Public modules re-export them.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import inspect
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol

from typing_extensions import TypeVar

from flowkit import reason_codes
from flowkit.activities import typed
from flowkit.activities.results import Batch, BatchFailure, BatchResult, FinalizeResult
from flowkit.errors import ConfigError
from flowkit.limits import VERSION_CHARS
from flowkit.text import printed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping

    from pydantic import BaseModel

    from flowkit.activities.context import RunContext

__all__ = [
    "PERMANENT_ERRORS",
    "Batch",
    "BatchFailure",
    "BatchResult",
    "EchoHandler",
    "FinalizeResult",
    "RoleHandler",
]

In = TypeVar("In", contravariant=True, default=Any)
"""The type of the items that a handler processes; of a source, of its `io.input_inline`."""
Out = TypeVar("Out", covariant=True, default=Any)
"""The type of its results."""


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


PERMANENT_ERRORS = (TypeError, ValueError, KeyError)
"""The errors that `RoleHandler.classify_error` takes for bad input."""


class RoleHandler(Generic[In, Out]):
    """Runs the nodes of one role. One instance serves many runs, so do not store the state of a run in it.

    A subclass of `RoleHandler[In, Out]` defines `process`, which receives an item and returns a result, or `produce`,
    which yields the results of a source. `In` and `Out` are types that pydantic validates.

    A subclass of the bare `RoleHandler` receives and returns records instead. FlowKit calls its methods in this order:
    `init`, `load_input`, `iter_batches` (unless an input adapter delivers the batches), `process_batch` for each batch,
    `finalize`. It passes any exception to `classify_error`. `init`, `load_input` and `iter_batches` receive the
    RunContext as well if they declare a parameter `ctx`.
    """

    role: str = ""
    key: Any = None
    """What the uids of a source come from: a field of its items, a tuple of fields, or a function of the item."""
    inline: bool = False
    """Whether an engine that hosts this handler runs its attempts itself, as local activities (docs/performance.md).

    Set it if an attempt takes well below two seconds. It has no effect in a worker.
    """
    allow_duplicate_uids: bool = False
    """Whether an attempt may yield several batches with one uid; only one of their results is then stored.

    By default, the attempt fails permanently as `duplicate_uid`.
    """
    handler_version: str = ""
    """Version of the handler, which attempts and errors name: letters, digits, `.`, `_`, `-` and `+`, 60 at most.

    Empty means the version of its package, if it is in one, and a hash of its source (docs/workers.md).
    """

    if TYPE_CHECKING:
        # A hook may be a coroutine or a plain function, and the first three may declare a parameter `ctx`.
        def init(self, info: dict[str, Any], *args: Any, **kwargs: Any) -> Any: ...
        def load_input(
            self,
            input_ref: dict[str, Any] | None,
            input_inline: dict[str, Any] | None,
            *args: Any,
            **kwargs: Any,
        ) -> Any: ...
        def iter_batches(self, loaded: Any, *args: Any, **kwargs: Any) -> Any: ...
        def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult | Awaitable[BatchResult]: ...
        def finalize(
            self, ctx: RunContext
        ) -> (
            FinalizeResult
            | BaseModel
            | Mapping[str, Any]
            | _Dataclass
            | Awaitable[FinalizeResult | BaseModel | Mapping[str, Any] | _Dataclass | None]
            | None
        ): ...
        def finalize_attempt(self, ctx: RunContext) -> Awaitable[None] | None: ...

        # `In` and `Out` are Any in a class that names no types, so that a helper called `process` is no error.
        def process(
            self, item: In, /, *args: Any, **kwargs: Any
        ) -> Out | BatchResult | Awaitable[Out | BatchResult]: ...
        def produce(
            self, given: In, /, *args: Any, **kwargs: Any
        ) -> AsyncIterator[Out] | Iterable[Out] | Awaitable[Iterable[Out]]: ...

    else:

        async def init(self, info: dict[str, Any]) -> None:
            """Prepare a run. `info` contains `task_id`, `node_id`, `attempt_epoch`, `worker_id` and `role`."""

        async def load_input(
            self, input_ref: dict[str, Any] | None, input_inline: dict[str, Any] | None
        ) -> Any:
            """Load and return the node's input.

            If the node names no input adapter, the returned dict may propose one: `input_adapter` and `input_args`.
            """
            return {"input_ref": input_ref or {}, "input_inline": input_inline or {}}

        async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
            """Yield the batches of a node that does not pull. Their uids must be the same in every attempt."""
            yield Batch(payload=loaded or {})

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            """Process one batch and return its result."""
            return BatchResult(success=True, metrics={"processed": 1})

        async def finalize(self, ctx: RunContext) -> FinalizeResult | None:
            """Finish the node; called even if there were no batches.

            Do not rely on `ctx.kv` here: earlier attempts may have processed some of the batches.
            """
            return FinalizeResult()

        async def finalize_attempt(self, ctx: RunContext) -> None:
            """End one attempt of a shard of a node with `parallel`; called when it has processed its batches.

            `finalize` follows once, in an attempt of its own, when all shards have ended.
            """

    def classify_error(self, exc: BaseException) -> tuple[str, bool]:
        """Return `(reason_code, permanent)` for an exception that another method raised."""
        if isinstance(exc, PERMANENT_ERRORS):
            return reason_codes.BAD_INPUT, True
        return reason_codes.UNEXPECTED_ERROR, False

    _flowkit_types: ClassVar[typed.TypedHandler | None] = None
    """What FlowKit knows of the types that the class names; None if it names none. Set by FlowKit."""

    def __init_subclass__(cls, *, names: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Read the types that the class names. Raise ConfigError if its hooks do not fit them."""
        super().__init_subclass__(**kwargs)
        cls._flowkit_types = typed.define(
            cls, RoleHandler, typed.names_of_caller() if names is None else names
        )

    @property
    def input_type(self) -> Any:
        """The type of its items; of a source, of its `io.input_inline`. None if the class names no types."""
        return self._flowkit_types.input_type if self._flowkit_types is not None else None

    @property
    def output_type(self) -> Any:
        """The type of its results; None if the class names no types."""
        return self._flowkit_types.output.kind if self._flowkit_types is not None else None

    @property
    def is_source(self) -> bool:
        """Whether it is a typed handler with `produce`."""
        return self._flowkit_types is not None and self._flowkit_types.is_source

    def input_schema(self) -> dict[str, Any] | None:
        """Return the JSON Schema of an item; of a source, of its `io.input_inline`. None if it is not known."""
        return self._flowkit_types.input_schema() if self._flowkit_types is not None else None

    def output_schema(self) -> dict[str, Any] | None:
        """Return the JSON Schema of a result; None if it is not known."""
        return self._flowkit_types.output.schema("serialization") if self._flowkit_types is not None else None

    def parameters_schema(self) -> dict[str, Any] | None:
        """Return the JSON Schema of what comes from `io.input_inline` besides the item; None if nothing does."""
        return self._flowkit_types.parameters_schema() if self._flowkit_types is not None else None

    async def results(self, ctx: RunContext) -> AsyncIterator[Out]:
        """Yield the results of all batches that this node has stored, in earlier attempts too, for `finalize`.

        Raise BatchFailure for one that does not validate, such as one of an earlier version of the handler.
        """
        types = self._flowkit_types
        async for partial in ctx.artifacts.partials():
            result: Any = partial.get("meta") if types is None else types.read_result(partial, ctx)
            yield result

    async def try_on(self, item: In, **context: Any) -> Out:
        """Process one item as a node does, in a unit test, and return the result as another node would read it.

        Keyword arguments are those of `flowkit.testing.handler_context`: `params`, `input_inline`, `vars` and others.
        Raise BatchFailure if the item or the result does not validate, and what `process` raises.
        """
        result: Out = await _doubles().try_item(self, item, **context)
        return result

    async def try_produce(self, given: Any = None, **context: Any) -> list[Out]:
        """Return all items that a source yields, in a unit test.

        `given` is what `produce` receives, as an object or as its JSON; without it, use `input_inline`. Keyword
        arguments are those of `try_on`.
        """
        items: list[Out] = await _doubles().try_source(self, given, **context)
        return items


def _doubles() -> Any:
    """Return the module that runs handlers in unit tests, which only tests import."""
    return import_module("flowkit.testing.tries")


_ARGUMENTS = {
    "init": ("info",),
    "load_input": ("input_ref", "input_inline"),
    "iter_batches": ("loaded",),
    "process_batch": ("batch", "ctx"),
    "finalize": ("ctx",),
    "finalize_attempt": ("ctx",),
    "classify_error": ("exc",),
}
"""The arguments with which FlowKit calls each hook."""
_SIMILARITY = 0.85
"""Least similarity of a misspelled hook. `finalise`, `iter_batch` and `processBatch` have it; `load_data` does not."""


def misspelled_hook(handler: RoleHandler) -> str | None:
    """Return the problem of a handler whose class defines a method that looks like a misspelled hook, or None.

    Private methods, inherited ones, and those beside the hook that they resemble count as helpers.
    """
    kind = type(handler)
    for name in [name for name in vars(kind) if not name.startswith("_") and name not in _ARGUMENTS]:
        close = difflib.get_close_matches(name.lower(), _ARGUMENTS, n=1, cutoff=_SIMILARITY)
        if (
            close
            and inspect.isroutine(getattr(kind, name))
            and getattr(kind, close[0]) is vars(RoleHandler)[close[0]]
        ):
            return (
                f"{kind.__name__}.{name} is not a hook of RoleHandler, so FlowKit never calls it; did you mean "
                f"{close[0]!r}? If it is a helper, begin its name with '_'"
            )
    return None


def types_problem(handler: RoleHandler) -> str | None:
    """Return the problem of a handler whose class names types but lacks `process`, `produce` or a key, or None."""
    kind = type(handler)
    try:
        if kind._flowkit_types is None:
            typed.define(kind, RoleHandler, {}, is_complete=True)
    except ConfigError as error:
        return str(error)
    return None


def prepares_input(handler: RoleHandler) -> bool:
    """Return whether a handler defines what it processes itself, in place of the `io.input_inline` of its node.

    FlowKit adds `iter_batches` to a source.
    """
    hooks = ("load_input",) if handler.is_source else ("load_input", "iter_batches")
    return any(getattr(type(handler), name) is not getattr(RoleHandler, name) for name in hooks)


def unfit_hook(handler: RoleHandler) -> str | None:
    """Return the problem of a handler with a hook that cannot be called with FlowKit's arguments, or None."""
    for name, arguments in _ARGUMENTS.items():
        try:
            signature = inspect.signature(getattr(handler, name))
        except (TypeError, ValueError):
            continue
        given = {"ctx": None} if "ctx" in signature.parameters and "ctx" not in arguments else {}
        try:
            signature.bind(*arguments, **given)
        except TypeError as error:
            needed = ", ".join(("self", *arguments))
            return f"{type(handler).__name__}.{name}{signature} does not fit: {error}; write {name}({needed})"
    return None


_VERSION = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._+-]{{0,{VERSION_CHARS - 1}}}")
_HASH_CHARS = 12
_PACKAGE_CHARS = 40
"""Longest version of a package in the version of a handler; longer ones are cut."""


def version_problem(handler: RoleHandler) -> str | None:
    """Return why the attribute `handler_version` of a handler is not valid, or None."""
    given = handler.handler_version
    if given == "" or (isinstance(given, str) and _VERSION.fullmatch(given)):
        return None
    return (
        f"{type(handler).__name__}.handler_version is {printed(given)}: set a text of 1 to "
        f"{VERSION_CHARS} letters, digits, '.', '_', "
        "'-' and '+' that begins with a letter or digit, or omit it"
    )


def version_of(handler: RoleHandler) -> str:
    """Return `handler_version`, or else the version of the handler's package, `+`, and a hash of its source.

    The hash covers the files of the modules that define the class of the handler and the classes it inherits, since an
    editable install keeps its version. A handler outside a package has only the hash.
    """
    if handler.handler_version:
        return handler.handler_version
    own = [each for each in type(handler).__mro__ if each not in RoleHandler.__mro__]
    classes = [each for each in own if not vars(each).get("calls_function")] or own or [RoleHandler]
    digest = hashlib.sha256()
    for module in dict.fromkeys(each.__module__ for each in classes):
        digest.update(_read_source(module))
    package = _package_version(classes[0].__module__)
    return f"{package}+{digest.hexdigest()[:_HASH_CHARS]}" if package else digest.hexdigest()[:_HASH_CHARS]


def _file_of(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


def _read_source(module: str) -> bytes:
    """Return the file of a module, or its name if it has none, as in an interactive session."""
    try:
        return Path(_file_of(module) or "").read_bytes()
    except OSError:
        return module.encode()


@cache
def _package_version(module: str) -> str:
    """Return the version of the installed package that contains a module; empty if there is none."""
    from importlib import metadata

    package, path = module.partition(".")[0], _file_of(module) or ""
    names = [package]
    if {"site-packages", "dist-packages"} & {*Path(path).parts}:  # The lookup by content takes 0.2 s.
        names = [*metadata.packages_distributions().get(package, ()), package]
    for name in names:
        try:
            found = metadata.version(name)
        except (metadata.PackageNotFoundError, ValueError):
            continue
        return re.sub(r"[^A-Za-z0-9._+-]", "-", found or "")[:_PACKAGE_CHARS].lstrip("._+-")
    return ""


_STEPS = 5
_STEP_SEC = 0.05


class EchoHandler(RoleHandler):
    """Processes a batch in about a quarter of a second and returns the number of steps as a metric."""

    role = "echo"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Run five short steps and check for a cancel before each one."""
        for _ in range(_STEPS):
            await ctx.raise_if_cancelled()
            await ctx.cancellable(asyncio.sleep(_STEP_SEC))
        return BatchResult(success=True, metrics={"echoed": _STEPS})
