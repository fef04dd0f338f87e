"""A fake client of a container engine that records its calls and runs real servers.

`run` replaces this process with the server of the image, on the published ports and with the mounted folder. This
tests containers on a machine without an engine. It does not test whether a real engine accepts the arguments.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["FAKE_DOCKER"])


def main(arguments: list[str]) -> int:
    """Handle a command like the real client."""
    with (STATE / "calls").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    match arguments:
        case ["version"]:
            sys.stdout.write("Server: Docker Engine\n")
        case ["info"]:
            sys.stdout.write("Security Options: seccomp\n")
        case ["image", "inspect", image]:
            sys.stdout.write(image)
            return 0 if _pulled(image).exists() else 1
        case ["pull", image]:
            _pulled(image).touch()
        case ["run", *options]:
            _exec_server(options)
    return 0


def _pulled(image: str) -> Path:
    return STATE / image.replace("/", "_")


def _exec_server(options: list[str]) -> None:
    from flowkit.local.mongo import (
        stand_in_command,  # imported only here, so that other calls are fast
    )
    from flowkit.local.temporal import temporal_cli

    ports = {inside: here for _, here, inside in (each.split(":") for each in _values(options, "--publish"))}
    folder, inside, _ = _values(options, "--volume")[0].split(":")
    entrypoint = _values(options, "--entrypoint")[0]
    if entrypoint == "/bin/sh":
        command = _kafka_command(Path(folder), options[-1])
    elif entrypoint == "mongod":
        command = stand_in_command(int(ports["27017"]), Path(folder) / "data.mv")
    else:
        arguments = options[options.index("server") :]
        adjusted = [ports.get(each, each).replace("0.0.0.0", "127.0.0.1") for each in arguments]
        command = [temporal_cli(), *(each.replace(f"{inside}/", f"{folder}/") for each in adjusted)]
    os.execvp(command[0], command)


def _kafka_command(folder: Path, script: str) -> list[str]:
    """Return the command for the broker; do what the script does before."""
    from flowkit.local.kafka import format_command, kafka_program, start_command
    from flowkit.local.sources import Source

    settings = (folder / "server.properties").read_text()
    adjusted = folder / "adjusted.properties"
    adjusted.write_text(settings.replace("/flowkit", str(folder)).replace("0.0.0.0", "127.0.0.1"))
    program = kafka_program([Source.CACHE, Source.DOWNLOAD])
    for step in map(shlex.split, script.split(" && ")):
        if "format" in step:
            arguments = [str(adjusted) if "properties" in each else each for each in step[2:]]
            subprocess.run(format_command(program, arguments), check=True)
    return start_command(program, adjusted)


def _values(options: list[str], name: str) -> list[str]:
    return [value for option, value in itertools.pairwise(options) if option == name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
