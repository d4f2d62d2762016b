"""The published `otel-arrow-dfe-quiver` crate as a program, built once into the cache from `quiver/` here.

`Cargo.lock` has versions and checksums and no registry addresses; cargo wants those too, so they are taken
from a lock file that it writes itself. The build takes some eight minutes of one core; a stamp with a digest
of the sources says that it was finished.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import CannotMeasure
from forebay.testing.servers import cache_directory

__all__ = ["NAME", "quiver_binary"]

NAME = "quiver-0.62.0"
SOURCES = Path(__file__).resolve().parent / "quiver"
BUILD_TIMEOUT_S = 3_600
_STAMP = "ready"


def quiver_binary(say: Callable[[str], None] = lambda _: None) -> Path:
    """The built program. Raises `CannotMeasure` where it cannot be had."""
    place = cache_directory() / "peers" / NAME
    binary, stamp, wanted = place / "target" / "release" / "quiver-peer", place / _STAMP, _digest()
    if binary.is_file() and stamp.is_file() and stamp.read_text() == wanted:
        return binary
    if shutil.which("cargo") is None:
        raise CannotMeasure("cargo is not installed, so the Quiver crate cannot be built")
    say("building the Quiver crate, which takes some minutes the first time")
    try:
        _build(place)
    except (OSError, subprocess.SubprocessError) as error:
        words = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise CannotMeasure(f"the Quiver crate could not be built: {words[-1]}") from error
    stamp.write_text(wanted)
    return binary


def _digest() -> str:
    total = hashlib.sha256()
    for path in (SOURCES / "Cargo.toml", SOURCES / "Cargo.lock", SOURCES / "src" / "main.rs"):
        total.update(path.read_bytes())
    return total.hexdigest()


def _build(place: Path) -> None:
    shutil.copytree(SOURCES, place, dirs_exist_ok=True)
    (place / "Cargo.lock").unlink()
    _cargo(place, "generate-lockfile")
    own = (place / "Cargo.lock").read_text().splitlines()
    address = next(line for line in own if line.startswith("source = "))
    lines: list[str] = []
    for line in (SOURCES / "Cargo.lock").read_text().splitlines():
        lines += [address, line] if line.startswith("checksum = ") else [line]
    (place / "Cargo.lock").write_text("\n".join(lines) + "\n")
    _cargo(place, "build", "--release", "--locked")


def _cargo(place: Path, *words: str) -> None:
    command = ["cargo", *words, "--quiet"]
    if shutil.which("nice"):
        command = ["nice", "-n", "19", *command]
    jobs = os.environ.get("CARGO_BUILD_JOBS", "1")
    subprocess.run(
        command,
        cwd=place,
        check=True,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        env=os.environ | {"CARGO_BUILD_JOBS": jobs},
    )
