"""What is secret, and how texts for people hide it: errors, kept lines, logs, and what commands print. Pure.

A value is secret if the schema of the params says so, if its key has a name such as `password`, or if it has the form
of a well-known token. `FLOWKIT_SECRET_NAMES` adds names. Where params have no schema, all values that expressions read
of them count as secret.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, quote_plus, unquote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

HIDDEN: Final = "(hidden)"
"""Stands in texts for people in place of a secret."""
SECRET_TEXT: Final = re.compile(
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"  # a JSON web token
    r"|AKIA[A-Z0-9]{16}"  # an AWS access key
    r"|AIza[\w-]{35}"  # a Google API key
    r"|xox[baprs]-[\w-]+"  # a Slack token
    r"|gh[pousr]_\w{30,}"  # a GitHub token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]+-----|$)"
    r"|(?<=(?i:bearer) )[\w.~+/=-]{16,}"
    r"|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"  # the user and the password of an address
)
"""Secrets of well-known forms."""
NAMES_VARIABLE: Final = "FLOWKIT_SECRET_NAMES"
_NAMES: Final = (
    r"passw(or)?d|passphrase|secret|token|api_?key|access_?key|private_?key|authorization|credential|cookie"
)
_SECRET_MARK: Final = "x-secret"
"""The keyword of a JSON Schema that says whether a value is a secret."""

_SHORTEST: Final = 4
"""Characters from which on a value is hidden in texts. Most words contain shorter ones."""
_SHORTEST_LINE: Final = 8
"""Characters from which on a single line of a secret of several lines is hidden."""
_SHORTEST_BASE64: Final = 8
_MANY: Final = 1_000
"""Number of secrets up to which texts hide all spellings of each. They look for every one in every text."""
_MANY_CHARS: Final = 100_000
"""Characters of secrets and of their lines of which texts hide all spellings. They hide others as they are."""
_MOST_PATHS: Final = 1_000
"""Number of secret places up to which they are listed. Beyond it, all params are secret."""
_MOST_STEPS: Final = 500_000
"""How many parts of params, multiplied by the schemas that apply to each, are looked at. Beyond it, all are secret."""

Path = tuple[str | int, ...]
"""The keys and indexes that lead to a part of a value."""


# --- names and schemas --------------------------------------------------------------------------------------------


@lru_cache
def _names_with(more: str) -> re.Pattern[str]:
    words = [re.escape(each.strip()) for each in more.split(",") if each.strip()]
    return re.compile("|".join([_NAMES, *words]), re.IGNORECASE)


def is_secret_name(name: object) -> bool:
    """Return whether a value under this key is a secret, or whether a text contains the name of one."""
    return _names_with(os.environ.get(NAMES_VARIABLE, "")).search(str(name)) is not None


def hide_named(name: object, value: Any) -> Any:
    """Return a value without the texts that it holds under keys such as `password`. `name` is its own key."""
    if is_secret_name(name):
        return hide_texts(value)
    match value:
        case Mapping():
            return {key: hide_named(key, held) for key, held in value.items()}
        case list() | tuple():
            return [hide_named("", held) for held in value]
    return value


def hide_texts(held: Any) -> Any:
    """Return a value with all its texts hidden. Numbers stay: they count tokens, for example."""
    match held:
        case Mapping():
            return {key: hide_texts(each) for key, each in held.items()}
        case list() | tuple():
            return [hide_texts(each) for each in held]
        case str() | bytes() if held:
            return HIDDEN
    return held


def is_secret_schema(schema: Mapping[str, Any]) -> bool:
    """Return whether a JSON Schema says itself that its values are secrets, as pydantic's for SecretStr does."""
    marked = schema.get(_SECRET_MARK)
    if isinstance(marked, bool):
        return marked
    return schema.get("format") == "password" or schema.get("writeOnly") is True


def may_hold_secrets(schema: object) -> bool:
    """Return whether a JSON Schema says of any value that it is a secret. Most say so of none."""
    if isinstance(schema, list):
        return any(map(may_hold_secrets, schema))
    if not isinstance(schema, Mapping):
        return False
    return is_secret_schema(schema) or any(map(may_hold_secrets, schema.values()))


def hides_value(schema: Mapping[str, Any], path: Sequence[str | int], value: Any) -> bool:
    """Return whether an error must not show the value at a path: it is a secret, or may contain one.

    The path may have names of members of a union, which say nothing of the value.
    """
    if any(is_secret_name(part) for part in path) and not isinstance(value, (int, float)):
        return True
    if not may_hold_secrets(schema):
        return False
    if isinstance(value, (dict, list, tuple)):
        return True
    found = [*_alternatives([schema], schema)]
    for part in path:
        if parts := [*_below(found, part)]:
            found = [*_alternatives(parts, schema)]
    return any(_holds_secret(each, schema, set()) for each in found)


def _holds_secret(schema: object, root: Mapping[str, Any], seen: set[str]) -> bool:
    """Return whether a schema is that of a secret, or has one below it."""
    if isinstance(schema, list):
        return any(_holds_secret(each, root, seen) for each in schema)
    if not isinstance(schema, Mapping):
        return False
    for reference in map(str, _values_of(schema, _REFERENCES)):
        if reference not in seen:
            seen.add(reference)
            if _holds_secret(_resolve(root, reference), root, seen):
                return True
    return is_secret_schema(schema) or any(_holds_secret(each, root, seen) for each in schema.values())


_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_UNKNOWN: Final[Mapping[str, Any]] = {_SECRET_MARK: True}
_OF_THE_VALUE: Final = ("anyOf", "oneOf", "allOf", "if", "then", "else")
_OF_FIELDS: Final = ("additionalProperties", "unevaluatedProperties")
_OF_ITEMS: Final = ("contains", "unevaluatedItems", "additionalItems")


def _values_of(schema: Mapping[str, Any], names: Iterable[str]) -> Iterator[Any]:
    return (schema[name] for name in names if name in schema)


def _schemas_in(held: object) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas in what a keyword holds: a list of them, or one. One by name is all of them."""
    if isinstance(held, Mapping):
        yield held
    elif isinstance(held, list):
        yield from (each for each in held if isinstance(each, Mapping))


def _by_name(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    """Return the schemas that a keyword holds by name. A schema may be wrong: a task that is rejected has one, too."""
    held = schema.get(keyword)
    return held if isinstance(held, Mapping) else {}


def _resolve(root: Mapping[str, Any], reference: str) -> Mapping[str, Any]:
    """Return the schema to which a reference leads. One that leads nowhere may lead to a secret."""
    found: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    is_pointer = reference == "#" or reference.startswith("#/")
    return found if is_pointer and isinstance(found, Mapping) else _UNKNOWN


def _alternatives(
    schemas: Iterable[Mapping[str, Any]], root: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield schemas, and all others that may say something of the same value, by reference or beside them, once each.

    With repeated ones, alternatives inside of alternatives would double their number at each level.
    """
    waiting, seen = [*schemas], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        for held in _values_of(each, _OF_THE_VALUE):
            waiting += _schemas_in(held)
        for keyword in ("dependentSchemas", "dependencies"):
            waiting += _schemas_in([*_by_name(each, keyword).values()])
        waiting += [_resolve(root, str(reference)) for reference in _values_of(each, _REFERENCES)]


def _below(schemas: Iterable[Mapping[str, Any]], part: str | int) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas that may be those of a field or of an item."""
    for each in schemas:
        if isinstance(part, int):
            yield from _of_item(each, part)
        else:
            yield from _of_field(each, part)


def _of_item(schema: Mapping[str, Any], place: int) -> Iterator[Mapping[str, Any]]:
    items = schema.get("items")
    first = items if isinstance(items, list) else schema.get("prefixItems")
    fixed = first if isinstance(first, list) else []
    yield from _schemas_in(fixed[place] if place < len(fixed) else items)
    for held in _values_of(schema, _OF_ITEMS):
        yield from _schemas_in(held)


def _of_field(schema: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    known = _by_name(schema, "properties")
    if name in known:
        yield from _schemas_in(known[name])
        return
    for held in _values_of(schema, _OF_FIELDS):
        yield from _schemas_in(held)
    yield from _schemas_in(
        [*_by_name(schema, "patternProperties").values()]
    )  # matching one could take for ever


def secret_paths(params: Any, schema: Mapping[str, Any]) -> list[list[str | int]]:
    """Return where params are secret, as their JSON Schema says. One empty path stands for all of them."""
    if not may_hold_secrets(schema):
        return []
    found: list[list[str | int]] = []
    steps = 0
    for path, count in _walk(params, [schema], schema, ()):
        steps += count
        if len(found) == _MOST_PATHS or steps > _MOST_STEPS:
            return [[]]
        if path is not None:
            found.append([*path])
    return found


def _walk(
    value: Any, schemas: Sequence[Mapping[str, Any]], root: Mapping[str, Any], path: Path
) -> Iterator[tuple[Path | None, int]]:
    """Yield for a value and each part of it the path, or None if it is no secret, and how many schemas apply."""
    found = [*_alternatives(schemas, root)]
    if any(map(is_secret_schema, found)):
        yield path, len(found)
        return
    yield None, len(found)
    parts: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    for part, held in parts:
        yield from _walk(held, [*_below(found, part)], root, (*path, part))


def values_at(value: Any, paths: Iterable[Sequence[str | int]]) -> list[Any]:
    """Return the parts of a value at these paths, as far as they exist."""
    return [found for path in paths for found in _at(value, path)]


def _at(value: Any, path: Sequence[str | int]) -> Iterator[Any]:
    for part in path:
        if isinstance(value, Mapping) and part in value:
            value = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return
    yield value


# --- texts --------------------------------------------------------------------------------------------------------


def spellings(secret: str) -> Iterator[str]:
    """Yield the forms in which a text can contain a secret, or a line of one: as it is, in JSON, also inside of JSON,
    as `repr` shows it, in HTML, in URLs, in commands and in base64.
    """
    yield from {secret} if secret.isalnum() and secret.isascii() else _escaped(secret)
    yield from _in_base64(secret)


def _lines_of(secret: str) -> Iterator[str]:
    """Yield the lines of a secret of several lines that are hidden by themselves."""
    lines = secret.splitlines()
    if len(lines) > 1:
        yield from (line for each in lines if len(line := each.strip()) >= _SHORTEST_LINE)


def _escaped(text: str) -> set[str]:
    once = {text, repr(text)[1:-1], ascii(text)[1:-1]}
    once |= {json.dumps(text, ensure_ascii=each)[1:-1] for each in (True, False)}
    once |= {text.replace("\\", "\\\\").replace(mark, f"\\{mark}") for mark in "'\""}
    twice = {json.dumps(each, ensure_ascii=ascii_)[1:-1] for each in once for ascii_ in (True, False)}
    twice |= {repr(each)[1:-1] for each in once} | {each.replace("/", "\\/") for each in once}
    tags = {html.escape(each, quote=quotes) for each in once for quotes in (True, False)}
    tags |= {each.replace("&#x27;", other) for each in tags for other in ("&#39;", "&apos;", "'")}
    percent = {
        quote(text, safe=safe, errors="replace") for safe in ("", "/", "~()*!.'", ":/?#[]@!$&'()*+,;=")
    }
    percent.add(quote_plus(text, errors="replace"))
    percent |= {re.sub("%..", lambda found: found[0].lower(), each) for each in percent}
    return once | twice | tags | percent | {shlex.quote(text).removeprefix("'").removesuffix("'")}


def _in_base64(text: str) -> Iterator[str]:
    """Yield the base64 of a text wherever it begins in a longer one, without the characters that depend on others."""
    data = text.encode("utf-8", "surrogatepass")
    for before, shared in ((0, 0), (1, 2), (2, 3)):
        size = before + len(data)
        encoded = base64.b64encode(bytes(before) + data).decode()[shared : size * 8 // 6]
        if len(encoded) >= _SHORTEST_BASE64:
            yield encoded
            yield encoded.replace("+", "-").replace("/", "_")


def list_texts(secret: Any) -> Iterator[str]:
    """Yield the texts of a value and of its parts, numbers as text."""
    if isinstance(secret, Mapping):
        secret = list(secret.values())
    if isinstance(secret, (list, tuple)):
        for each in secret:
            yield from list_texts(each)
    elif isinstance(secret, str):
        yield secret
    elif isinstance(secret, bytes):
        yield secret.decode("utf-8", "replace")
    elif not isinstance(secret, bool) and secret is not None:
        yield str(secret)


def forms_of(texts: Iterable[str], shortest: int = _SHORTEST) -> list[str]:
    """Return the forms of secrets that texts hide, longest first. Shorter ones than `shortest` characters stay."""
    chosen = {each for each in texts if len(each) >= shortest}
    lines = {line for each in chosen for line in _lines_of(each)} - chosen
    forms = chosen | lines
    for each in _spelled(chosen, lines):
        forms.update(spellings(each))
    return sorted((each for each in forms if len(each) >= shortest), key=len, reverse=True)


def _spelled(secrets: set[str], lines: set[str]) -> Iterator[str]:
    """Yield those texts of which all spellings are hidden: of secrets, then of their lines, the shortest first."""
    if len(secrets) > _MANY:
        return
    chars = 0
    for each in [*sorted(secrets, key=len), *sorted(lines, key=len)][:_MANY]:
        chars += len(each)
        if chars > _MANY_CHARS:
            return
        yield each


def hide_forms(text: str, forms: Iterable[str], others: Iterable[tuple[int, int]] = ()) -> str:
    """Return a text without these forms of secrets, and without the `others`, which are places in it.

    All are looked for in the text as it is: where two overlap, hiding one first would show the rest of the other.
    """
    found = [*others]
    for form in forms:
        at = text.find(form)
        while at >= 0:
            found.append((at, at + len(form)))
            at = text.find(form, at + len(form))
    parts: list[str] = []
    end = 0
    for begin, after in sorted(found):
        if begin >= end:
            parts += [text[end:begin], HIDDEN]
        end = max(end, after)
    return "".join([*parts, text[end:]])


def hide(text: str, values: Any, shortest: int = _SHORTEST) -> str:
    """Return a text for people without these values. Those of fewer than `shortest` characters stay."""
    return hide_forms(text, forms_of(list_texts(values), shortest))


class Mask:
    """Hides texts of well-known forms, the values of keys such as `password`, and these values in other texts.

    `given` are the values in which to look for such keys.
    """

    def __init__(self, *given: Any) -> None:
        self._secrets: set[str] = set()
        self._forms: list[str] = []
        """The forms of all secrets, longest first."""
        if given:
            self.add(given)

    def add(self, given: Any) -> None:
        """Look for such keys in one more value."""
        self._add([*_list_secrets(given, named=False)])

    def add_values(self, values: Any) -> None:
        """Hide all of these values, such as those of expressions."""
        self._add([*list_texts(values)])

    def _add(self, secrets: list[str]) -> None:
        if not self._secrets.issuperset(secrets):
            self._secrets.update(secrets)
            self._forms = forms_of(self._secrets)

    @property
    def longest(self) -> int:
        """Number of characters of the longest secret; 0 if none is known."""
        return len(self._forms[0]) if self._forms else 0

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        return hide_forms(text, self._forms, (found.span() for found in SECRET_TEXT.finditer(text)))

    def value(self, value: Any) -> Any:
        """Return a value of JSON without secrets."""
        match value:
            case Mapping():
                return {key: self._hold(key, held) for key, held in value.items()}
            case list() | tuple():
                return [self.value(held) for held in value]
            case str():
                return self.text(value)
        return value

    def _hold(self, key: object, held: Any) -> Any:
        return hide_texts(held) if is_secret_name(key) else self.value(held)


def _list_secrets(value: Any, *, named: bool) -> Iterator[str]:
    match value:
        case Mapping():
            for key, held in value.items():
                yield from _list_secrets(held, named=named or is_secret_name(key))
        case list() | tuple():
            for held in value:
                yield from _list_secrets(held, named=named)
        case str() if named:
            yield value


UNKNOWN_VALUES: Final = (
    "values by expression are hidden, because the graph has no params_schema, which says what is no secret"
)
"""Why an error hides values that may be no secrets, and how to show them."""


class AttemptMask:
    """Hides the secrets of one attempt in its errors, and in the log of its process: of its input, of its params, and
    `values` of expressions.

    It reads what it is given when it hides the first text: most attempts have no error.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, *, are_known: bool = True) -> None:
        """`values` are hidden. They may be no secrets unless `are_known`, which errors then say."""
        self._given: list[Callable[[], Any]] = []
        self.hide(values or {}, are_known=are_known)

    def hide(self, values: Mapping[str, Any], *, are_known: bool) -> None:
        """Hide these values of expressions."""
        self.values, self._are_known = values, are_known
        self.__dict__.pop("mask", None)

    def read(self, given: Callable[[], Any]) -> None:
        """Look for secrets in what `given` returns, too."""
        self._given.append(given)
        self.__dict__.pop("mask", None)

    @cached_property
    def mask(self) -> Mask:
        """The mask of all secrets."""
        made = Mask()
        for each in self._given:
            with suppress(Exception):  # an input that cannot be read hides nothing, and fails nothing
                made.add(each())
        made.add_values(self.values)
        return made

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        return self.mask.text(text)

    def error(self, text: str) -> str:
        """Return the text of an error without secrets. If it hides what may be none, it says how to show that."""
        shown = self.text(text)
        if HIDDEN not in shown or not self.values or self._are_known or UNKNOWN_VALUES in shown:
            return shown
        return f"{shown} ({UNKNOWN_VALUES})"
