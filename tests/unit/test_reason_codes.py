"""Reason codes and names in Temporal are written in one module each; all other code uses the constants."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.sources import sources

from flowkit import reason_codes
from flowkit.models import temporal_names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

MODULES = sources()
HOMES = {"flowkit.reason_codes", "flowkit.models.temporal_names"}
INDEPENDENT = "flowkit.testing.external"
"""The external worker for tests, which shares no code with the rest of FlowKit, so that it can check the bridge."""

FIELDS = {"code", "type", "reason_code", "cause", "permanent_on"}
"""Names of keywords, attributes and parameters whose value is a reason code."""

REPORTS = {"failure", "lost", "yielded"}
"""Functions of `attempt.failures` whose first argument is a reason code."""

NAMING = {
    *("defn", "query", "signal", "update", "start_workflow", "execute_workflow", "execute_update"),
    *("execute_activity", "start_activity", "execute_local_activity", "start_local_activity"),
}
"""Functions of Temporal's SDK whose first argument, or argument `name`, is a name in Temporal."""


WITHOUT_TEXTS = (ast.Name, ast.Attribute, ast.expr_context, ast.arg)
"""Most nodes of a syntax tree, which give no value to anything."""


def constants(module: ModuleType) -> set[str]:
    """Return the texts that a module defines under names in capitals."""
    return {value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}


CODES, NAMES = constants(reason_codes), constants(temporal_names)
COMPOUND = {text for text in CODES | NAMES if "_" in text}
"""Texts that can only be a code or a name. The others, such as `error`, are also ordinary words."""


def texts(node: ast.AST | None) -> Iterator[ast.Constant]:
    """Yield the texts that `node` is or chooses from: itself, elements, and operands of `or` and `if`."""
    match node:
        case ast.Constant(value=str()):
            yield node
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) | ast.BoolOp(values=parts):
            for part in parts:
                yield from texts(part)
        case ast.IfExp(body=first, orelse=second):
            yield from texts(first)
            yield from texts(second)


def values_of_fields(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yield the values that `node` gives to a field for a reason code."""
    match node:
        case ast.keyword(arg=str(name), value=value) if name in FIELDS:
            yield value
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in FIELDS:
            yield value
        case ast.AnnAssign(target=ast.Name(id=name), value=value) if name in FIELDS:
            yield value
        case ast.arguments(posonlyargs=first, args=rest, defaults=defaults):
            args = [*first, *rest]
            named = zip(args[len(args) - len(defaults) :], defaults, strict=True)
            yield from (default for arg, default in named if arg.arg in FIELDS)


def places_of_codes(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yield the parts of `node` that are reason codes by their place."""
    yield from values_of_fields(node)
    match node:
        case ast.Compare(left=left, comparators=others):
            yield from (left, *others)
        case ast.BoolOp(op=ast.Or()) | ast.Return(value=ast.Tuple()):
            yield node.value if isinstance(node, ast.Return) else node
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in REPORTS:
            yield first


def places_of_names(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yield the parts of `node` that are names in Temporal by their place."""
    match node:
        case ast.Call(func=ast.Attribute(attr=called), args=args, keywords=keywords) if called in NAMING:
            yield from args[:1]
            yield from (keyword.value for keyword in keywords if keyword.arg == "name")
        case ast.Compare(left=ast.Attribute(attr="workflow_type"), comparators=others):
            yield from others


def members_of_enums(nodes: list[ast.AST]) -> set[ast.AST]:
    """Return the values of enumerations, which are vocabularies of their own."""
    enums = (
        node
        for node in nodes
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases)
    )
    return {line.value for enum in enums for line in enum.body if isinstance(line, ast.Assign)}


def members_of_types(nodes: list[ast.AST]) -> set[ast.AST]:
    """Return the texts of `Literal` types, where Python allows no names."""
    types = (
        node.slice
        for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal"
    )
    return {text for members in types for text in texts(members)}


def first_word(value: object) -> str:
    """Return a text up to its colon: `hard_fail:` begins the cancel reason of a failed task."""
    return value.partition(":")[0] if isinstance(value, str) else ""


def literals(tree: ast.AST) -> set[tuple[int, str]]:
    """Return the line and the text of each code and name that is written as a literal."""
    nodes = [*ast.walk(tree)]
    members = members_of_enums(nodes) | members_of_types(nodes)
    found = set()
    for node in nodes:
        if isinstance(node, WITHOUT_TEXTS):
            continue
        written = [text for place in places_of_codes(node) for text in texts(place) if text.value in CODES]
        written += [text for place in places_of_names(node) for text in texts(place)]
        if isinstance(node, ast.Constant) and first_word(node.value) in COMPOUND and node not in members:
            written.append(node)
        found |= {(text.lineno, str(text.value)) for text in written}
    return found


CHECKED = sorted(name for name in MODULES.keys() - HOMES if not f"{name}.".startswith(f"{INDEPENDENT}."))


def test_codes_and_names_are_literals_in_their_own_module_only() -> None:
    for module in CHECKED:
        assert sorted(literals(ast.parse(MODULES[module].read_text(encoding="utf-8")))) == []


def test_the_check_finds_a_literal() -> None:
    for line in [
        'fail(code="timeout")',
        'raise ApplicationError(text, type="error")',
        'failure("timeout", text, permanent=False)',
        'code = result.reason_code or "error"',
        'code = "fenced"',
        'def __init__(self, code: str = "removed") -> None: ...',
        'if error.code == "fenced": ...',
        'if error.type in ("lost", "fenced"): ...',
        'codes = frozenset({"lease_lost"})',
        'self._bound["open_task"]',
        'reason = f"hard_fail:{code}"',
        'fail(code="timeout" if late else other)',
        'def classify(): return "error", False',
        '@activity.defn(name="anything")\nasync def run(): ...',
        'handle.query("status")',
        'if description.workflow_type != "Task": ...',
    ]:
        assert len(literals(ast.parse(line))) > 0


def test_the_check_leaves_ordinary_words_alone() -> None:
    for line in [
        'fields = {"error": str(error)}',
        'def check(value, name: str = "timeout") -> None: ...',
        'class Kind(StrEnum):\n    TAKEN = "epoch_taken"',
        'document["status"]',
        'log.error("error")',
    ]:
        assert literals(ast.parse(line)) == set()


def test_a_reason_code_is_its_name_in_small_letters() -> None:
    names = {name: value for name, value in vars(reason_codes).items() if name.isupper()}
    assert names == {name: name.lower() for name in names}
