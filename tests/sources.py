"""The modules of the package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKED = ("workflows", "activities", "adapters", "bridge")
"""The folders at the root to which links of the package point."""


def sources() -> dict[str, Path]:
    """Return every module of the package by its name."""
    found: dict[str, Path] = {}
    for folder in (ROOT / "src" / "flowkit", *(ROOT / name for name in LINKED)):
        base = ROOT / "src" if folder.parent.name == "src" else ROOT
        for path in folder.rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents if parent != ROOT):
                parts = path.relative_to(base).with_suffix("").parts
                parts = parts if parts[0] == "flowkit" else ("flowkit", *parts)
                found[".".join(parts).removesuffix(".__init__")] = path
    return found
