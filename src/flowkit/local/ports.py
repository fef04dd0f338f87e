"""Ports of this machine that nobody listens on."""

import random
import socket

HOST = "127.0.0.1"
# Below the ports that Linux and macOS hand out to outgoing connections: those could take a port between its choice
# and the moment its server listens.
CANDIDATES = range(20_000, 32_768)


def free_port() -> int:
    """A port that is free now, chosen by chance so that processes choosing at once do not meet."""
    return next(port for port in random.SystemRandom().sample(CANDIDATES, len(CANDIDATES)) if is_free(port))


def is_free(port: int) -> bool:
    """Whether a server could listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def is_listening(port: int) -> bool:
    """Whether somebody accepts connections on the port."""
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True
