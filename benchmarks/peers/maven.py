"""Jars by Maven, fetched once: kept in the cache beside the other peers, under a digest of the pom."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import CannotMeasure
from forebay.testing.servers import cache_directory

__all__ = ["jars_of"]

FETCH_TIMEOUT_S = 600
_STAMP = "ready"


def jars_of(pom: Path, name: str, say: Callable[[str], None] = lambda _: None) -> Path:
    """The directory of the jars that a pom names. Raises `CannotMeasure` where they cannot be had."""
    if shutil.which("java") is None:
        raise CannotMeasure(f"java is not installed, so {name} cannot run")
    wanted = hashlib.sha256(pom.read_bytes()).hexdigest()
    place = cache_directory() / "peers" / f"{name.lower().replace(' ', '-')}-{wanted[:12]}"
    stamp = place / _STAMP
    if stamp.is_file():
        return place / "libs"
    if shutil.which("mvn") is None:
        raise CannotMeasure(f"Maven is not installed, so the jars of {name} cannot be fetched")
    say(f"fetching the jars of {name}")
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(pom, place / "pom.xml")
    command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=libs"]
    try:
        subprocess.run(
            command, cwd=place, check=True, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        words = str(getattr(error, "stdout", None) or error).strip().splitlines()
        raise CannotMeasure(f"the jars of {name} could not be fetched: {words[-1]}") from error
    stamp.write_text(wanted)
    return place / "libs"
