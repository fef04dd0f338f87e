"""The syntax tree of a compiled expression, and the variables that it reads. Pure.

The CEL package has no syntax tree in Python. It serializes an expression as the message `CheckedExpr` of the CEL
specification, which this module reads. FlowKit imports it with the first expression, as it does the CEL package.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.any_pb2 import Any as Wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator


_PACKAGE = "flowkit.cel"
_TEXT, _NUMBER, _FLAG = "TYPE_STRING", "TYPE_INT64", "TYPE_BOOL"
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Position": {"key": (1, _NUMBER), "value": (2, _NUMBER)},
    "SourceInfo": {"positions": (4, "Position*")},
    "Constant": {"string_value": (6, _TEXT)},
    "Ident": {"name": (1, _TEXT)},
    "Select": {"operand": (1, "Expr"), "field": (2, _TEXT), "test_only": (3, _FLAG)},
    "Call": {"target": (1, "Expr"), "function": (2, _TEXT), "args": (3, "Expr*")},
    "CreateList": {"elements": (1, "Expr*")},
    "Entry": {"map_key": (3, "Expr"), "value": (4, "Expr")},
    "CreateStruct": {"entries": (2, "Entry*")},
    "Comprehension": {
        "iter_var": (1, _TEXT),
        "iter_range": (2, "Expr"),
        "accu_var": (3, _TEXT),
        "accu_init": (4, "Expr"),
        "loop_condition": (5, "Expr"),
        "loop_step": (6, "Expr"),
        "result": (7, "Expr"),
        "iter_var2": (8, _TEXT),
    },
    "Expr": {
        "id": (2, _NUMBER),
        "const_expr": (3, "Constant"),
        "ident_expr": (4, "Ident"),
        "select_expr": (5, "Select"),
        "call_expr": (6, "Call"),
        "list_expr": (7, "CreateList"),
        "struct_expr": (8, "CreateStruct"),
        "comprehension_expr": (9, "Comprehension"),
    },
    "CheckedExpr": {"expr": (4, "Expr"), "source_info": (5, "SourceInfo")},
}
"""For each message, the fields that FlowKit needs, with number and type; `*` marks a repeated field."""

_INDEX = "_[_]"
"""The function of CEL's operator `a[b]`."""


class Access(NamedTuple):
    """A variable that an expression reads, or a part of it: `vars.routing.sla` or `nodes["a"].status`."""

    root: str
    path: tuple[str, ...]
    """The keys as far as the expression names them; an index that is computed ends the path."""
    position: int
    """Index of the variable in the text of the expression."""


class Zone(NamedTuple):
    """A time zone that an expression names."""

    name: str
    position: int
    """Index of the name in the text of the expression."""


class Tree(NamedTuple):
    """What FlowKit reads from the syntax tree of an expression."""

    accesses: tuple[Access, ...]
    iterates: bool
    """Whether the expression iterates over a list or an object, for example with `exists`."""
    zones: tuple[Zone, ...]
    """The time zones of days, as far as the expression names them."""


def read_tree(serialized: bytes, roots: frozenset[str], date: str) -> Tree:
    """Return the accesses to the variables `roots` in a serialized expression, in the order of the text, and the time
    zones in calls of the function `date`.
    """
    checked = _CLASSES[f"{_PACKAGE}.CheckedExpr"]()
    checked.ParseFromString(Wrapped.FromString(serialized).value)
    reader = _TreeReader(roots, date, {entry.key: entry.value for entry in checked.source_info.positions})
    accesses = sorted(reader.read(checked.expr), key=lambda access: access.position)
    return Tree(tuple(dict.fromkeys(accesses)), reader.iterates, tuple(reader.zones))


class _TreeReader:
    """Walks a tree. A macro such as `exists` has a variable of its own, which may hide one of the roots."""

    def __init__(self, roots: frozenset[str], date: str, positions: dict[int, int]) -> None:
        self._roots = roots
        self._date = date
        self._positions = positions
        self._hidden: Counter[str] = Counter()
        self.iterates = False
        self.zones: list[Zone] = []

    def read(self, expr: Any) -> Iterator[Access]:
        """Yield the accesses in `expr`."""
        access = self._read_access(expr)
        if access is not None:
            yield access
        elif expr.HasField("comprehension_expr"):
            yield from self._read_comprehension(expr.comprehension_expr)
        else:
            self._note_zone(expr.call_expr)
            for part in _list_operands(expr):
                yield from self.read(part)

    def _note_zone(self, call: Any) -> None:
        """Note the time zone of a call of `date`, if the text contains it."""
        if (
            call.function == self._date
            and len(call.args) > 1
            and call.args[1].const_expr.HasField("string_value")
        ):
            zone = call.args[1]
            self.zones.append(Zone(zone.const_expr.string_value, self._positions.get(zone.id, 0)))

    def _read_comprehension(self, loop: Any) -> Iterator[Access]:
        self.iterates = True
        yield from self.read(loop.iter_range)
        yield from self.read(loop.accu_init)
        own = [name for name in (loop.iter_var, loop.iter_var2, loop.accu_var) if name]
        self._hidden.update(own)
        for part in (loop.loop_condition, loop.loop_step, loop.result):
            yield from self.read(part)
        self._hidden.subtract(own)

    def _read_access(self, expr: Any) -> Access | None:
        """Return the access that `expr` is, if it is a variable followed by keys that the text contains."""
        if expr.HasField("ident_expr"):
            name = expr.ident_expr.name.removeprefix(".")
            if name not in self._roots or self._hidden[name]:
                return None
            return Access(name, (), self._positions.get(expr.id, 0))
        operand, key = _split_access(expr)
        access = None if operand is None else self._read_access(operand)
        return None if access is None else access._replace(path=(*access.path, key))


def _split_access(expr: Any) -> tuple[Any, str]:
    """Return the operand and the key of `a.key` and `a["key"]`; no operand for other expressions."""
    if expr.HasField("select_expr"):
        return expr.select_expr.operand, expr.select_expr.field
    call = expr.call_expr
    if expr.HasField("call_expr") and call.function == _INDEX:
        operand, key = call.args
        if key.HasField("const_expr") and key.const_expr.HasField("string_value"):
            return operand, key.const_expr.string_value
    return None, ""


def _list_operands(expr: Any) -> Iterator[Any]:
    """Yield the operands of an expression."""
    if expr.HasField("select_expr"):
        yield expr.select_expr.operand
    if expr.call_expr.HasField("target"):
        yield expr.call_expr.target
    yield from expr.call_expr.args
    yield from expr.list_expr.elements
    for entry in expr.struct_expr.entries:
        yield entry.map_key
        yield entry.value


def _build_classes() -> dict[str, Any]:
    """Return the class of each message of the file, by its full name."""
    file = descriptor_pb2.FileDescriptorProto(name="flowkit/cel.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add_field(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name], pool)


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    field = message.field.add(name=name, number=number)
    field.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
    if kind.startswith("TYPE_"):
        field.type = field.Type.Value(kind)
        if message.name == "Constant":  # An empty text must differ from an absent one.
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name="constant_kind")
    else:
        field.type = field.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind.rstrip('*')}"


_CLASSES = _build_classes()
"""All classes of the file, for as long as the process runs: no message that a tree contains has another one.

protobuf itself holds such a class only weakly: once no message of it exists, the garbage collector removes it, and a
thread that then reads a message of that class can crash the process.
"""
