"""A real Oxia server on loopback.

Oxia's own defaults listen on all interfaces, for metrics too, so both addresses are always given. There is no
health service in this version, and its public port opens a moment too early: a client that asks for the shard
assignments in that moment makes the server panic. The metrics port opens last, so the server is ready when
both accept. The number of shards is not stored in its directory, and a directory started with another number
hides keys without a word, so it is remembered here in a small file beside the data.
"""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

from forebay.errors import UsageError
from forebay.testing._servers.oxia_binary import oxia_binary
from forebay.testing._servers.ports import free_ports
from forebay.testing._servers.process import ServerProcess
from forebay.testing._servers.server import Server

__all__ = ["OxiaServer"]

START_TIMEOUT_S = 60.0
"""It takes a quarter of a second on a quiet machine; replaying a long log takes longer."""


class OxiaServer(Server):
    """A context manager around one Oxia process. Restarts keep address and data.

    Without a directory it makes one of its own and removes it at the end. Raises `ServerUnavailable` where
    there is no binary and none can be built.
    """

    def __init__(self, shards: int = 1, directory: Path | str | None = None) -> None:
        binary = oxia_binary()
        self._own_directory = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="forebay-oxia-") if directory is None else directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.shards = _remembered_shards(self.directory, shards)
        self.port, self._metrics_port = free_ports(2)
        self.address = f"127.0.0.1:{self.port}"
        """Host and port of the public service."""
        command = [str(binary), "standalone", "-p", self.address, "-m", f"127.0.0.1:{self._metrics_port}"]
        command += ["-s", str(shards), "--data-dir", "db", "--wal-dir", "wal"]
        self._process = ServerProcess(
            "oxia",
            command,
            output=self.directory / "oxia.log",
            leftovers=[self.directory] if self._own_directory else [],
        )

    def url(self, namespace: str = "default", *, address: str | None = None) -> str:
        """What `open_coordinator` takes; `address` leads through a proxy."""
        return f"oxia://{address or self.address}/{namespace}"

    def start(self) -> None:
        """Start, on the same address and data as before, and wait until it serves."""
        self._process.start(self._accepts, timeout_s=START_TIMEOUT_S)

    def stop(self) -> None:
        """SIGTERM: an orderly end."""
        self._process.stop()

    def restart(self) -> None:
        """`stop`, then `start`."""
        self.stop()
        self.start()

    def _accepts(self) -> bool:
        try:
            for port in (self._metrics_port, self.port):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return False
        return True


def _remembered_shards(directory: Path, shards: int) -> int:
    note = directory / "shards"
    if note.exists() and note.read_text() != str(shards):
        raise UsageError(
            f"{directory} was made with {note.read_text()} shards, not {shards}",
            hint="Oxia does not store the number and would hide keys: give the one it was made with",
        )
    note.write_text(str(shards))
    return shards
