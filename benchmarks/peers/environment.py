"""Virtual environments of peers: made on first use, kept in the cache that also holds the built servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import CannotMeasure
from forebay.testing.servers import cache_directory

__all__ = ["peer_python"]

BUILD_TIMEOUT_S = 600
_STAMP = "ready"
"""Written last: an environment without it was left half-made and is made again."""


def peer_python(name: str, pins: Sequence[str], say: Callable[[str], None]) -> Path:
    """The interpreter of the environment `name` with these packages. Raises `CannotMeasure` without them."""
    place = cache_directory() / "peers" / name
    python, stamp = place / "bin" / "python", place / _STAMP
    wanted = "\n".join([sys.version, *pins])
    if not stamp.exists() or stamp.read_text() != wanted:
        say(f"installing {pins[0]} into an environment of its own")
        _run([sys.executable, "-m", "venv", "--clear", str(place)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins])
        stamp.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        words = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise CannotMeasure(f"the environment of a peer could not be made: {words[-1]}") from error
