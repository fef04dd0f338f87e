"""One text of metrics of those of several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LABEL = "process"


def join(texts: Mapping[str, bytes]) -> bytes:
    """Return one text, in which each sample has the label `process` with the name of the text that it comes from.

    The names need no escapes. The samples of a family stay together, as the format demands.
    """
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for process, text in texts.items():
        label = f'{LABEL}="{process}"'.encode()
        family = b""
        for line in text.splitlines():
            if line.startswith(b"# "):
                family = line.split(b" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head and len(head) < 2:
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, label))
    lines = [line for family in heads for line in (*heads[family], *samples.get(family, ()))]
    return b"".join(line + b"\n" for line in lines)


def _labelled(sample: bytes, label: bytes) -> bytes:
    """Return a sample with one more label. The name of a sample contains neither spaces nor braces."""
    head, space, value = sample.partition(b" ")
    name, brace, _ = head.partition(b"{")
    if not brace:
        return name + b"{" + label + b"}" + space + value
    rest = sample[len(name) + 1 :]
    return name + b"{" + label + (b"" if rest.startswith(b"}") else b",") + rest
