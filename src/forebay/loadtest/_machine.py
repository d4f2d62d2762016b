"""What the machine and the source tree are, and how busy the machine is: for the record beside a run.

Everything here is best effort: a run on a system without /proc, or from an installed package without git, has
less to tell and goes on.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["environment", "git_state", "host_counters", "process_counters"]

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
GIT_S_MAX = 10.0
"""Seconds that git has to answer."""
SECTOR_BYTES = 512
"""Unit of /proc/diskstats, whatever the disk says of itself."""
_PACKAGES = ("forebay", "httptools", "msgspec", "numpy", "obstore", "pyarrow", "uvloop")
_VARIABLES = ("FOREBAY_", "LLOG_", "PYTHON", "UV_")
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Versions, the machine, and the variables that change how we run; none that may hold a secret."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_bytes": _memory().get("MemTotal"),
        "load_average": os.getloadavg(),
        "packages": versions,
        "variables": {
            name: value
            for name, value in sorted(variables.items())
            if name.startswith(_VARIABLES) and not any(word in name.upper() for word in _SECRET)
        },
    }


def git_state(directory: Path) -> dict[str, Any]:
    """Commit, and whether files differ from it; empty where the code does not lie in a work tree."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(directory), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S_MAX, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
        return {"commit": git("rev-parse", "HEAD"), "changed_files": [line[3:] for line in changed]}
    except (OSError, subprocess.SubprocessError):
        return {}


def host_counters() -> dict[str, Any]:
    """How busy the machine is: processor seconds since boot, memory, load, bytes of disks."""
    found: dict[str, Any] = {"load_average": os.getloadavg()}
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        idle = ticks[3] + ticks[4]
        found |= {"cpu_busy_s": (sum(ticks[:8]) - idle) / TICKS_PER_S, "cpu_idle_s": idle / TICKS_PER_S}
    memory = _memory()
    if "MemAvailable" in memory:
        found["memory_available_bytes"] = memory["MemAvailable"]
    with contextlib.suppress(OSError, ValueError, IndexError):
        disks = [line.split() for line in Path("/proc/diskstats").read_text().splitlines()]
        whole = [words for words in disks if Path("/sys/block", words[2]).exists()]
        found["disk_read_bytes"] = sum(int(words[5]) for words in whole) * SECTOR_BYTES
        found["disk_written_bytes"] = sum(int(words[9]) for words in whole) * SECTOR_BYTES
    return found


def _memory() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return {
            name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)
        }
    except (OSError, ValueError, IndexError):
        return {}


def process_counters(pid: int) -> dict[str, float]:
    """CPU seconds and resident bytes of a process, on Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return {}
    ticks = int(fields[11]) + int(fields[12])
    return {"cpu_s": ticks / TICKS_PER_S, "rss_bytes": int(fields[21]) * PAGE_BYTES}
