"""Free loopback ports that stay free across a restart.

Asking the kernel for port 0 gives a port of its ephemeral range, which it may hand to any outgoing connection
the moment a killed server lets go of it. Ours come from below that range, picked at random so that parallel
test runs rarely look at the same one, and tested by binding.
"""

from __future__ import annotations

import random
import socket

from forebay.testing._servers.errors import ServerUnavailable

__all__ = ["GRPC_OFFSET", "free_ports"]

GRPC_OFFSET = 10_000
"""SeaweedFS takes this much above each of its ports for gRPC."""
PORT_MIN, PORT_MAX = 12_000, 21_999
"""With the offset still below 32,768, where Linux begins to number outgoing connections."""
TRIES_MAX = 1_000


def free_ports(count: int, *, with_grpc: bool = False) -> list[int]:
    """`count` different ports on 127.0.0.1, each with `port + GRPC_OFFSET` free too if asked for."""
    picker = random.SystemRandom()
    found: list[int] = []
    for _ in range(TRIES_MAX):
        port = picker.randint(PORT_MIN, PORT_MAX)
        wanted = [port, port + GRPC_OFFSET] if with_grpc else [port]
        if port not in found and all(_is_free(each) for each in wanted):
            found.append(port)
            if len(found) == count:
                return found
    raise ServerUnavailable(
        f"no {count} free ports between {PORT_MIN} and {PORT_MAX}", hint="end what holds them and try again"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
