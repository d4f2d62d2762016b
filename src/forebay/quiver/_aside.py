"""Files that are kept for somebody to look at: rejected segments in `dead/`, damaged bytes in `quarantine/`.

Both together have one bound. A new file makes room by the oldest of its own directory, then by those of the
other; one that alone is too large is not kept. Everything here runs in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from forebay.quiver._disk import Disk, Piece, write_file

__all__ = ["ASIDE", "keep", "total_bytes"]

ASIDE: Final = ("dead", "quarantine")


def total_bytes(disk: Disk) -> int:
    """Bytes of all of them."""
    return sum(size for directory in ASIDE for _, size in disk.list(directory))


def keep(disk: Disk, directory: str, files: Mapping[str, Piece], limit: int) -> int:
    """Write files into a directory of `ASIDE`, durably; the bytes of both directories after it."""
    others = [each for each in ASIDE if each != directory]
    kept = [
        (f"{each}/{name}", size)
        for each in (directory, *others)
        for name, size in disk.list(each)
        if each != directory or name not in files
    ]
    total = sum(size for _, size in kept)
    need = sum(size for size in map(len, files.values()) if size <= limit)
    while kept and total + need > limit:
        name, size = kept.pop(0)
        disk.remove(name)
        total -= size
    for name, data in files.items():
        disk.remove(f"{directory}/{name}")
        if total + len(data) <= limit:
            write_file(disk, f"{directory}/{name}", [data])
            total += len(data)
    disk.sync_directory(directory)
    return total
