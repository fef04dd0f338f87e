"""A stand-in for the client of a container engine: it records what it is asked, and runs real servers.

`run` becomes the server of that image as this process, on the published ports and with the mounted folder. It is what
can be tried of containers on a machine without an engine; whether a real engine takes the same arguments is not.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

STATE = Path(os.environ["FAKE_DOCKER"])


def main(arguments: list[str]) -> int:
    """Do as the client would."""
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
            _become(options)
    return 0


def _pulled(image: str) -> Path:
    return STATE / image.replace("/", "_")


def _become(options: list[str]) -> None:
    from flowkit.local.mongo_stand_in import stand_in_command  # what no other call needs to wait for
    from flowkit.local.temporal_cli import temporal_cli

    ports = {inside: here for _, here, inside in (each.split(":") for each in _values(options, "--publish"))}
    folder, inside, _ = _values(options, "--volume")[0].split(":")
    entrypoint = _values(options, "--entrypoint")[0]
    if entrypoint == "mongod":
        command = stand_in_command(int(ports["27017"]), Path(folder) / "data.mv")
    else:
        arguments = options[options.index("server") :]
        told = [ports.get(each, each).replace("0.0.0.0", "127.0.0.1") for each in arguments]
        command = [temporal_cli(), *(each.replace(f"{inside}/", f"{folder}/") for each in told)]
    os.execvp(command[0], command)


def _values(options: list[str], name: str) -> list[str]:
    return [value for option, value in itertools.pairwise(options) if option == name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
