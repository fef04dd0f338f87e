"""One text of metrics of those of several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_LABEL = "process"


def join(texts: Mapping[str, bytes]) -> bytes:
    """Return one text, in which each sample has the label `process` with the name of the text that it comes from.

    The names need no escapes. The samples of a family stay together, as the format demands.
    """
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
    for process, text in texts.items():
        label, family = f'{_LABEL}="{process}"'.encode(), b""
        for line in text.split(b"\n"):
            if line.startswith(b"# "):
                family = line.split(b" ", 3)[2]
            head, samples = families.setdefault(family, ([], []))
            if not line.startswith(b"#"):
                samples += [_labelled(line, label)] if line else []
            elif line not in head:
                head.append(line)
    lines = [line for head, samples in families.values() for line in (*head, *samples)]
    return b"".join(line + b"\n" for line in lines)


def _labelled(sample: bytes, label: bytes) -> bytes:
    """Return a sample with one more label. The name of a sample contains neither spaces nor braces."""
    name, brace, rest = sample.partition(b"{")
    if not brace or b" " in name:
        name, space, value = sample.partition(b" ")
        return name + b"{" + label + b"}" + space + value
    return name + b"{" + label + (b"" if rest.startswith(b"}") else b",") + rest
