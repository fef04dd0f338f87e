"""Functions for texts that users read: make them safe to encode, truncate them, suggest and list names, format times.

Handlers, drivers and file names may contain lone surrogates; gRPC, JSON and BSON refuse to encode them.
"""

from __future__ import annotations

import difflib
import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

ELLIPSIS = "…"
EXCERPT = "\n  | "
"""Begins each line of a text that an error or a warning shows below its own line."""

_NAMES = 3
_COMPARED = 200
"""How many names one name is compared with."""

_NAME_CHARS = 40
_LINE_CHARS = 100
_VALUE_CHARS = 80
_CAUSE_CHARS = 200
_HOST = r"(?:[A-Za-z0-9._%-]+|\[[0-9A-Fa-f:.%]+\])(?::\d{1,5})?"
_ADDRESS = re.compile(
    rf"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+]*)://)?(?:[^/?#@]*@)?(?P<hosts>{_HOST}(?:, ?{_HOST})*)(?:[/?][^@]*)?"
)
_DECEPTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
"""Control characters except tab and line feed, line separators, and characters that change the direction of text."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+]*://")
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def clean(text: str) -> str:
    r"""Return `text` with each lone surrogate replaced by its escape, such as `\ud800`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def visible(text: str) -> str:
    r"""Return `text` with its control and bidirectional characters as escapes like `\u001b`; tabs and line feeds stay.

    They could move the cursor of a terminal, hide text or reverse it. JSON texts keep their meaning.
    """
    return _DECEPTIVE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shell_word(text: str) -> str:
    r"""Return a text as one word of a command for bash or zsh, which can be pasted into a terminal.

    Control characters would act there before the shell reads them, so `$'…'` contains them as escapes like `\025`.
    """
    if visible(text) == text and text.isprintable():
        quoted = shlex.quote(text)
        # zsh makes the path of a command of a word that begins with an equals sign, which bash takes as it is.
        return f"'{text}'" if quoted == text and text.startswith("=") else quoted
    parts = (c if c.isprintable() and c not in "'\\" else _octal(c) for c in clean(text))
    return f"$'{''.join(parts)}'"


def shell_command(command: str, *arguments: str, options: Sequence[str] = ()) -> str:
    """Return a command with arguments and options, which can be pasted into a terminal.

    Arguments that begin with `-` follow `--`, so that none of them is taken for an option.
    """
    has_dash = any(each.startswith("-") and each != "-" for each in arguments)
    words = [*options, "--", *arguments] if has_dash else [*arguments, *options]
    return " ".join([command, *map(shell_word, words)])


def _octal(char: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in char.encode())


def shown_address(address: str) -> str:
    """Return the scheme and the hosts of a server's address, without user, password and options.

    `…` replaces the hosts if the address is ambiguous: parts of an unescaped password may look like a host.
    """
    parts = _ADDRESS.fullmatch(address)
    if parts is None:
        scheme = _SCHEME.match(address)
        return f"{scheme[0] if scheme else ''}…"
    return f"{parts['scheme']}://{parts['hosts']}" if parts["scheme"] else parts["hosts"]


def did_you_mean(name: object, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return a sentence that suggests the known name most similar to `name`, or `otherwise` if none is similar."""
    close = difflib.get_close_matches(str(name), _likely_names(str(name), known), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def _likely_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names to compare. Of many, only those that share a half with `name`: a comparison is slow."""
    given, half = [*known], max(1, len(name) // 2)
    if len(given) <= _COMPARED:
        return given
    head, tail = name[:half], name[-half:]
    return [each for each in given if each.startswith(head) or each.endswith(tail)][:_COMPARED]


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return what `did_you_mean` returns, for the end of an error: after a semicolon, or an empty string."""
    hint = did_you_mean(name, known)
    return hint and f"; {hint}"


def kind_of(value: object) -> str:
    """Return the type of a value with its article, for example `a dict`."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units: `0.5 s`, `45 s`, `10 min`, `1 h 30 min`, `2 d`."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    parts: list[str] = []
    rest = round(seconds)
    if seconds >= 3_600:
        rest = round(seconds / 60) * 60
    for size, unit in _UNITS:
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count} {unit}")
    if rest:
        parts.append(f"{rest} s")
    return " ".join(parts[:2])


def names(given: Sequence[str], *, last: str = " and ") -> str:
    """Return a list of names for a sentence: `a`, `a and b`, `a, b, c and 4 more`. `last` precedes the last name.

    Names of more than 40 characters are shortened, so that the list stays short.
    """
    if len(given) > _NAMES + 1:
        return f"{', '.join(map(shorten, given[:_NAMES]))} and {len(given) - _NAMES:,} more"
    *first, end = map(shorten, given or [""])
    return f"{', '.join(first)}{last}{end}" if first else end


def count_of(number: int, what: str) -> str:
    """Return a number with what it counts, such as `1 node` or `1,200 nodes`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def describe_set_aside(batches: int) -> str:
    """Return a text for the number of failed batches that a node has set aside."""
    return "1 batch is set aside" if batches == 1 else f"{batches:,} batches are set aside"


def describe_causes(codes: Mapping[str, int], latest: str) -> str:
    """Return why batches have failed: how many with each reason code, most first, and the error of the latest one."""
    ordered = sorted(codes.items(), key=lambda each: (-each[1], each[0]))
    shown = [f"{code} {count:,}" for code, count in ordered[:_NAMES]]
    more = sum(count for _, count in ordered[_NAMES:])
    others = [f"others {more:,}"] if more else []
    return f"{', '.join([*shown, *others])}; latest: {shorten(latest, _CAUSE_CHARS)}"


def truncate(text: str, chars: int) -> str:
    """Return `text`, truncated to at most `chars` characters. A truncated text ends in `…`."""
    if len(text) <= chars:
        return text
    return f"{text[: chars - 1]}{ELLIPSIS}" if chars > 0 else ""


def truncate_start(text: str, chars: int) -> str:
    """Return `text`, truncated to its last characters, at most `chars`. A truncated text begins with `…`."""
    return text if len(text) <= chars else f"{ELLIPSIS}{text[len(text) - chars + 1 :]}"


def bounded(text: str, chars: int) -> str:
    """Return `text` as valid UTF-8, truncated to at most `chars` characters. A truncated text ends in `…`."""
    return truncate(clean(text), chars)


def prefix(text: str, chars: int) -> str:
    """Return the first `chars` characters of `text` as valid UTF-8: a name or code, to which an `…` would
    not belong.
    """
    return clean(text[:chars])[:chars]


def truncate_utf8(text: str, limit: int) -> str:
    """Return `text`, truncated to at most `limit` bytes of UTF-8. A truncated text ends in `…`."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit:
        return text
    kept = limit - len(ELLIPSIS.encode())
    return encoded[:kept].decode("utf-8", "ignore") + ELLIPSIS if kept >= 0 else ""


def one_line(value: object) -> str:
    """Return the text of a value or an error, with each series of spaces and line breaks replaced by one space."""
    return " ".join(str(value).split())


def shorten(text: str, chars: int = _NAME_CHARS) -> str:
    """Return a text on one line, of at most `chars` characters."""
    return truncate(one_line(text), chars)


def shown(value: object, hide: Callable[[str], str] = str) -> str:
    """Return `value` as an error shows it, with its type unless the text shows it."""
    text = printed(value, hide)
    return (
        text if value is None or isinstance(value, (str, int, float)) else f"{text} ({type(value).__name__})"
    )


def printed(value: object, hide: Callable[[str], str] = str) -> str:
    """Return the `repr` of a value on one line, cut to 80 characters. `hide` masks it before the cut."""
    try:
        text = repr(hide(value) if isinstance(value, str) else value)
    except (RecursionError, ValueError):  # ValueError: the integer has more digits than Python prints
        return f"{kind_of(value)} too large or nested too deeply to show"
    return printable(truncate(hide(text), _VALUE_CHARS))


def add_caret(problem: str, text: str, position: int) -> str:
    """Return a problem, followed by the line of `text` that contains `position` and a caret below that place."""
    start = text.rfind("\n", 0, position) + 1
    column = position - start
    first = start + max(0, column - _LINE_CHARS // 2)
    line = text[first : first + _LINE_CHARS].partition("\n")[0]
    shown = "".join(c if c.isprintable() else " " for c in line)
    return f"{problem}{EXCERPT}{shown}{EXCERPT}{' ' * (position - first)}^"


def shown_path(path: str, chars: int = _VALUE_CHARS) -> str:
    """Return a path as an error shows it: on one line, with the middle cut out if it is long."""
    half = chars // 2 - 1
    return printable(path if len(path) <= chars else f"{path[:half]}…{path[-half:]}")


def printable(text: str) -> str:
    """Return `text` with line breaks, control characters and lone surrogates escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
