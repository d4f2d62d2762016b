"""The Oxia program: built once by the Go toolchain from a pinned module, then kept in a cache.

Why 0.14.0: it is the newest release that builds as a single Go module. It has one bug that no test could live
with: the leader takes an offset under its lock, lets go, and appends to the log afterwards, so that two
writers at once stop the shard for good. Upstream mended it in 0.14.2 by holding the lock over the append. The
build makes the same change, one word in a copy of the module, and refuses to go on where that line is not
found exactly once.

`go.mod` and `go.sum` beside this package pin every module by checksum. The directory in the cache carries a
digest of all inputs, so another pin or another mend never meets an old binary. Many test workers may ask at
the same time: a file lock lets one of them build, and a rename puts the finished program in place, so nobody
ever sees half of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import TypeAlias

from forebay.testing._servers.errors import ServerUnavailable

__all__ = ["OXIA_VERSION", "Progress", "cache_directory", "find_oxia", "oxia_binary"]

OXIA_VERSION = "0.14.0"
MODULE = "github.com/oxia-db/oxia"
MENDED_FILE = "server/leader_controller.go"
BEFORE = "\tterm := lc.term\n\tlc.Unlock()\n"
AFTER = "\tterm := lc.term\n\tdefer lc.Unlock()\n"
BUILD_FLAGS = ("-mod=mod", "-buildvcs=false", "-trimpath")
BUILD_TIMEOUT_S = 1_800
"""Cold on two busy cores it takes five minutes or so; half an hour means that it hangs."""
PROGRESS_EVERY_PACKAGES = 50
ERROR_LINES_MAX = 20

Progress: TypeAlias = Callable[[str], None]


def cache_directory() -> Path:
    """`FOREBAY_CACHE_DIR`, else `XDG_CACHE_HOME/forebay`, else `~/.cache/forebay`."""
    if own := os.environ.get("FOREBAY_CACHE_DIR"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "forebay"
    return Path.home() / ".cache" / "forebay"


def find_oxia() -> Path | None:
    """The program in the cache, or None where it has not been built."""
    program = _place() / "oxia"
    return program if os.access(program, os.X_OK) else None


def oxia_binary(progress: Progress | None = None) -> Path:
    """The program; built first if need be. Raises `ServerUnavailable` with the reason."""
    found = find_oxia()
    if found is not None:
        return found
    if shutil.which("go") is None:
        raise ServerUnavailable(
            "Oxia is not in the cache, and there is no Go toolchain to build it",
            hint="install Go 1.24.2 or newer and run `python -m forebay.testing.servers`",
        )
    place = _place()
    with _lock(place.with_name(f".{place.name}.lock")):
        return find_oxia() or _build(place, progress or _to_stderr)


def _build(place: Path, progress: Progress) -> Path:
    progress(f"building Oxia {OXIA_VERSION} (about three minutes when nothing is cached, then never again)")
    # We hold the lock, so whatever lies there under this name was left by a build that was killed.
    for leftover in place.parent.glob(f".{place.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    # Beside its final place, so that the rename stays inside one file system.
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as scratch:
        work = Path(scratch)
        for name, content in _inputs().items():
            (work / name).write_bytes(content)
        source = _module_directory(work)
        progress("copying and mending the module")
        _copy_mended(source, work / "src")
        _go(work, "mod", "edit", "-replace", f"{MODULE}=./src")
        (work / "made").mkdir()
        _compile(work, progress)
        if place.exists():  # Half a cache entry, without the program: not ours to keep.
            shutil.rmtree(place)
        (work / "made").rename(place)
    progress(f"built {place / 'oxia'}")
    return place / "oxia"


def _module_directory(work: Path) -> Path:
    answer = _go(work, "mod", "download", "-json", MODULE)
    return Path(json.loads(answer)["Dir"])


def _copy_mended(source: Path, target: Path) -> None:
    # Only content is copied: the module cache is read-only, and a copy that is would be hard to remove.
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    for directory in [target, *target.rglob("*/")]:
        directory.chmod(0o755)
    mended = target / MENDED_FILE
    text = mended.read_text()
    if text.count(BEFORE) != 1:
        raise ServerUnavailable(
            f"{MENDED_FILE} of Oxia {OXIA_VERSION} is not what the mend expects",
            hint="the module was changed: check go.mod and go.sum of forebay.testing",
        )
    mended.write_text(text.replace(BEFORE, AFTER))


def _compile(work: Path, progress: Progress) -> None:
    command = ["go", "build", "-v", *BUILD_FLAGS, "-o", "made/oxia", f"{MODULE}/cmd"]
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=work, env=_go_environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as build:
        assert build.stderr is not None
        limit = threading.Timer(BUILD_TIMEOUT_S, build.kill)
        limit.start()
        for line in build.stderr:  # One line per package, or per error.
            lines.append(line.rstrip())
            if len(lines) % PROGRESS_EVERY_PACKAGES == 0:
                progress(f"{len(lines)} packages compiled")
        limit.cancel()
    if build.returncode != 0:
        raise _build_failed(lines)


def _go(work: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["go", *arguments],
            cwd=work,
            env=_go_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise _build_failed(str(error.stderr).splitlines() or str(error.stdout).splitlines()) from None
    return done.stdout


def _build_failed(lines: list[str]) -> ServerUnavailable:
    tail = "\n".join(lines[-ERROR_LINES_MAX:])
    return ServerUnavailable(
        f"Oxia {OXIA_VERSION} could not be built:\n{tail}",
        hint="check that `go version` says 1.24.2 or newer and that Go can reach its module proxy",
    )


def _go_environment() -> dict[str, str]:
    # A workspace or flags of the user's own projects would leak into the build.
    return {**os.environ, "GOWORK": "off", "GOFLAGS": ""}


def _inputs() -> dict[str, bytes]:
    package = resources.files("forebay.testing") / "oxia_build"
    return {name: (package / name).read_bytes() for name in ("go.mod", "go.sum")}


def _place() -> Path:
    machine = f"{platform.system()} {platform.machine()}"
    parts = [*_inputs().values(), AFTER.encode(), " ".join(BUILD_FLAGS).encode(), machine.encode()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]
    return cache_directory() / "servers" / f"oxia-{OXIA_VERSION}-{digest}"


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = path.open("ab")
    except OSError as error:
        raise ServerUnavailable(
            f"the cache {path.parent} cannot be written: {error.strerror}",
            hint="set FOREBAY_CACHE_DIR to a directory that can",
        ) from None
    with held:
        # The lock file stays: unlinking it would let two builders lock two files of one name.
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"forebay: {line}\n")
    sys.stderr.flush()
