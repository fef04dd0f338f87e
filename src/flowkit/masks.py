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
from urllib.parse import quote, quote_plus

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
_MOST_PATHS: Final = 1_000
"""Number of secret places up to which they are listed. Beyond it, all params are secret."""

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
    definitions = _definitions(schema)
    found = [*_alternatives(schema, definitions)]
    for part in path:
        if parts := [*_below(found, part)]:
            found = [every for each in parts for every in _alternatives(each, definitions)]
    return any(_holds_secret(each, definitions, set()) for each in found)


def _holds_secret(schema: object, definitions: Mapping[str, Any], seen: set[str]) -> bool:
    """Return whether a schema is that of a secret, or has one below it."""
    if isinstance(schema, list):
        return any(_holds_secret(each, definitions, seen) for each in schema)
    if not isinstance(schema, Mapping):
        return False
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name and name not in seen:
        seen.add(name)
        if _holds_secret(definitions.get(name), definitions, seen):
            return True
    return is_secret_schema(schema) or any(_holds_secret(each, definitions, seen) for each in schema.values())


def _definitions(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema.get("$defs") or schema.get("definitions") or {}


def _alternatives(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, and those of which its values fit one or all: by reference, `anyOf`, `oneOf` and `allOf`."""
    waiting, seen = [schema], set[str]()
    while waiting:
        each = waiting.pop()
        yield each
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += [one for one in each.get(name) or () if isinstance(one, Mapping)]
        name = str(each.get("$ref", "")).rpartition("/")[2]
        if name and name not in seen and isinstance(definitions.get(name), Mapping):
            seen.add(name)
            waiting.append(definitions[name])


def _below(schemas: Iterable[Mapping[str, Any]], part: str | int) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas of a field or of an item."""
    for each in schemas:
        if isinstance(part, int):
            fixed = each.get("prefixItems") or []
            found = fixed[part] if part < len(fixed) else each.get("items")
        else:
            found = (each.get("properties") or {}).get(part, each.get("additionalProperties"))
        if isinstance(found, Mapping):
            yield found


def secret_paths(params: Any, schema: Mapping[str, Any]) -> list[list[str | int]]:
    """Return where params are secret, as their JSON Schema says. One empty path stands for all of them."""
    if not may_hold_secrets(schema):
        return []
    found: list[list[str | int]] = []
    for path in _walk(params, [schema], _definitions(schema), ()):
        if len(found) == _MOST_PATHS:
            return [[]]
        found.append([*path])
    return found


def _walk(
    value: Any, schemas: Sequence[Mapping[str, Any]], definitions: Mapping[str, Any], path: Path
) -> Iterator[Path]:
    found = [every for each in schemas for every in _alternatives(each, definitions)]
    if any(map(is_secret_schema, found)):
        yield path
        return
    parts: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    for part, held in parts:
        yield from _walk(held, [*_below(found, part)], definitions, (*path, part))


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
    """Yield the forms in which a text can contain a secret, or a line of it: as it is, in JSON, also inside of JSON, as
    `repr` shows it, in HTML, in URLs, in commands and in base64.
    """
    lines = secret.splitlines()
    for each in (secret, *(line.strip() for line in lines if len(lines) > 1)):
        if each == secret or len(each) >= _SHORTEST_LINE:
            yield from {each} if each.isalnum() and each.isascii() else _escaped(each)
            yield from _in_base64(each)


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
    forms = {form for each in chosen for form in spellings(each)} if len(chosen) <= _MANY else chosen
    return sorted((each for each in forms if len(each) >= shortest), key=len, reverse=True)


def hide_forms(text: str, forms: Iterable[str]) -> str:
    """Return a text without these forms of secrets."""
    for form in forms:
        text = text.replace(form, HIDDEN)
    return text


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
        return hide_forms(SECRET_TEXT.sub(HIDDEN, text), self._forms)

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
