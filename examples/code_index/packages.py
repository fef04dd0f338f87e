"""Sum the facts of files by package and rank the packages. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from code_index.tree import package_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from code_index.facts import FileFacts

TOTAL = "(total)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The sums over the files of one package."""

    package: str
    files: int = 0
    problems: int = 0
    """Files that could not be parsed."""
    lines: int = 0
    functions: int = 0
    classes: int = 0
    imports: int = 0
    complexity: int = 0
    longest_function: str = ""
    longest_lines: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    """Number of functions by length in lines."""

    def plus(self, other: Package) -> Package:
        """Return the sum of both, under the name of this package."""
        longest = max(self, other, key=lambda one: (one.longest_lines, one.longest_function))
        return Package(
            package=self.package,
            files=self.files + other.files,
            problems=self.problems + other.problems,
            lines=self.lines + other.lines,
            functions=self.functions + other.functions,
            classes=self.classes + other.classes,
            imports=self.imports + other.imports,
            complexity=self.complexity + other.complexity,
            longest_function=longest.longest_function,
            longest_lines=longest.longest_lines,
            lengths=dict(Counter(self.lengths) + Counter(other.lengths)),
        )


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The partial sums of a batch, because the files of a package may be in several batches."""

    packages: list[Package]
    file_count: int


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The ranking and the totals."""

    ranking: list[Package]
    total: Package
    packages: int


def grouped(files: Iterable[FileFacts]) -> list[Package]:
    """Return the packages of these files."""
    return merged(_package_of_one(file) for file in files)


def _package_of_one(file: FileFacts) -> Package:
    return Package(
        package=package_of(file.path),
        files=1,
        problems=int(file.problem is not None),
        lines=file.lines,
        functions=file.functions,
        classes=file.classes,
        imports=file.imports,
        complexity=file.complexity,
        longest_function=file.longest_function,
        longest_lines=file.longest_lines,
        lengths=file.lengths,
    )


def merged(parts: Iterable[Package]) -> list[Package]:
    """Merge partial sums into one for each package, sorted by name. The order of the parts does not matter."""
    sums: dict[str, Package] = {}
    for part in parts:
        known = sums.get(part.package)
        sums[part.package] = part if known is None else known.plus(part)
    return [sums[name] for name in sorted(sums)]


def total(packages: Iterable[Package]) -> Package:
    """Return the sum of all packages."""
    whole = Package(package=TOTAL)
    for package in packages:
        whole = whole.plus(package)
    return whole


def ranked(packages: Iterable[Package], top: int) -> list[Package]:
    """Return the `top` most complex packages, most complex first."""
    return sorted(packages, key=lambda one: (-one.complexity, one.package))[:top]


def as_dicts(packages: Iterable[Package]) -> list[dict[str, Any]]:
    """Convert packages to dicts, for storage."""
    return [asdict(package) for package in packages]


def from_dicts(stored: Iterable[dict[str, Any]]) -> list[Package]:
    """Convert stored dicts to packages."""
    return [Package(**fields) for fields in stored]
