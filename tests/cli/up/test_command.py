"""The command line of `flowkit up`: mistakes, missing programs and `--install`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.cli.up.up_process import (
    environment_without_servers,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "temporal,redis"],
            "--only 'redis' is unknown; choose from temporal, mongo, engine, bridge, worker",
        ),
        (["--only", "worker"], "a worker needs handlers, but none are given; name them as module:CLASS"),
        (["--only", "engine", "shop:Shop"], "handlers are given, but this command starts no worker"),
        (["--workers", "2"], "--workers is given, but this command starts no worker; name the handlers"),
        (
            ["--only", "mongo", "--function", "a=b:c"],
            "--function is given, but this command starts no engine",
        ),
        (
            ["--only", "mongo", "--role", "shop:Shop"],
            "--role is given, but this command starts no engine",
        ),
        (["--role", "nowhere:Shop"], "module 'nowhere' was not found"),
        (["nowhere:Shop"], "module 'nowhere' was not found; run flowkit in the folder that contains it"),
        (["--function", "f=nowhere:f"], "module 'nowhere' was not found"),
        (["shop"], "'shop' is not module:name; for example"),
        (
            ["--external", "in dexer"],
            "--external 'in dexer' is not allowed; it must be a role: a letter or digit",
        ),
        (["--port-base", "65532"], "Invalid value for '--port-base'"),
        (
            ["--data", "/sys/flowkit"],
            "cannot write to /sys/flowkit (Operation not permitted); choose a writable folder",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_reported_in_one_line_before_anything_starts(
    program: Program, arguments: list[str], message: str
) -> None:
    output = program.run("up", *arguments)
    assert output.code == 2
    assert output.err.startswith(f"flowkit: {message}")
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_a_missing_program_is_reported_in_one_line_with_the_remedy(program: Program, tmp_path: Path) -> None:
    env = {**environment_without_servers(tmp_path), "PATH": str(tmp_path)}
    output = program.run("up", "--only", "mongo", env={**env, "MONGO_URL": ""})
    assert output.code == 3
    assert output.err == (
        "flowkit: `java` is not on PATH; install MongoDB, or a JDK 17 or newer and Maven, "
        "or set MONGO_URL to a running server\n"
    )


def test_sources_without_the_server_are_reported_in_one_line(program: Program, tmp_path: Path) -> None:
    env = {
        "PATH": str(tmp_path),
        "FLOWKIT_SERVERS": "path,container",
        "MONGO_URL": "",
        "TEMPORAL_ADDRESS": "",
    }
    output = program.run("up", env=env)
    assert output.code == 3
    assert output.err.startswith(
        "flowkit: no Temporal server found in FLOWKIT_SERVERS=path,container; unset FLOWKIT_"
    )


def test_a_missing_network_is_reported_in_one_line_with_the_remedies(
    program: Program, tmp_path: Path
) -> None:
    env = {"FLOWKIT_CACHE": str(tmp_path / "cache"), "FLOWKIT_SERVERS": "", "PATH": str(tmp_path)}
    proxies = dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:1")
    output = program.run(
        "up", "--install", "--only", "temporal", env={**env, **proxies, "FLOWKIT_TEMPORAL_BIN": ""}
    )
    assert output.code == 3
    message = output.err.splitlines()[-1]
    assert message.startswith("flowkit: cannot install the Temporal CLI: cannot reach github.com (")
    assert "and `go` is not on PATH; put `temporal` on PATH, set FLOWKIT_TEMPORAL_BIN" in message


def test_install_prints_the_source_of_each_server(program: Program, tmp_path: Path) -> None:
    mongod = tmp_path / "mongod"
    mongod.write_text("#!/bin/sh\n")
    mongod.chmod(0o755)
    output = program.run(
        "up", "--install", "--only", "mongo", env={"PATH": str(tmp_path), "FLOWKIT_SERVERS": ""}
    )
    assert (output.code, output.out) == (0, f"mongo: {mongod} (path)\n")
