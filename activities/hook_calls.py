"""How FlowKit calls a typed function of a user: which parameter is the item, which the context, which come by name."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import types
import typing
from collections import abc
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NotRequired, Required, Union

from pydantic import ConfigDict
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from typing_extensions import TypedDict

from flowkit.activities.json_types import JsonType
from flowkit.activities.results import BatchResult
from flowkit.errors import ConfigError
from flowkit.models.graphs import FAILED_NODES_KEY

if TYPE_CHECKING:
    from collections.abc import Sequence

RESERVED = frozenset({"input_adapter", "input_args", FAILED_NODES_KEY})
"""The keys of `io.input_inline` that FlowKit reads or adds, which are no fields of an item and no parameters."""


class UnknownType:
    """Stands for an annotation whose names are not known."""

    def __init__(self, text: str) -> None:
        self.text = text


def resolve_annotations(function: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the annotations of a function as types. `names` are the local names where it is defined."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    known = getattr(plain, "__globals__", {})
    found = {}
    for name, given in getattr(plain, "__annotations__", {}).items():
        found[name] = resolve(given, known, names)
    return found


def resolve(given: Any, known: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """Return the type that an annotation names, or an UnknownType."""
    text = given.__forward_arg__ if isinstance(given, typing.ForwardRef) else given
    if not isinstance(text, str):
        return given
    try:
        return eval(text, {**_USUAL, **known}, dict(names))
    except (NameError, AttributeError, TypeError, SyntaxError):
        return UnknownType(text)


_USUAL = {**{name: getattr(abc, name) for name in abc.__all__}, "Any": Any, "BatchResult": BatchResult}
"""Names of annotations that a module may import only for type checkers, since they say nothing of an item."""


def is_context(name: str, annotation: Any) -> bool:
    """Return whether a parameter is for the RunContext: by its annotation, or by the name `ctx` if it says nothing."""
    if annotation in (inspect.Parameter.empty, Any):
        return name == "ctx"
    if isinstance(annotation, UnknownType):
        return re.search(r"\bRunContext\b", annotation.text) is not None
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    return any(getattr(each, "__name__", "") in ("RunContext", "ProcessContext") for each in members)


def is_generator(function: Any, returns: Any) -> bool:
    """Return whether a function yields its results, as its code or its annotation says."""
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        return True
    origin = typing.get_origin(returns) or returns
    return isinstance(origin, type) and issubclass(origin, (AsyncIterator, Iterator))


def without(kind: Any, annotation: Any) -> Any:
    """Return the type of an annotation without one member of a union; Any if nothing else is left of it."""
    if annotation is inspect.Parameter.empty or annotation is kind:
        return Any
    if not _is_union(annotation):
        return annotation
    kept = tuple(each for each in typing.get_args(annotation) if each is not kind)
    return functools.reduce(operator.or_, kept)


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """How FlowKit calls a function of the user."""

    owner: str
    """What errors call it: `Count.process`, or the name of a function."""
    is_coroutine: bool = False
    is_generator: bool = False
    """Whether it is an asynchronous generator."""
    item: str | None = None
    """The name of its first parameter, which receives the item; None if it has none."""
    item_kind: Any = Any
    context: str | None = None
    """The name of the parameter that receives the RunContext."""
    parameters: JsonType | None = None
    """The parameters that come from `io.input_inline`, as a TypedDict; None if there are none."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Those of them that have a default, with the default."""
    returns: Any = inspect.Parameter.empty

    @property
    def names(self) -> frozenset[str]:
        """The names of the parameters that come from `io.input_inline`."""
        return frozenset(self.parameters.kind.__annotations__) if self.parameters is not None else frozenset()

    def parameters_schema(self) -> dict[str, Any] | None:
        """Return the JSON Schema of the parameters that come from `io.input_inline`, with their defaults."""
        schema = self.parameters.schema("validation") if self.parameters is not None else None
        if schema is None:
            return None
        for name, default in self.defaults.items():
            try:
                schema["properties"][name].setdefault("default", to_jsonable_python(default))
            except ValueError:
                continue
        schema["title"] = f"Parameters of {self.owner}"
        return schema


def merge_schemas(schemas: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the JSON Schema of objects with the properties of all these schemas; None for none.

    The first schema that has a property says what it is.
    """
    if not schemas:
        return None
    merged = dict(schemas[0])
    for each in schemas[1:]:
        for key in ("properties", "$defs"):
            if found := {**each.get(key, {}), **merged.get(key, {})}:
                merged[key] = found
        if required := {*merged.get("required", ()), *each.get("required", ())}:
            merged["required"] = sorted(required)
    return merged


_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def read_hook(
    function: Any, owner: str, *, has_item: bool, names: Mapping[str, Any], skips_self: bool = False
) -> Hook:
    """Return how to call a function, or a method if it skips `self`. Raise ConfigError if FlowKit cannot call it."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    given = [*inspect.signature(function).parameters.values()][1 if skips_self else 0 :]
    kinds = resolve_annotations(function, names)
    annotated = {each.name: kinds.get(each.name, inspect.Parameter.empty) for each in given}
    item = _find_item(given, annotated, owner) if has_item else None
    rest = given[1:] if has_item else given
    contexts = [each.name for each in rest if is_context(each.name, annotated[each.name])]
    if len(contexts) > 1:
        raise ConfigError(
            f"{owner} has two parameters for the RunContext, {' and '.join(contexts)}: remove one"
        )
    own = [each for each in rest if each.name not in contexts]
    _check_parameters(own, annotated, owner, takes_positional=not skips_self)
    return Hook(
        owner=owner,
        is_coroutine=inspect.iscoroutinefunction(plain),
        is_generator=inspect.isasyncgenfunction(plain),
        item=item,
        item_kind=_item_kind(annotated, item, owner, is_method=skips_self),
        context=contexts[0] if contexts else None,
        parameters=_parameters_type(own, annotated, owner),
        defaults={each.name: each.default for each in own if each.default is not inspect.Parameter.empty},
        returns=kinds.get("return", inspect.Parameter.empty),
    )


def _item_kind(annotated: Mapping[str, Any], item: str | None, owner: str, *, is_method: bool) -> Any:
    if item is None or (is_method and isinstance(annotated[item], UnknownType)):
        return Any
    return known_type(annotated[item], item, owner)


def _find_item(given: Sequence[inspect.Parameter], annotated: Mapping[str, Any], owner: str) -> str:
    first = given[0] if given else None
    if (
        first is None
        or first.kind is inspect.Parameter.KEYWORD_ONLY
        or first.kind
        not in (
            *_KEYWORDS,
            inspect.Parameter.POSITIONAL_ONLY,
        )
    ):
        raise ConfigError(
            f"{owner} has no parameter for its item: let the first one receive it, such as (item: Page, ctx: "
            "RunContext); a function that gets no item but yields some is a source, an `async def` with `yield`"
        )
    if is_context(first.name, annotated[first.name]):
        raise ConfigError(f"{owner}: the first parameter must be the item; put {first.name} after it")
    return first.name


def _check_parameters(
    own: Sequence[inspect.Parameter], annotated: Mapping[str, Any], owner: str, *, takes_positional: bool
) -> None:
    for each in own:
        if each.name in RESERVED:
            raise ConfigError(
                f"{owner}: a parameter cannot be called {each.name!r}, which is a key of FlowKit in io.input_inline"
            )
        if each.kind not in _KEYWORDS:
            raise ConfigError(
                f"{owner}: FlowKit passes parameters by name, so {each} is not possible: declare each of them"
            )
        if isinstance(each.default, FieldInfo):
            raise ConfigError(
                f"{owner}: the default of the parameter {each.name!r} is a Field, which a direct call would pass on: "
                f"write {each.name}: Annotated[…, Field(…)], and the value as the default"
            )
        if not takes_positional and each.kind is not inspect.Parameter.KEYWORD_ONLY:
            raise ConfigError(
                f"{owner} is called with the item and the context, so its parameter {each.name!r} gets neither: "
                "annotate it with RunContext, or put `*` before it if it comes from io.input_inline"
            )


def known_type(annotation: Any, name: str, owner: str) -> Any:
    """Return a type; Any for no annotation. Raise ConfigError for one whose names are not known."""
    if annotation is inspect.Parameter.empty:
        return Any
    if isinstance(annotation, UnknownType):
        raise ConfigError(
            f"{owner}: the type {annotation.text!r} of {name} is not known where {owner} is defined: import it "
            "outside of `if TYPE_CHECKING`, and define it before"
        )
    if is_protocol(annotation):
        raise ConfigError(
            f"{owner}: the type of {name}, {annotation.__name__}, is a Protocol, which has no form in JSON: name a "
            "model, or a union of models"
        )
    return annotation


def is_protocol(kind: Any) -> bool:
    """Return whether a type is a Protocol, which says what an object can do, and not what it is."""
    return bool(getattr(kind, "_is_protocol", False))


def _parameters_type(
    own: Sequence[inspect.Parameter], annotated: Mapping[str, Any], owner: str
) -> JsonType | None:
    if not own:
        return None
    fields: dict[str, Any] = {}
    for each in own:
        kind = known_type(annotated[each.name], each.name, owner)
        fields[each.name] = Required[kind] if each.default is inspect.Parameter.empty else NotRequired[kind]
    make: Any = TypedDict
    made = make("Parameters", fields)
    made.__pydantic_config__ = ConfigDict(title=owner)
    return JsonType(made, owner)
