"""Whether the data of one role fits the input of another, by the JSON Schemas that typed roles announce. Pure.

Not to fit means: the output lacks a required field of the input, or has it with another JSON type. Whatever the schemas
leave open fits, so that a problem means that the handler would refuse the data (docs/workers.md, Contracts).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit.graph.expressions import is_expression
from flowkit.graph.input_adapters import RECHUNK
from flowkit.models import ENGINE_TYPES
from flowkit.models.metas import VALUE
from flowkit.text import count_of, printable, printed, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from flowkit.models import Graph, Node

    Schema = dict[str, Any]

CONVERTS = "x-flowkit-converts"
"""Keyword of a schema whose values may have another form than it says, because code of the user converts them."""

_ANY: Schema = {CONVERTS: True}
_DEPTH = 20
"""How many references and groups of alternatives a part of a schema may be inside each other."""
_ALTERNATIVES = 50
_PAIRS = 10_000
"""How many pairs of parts of two schemas are compared. What is left fits."""
_FIELDS = 100_000
"""How many required fields are compared. What is left fits."""
_STEPS = 50_000
"""How many parts of a schema are read. A few lines of JSON can refer to each other in so many ways that reading all of
them never ends."""
_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """The JSON Schemas of the input and the output of a role; None for one that has no type."""

    input: Schema | None = None
    output: Schema | None = None
    is_source: bool = False
    """Whether the input is that of the node itself, and not the batches of others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataEdge:
    """An edge of a graph over which data flows: the node pulls the batches of the source."""

    source: str
    node: str
    source_role: str
    role: str
    chunks: bool = False
    """Whether the node gets chunks of a list of each batch."""
    list_key: str | None = None
    """The field with this list; without one, the data of a batch is the only item."""

    @property
    def roles(self) -> tuple[str, str]:
        """The roles of the source and of the node."""
        return self.source_role, self.role


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """A required part of an input that the output lacks, or has with another JSON type."""

    path: str
    """The field, as `page.url`; empty for the value as a whole."""
    wanted: str
    found: str | None
    """The JSON type in the output; None if the output lacks the field."""

    def below(self, name: str) -> Mismatch:
        """Return the same problem of a part in which `name` contains it."""
        inner = self.path if not self.path or self.path.startswith("[]") else f".{self.path}"
        return Mismatch(path=f"{name}{inner}", wanted=self.wanted, found=self.found)

    def __str__(self) -> str:
        """Return the problem, for people: `'url' (string) is missing`, `'words' is string, not integer`."""
        if self.found is None:
            return f"{printed(self.path)} ({self.wanted}) is missing"
        return f"{printed(self.path) if self.path else 'it'} is {self.found}, not {self.wanted}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfit:
    """An edge whose roles do not fit, with the first pair of their schemas."""

    edge: DataEdge
    others: int
    """The number of the other edges between the same roles."""
    output: Schema
    input: Schema
    mismatches: Sequence[Mismatch]

    def describe(self, output_place: str = "", input_place: str = "") -> str:
        """Return the problem, for people. The places say where the types are defined, as `pipeline.py:12`."""
        edge, given, taken = self.edge, type_name(self.output), type_name(self.input)
        shown = [str(each) for each in self.mismatches[:_SHOWN]]
        more = len(self.mismatches) - len(shown)
        problems = ", ".join(shown) + (f" and {more} more" if more else "")
        others = f" (and {count_of(self.others, 'more edge')} of these roles)" if self.others else ""
        part = " (chunks of it)" if edge.chunks else ""
        return (
            f"node {edge.node!r} pulls from {edge.source!r}{others}, but the output of role {edge.source_role!r}, "
            f"{given}{part}, does not fit the input of role {edge.role!r}, {taken}: {problems}; "
            f"{self._remedy(output_place and f' ({output_place})', input_place and f' ({input_place})')}"
        )

    def _remedy(self, output_place: str, input_place: str) -> str:
        if self.mismatches[0].found is None:
            return f"add it to the output{output_place}, or make it optional in the input{input_place}"
        return f"use one type for it in the output{output_place} and the input{input_place}"


def data_edges(graph: Graph) -> tuple[DataEdge, ...]:
    """Return the edges over which roles pull the batches of other roles, without those that expressions decide."""
    roles = {node.node_id: node.type for node in graph.nodes if node.type not in ENGINE_TYPES}
    return tuple(edge for node in graph.nodes if node.pulls for edge in _edges_to(node, roles))


def _edges_to(node: Node, roles: Mapping[str, str]) -> Iterable[DataEdge]:
    inline = node.io.input_inline or {}
    args = inline.get("input_args") or {}
    key = args.get("meta_list_key")
    if node.node_id not in roles or any(map(is_expression, (args, args.get("from_nodes"), key))):
        return
    for source in node.pulls_from:
        if source in roles:
            yield DataEdge(
                source=source,
                node=node.node_id,
                source_role=roles[source],
                role=node.type,
                chunks=inline["input_adapter"] == RECHUNK,
                list_key=key,
            )


def find_unfit(edges: Iterable[DataEdge], contracts: Mapping[str, Sequence[Contract]]) -> list[Unfit]:
    """Return the edges that do not fit, one for each pair of roles.

    `contracts` has those of each version of a role. An edge fits if any version of its source fits any version of its
    role, or if one of them has no type.
    """
    groups: dict[tuple[str, str, bool, str | None], list[DataEdge]] = {}
    for edge in edges:
        groups.setdefault((edge.source_role, edge.role, edge.chunks, edge.list_key), []).append(edge)
    found = (_find_unfit(group, contracts) for group in groups.values())
    return [each for each in found if each is not None]


def _find_unfit(group: Sequence[DataEdge], contracts: Mapping[str, Sequence[Contract]]) -> Unfit | None:
    edge = group[0]
    outputs = [each.output for each in contracts.get(edge.source_role, ())]
    inputs = [None if each.is_source else each.input for each in contracts.get(edge.role, ())]
    first: Unfit | None = None
    for given, taken in itertools.product(outputs, inputs):
        problems = [] if given is None or taken is None else edge_mismatches(edge, given, taken)
        if not problems or given is None or taken is None:
            return None
        others = len(group) - 1
        first = first or Unfit(edge=edge, others=others, output=given, input=taken, mismatches=problems)
    return first


def edge_mismatches(edge: DataEdge, output: Schema, input_schema: Schema) -> list[Mismatch]:
    """Return why an output does not fit the input of the role that pulls it over this edge; empty if it fits."""
    comparison = _Comparison(output, input_schema)
    return comparison.chunks(edge.list_key) if edge.chunks else comparison.batches()


def mismatches(output_schema: Schema, input_schema: Schema) -> list[str]:
    """Return why a batch with this output does not fit an input; empty if it fits, or if it may fit.

    An output that is no object is stored as the field `value`, and an input that is no object gets that field.
    """
    return [str(each) for each in _Comparison(output_schema, input_schema).batches()]


def takes_objects(input_schema: Schema) -> bool:
    """Return whether an object may fit an input."""
    forms = _Parts(input_schema).alternatives(input_schema)
    return any(
        not _types(form) or any(_accepts("object", {}, wanted, form) for wanted in _types(form))
        for form in forms
    )


def type_name(schema: Schema) -> str:
    """Return a short name of the type of a schema: the title of a model, `list[Page]`, `integer`."""
    return _Parts(schema).name(schema)


class _Parts:
    """A schema with the definitions to which its parts refer."""

    def __init__(self, root: Schema) -> None:
        found = root.get("$defs")
        self._definitions: Schema = found if isinstance(found, dict) else {}
        self._steps = 0

    def _is_beyond(self, depth: int) -> bool:
        """Count a step. Return whether a part is too deep to be read, or too much has been read."""
        self._steps += 1
        return depth > _DEPTH or self._steps > _STEPS

    def alternatives(self, part: object, depth: int = 0) -> list[Schema]:
        """Return the forms that a value of a part may have, each without references and groups of alternatives."""
        if not isinstance(part, dict) or self._is_beyond(depth):
            return [_ANY]
        own = {key: value for key, value in part.items() if key not in ("$ref", "allOf", "anyOf", "oneOf")}
        groups = [self.alternatives(self._definition(part["$ref"]), depth + 1)] if "$ref" in part else []
        groups += [self.alternatives(each, depth + 1) for each in _listed(part, "allOf")]
        for key in ("anyOf", "oneOf"):
            if key in part:
                either = (self.alternatives(each, depth + 1) for each in _listed(part, key))
                groups.append([*itertools.chain.from_iterable(either)] or [_ANY])
        forms = [own]
        for group in groups:
            if len(forms) * len(group) > _ALTERNATIVES:
                return [_ANY]
            forms = [_both(form, each) for form in forms for each in group]
        return forms

    def _definition(self, reference: object) -> object:
        name = reference.removeprefix("#/$defs/") if isinstance(reference, str) else ""
        return self._definitions.get(name.replace("~1", "/").replace("~0", "~"))

    def name(self, part: object, depth: int = 0) -> str:
        """Return a short name of the type of a part."""
        if not isinstance(part, dict) or self._is_beyond(depth):
            return "any value"
        known = self._definition(part["$ref"]) if "$ref" in part else part
        if isinstance(known, dict) and isinstance(known.get("title"), str):
            return printable(shorten(known["title"]))
        if part.get("type") == "array" and "items" in part:
            return shorten(f"list[{self.name(part['items'], depth + 1)}]")
        either = [self.name(each, depth + 1) for each in _listed(part, "anyOf") + _listed(part, "oneOf")]
        return shorten(" | ".join(dict.fromkeys(either))) if either else _type_text([part])


def _listed(part: Schema, key: str) -> list[Any]:
    found = part.get(key)
    return found if isinstance(found, list) else []


def _both(one: Schema, other: Schema) -> Schema:
    """Return a form that has what both forms say."""
    if "type" in one and "type" in other and one["type"] != other["type"]:
        return _ANY
    merged = {**one, **other}
    for key, empty in (("properties", {}), ("required", [])):
        if key in one and key in other:
            own, more = _checked(one[key], empty), _checked(other[key], empty)
            merged[key] = {**own, **more} if isinstance(own, dict) else [*own, *more]
    if _may_have_more(one) and "properties" in one:
        merged["additionalProperties"] = one["additionalProperties"]
    return merged


def _checked(value: Any, empty: Any) -> Any:
    return value if isinstance(value, type(empty)) else empty


def _may_have_more(form: Schema) -> bool:
    """Return whether objects of a form may have fields that it does not name. Models have none by default."""
    return form.get("additionalProperties") not in (None, False)


_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_KNOWN_TYPES = (*_JSON_TYPES.values(), "null")


def _types(form: Schema) -> tuple[str, ...]:
    """Return the JSON types of a form; empty if it may have any."""
    if form.get(CONVERTS):
        return ()
    given = form.get("type")
    if isinstance(given, str):
        return (given,) if given in _KNOWN_TYPES else ()
    if isinstance(given, list):
        return tuple(name for name in _KNOWN_TYPES if name in given)
    values = [form["const"]] if "const" in form else _listed(form, "enum")
    return tuple(dict.fromkeys(_JSON_TYPES.get(type(value), "null") for value in values))


def _type_text(forms: Iterable[Schema]) -> str:
    found = [_types(form) for form in forms]
    if not all(found):
        return "any value"
    return " or ".join(dict.fromkeys(itertools.chain.from_iterable(found)))


_NUMBERS = ("integer", "number")


def _accepts(given: str, output: Schema, wanted: str, taken: Schema) -> bool:
    """Return whether a value of a JSON type may be valid for another one, by the conversions of pydantic.

    A text may be a number only if its form is known: FlowKit's schemas name the format of decimal numbers.
    """
    if given == wanted:
        return True
    if wanted in _NUMBERS and given in (*_NUMBERS, "boolean"):
        return True
    formed = any(key in output for key in ("format", "pattern", "enum", "const"))
    if given == "string":
        return formed and wanted in (*_NUMBERS, "boolean")
    if wanted == "string":
        return given in _NUMBERS and "format" in taken
    if wanted == "boolean":
        return given in _NUMBERS and formed
    return given == "object" and wanted == "array" and "prefixItems" in taken


class _Comparison:
    """Compares the parts of an output with those of an input."""

    def __init__(self, output: Schema, input_schema: Schema) -> None:
        self._output, self._input = output, input_schema
        self._given, self._taken = _Parts(output), _Parts(input_schema)
        self._known: dict[tuple[int, int], list[Mismatch]] = {}
        """The results by pairs of parts. A pair fits as long as it is being compared, so recursion ends."""
        self._depth = 0
        self._fields_left = _FIELDS
        self._kept: list[object] = []
        """The parts themselves, so that their ids stay theirs."""

    def batches(self) -> list[Mismatch]:
        """Compare the stored output as a whole."""
        return self._choose(
            self._given.alternatives(self._output), self._taken.alternatives(self._input), self._batch
        )

    def chunks(self, list_key: str | None) -> list[Mismatch]:
        """Compare the items of a list in the stored output with the items of the input, which must be a list."""
        items = self._items(list_key)
        chunk = {"type": "array", "items": items, "minItems": 1}
        return self._choose([chunk], self._taken.alternatives(self._input), self._forms)

    def _items(self, list_key: str | None) -> Schema:
        """Return the schema of the items of the list with this key in the stored output, or else of that output."""
        stored = self._stored_form()
        fields = _checked(stored.get("properties"), {})
        if list_key not in fields:
            return _ANY if _is_open(stored) else stored
        [form, *others] = self._given.alternatives(fields[list_key])
        if others or not _types(form) or ("array" in _types(form) and len(_types(form)) > 1):
            return _ANY
        return form.get("items", _ANY) if _types(form) == ("array",) else stored

    def _stored_form(self) -> Schema:
        """Return the form of the stored output; any if it may have several."""
        [form, *others] = self._given.alternatives(self._output)
        if others or not _types(form) or ("object" in _types(form) and len(_types(form)) > 1):
            return _ANY
        return form if _types(form) == ("object",) else _stored(form)

    def _batch(self, given: Schema, taken: Schema) -> list[Mismatch]:
        """Compare a form of the output with a form of the input. A typed handler unwraps the field `value`."""
        found, given_types, taken_types = self._forms(given, taken), _types(given), _types(taken)
        if found and given_types == ("object",) and "object" not in taken_types:
            fields = _checked(given.get("properties"), {})
            if VALUE in fields or _is_open(given):
                return [each.below(VALUE) for each in self._parts(fields.get(VALUE, _ANY), taken)]
        if found and taken_types == ("object",) and "object" not in given_types:
            wrapped = self._fields(_stored(given), taken)
            return found if wrapped and VALUE not in self._required(taken) else wrapped
        return found

    def _parts(self, given: object, taken: object) -> list[Mismatch]:
        key = id(given), id(taken)
        if key not in self._known:
            if len(self._known) > _PAIRS or self._depth > _DEPTH:
                return []
            self._known[key] = []
            self._kept += given, taken
            outputs, inputs = self._given.alternatives(given), self._taken.alternatives(taken)
            self._depth += 1
            self._known[key] = self._choose(outputs, inputs, self._forms)
            self._depth -= 1
        return self._known[key]

    def _choose(
        self,
        outputs: Sequence[Schema],
        inputs: Sequence[Schema],
        compare: Callable[[Schema, Schema], list[Mismatch]],
    ) -> list[Mismatch]:
        """Return the problems of the closest pair of forms; empty if any form of the output fits one of the input."""
        closest: list[Mismatch] | None = None
        for given, taken in itertools.product(outputs, inputs):
            found = compare(given, taken)
            if not found:
                return []
            if any(each.path for each in found) and (closest is None or len(found) < len(closest)):
                closest = found
        return [_wrong_type(outputs, inputs)] if closest is None else closest

    def _forms(self, given: Schema, taken: Schema) -> list[Mismatch]:
        given_types, taken_types = _types(given), _types(taken)
        if not given_types or not taken_types:
            return []
        if not any(
            _accepts(one, given, other, taken) for one, other in itertools.product(given_types, taken_types)
        ):
            return [_wrong_type([given], [taken])]
        if given_types == taken_types == ("object",):
            return self._fields(given, taken)
        if given_types == taken_types == ("array",):
            return self._items_of(given, taken)
        return []

    def _items_of(self, given: Schema, taken: Schema) -> list[Mismatch]:
        """Compare the items of two lists. An empty list fits whatever its items would be."""
        if not given.get("minItems") or "prefixItems" in given or "prefixItems" in taken:
            return []
        return [each.below("[]") for each in self._parts(given.get("items", _ANY), taken.get("items", _ANY))]

    def _required(self, taken: Schema) -> list[str]:
        """Return the names of the required fields; none once too many have been compared."""
        names = _listed(taken, "required")
        self._fields_left -= len(names)
        if self._fields_left < 0:
            return []
        return [*dict.fromkeys(each for each in names if isinstance(each, str))]

    def _fields(self, given: Schema, taken: Schema) -> list[Mismatch]:
        known, wanted = (_checked(each.get("properties"), {}) for each in (given, taken))
        found = []
        for name in self._required(taken):
            part = wanted.get(name, _ANY)
            if name in known:
                found += [each.below(name) for each in self._parts(known[name], part)]
            elif not _is_open(given):
                found.append(
                    Mismatch(path=name, wanted=_type_text(self._taken.alternatives(part)), found=None)
                )
        return found


def _is_open(form: Schema) -> bool:
    """Return whether an object of a form may have any fields."""
    return _may_have_more(form) or not isinstance(form.get("properties"), dict) or "patternProperties" in form


def _stored(form: Schema) -> Schema:
    """Return the form in which an output that is no object is stored."""
    return {"type": "object", "properties": {VALUE: form}}


def _wrong_type(outputs: Iterable[Schema], inputs: Iterable[Schema]) -> Mismatch:
    return Mismatch(path="", wanted=_type_text(inputs), found=_type_text(outputs))
