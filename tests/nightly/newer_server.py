"""The development server of the release, built with Go where it cannot be downloaded.

`go install` cannot build that release: its module replaces another one by a folder that Go's proxy does not carry.
The package of its development server does not need that folder, so a module of ours contains a copy of the package
and a program that takes the same flags.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from flowkit.local.container import output_of
from flowkit.local.errors import InstallFailed, WrongHash
from flowkit.local.install import fingerprint, install_once, require_program, run_command
from flowkit.local.temporal import MODULE, RELEASE, download_temporal

NAME = "temporal-server"
PACKAGE = "internal/devserver"
FILES = ("server.go", "log.go", "freeport.go")
REPLACED = f"{MODULE}/cliext"
PROGRAM = Path(__file__).parent / "server.go.txt"


def newer_server() -> str:
    """Return the path of the server; download or build it if it is not in the cache. Raises InstallFailed."""
    try:
        return download_temporal()
    except WrongHash:
        raise
    except InstallFailed:
        version = f"{RELEASE}-{fingerprint(PROGRAM.read_text(encoding='utf-8'))}"
        return str(install_once(NAME, version, _build) / "temporal")


def is_built(program: str) -> bool:
    """Whether a program is a built server, which has only the command `server start-dev`."""
    return Path(program).parent.parent.name == NAME


def module_file(original: str) -> str:
    """Return the go.mod of our module: that of the release, without the module that it replaces."""
    required = [line for line in original.splitlines() if REPLACED not in line]
    return "\n".join(["module flowkit/temporal-server", *required[1:], ""])


def _build(folder: Path) -> None:
    go = require_program("go", remedy="install it to build Temporal's development server")
    module, environment = folder / "module", {**os.environ, "GOFLAGS": "-mod=mod", "GOWORK": "off"}
    (module / "devserver").mkdir(parents=True)
    run_command([go, "mod", "download", f"{MODULE}@{RELEASE}"], folder=module, env=environment)
    _copy(Path(output_of([go, "env", "GOMODCACHE"]).strip()) / f"{MODULE}@{RELEASE}", module)
    build = ("build", "-buildvcs=false", "-trimpath", "-o", str(folder / "temporal"), ".")
    run_command([go, *build], folder=module, env=environment)
    shutil.rmtree(module)


def _copy(release: Path, module: Path) -> None:
    """Copy the package, whose files are read-only in Go's cache, and add the program."""
    for name in FILES:
        shutil.copyfile(release / PACKAGE / name, module / "devserver" / name)
    shutil.copyfile(release / "go.sum", module / "go.sum")
    shutil.copyfile(PROGRAM, module / "main.go")
    (module / "go.mod").write_text(module_file((release / "go.mod").read_text(encoding="utf-8")))
