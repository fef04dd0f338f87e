"""Virtual environments of their own for tests that need another release of a package, or one that FlowKit does not."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def own_environment(folder: Path, *packages: str) -> Path:
    """Make an environment with these packages, in which all others are those of this one. Return its Python.

    Skip the test if the packages cannot be installed.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *packages]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot install {', '.join(packages)}: {done.stderr.strip()[-300:]}")
    own = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # Packages of a folder that `addsitedir` adds come after the own ones.
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (folder / own / "others.pth").write_text(line, encoding="utf-8")
    return python
