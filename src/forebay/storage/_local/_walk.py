"""A directory tree as a stream of keys in byte order.

Whole keys are compared, so a directory takes the place of its name with a slash: `a-b` comes before `a/x`,
although `a` comes before `a-b`. Each directory is read whole and sorted when its turn comes; nothing else
is held, and directories that cannot hold a wanted key are not opened.

Skipped: our own directory, symbolic links, anything that is neither file nor directory, and names that are
no valid keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from forebay.errors import InvalidKey
from forebay.storage._api import validate_key, validate_prefix

__all__ = ["walk"]


def walk(root: Path, prefix: str, after: str) -> Iterator[str]:
    """Keys of files under `root` that start with `prefix` and come after `after`."""
    directory, _, _ = prefix.rpartition("/")
    yield from _below(root, f"{directory}/" if directory else "", prefix, after)


def _below(root: Path, base: str, prefix: str, after: str) -> Iterator[str]:
    for key in _sorted_children(root, base, prefix):
        if not key.endswith("/"):
            if key > after:
                yield key
        elif key > after or after.startswith(key):
            yield from _below(root, key, prefix, after)


def _sorted_children(root: Path, base: str, prefix: str) -> list[str]:
    """Keys of the files and, ending with a slash, of the directories right below `base`."""
    children = []
    try:
        with os.scandir(root / base) as entries:
            for entry in entries:
                is_directory = entry.is_dir(follow_symlinks=False)
                key = f"{base}{entry.name}"
                if not (key.startswith(prefix) or (is_directory and prefix.startswith(f"{key}/"))):
                    continue
                if (is_directory or entry.is_file(follow_symlinks=False)) and _is_valid(key, is_directory):
                    children.append(f"{key}/" if is_directory else key)
    except (FileNotFoundError, NotADirectoryError):
        return []
    children.sort()
    return children


def _is_valid(key: str, is_directory: bool) -> bool:
    try:
        validate_prefix(key) if is_directory else validate_key(key)
    except InvalidKey:
        return False
    return True
