"""Free ports on this machine."""

import random
import socket

HOST = "127.0.0.1"
# Below the range that Linux and macOS use for outgoing connections: such a connection could take the
# port before the server listens on it.
CANDIDATES = range(20_000, 32_768)


def free_port() -> int:
    """Return a random free port. Random, so that processes that choose at the same time rarely collide."""
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
    """Whether a server accepts connections on the port."""
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True
