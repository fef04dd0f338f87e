"""`python -m tests.nightly.core_alone`: the quick tests of the core in a copy without its products."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

PRODUCTS = ("src/flowkit/admission", "src/flowkit/gateway", "src/flowkit/observe", "src/flowkit/page")
TESTS_OF_PRODUCTS = (
    "tests/admission",
    "tests/gateway",
    "tests/observe",
    "tests/page",
    "tests/cli/test_admission.py",
    "tests/cli/test_own_products.py",
    "tests/fuzz/*admission*",
    "tests/fuzz/*flow*",
    "tests/integration/admission",
    "tests/integration/flow_model",
    "tests/integration/flows",
    "tests/integration/test_flow_model.py",
    "tests/server/test_rights.py",
    "tests/test_doors.py",
    "tests/test_values_at_doors.py",
    "tests/contract/test_followed_lines.py",
    "tests/unit/test_sinks.py",
    "tests/unit/test_waits.py",
)
"""By patterns. The last ones also test the core, together with the products."""

QUICK_TESTS = ("tests/cli", "tests/contract", "tests/local", "tests/server", "tests/unit", "tests/test_*.py")
"""By patterns. The tests of the pages are not among them: the pages describe the products, too."""


def main(jobs: str = "2") -> int:
    """Run the tests in a temporary copy. Return the exit code of pytest."""
    with tempfile.TemporaryDirectory(prefix="flowkit-core-") as folder:
        copy = Path(folder)
        _copy_to(copy)
        _delete(copy)
        tests = [
            str(path.relative_to(copy)) for pattern in QUICK_TESTS for path in sorted(copy.glob(pattern))
        ]
        command = (
            *(str(Path(sys.executable).parent / "pytest"), "-q", "-n", jobs),
            *("-m", "not server and not slow and not nightly", *tests),
        )
        # The package of the copy precedes the installed one, whose entry points then have no code for the products.
        environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
        return subprocess.run(command, cwd=copy, env=environment, check=False).returncode


def _copy_to(copy: Path) -> None:
    """Copy the files that Git knows, and those that it will, into a repository of their own."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", at=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    _git("init", "--quiet", at=copy)
    _git("add", "--all", at=copy)


def _delete(copy: Path) -> None:
    for pattern in (*PRODUCTS, *TESTS_OF_PRODUCTS):
        found = [*copy.glob(pattern)]
        if not found:
            raise FileNotFoundError(f"nothing to delete: {pattern}")
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _git(*arguments: str, at: Path) -> str:
    return subprocess.run(("git", *arguments), cwd=at, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
