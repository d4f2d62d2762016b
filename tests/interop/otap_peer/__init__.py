"""The published `otel-arrow-dfe-pdata` crate as a program, built once into the cache from the sources here.

The build takes some 25 minutes of two cores, because the crate stands on DataFusion; so it is made only where
`FOREBAY_OTAP_PEER=build` asks for it. What it made is kept in `tests/dataflow/data/otap` for everybody else.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from forebay.testing.servers import cache_directory

__all__ = ["frames", "join_frames", "peer", "run"]

NAME = "otap-0.62.0"
SOURCES = Path(__file__).resolve().parent
BUILD_TIMEOUT_S = 7_200
_LENGTH = struct.Struct("<I")


def peer() -> Path | None:
    """The program, none where it is neither there nor to be built."""
    place = cache_directory() / "peers" / NAME
    binary = place / "target" / "debug" / "otap-peer"
    if not binary.is_file() and os.environ.get("FOREBAY_OTAP_PEER") == "build":
        shutil.copytree(SOURCES, place, dirs_exist_ok=True)
        subprocess.run(["cargo", "build", "--quiet"], cwd=place, check=True, timeout=BUILD_TIMEOUT_S)
    return binary if binary.is_file() else None


def run(binary: Path, *words: str, requests: Sequence[bytes]) -> list[bytes]:
    """What the program makes of the frames."""
    data = join_frames(requests)
    done = subprocess.run([binary, *words], input=data, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()[-1_000:]
    return frames(done.stdout)


def join_frames(parts: Sequence[bytes]) -> bytes:
    """Each with its length before it."""
    return b"".join(_LENGTH.pack(len(each)) + each for each in parts)


def frames(data: bytes) -> list[bytes]:
    """The parts again."""
    found, at = [], 0
    while at < len(data):
        [length] = _LENGTH.unpack_from(data, at)
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return found
