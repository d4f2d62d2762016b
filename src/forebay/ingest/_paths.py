"""Names in the bucket: which prefixes and manifests are accepted, and what a batch is called.

The draft's own store percent-encodes some letters and drops empty parts, so that a path with them is written
under one name and looked for under another. Paths are therefore limited to letters that every store keeps.
"""

from __future__ import annotations

import re
from typing import Final

from forebay.errors import InvalidKey, UsageError
from forebay.kit.ids import ULID_LENGTH, ulid_time_ms

__all__ = [
    "BATCH_SUFFIX",
    "batch_location",
    "batch_time_ms",
    "check_manifest_path",
    "check_path",
    "owner_marker",
]

BATCH_SUFFIX: Final = ".json"
"""How our batches end. `.batch`, which the draft's manifests show, is accepted as well."""
_SUFFIXES: Final = (".json", ".batch")
_OWNER_NAME: Final = "forebay-owner.json"
_PATH: Final = re.compile(r"[A-Za-z0-9._=-]+(?:/[A-Za-z0-9._=-]+)*")


def check_path(name: str, path: str) -> str:
    """Return `path`, or raise `InvalidKey` where some store would change it. `name` is the setting."""
    if not _PATH.fullmatch(path) or any(part in (".", "..") for part in path.split("/")):
        raise InvalidKey(
            path, f"not usable as {name}", hint="letters, digits and . _ = - between single slashes, no more"
        )
    return path


def check_manifest_path(path: str) -> str:
    """Return `path`, or raise `InvalidKey` where it cannot be that of a manifest."""
    if batch_time_ms(path) is not None:
        raise InvalidKey(
            path,
            "named like a batch",
            hint="orphans are collected by their names: name the manifest otherwise",
        )
    return check_path("manifest_path", path)


def batch_location(prefix: str, ulid: str) -> str:
    """Where the batch of this id lies."""
    return f"{prefix}/{ulid}{BATCH_SUFFIX}"


def batch_time_ms(location: str) -> int | None:
    """When a batch was named, by the ULID in its location; None where it is not a batch's name."""
    name = location.rpartition("/")[2]
    if len(name) <= ULID_LENGTH or name[ULID_LENGTH:] not in _SUFFIXES:
        return None
    try:
        return ulid_time_ms(name[:ULID_LENGTH])
    except UsageError:
        return None


def owner_marker(prefix: str) -> str:
    """The object that names the manifest a prefix belongs to."""
    return f"{prefix}/{_OWNER_NAME}"
