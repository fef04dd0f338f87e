"""Roles that are functions: `@role("count") async def count(page: Page) -> Words`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
import typing
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, Never, Protocol, overload

from typing_extensions import ParamSpec, TypeVar

from flowkit.activities import hook_calls, typed
from flowkit.activities.handlers import RoleHandler
from flowkit.activities.results import BatchResult
from flowkit.errors import ConfigError
from flowkit.text import printed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from flowkit.activities.context import RunContext

In = TypeVar("In", contravariant=True, default=Any)
Out = TypeVar("Out", covariant=True, default=Any)
Item = TypeVar("Item")
Result = TypeVar("Result")
P = ParamSpec("P", default=...)
Returned = TypeVar("Returned", covariant=True, default=Any)


class FunctionRole(RoleHandler[In, Out], Generic[In, Out, P, Returned]):
    """The handler that `@role` makes of a function. A call of it calls the function."""

    calls_function: ClassVar[bool] = True
    _flowkit_function: Callable[..., Any]

    def __call__(self, item: In, /, *args: P.args, **kwargs: P.kwargs) -> Returned:
        """Call the function."""
        returned: Returned = self._flowkit_function(item, *args, **kwargs)
        return returned

    def __reduce__(self) -> str:
        """Return its name: another process finds it in the module that defines it."""
        return type(self).__qualname__


class SourceRole(RoleHandler[Never, Out], Generic[Out, P, Returned]):
    """The handler that `@role` makes of a generator. A call of it calls the generator."""

    calls_function: ClassVar[bool] = True
    _flowkit_function: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Returned:
        """Call the generator."""
        returned: Returned = self._flowkit_function(*args, **kwargs)
        return returned

    def __reduce__(self) -> str:
        """Return its name: another process finds it in the module that defines it."""
        return type(self).__qualname__


class RoleDecorator(Protocol):
    """Makes a handler of a function."""

    @overload
    def __call__(
        self, function: Callable[P, AsyncIterator[Result]], /
    ) -> SourceRole[Result, P, AsyncIterator[Result]]: ...
    @overload
    def __call__(
        self, function: Callable[P, Iterator[Result]], /
    ) -> SourceRole[Result, P, Iterator[Result]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Item, P], Coroutine[Any, Any, Result | BatchResult]], /
    ) -> FunctionRole[Item, Result, P, Coroutine[Any, Any, Result]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Item, P], Result | BatchResult], /
    ) -> FunctionRole[Item, Result, P, Result]: ...


def role(
    name: str,
    *,
    key: str | tuple[str, ...] | Callable[[Any], Any] | None = None,
    finalize: Callable[..., Any] | None = None,
    init: Callable[..., Any] | None = None,
    classify_error: Callable[[BaseException], tuple[str, bool]] | None = None,
    inline: bool = False,
    handler_version: str = "",
) -> RoleDecorator:
    """Make a handler of a function for the role `name`.

    The first parameter of the function receives the item, one annotated with RunContext the context, and the others
    come from the `io.input_inline` of the node. A generator is a source: all its parameters come from there, and `key`
    says what the uids of its items come from (`RoleHandler.key`).

    `finalize` is a function that finishes the node: it receives the stored results as its first parameter, in a
    coroutine function to read with `async for` and in a plain one as a list, and the context if it is annotated with
    it. `init` and `classify_error` are those of RoleHandler, without `self`.

    Raise ConfigError if FlowKit cannot call the function, or a source has no key that is the same in every attempt.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f'@role needs the name of the role, such as @role("count"), not {printed(name)}')
    hooks = {"init": init, "classify_error": classify_error}
    given: dict[str, Any] = {
        "role": name,
        "key": staticmethod(key) if callable(key) else key,
        "inline": inline,
        "handler_version": handler_version,
        **{hook: staticmethod(function) for hook, function in hooks.items() if function is not None},
    }

    def decorate(function: Any) -> Any:
        return _make_role(function, given, finalize, typed.names_of_caller())

    made: Any = decorate
    decorator: RoleDecorator = made
    return decorator


def _make_role(
    function: Any, given: dict[str, Any], finalize: Callable[..., Any] | None, names: dict[str, Any]
) -> Any:
    """Return the handler of a function."""
    if not inspect.isfunction(function):
        raise ConfigError(f"@role must decorate a function, not {function!r:.80}")
    if next(iter(inspect.signature(function).parameters), "") in ("self", "cls"):
        raise ConfigError(
            f"@role decorates functions, but {function.__qualname__} is a method: define it outside of the class, or "
            "let a class inherit RoleHandler[In, Out]"
        )
    returns = hook_calls.resolve_annotations(function, names).get("return", Any)
    is_source = hook_calls.is_generator(function, returns)
    name = "produce" if is_source else "process"
    given = {
        **given,
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
        "_flowkit_kinds": _types_of(function, returns, names, is_source=is_source),
        "_flowkit_function": staticmethod(function),
        name: staticmethod(function),
    }
    if finalize is not None:
        given["finalize"] = _make_finalize(finalize, function.__name__, names)
    bases = (SourceRole if is_source else FunctionRole,)
    kind = types.new_class(function.__name__, bases, {"names": names}, lambda members: members.update(given))
    return functools.update_wrapper(kind(), function)


def _types_of(function: Any, returns: Any, names: dict[str, Any], *, is_source: bool) -> tuple[Any, Any]:
    returns = hook_calls.known_type(returns, "its results", function.__name__)
    if is_source:
        return typed.NO_ITEM, (typing.get_args(returns) or (Any,))[0]
    hook = hook_calls.read_hook(function, function.__name__, has_item=True, names=names)
    return hook.item_kind, hook_calls.without(BatchResult, returns)


def _make_finalize(function: Any, owner: str, names: dict[str, Any]) -> Any:
    """Return the method that calls the function that finishes a node."""
    hook = hook_calls.read_hook(
        function, f"finalize of {owner}", has_item=_has_results(function, names), names=names
    )
    if hook.parameters is not None:
        raise ConfigError(
            f"finalize of {owner} has the parameter {min(hook.names)!r}: FlowKit passes the stored results to the "
            "first parameter, and the context to the one annotated with RunContext"
        )

    async def call_with_results(self: Any, ctx: RunContext) -> Any:
        named = {} if hook.context is None else {hook.context: ctx}
        if hook.is_coroutine:
            return await function(self.results(ctx), **named)
        return await asyncio.to_thread(function, [each async for each in self.results(ctx)], **named)

    def call(self: Any, ctx: RunContext) -> Any:
        return function(**({} if hook.context is None else {hook.context: ctx}))

    made = call_with_results if hook.item is not None else call
    made.__qualname__ = f"finalize of {owner}"
    return made


def _has_results(function: Any, names: dict[str, Any]) -> bool:
    annotated = hook_calls.resolve_annotations(function, names)
    return any(
        not hook_calls.is_context(name, annotated.get(name, inspect.Parameter.empty))
        for name in inspect.signature(function).parameters
    )
