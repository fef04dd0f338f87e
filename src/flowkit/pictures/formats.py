"""The formats of pictures."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from flowkit.pictures.dot import to_dot
from flowkit.pictures.mermaid import to_mermaid
from flowkit.pictures.text import COLUMNS, to_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.pictures.model import Picture


class Format(StrEnum):
    """A format of a picture."""

    TEXT = "text"
    """Boxes and lines for a terminal."""
    MERMAID = "mermaid"
    DOT = "dot"
    """The language of Graphviz."""
    SVG = "svg"
    PNG = "png"


SUFFIXES: Final[Mapping[str, Format]] = {
    ".txt": Format.TEXT,
    ".mmd": Format.MERMAID,
    ".mermaid": Format.MERMAID,
    ".dot": Format.DOT,
    ".gv": Format.DOT,
    ".svg": Format.SVG,
    ".png": Format.PNG,
}
"""The format of a file, by the end of its name."""


def draw(picture: Picture, form: Format, columns: int = COLUMNS) -> bytes:
    """Return a file with the picture. Raise ConfigError if no installed program can draw SVG or PNG."""
    if form is Format.SVG or form is Format.PNG:
        from flowkit.pictures.programs import render

        return render(to_dot(picture), "svg" if form is Format.SVG else "png")
    if form is Format.TEXT:
        return f"{to_text(picture, columns).plain}\n".encode()
    return (to_dot(picture) if form is Format.DOT else to_mermaid(picture)).encode()
