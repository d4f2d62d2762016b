"""The published `opendata-buffer` crate as a program: built once into the cache, answers in JSON.

Its sources lie outside this repository, in `../shared/peers/opendata` beside the checkout or where
FOREBAY_OPENDATA_PEER points. The build takes some eleven minutes of one core; a stamp with a digest of the
sources says that it was finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import CannotMeasure
from forebay.testing.servers import SeaweedServer, cache_directory

__all__ = ["OpenDataPeer", "PeerError", "opendata_binary"]

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "opendata-buffer-0.3.0"
BUILD_TIMEOUT_S = 3_600
RUN_TIMEOUT_S = 180
_STAMP = "ready"


class PeerError(Exception):
    """The program answered nothing usable."""


def _sources() -> Path:
    given = os.environ.get("FOREBAY_OPENDATA_PEER")
    place = Path(given) if given else ROOT.parent / "shared" / "peers" / "opendata"
    if not (place / "build.sh").is_file():
        raise CannotMeasure("the sources of the opendata peer are not there (FOREBAY_OPENDATA_PEER)")
    return place


def _digest(sources: Path) -> str:
    total = hashlib.sha256()
    for path in sorted([sources / "Cargo.lock", sources / "Cargo.toml", *(sources / "src").glob("*.rs")]):
        total.update(path.read_bytes())
    return total.hexdigest()


def opendata_binary(say: Callable[[str], None] = lambda _: None) -> Path:
    """The built program. Raises `CannotMeasure` where it cannot be had."""
    sources = _sources()
    place = cache_directory() / "peers" / NAME
    binary, stamp, wanted = place / "target" / "release" / "peer", place / _STAMP, _digest(sources)
    if binary.is_file() and stamp.is_file() and stamp.read_text() == wanted:
        return binary
    if shutil.which("cargo") is None:
        raise CannotMeasure("cargo is not installed, so the opendata peer cannot be built")
    say("building the opendata peer, which takes some minutes the first time")
    environment = os.environ | {"CARGO_BUILD_JOBS": os.environ.get("CARGO_BUILD_JOBS", "1")}
    command = ["sh", str(sources / "build.sh"), str(place)]
    if shutil.which("nice"):
        command = ["nice", "-n", "19", *command]
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.SubprocessError) as error:
        words = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise CannotMeasure(f"the opendata peer could not be built: {words[-1]}") from error
    stamp.write_text(wanted)
    return binary


@dataclass(frozen=True, slots=True)
class OpenDataPeer:
    """The program on one queue of one server."""

    binary: Path
    server: SeaweedServer
    prefix: str
    manifest: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    """Every run of it, for `end`."""

    def words(self, command: str, **options: Any) -> list[str]:
        """The command line."""
        words = [
            str(self.binary),
            command,
            *("--endpoint", self.server.endpoint),
            *("--bucket", self.server.bucket),
            *("--prefix", self.prefix),
            *("--manifest", self.manifest),
        ]
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
        return words

    @property
    def environment(self) -> dict[str, str]:
        """What it needs to know besides."""
        return dict(os.environ) | {
            "AWS_ACCESS_KEY_ID": self.server.access_key,
            "AWS_SECRET_ACCESS_KEY": self.server.secret_key,
        }

    def start(self, command: str, **options: Any) -> subprocess.Popen[str]:
        """Begin a run."""
        process = subprocess.Popen(
            self.words(command, **options),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        """Stop what still runs."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def run(self, command: str, *, codes: tuple[int, ...] = (0,), **options: Any) -> dict[str, Any]:
        """A run to its end; what it printed."""
        return finish(self.start(command, **options), codes=codes)


def finish(process: subprocess.Popen[str], *, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """Wait for a run; what it printed. Raises `PeerError` for another exit code."""
    try:
        printed, words = process.communicate(timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise PeerError("the opendata peer did not end") from error
    if process.returncode not in codes:
        raise PeerError(f"the opendata peer ended with {process.returncode}: {words[-500:]}{printed[-500:]}")
    found: dict[str, Any] = json.loads(printed)
    return found
