"""Typed handlers: the items that `process` receives, what FlowKit stores for its results, and the batches of `produce`.

`RoleHandler[In, Out]` and `@role` create one TypedHandler for each class.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import typing_extensions
from pydantic import BaseModel

from flowkit import reason_codes
from flowkit.activities.hook_calls import (
    RESERVED,
    Hook,
    is_protocol,
    known_type,
    merge_schemas,
    read_hook,
    resolve,
    without,
)
from flowkit.activities.json_types import JsonType, expanded, shown_value, type_name
from flowkit.activities.lost_values import LostValue
from flowkit.activities.results import Batch, BatchFailure, BatchResult
from flowkit.activities.uid_rule import UidRule
from flowkit.errors import ConfigError
from flowkit.text import printed
from flowkit.validation.invalid import SHOWN_PROBLEMS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


class HookContext(Protocol):
    """What typed handlers need of a RunContext, and of the one in a separate process."""

    node_id: str

    @property
    def params(self) -> dict[str, Any]:
        """The params of the task."""

    @property
    def input_inline(self) -> dict[str, Any] | None:
        """The `io.input_inline` of the node."""

    def read_once(self, name: Any, read: Callable[[], T]) -> T:
        """Return what `read` returns, which is called once for a name."""

    def without_values(self, text: str) -> str:
        """Return a text for people without the values of expressions in the input of the node."""


class ItemBatch(Batch):
    """A batch of a node with `map` and `batch_size` 1, whose payload holds one item."""


@dataclass(kw_only=True, eq=False)
class TypedHandler:
    """What FlowKit knows of the types of a handler class, and how it calls `process` or `produce`."""

    name: str
    """The name of the class or of the function."""
    input: JsonType
    """The type of its items; of a source, of what `produce` receives first."""
    output: JsonType
    hook: Hook
    """How FlowKit calls `process` or `produce`."""
    uids: UidRule | None
    """The rule for the uids of a source; None for any other handler."""
    final: Hook | None = None
    """How FlowKit calls the function that finishes a node; None for a class, and for a function without one."""
    keeps_items: bool = False
    """Whether FlowKit stores each item as it is, for the function that finishes the node."""

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the parameters that come from `io.input_inline`."""
        return self.hook.names | (self.final.names if self.final is not None else frozenset())

    @property
    def is_source(self) -> bool:
        """Whether the handler has `produce`."""
        return self.uids is not None

    @property
    def input_type(self) -> Any:
        """The type of its items; of a source, of its `io.input_inline`; None if that has no parameters."""
        if not self._is_by_name:
            return self.input.kind
        return self.hook.parameters.kind if self.hook.parameters is not None else None

    @property
    def _is_by_name(self) -> bool:
        """Whether all parameters of a source come from `io.input_inline` by name."""
        return self.is_source and self.hook.item is None

    def input_schema(self) -> dict[str, Any] | None:
        """Return the JSON Schema of an item; of a source, of its `io.input_inline`."""
        return self.parameters_schema() if self._is_by_name else self.input.schema("validation")

    def parameters_schema(self) -> dict[str, Any] | None:
        """Return the JSON Schema of what comes from `io.input_inline`, besides the item."""
        if self.is_source and not self._is_by_name:
            return self.input.schema("validation")
        given = [each.parameters_schema() for each in (self.hook, self.final) if each is not None]
        return merge_schemas([each for each in given if each is not None])

    # -- a batch

    def read(self, batch: Batch, ctx: HookContext) -> tuple[Any, dict[str, Any]]:
        """Return the item of a batch and the named arguments. Raise BatchFailure if one does not validate."""
        value, origin = self._find_item(batch, ctx)
        try:
            item = self.input.from_meta(value) if origin.unwraps else self.input.from_json(value)
        except ValueError as error:
            problems = self.input.problems(error, ctx.without_values)
            text = f"{_describe(batch, ctx)}{origin.text} is not a valid {self.input.name}: {problems}"
            raise _bad_input(text + self._hint(origin, value, ctx)) from None
        return item, self.arguments(ctx, takes_all=not origin.is_inline)

    def _find_item(self, batch: Batch, ctx: HookContext) -> tuple[Any, _Origin]:
        payload = batch.payload
        keys = payload.keys()
        if keys == _PULLED:
            return payload["meta"], _Origin(f" from node {payload['from_node']!r}", unwraps=True)
        if keys == _CHUNK:
            return payload["items"], _Origin(f" from node {payload['from_node']!r}", is_list="rechunk:size")
        if keys == _MAPPED:
            return self._find_mapped(batch)
        if keys == _OWN:
            inline = self._own_fields(payload["input_inline"])
            names = self.names - self._fields
            return {name: each for name, each in inline.items() if name not in names}, _OWN_INPUT
        return payload, _Origin("")

    def _find_mapped(self, batch: Batch) -> tuple[Any, _Origin]:
        items = batch.payload["items"]
        if isinstance(batch, ItemBatch):
            return items[0], _Origin(f" (item {batch.payload['first']} of map.over)")
        return items, _Origin(f" (items from {batch.payload['first']} of map.over)", is_list="map.batch_size")

    @cached_property
    def _fields(self) -> frozenset[str]:
        schema = self.input.schema("validation")
        found = expanded(schema, schema.get("$defs") or {}) if schema else ()
        return frozenset(name for each in found for name in each.get("properties") or {})

    def _own_fields(self, inline: Any) -> dict[str, Any]:
        """Return an `io.input_inline` without the keys of FlowKit, unless the item has a field with the name of one."""
        return {
            name: each
            for name, each in (inline or {}).items()
            if name not in RESERVED or name in self._fields
        }

    def _hint(self, origin: _Origin, value: Any, ctx: HookContext) -> str:
        if origin.is_list and not self.input.is_list:
            return f"; with {origin.is_list}, a batch is a list, so the type of the item must be list[…]"
        if origin.is_inline:
            return (
                f"; node {ctx.node_id!r} has no input adapter and no map, so its item is its io.input_inline: to get "
                'the results of other nodes, set "input_adapter": "pull.from_artifacts"'
            )
        return ""

    def result(self, given: Any, batch: Batch, ctx: HookContext) -> BatchResult:
        """Return what FlowKit stores for the result of `process`. Raise BatchFailure if it does not fit its type."""
        if isinstance(given, BatchResult):
            return given
        try:
            return BatchResult.model_construct(success=True, metrics=self.output.to_meta(given))
        except ValueError as error:
            raise self._mismatch(_describe(batch, ctx), given, error, ctx) from None

    async def finish(self, waiting: Awaitable[Any], batch: Batch, ctx: HookContext) -> BatchResult:
        """Return the `result` for what a plain function has returned to be awaited."""
        return self.result(await waiting, batch, ctx)

    def _mismatch(self, place: str, given: Any, error: ValueError, ctx: HookContext) -> BatchFailure:
        problems = self.output.problems(error, ctx.without_values)
        forgot = "; does the function return its result?" if given is None else ""
        is_lost = isinstance(error, LostValue)
        wrong = "would reach the next node changed" if is_lost else f"is not a valid {self.output.name}"
        return BatchFailure(
            f"the result of {self.hook.owner} for {place} {wrong}: {problems}{forgot}",
            reason_code=reason_codes.SCHEMA_MISMATCH,
        )

    def read_result(self, partial: Mapping[str, Any], ctx: HookContext) -> Any:
        """Return the result that a stored batch of the node holds. Raise BatchFailure if it does not validate."""
        try:
            return self.output.from_meta(partial.get("meta") or {})
        except ValueError as error:
            problems = self.output.problems(error, ctx.without_values)
            stored = f"the stored result of batch {printed(partial.get('batch_uid'))} of node {ctx.node_id!r}"
            text = f"{stored} is not a valid {self.output.name}: {problems}"
            raise BatchFailure(text, reason_code=reason_codes.SCHEMA_MISMATCH) from None

    def item_payload(self, item: Any) -> dict[str, Any]:
        """Return the payload of a batch with an item, as of a node that pulls. Raise BatchFailure for a wrong item."""
        try:
            return {"from_node": "test", "ref": {}, "meta": self.input.to_input(item)}
        except ValueError as error:
            raise _bad_input(
                f"the item is not a valid {self.input.name}: {self.input.problems(error, str)}"
            ) from None

    # -- a source

    def source_input(self, given: Any) -> Any:
        """Return the `input_inline` for what `produce` receives, as an object or as its JSON."""
        return given if isinstance(given, Mapping) else self.input.to_input(given)

    def describe_duplicate(self, first: Any, second: Batch, ctx: HookContext) -> str:
        """Return the error about two items with one uid. `first` is the `meta` of the first one; None if unknown."""
        key = self.uids.name if self.uids is not None else "uid"
        shown = [
            shown_value(each, ctx.without_values) for each in (first, second.payload) if each is not None
        ]
        return (
            f"{self.name} yields two items with the same key {key}, {shown_value(second.batch_uid, ctx.without_values)}"
            f": {' and '.join(shown)}. FlowKit stores one result for each key: choose a key that differs, such as a "
            "tuple of fields, or do not yield the item twice"
        )

    def given(self, loaded: Any, ctx: HookContext) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of `produce` for what `load_input` has returned. Raise BatchFailure if one is wrong."""
        if self._is_by_name:
            return [], self.arguments(ctx, takes_all=True)
        is_default = isinstance(loaded, dict) and loaded.keys() == _OWN
        value = self._own_fields(loaded["input_inline"]) if is_default else loaded
        try:
            item = self.input.from_json(value)
        except ValueError as error:
            problems = self.input.problems(error, ctx.without_values)
            what = "io.input_inline" if is_default else "what load_input has returned"
            raise _bad_input(
                f"{what} of node {ctx.node_id!r} is not a valid {self.input.name}: {problems}"
            ) from None
        return [item], self.arguments(ctx, takes_all=False)

    def check_produced(self, produced: Any) -> Iterable[Any]:
        """Return what `produce` has returned. Raise TypeError if it is nothing to iterate over."""
        if isinstance(produced, Iterable):
            return produced
        raise TypeError(
            f"{self.hook.owner} must yield items or return a list of them, not {type(produced).__name__}"
        )

    def to_batch(self, item: Any, uids: UidRule, ctx: HookContext) -> Batch:
        """Return the batch for an item of a source. Raise BatchFailure if it does not validate, or has no uid."""
        try:
            meta = self.output.to_meta(item)
        except ValueError as error:
            raise self._mismatch("an item", item, error, ctx) from None
        return Batch.model_construct(batch_uid=uids.uid_of(item, ctx.without_values), payload=meta)

    # -- parameters

    def arguments(self, ctx: HookContext, *, takes_all: bool) -> dict[str, Any]:
        """Return the arguments that the function receives by name: the context, and those of `io.input_inline`.

        With `takes_all`, every key of `io.input_inline` must be a parameter.
        """
        if not self.names and not (takes_all and self.is_source):
            return {} if self.hook.context is None else {self.hook.context: ctx}
        inline = (ctx.input_inline or {}).keys() - RESERVED
        if takes_all and (unknown := sorted(inline - self.names)):
            known = (
                f"its parameters are {', '.join(sorted(self.names))}"
                if self.names
                else "it has no parameters"
            )
            names = ", ".join(unknown[:SHOWN_PROBLEMS])
            raise _bad_input(
                f"io.input_inline of node {ctx.node_id!r}: {self.name} has no parameter {names}; {known}"
            )
        if self.final is not None:
            self.final_arguments(ctx)  # so that wrong ones fail the node before its first batch
        return _named_arguments(self.hook, self.name, ctx)

    def final_arguments(self, ctx: HookContext) -> dict[str, Any]:
        """Return the arguments that the function that finishes the node receives by name."""
        return {} if self.final is None else _named_arguments(self.final, self.final.owner, ctx)


def _named_arguments(hook: Hook, owner: str, ctx: HookContext) -> dict[str, Any]:
    """Return the context, and the parameters that come from `io.input_inline`. Raise BatchFailure if one is wrong."""
    context: dict[str, Any] = {} if hook.context is None else {hook.context: ctx}
    parameters = hook.parameters
    if parameters is None:
        return context
    inline = ctx.input_inline or {}
    try:
        found: dict[str, Any] = ctx.read_once(
            parameters, lambda: parameters.from_json({key: inline[key] for key in hook.names & inline.keys()})
        )
    except ValueError as error:
        problems = parameters.problems(error, ctx.without_values)
        text = f"io.input_inline of node {ctx.node_id!r} does not fit the parameters of {owner}: {problems}"
        raise _bad_input(text) from None
    return context | found


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where the item of a batch comes from."""

    text: str
    unwraps: bool = False
    is_list: str = ""
    """What makes the item a list; empty if nothing does."""
    is_inline: bool = False


_OWN_INPUT = _Origin("", is_inline=True)
_PULLED = frozenset({"from_node", "ref", "meta"})
_CHUNK = frozenset({"from_node", "items", "parent"})
_MAPPED = frozenset({"items", "first"})
_OWN = frozenset({"input_ref", "input_inline"})


def read_params(kind: Any, ctx: HookContext) -> Any:
    """Return the params of the task as a type. Raise BatchFailure, which is permanent, if they do not validate."""
    wanted = _json_type(kind, "ctx.params_as")
    try:
        return wanted.from_json(ctx.params)
    except ValueError as error:
        problems = wanted.problems(error, ctx.without_values)
        raise _bad_input(f"the params of the task are not valid {wanted.name}: {problems}") from None


def final_metrics(given: Any) -> dict[str, Any] | None:
    """Return the metrics for a typed result of `finalize`: a model, a dataclass or a dict. None for anything else."""
    is_record = isinstance(given, (BaseModel, Mapping)) or hasattr(type(given), "__dataclass_fields__")
    if not is_record or isinstance(given, (Batch, BatchResult)):
        return None
    if isinstance(given, Mapping):
        return dict(given)
    kind: Any = type(given)
    return _json_type(kind, "finalize").to_meta(given)


@functools.lru_cache
def _json_type(kind: Any, owner: str) -> JsonType:
    return JsonType(kind, owner)


def _bad_input(text: str) -> BatchFailure:
    return BatchFailure(text, reason_code=reason_codes.BAD_INPUT, permanent=True)


def _describe(batch: Batch, ctx: HookContext) -> str:
    uid = "" if batch.batch_uid is None else f" {printed(batch.batch_uid)}"
    return f"batch{uid} of node {ctx.node_id!r}"


# --- classes ------------------------------------------------------------------------------------------------------

_MADE = "_flowkit_made"
"""Marks the hooks that FlowKit has added to a class."""


def define(
    cls: Any, base: Any, names: Mapping[str, Any], *, is_complete: bool = False
) -> TypedHandler | None:
    """Return the types of a handler class and add its hooks; None for a class that names no types.

    Also return None for a class without a role that lacks a hook or a key, which a class below may add, unless
    `is_complete` says that none will. `names` are the local names where the class is defined. Raise ConfigError if its
    hooks do not fit its types.
    """
    arguments = vars(cls).get("_flowkit_kinds") or type_arguments(cls, base)
    if arguments is None or any(isinstance(each, _VARIABLES) or _variables(each) for each in arguments):
        return None
    hook = _typed_hook(cls, base)
    key = inspect.getattr_static(cls, "key", None)
    if hook is None and not _has_batch_hooks(cls, base):
        if cls.role or is_complete:
            raise ConfigError(
                f"{cls.__name__} names types, but defines neither process nor produce{_suggest(cls)}"
            )
        return None
    if hook == "produce" and key is None and not (cls.role or is_complete):
        return None
    known = vars(sys.modules.get(cls.__module__, typing))
    kinds = [
        known_type(resolve(each, known, names), what, cls.__name__)
        for each, what in zip(arguments, ("its items", "its results"), strict=True)
    ]
    kinds[1] = without(BatchResult, kinds[1])
    types = _make_typed(cls, kinds, hook, names)
    if hook == "produce":
        types.uids = UidRule(_bound_key(cls, key), types.output, cls.__name__)
    _add_hooks(cls, types)
    return types


_VARIABLES = (typing.TypeVar, typing_extensions.TypeVar)


def names_of_caller(depth: int = 2) -> dict[str, Any]:
    """Return the local names where a class or a function is being defined: the frame that many calls above."""
    frame = sys._getframe(depth)
    return {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)


def type_arguments(cls: Any, base: Any) -> tuple[Any, Any] | None:
    """Return `In` and `Out` of a class that inherits `RoleHandler[In, Out]`; None if it names neither."""
    for each in vars(cls).get("__orig_bases__", cls.__bases__):
        origin, given = typing.get_origin(each) or each, typing.get_args(each)
        if origin is base and given:
            return given[0], given[1] if len(given) > 1 else Any
        if not (isinstance(origin, type) and issubclass(origin, base)) or origin is base:
            continue
        found = type_arguments(origin, base)
        if found is None:
            continue
        values = dict(zip(getattr(origin, "__parameters__", ()), given, strict=False))
        return _with_variables(found[0], values), _with_variables(found[1], values)
    return None


def _variables(kind: Any) -> tuple[Any, ...]:
    """Return the type variables in a type such as `list[T]`; none of a generic class that names none."""
    is_model = getattr(kind, "__pydantic_generic_metadata__", {}).get("origin") is not None
    if isinstance(kind, type) and not typing.get_args(kind) and not is_model:
        return ()
    variables: tuple[Any, ...] = getattr(kind, "__parameters__", ())
    return variables


def _with_variables(kind: Any, values: Mapping[Any, Any]) -> Any:
    """Return a type with the values of its type variables: `list[Page]` for `list[T]`."""
    if isinstance(kind, _VARIABLES):
        return values.get(kind, kind)
    variables = _variables(kind)
    return kind[tuple(values.get(each, each) for each in variables)] if variables else kind


def _typed_hook(cls: Any, base: Any) -> str | None:
    """Return `process` or `produce`, whichever the class has; None for neither, or if its batch hooks override it."""
    process, produce = _owner(cls, "process", base), _owner(cls, "produce", base)
    if process is not None and produce is not None:
        raise ConfigError(
            f"{cls.__name__} defines both process and produce: a source has produce, any other handler process"
        )
    name, batches = ("process", "process_batch") if process is not None else ("produce", "iter_batches")
    found, by_batch = process if process is not None else produce, _owner(cls, batches, base)
    if found is None:
        return None
    if by_batch is found:
        raise ConfigError(f"{cls.__name__} defines both {name} and {batches}: remove one of them")
    order = cls.__mro__
    return None if by_batch is not None and order.index(by_batch) < order.index(found) else name


def _owner(cls: Any, name: str, base: Any) -> Any:
    """Return the class below `base` that defines a method; None if none does, or FlowKit has added it."""
    for each in cls.__mro__:
        if each is base:
            return None
        if name in vars(each) and not hasattr(vars(each)[name], _MADE):
            return each
    return None


def _has_batch_hooks(cls: Any, base: Any) -> bool:
    return any(_owner(cls, name, base) is not None for name in ("process_batch", "iter_batches"))


def _suggest(cls: Any) -> str:
    close = [
        (name, hook)
        for hook in ("process", "produce")
        for name in difflib.get_close_matches(hook, vars(cls), n=1, cutoff=0.75)
    ]
    if close:
        return f"; is {close[0][0]!r} meant to be {close[0][1]!r}?"
    return (
        ": define `async def process(self, item, ctx)`, or for a source `async def produce(self, given, ctx)`"
    )


def _bound_key(cls: Any, key: Any) -> Any:
    """Return a key that is a function of the item, also if the class defines it as a method."""
    if isinstance(key, (staticmethod, classmethod)):
        return key.__get__(None, cls)
    if inspect.isfunction(key):
        given = inspect.signature(key).parameters.values()
        if len([each for each in given if each.default is inspect.Parameter.empty]) > 1:
            return functools.partial(key, cls)
    return key


def _make_typed(cls: Any, kinds: Sequence[Any], name: str | None, names: Mapping[str, Any]) -> TypedHandler:
    owner = cls.__name__
    output = JsonType(kinds[1], owner)
    if output.holds_secrets:
        raise ConfigError(
            f"{owner}: {output.name}, the type of the results, has a secret such as SecretStr, of which the next node "
            "would get only asterisks: pass a reference to it, or store its text with a field_serializer"
        )
    given = JsonType(Any if kinds[0] is NO_ITEM else kinds[0], owner)
    for each, use in ((given, "items"), (output, "results")):
        if problem := each.lost_problem(f"{each.name}, the type of the {use},"):
            raise ConfigError(f"{owner}: {problem}")
    hook = Hook(owner=owner) if name is None else _read_method(cls, name, kinds, names)
    return TypedHandler(
        name=owner,
        input=given,
        output=output,
        hook=hook,
        uids=None,
        final=vars(cls).get("_flowkit_final"),
        keeps_items=vars(cls).get("_flowkit_keeps", False),
    )


def _read_method(cls: Any, name: str, kinds: Sequence[Any], names: Mapping[str, Any]) -> Hook:
    is_function = "_flowkit_kinds" in vars(cls)
    hook = read_hook(
        getattr(cls, name),
        cls.__name__ if is_function else f"{cls.__name__}.{name}",
        has_item=kinds[0] is not NO_ITEM,
        names={**names, **vars(cls)},
        skips_self=not isinstance(inspect.getattr_static(cls, name), (staticmethod, classmethod)),
    )
    function = inspect.unwrap(getattr(cls, name))
    if name == "process" and (hook.is_generator or inspect.isgeneratorfunction(function)):
        raise ConfigError(
            f"{hook.owner} yields, but returns one result for an item: return it, or all of them in a list; a source, "
            "which yields its results, has produce"
        )
    _check_kinds(hook, kinds)
    return hook


NO_ITEM = typing.Never
"""Stands for `In` of a source function, whose parameters all come from `io.input_inline`."""


def _check_kinds(hook: Hook, kinds: Sequence[Any]) -> None:
    """Raise ConfigError if the annotations of a hook contradict `In` and `Out`, as far as classes can be compared."""
    given, wanted = hook.item_kind, kinds[0]
    if contradicts(wanted, given):
        raise ConfigError(
            f"{hook.owner} takes {type_name(given)}, but the class names {type_name(wanted)} as the type of its items"
        )
    if not hook.is_generator and contradicts(hook.returns, kinds[1]) and hook.returns is not BatchResult:
        raise ConfigError(
            f"{hook.owner} returns {type_name(hook.returns)}, but the class names {type_name(kinds[1])} as the type "
            "of its results"
        )


_OPEN = (Any, inspect.Parameter.empty)
"""Annotations that say nothing. `Any` is a class."""


def contradicts(given: Any, wanted: Any) -> bool:
    """Return whether a value of the type `given` is certainly none of the type `wanted`: of two classes, or lists."""
    if (origin := typing.get_origin(given)) is not None and origin is typing.get_origin(wanted):
        parts = zip(typing.get_args(given), typing.get_args(wanted), strict=False)
        is_sequence = isinstance(origin, type) and issubclass(origin, Sequence)
        return is_sequence and any(contradicts(*each) for each in parts)
    if not all(isinstance(each, type) and typing.get_origin(each) is None for each in (given, wanted)):
        return False
    if any(each in _OPEN or typing_extensions.is_typeddict(each) for each in (given, wanted)):
        return False
    if is_protocol(given) or is_protocol(wanted):
        return False
    if given in (int, bool) and wanted in (int, float):
        return False
    return not issubclass(given, wanted) and not issubclass(given, (AsyncIterator, Iterator))


def _add_hooks(cls: Any, typed: TypedHandler) -> None:
    """Add the hooks for batches that call the typed one. Their names in logs are those of the typed one."""
    hook = typed.hook
    if typed.uids is not None:
        produce = _produce if hook.is_generator or hook.is_coroutine else _produce_plain
        _add_hook(cls, "iter_batches", produce(typed, typed.uids), hook.owner)
        _add_hook(cls, "process_batch", _keep(), hook.owner)
    elif hook.item is not None:
        process = (_process if hook.is_coroutine else _process_plain)(typed)
        _add_hook(cls, "process_batch", process, hook.owner, wrapped=cls.process)


def _add_hook(cls: Any, name: str, function: Any, owner: str, wrapped: Any = None) -> None:
    """Add a hook that FlowKit has made. A debugger that is to stop in it stops in `wrapped`."""
    setattr(function, _MADE, True)
    if wrapped is not None:
        function.__signature__ = inspect.signature(function)
        function.__wrapped__ = wrapped
    function.__qualname__ = owner
    setattr(cls, name, function)


def _process(typed: TypedHandler) -> Any:
    async def process_batch(self: Any, batch: Batch, ctx: HookContext) -> BatchResult:
        item, given = typed.read(batch, ctx)
        return typed.result(await self.process(item, **given), batch, ctx)

    return process_batch


def _process_plain(typed: TypedHandler) -> Any:
    def process_batch(self: Any, batch: Batch, ctx: HookContext) -> Any:
        item, given = typed.read(batch, ctx)
        result = self.process(item, **given)
        return (
            typed.finish(result, batch, ctx)
            if inspect.isawaitable(result)
            else typed.result(result, batch, ctx)
        )

    return process_batch


def _produce(typed: TypedHandler, uids: UidRule) -> Any:
    async def iter_batches(self: Any, loaded: Any, *, ctx: HookContext) -> AsyncIterator[Batch]:
        given, named = typed.given(loaded, ctx)
        async with aclosing(_batches(typed, uids, ctx, self.produce(*given, **named))) as batches:
            async for batch in batches:
                yield batch

    return iter_batches


def _produce_plain(typed: TypedHandler, uids: UidRule) -> Any:
    def iter_batches(
        self: Any, loaded: Any, *, ctx: HookContext
    ) -> Iterator[Batch] | AsyncGenerator[Batch, None]:
        given, named = typed.given(loaded, ctx)
        produced = self.produce(*given, **named)
        if inspect.isawaitable(produced) or isinstance(produced, AsyncIterable):
            return _batches(typed, uids, ctx, produced)
        return (typed.to_batch(item, uids, ctx) for item in typed.check_produced(produced))

    return iter_batches


async def _batches(
    typed: TypedHandler, uids: UidRule, ctx: HookContext, produced: Any
) -> AsyncGenerator[Batch, None]:
    """Yield the batches for what `produce` has returned: an asynchronous iterable, or what gives one or a plain one."""
    if inspect.isawaitable(produced):
        produced = await produced
    if not isinstance(produced, AsyncIterable):
        for item in typed.check_produced(produced):
            yield typed.to_batch(item, uids, ctx)
        return
    try:
        async for item in produced:
            yield typed.to_batch(item, uids, ctx)
    finally:
        if (close := getattr(produced, "aclose", None)) is not None:
            await close()


def _keep() -> Any:
    async def process_batch(self: Any, batch: Batch, ctx: HookContext) -> BatchResult:
        return BatchResult.model_construct(success=True, metrics=batch.payload)

    return process_batch
