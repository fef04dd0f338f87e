"""Roles that are functions: `@role("count") async def count(page: Page) -> Words`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
import typing
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, Literal, Never, Protocol, overload

from typing_extensions import ParamSpec, TypeVar

from flowkit.activities import hook_calls, typed
from flowkit.activities.handlers import RoleHandler
from flowkit.activities.json_types import type_name
from flowkit.activities.results import BatchResult
from flowkit.errors import ConfigError
from flowkit.text import printed

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Hashable, Iterable, Iterator

    from flowkit.activities.context import RunContext

In = TypeVar("In", contravariant=True, default=Any)
Out = TypeVar("Out", covariant=True, default=Any)
Item = TypeVar("Item")
Result = TypeVar("Result", default=Any)
Stored = TypeVar("Stored", bound="Hashable | list[Any] | dict[Any, Any] | set[Any] | None")
"""A result that FlowKit stores: anything but a BatchResult, whose class says that it has no hash."""
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


class CollectorRole(RoleHandler[Item, Item], Generic[Item, P, Returned]):
    """The handler that `@role` makes of a function that receives all items. A call of it calls the function."""

    calls_function: ClassVar[bool] = True
    _flowkit_function: Callable[..., Any]

    def __call__(
        self, items: AsyncIterator[Item] | list[Item], /, *args: P.args, **kwargs: P.kwargs
    ) -> Returned:
        """Call the function."""
        returned: Returned = self._flowkit_function(items, *args, **kwargs)
        return returned

    def __reduce__(self) -> str:
        """Return its name: another process finds it in the module that defines it."""
        return type(self).__qualname__


class RoleDecorator(Protocol):
    """Makes a handler of a function that processes an item.

    Without a member `BatchResult`, the type of the result is taken whole: mypy joins the members of a union that it
    compares with another union, so that `Cat | Dog` would become their base class.
    """

    @overload
    def __call__(
        self, function: Callable[Concatenate[Item, P], Coroutine[Any, Any, Stored]], /
    ) -> FunctionRole[Item, Stored, P, Coroutine[Any, Any, Stored]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Item, P], Coroutine[Any, Any, Result | BatchResult]], /
    ) -> FunctionRole[Item, Result, P, Coroutine[Any, Any, Result]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Item, P], Awaitable[Stored]], /
    ) -> FunctionRole[Item, Stored, P, Awaitable[Stored]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Item, P], Awaitable[Result | BatchResult]], /
    ) -> FunctionRole[Item, Result, P, Awaitable[Result]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Item, P], Stored], /
    ) -> FunctionRole[Item, Stored, P, Stored]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Item, P], Result | BatchResult], /
    ) -> FunctionRole[Item, Result, P, Result]: ...


class SourceDecorator(Protocol):
    """Makes a handler of a generator."""

    @overload
    def __call__(
        self, function: Callable[P, AsyncIterator[Result]], /
    ) -> SourceRole[Result, P, AsyncIterator[Result]]: ...
    @overload
    def __call__(
        self, function: Callable[P, AsyncIterable[Result]], /
    ) -> SourceRole[Result, P, AsyncIterable[Result]]: ...
    @overload
    def __call__(
        self, function: Callable[P, Iterator[Result]], /
    ) -> SourceRole[Result, P, Iterator[Result]]: ...
    @overload
    def __call__(
        self, function: Callable[P, Iterable[Result]], /
    ) -> SourceRole[Result, P, Iterable[Result]]: ...


class CollectorDecorator(Protocol):
    """Makes a handler of a function that receives all items."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[AsyncIterator[Item], P], Coroutine[Any, Any, Result]], /
    ) -> CollectorRole[Item, P, Coroutine[Any, Any, Result]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[list[Item], P], Result], /
    ) -> CollectorRole[Item, P, Result]: ...


@overload
def role(
    name: str,
    *,
    collects: Literal[True],
    init: Callable[..., Any] | None = None,
    classify_error: Callable[[BaseException], tuple[str, bool]] | None = None,
    inline: bool = False,
    handler_version: str = "",
) -> CollectorDecorator: ...


@overload
def role(
    name: str,
    *,
    key: str | tuple[str, ...] | Callable[[Any], Any],
    finalize: Callable[..., Any] | None = None,
    init: Callable[..., Any] | None = None,
    classify_error: Callable[[BaseException], tuple[str, bool]] | None = None,
    inline: bool = False,
    handler_version: str = "",
) -> SourceDecorator: ...


@overload
def role(
    name: str,
    *,
    key: None = None,
    finalize: Callable[..., Any] | None = None,
    init: Callable[..., Any] | None = None,
    classify_error: Callable[[BaseException], tuple[str, bool]] | None = None,
    inline: bool = False,
    handler_version: str = "",
) -> RoleDecorator: ...


def role(
    name: str,
    *,
    collects: bool = False,
    key: str | tuple[str, ...] | Callable[[Any], Any] | None = None,
    finalize: Callable[..., Any] | None = None,
    init: Callable[..., Any] | None = None,
    classify_error: Callable[[BaseException], tuple[str, bool]] | None = None,
    inline: bool = False,
    handler_version: str = "",
) -> Any:
    """Make a handler of a function for the role `name`.

    The first parameter of the function receives the item, one annotated with RunContext the context, and the others
    come from the `io.input_inline` of the node. A generator is a source: all its parameters come from there, and `key`
    says what the uids of its items come from (`RoleHandler.key`).

    `finalize` is a function that finishes the node. Its first parameter receives the stored results: in a coroutine
    function to read with `async for`, in a plain one as a list. The context and other parameters are as above.

    With `collects`, the function is this one: FlowKit stores each item as it is, and calls the function once with all.

    `init` and `classify_error` are those of RoleHandler, without `self`.

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

    if collects and (key is not None or finalize is not None):
        extra = "key" if finalize is None else "finalize"
        raise ConfigError(
            f"@role({name!r}, collects=True) has {extra}: its function finishes the node; remove {extra}"
        )

    def decorate(function: Any) -> Any:
        names = typed.names_of_caller()
        _check_function(function)
        base, own = (
            _describe_collector(function, names)
            if collects
            else _describe_function(function, finalize, names)
        )
        return _make_role(function, given, base, own, names)

    return decorate


def _check_function(function: Any) -> None:
    if not inspect.isfunction(function):
        raise ConfigError(f"@role must decorate a function, not {function!r:.80}")
    if next(iter(inspect.signature(function).parameters), "") in ("self", "cls"):
        raise ConfigError(
            f"@role decorates functions, but {function.__qualname__} is a method: define it outside of the class, or "
            "let a class inherit RoleHandler[In, Out]"
        )


def _make_role(
    function: Any, given: dict[str, Any], base: Any, own: dict[str, Any], names: dict[str, Any]
) -> Any:
    """Return the handler of a function: an instance of a class below `base` with its `own` members."""
    members = {
        **given,
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
        "_flowkit_function": staticmethod(function),
        **own,
    }
    kind = types.new_class(function.__name__, (base,), {"names": names}, lambda space: space.update(members))
    return functools.update_wrapper(kind(), function)


def _describe_function(function: Any, finalize: Any, names: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the base and the members of the class for a function that yields items, or processes one."""
    returns = hook_calls.resolve_annotations(function, names).get("return", Any)
    is_source = hook_calls.is_generator(function, returns)
    own: dict[str, Any] = {
        "_flowkit_kinds": _types_of(function, returns, names, is_source=is_source),
        "produce" if is_source else "process": staticmethod(function),
    }
    if finalize is not None:
        own |= _make_finalize(finalize, f"finalize of {function.__name__}", names)
        _check_results(finalize, own["_flowkit_final"], own["_flowkit_kinds"][1], function.__name__)
    return SourceRole if is_source else FunctionRole, own


def _types_of(function: Any, returns: Any, names: dict[str, Any], *, is_source: bool) -> tuple[Any, Any]:
    returns = hook_calls.known_type(returns, "its results", function.__name__)
    if is_source:
        return typed.NO_ITEM, (typing.get_args(returns) or (Any,))[0]
    hook = hook_calls.read_hook(function, function.__name__, has_item=True, names=names)
    return hook.item_kind, hook_calls.without(BatchResult, returns)


def _describe_collector(function: Any, names: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the base and the members of the class for a function that receives all items.

    Raise ConfigError if it does not name their type as that of an iterator or a list.
    """
    own = _make_finalize(function, function.__name__, names)
    if own["_flowkit_final"].item is None:
        raise ConfigError(
            f"{function.__name__} collects, but has no parameter for its items: let the first one be it"
        )
    item = _received_type(
        function, own["_flowkit_final"], f"{function.__name__} collects, and is", "all items"
    )
    own |= {"_flowkit_kinds": (item, item), "_flowkit_keeps": True, "process": staticmethod(_keep_item)}
    return CollectorRole, own


def _received_type(function: Any, hook: hook_calls.Hook, who: str, what: str) -> Any:
    """Return the type of what a function that finishes a node receives, one by one or in a list.

    Raise ConfigError if its annotation is that of something else.
    """
    is_async = inspect.iscoroutinefunction(function)
    given = AsyncIterator if is_async else list
    origin = typing.get_origin(hook.item_kind) or hook.item_kind
    if origin is not Any and not (isinstance(origin, type) and issubclass(given, origin)):
        raise ConfigError(
            f"{who} {'a coroutine' if is_async else 'a plain'} function, so it receives {what} as "
            f"{'an AsyncIterator' if is_async else 'a list'}, not as {type_name(hook.item_kind)}"
        )
    return hook_calls.known_type((typing.get_args(hook.item_kind) or (Any,))[0], "its items", hook.owner)


def _check_results(finalize: Any, hook: hook_calls.Hook, result: Any, owner: str) -> None:
    """Raise ConfigError if a function that finishes a node cannot receive the results of the role."""
    if hook.item is None:
        return
    item = _received_type(finalize, hook, f"{hook.owner} is", "the results")
    if typed.contradicts(result, item):
        raise ConfigError(
            f"{hook.owner} receives results of the type {type_name(item)}, but {owner} returns {type_name(result)}"
        )


async def _keep_item(item: Any) -> Any:
    return item


def _make_finalize(function: Any, owner: str, names: dict[str, Any]) -> dict[str, Any]:
    """Return the members of a class that call the function that finishes a node."""
    hook = hook_calls.read_hook(function, owner, has_item=_has_results(function, names), names=names)

    async def call_with_results(self: Any, ctx: RunContext) -> Any:
        named = self._flowkit_types.final_arguments(ctx)
        if hook.is_coroutine:
            return await function(self.results(ctx), **named)
        return await asyncio.to_thread(function, [each async for each in self.results(ctx)], **named)

    def call(self: Any, ctx: RunContext) -> Any:
        return function(**self._flowkit_types.final_arguments(ctx))

    made = call_with_results if hook.item is not None else call
    made.__qualname__ = owner
    return {"finalize": made, "_flowkit_final": hook}


def _has_results(function: Any, names: dict[str, Any]) -> bool:
    """Return whether a function that finishes a node has a parameter for the stored results."""
    annotated = hook_calls.resolve_annotations(function, names)
    return any(
        not hook_calls.is_context(name, annotated.get(name, inspect.Parameter.empty))
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is not inspect.Parameter.KEYWORD_ONLY
    )
