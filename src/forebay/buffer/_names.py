"""How the objects of a queue are named, and which names a queue may use.

    {prefix}/{ULID}.batch            a batch of ours, and of the Rust implementation
    {prefix}/{ULID}/{16 hex digits}  a batch of the Go producer: its process, then a counter
    {prefix}/forebay-owner           which manifest the batches of this prefix belong to

Prefixes and paths are held to plain letters, digits and `. _ = -`: other clients percent-encode everything
else, some of them twice, and then look for an object that nobody wrote.
"""

from __future__ import annotations

import re
from typing import Final

from forebay.errors import UsageError
from forebay.kit.ids import ulid_time_ms

__all__ = ["BATCH_SUFFIX", "OWNER_NAME", "batch_location", "batch_time_ms", "check_path", "is_go_name"]

BATCH_SUFFIX: Final = ".batch"
OWNER_NAME: Final = "forebay-owner"

_PLAIN: Final = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*", re.ASCII)
_GO_ORDINAL: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)
_HINT: Final = "use letters, digits and . _ = - between single slashes, such as ingest/orders"


def check_path(path: str, what: str) -> str:
    """Return `path`, or raise `UsageError` where another client would spell it differently."""
    if not _PLAIN.fullmatch(path) or any(part in (".", "..") for part in path.split("/")):
        raise UsageError(f"{what} {path[:200]!r}", hint=_HINT)
    return path


def batch_location(prefix: str, ulid: str) -> str:
    """The key of a new batch."""
    return f"{prefix}/{ulid}{BATCH_SUFFIX}"


def batch_time_ms(name: str) -> int | None:
    """The time in the last part of a batch's key, or None where it is not `{ULID}.batch`."""
    return _ulid_time_ms(name.removesuffix(BATCH_SUFFIX)) if name.endswith(BATCH_SUFFIX) else None


def is_go_name(name: str) -> bool:
    """Whether this, below the prefix, is what the Go producer calls a batch."""
    run, _, ordinal = name.partition("/")
    return _GO_ORDINAL.fullmatch(ordinal) is not None and _ulid_time_ms(run) is not None


def _ulid_time_ms(text: str) -> int | None:
    try:
        return ulid_time_ms(text)
    except UsageError:
        return None
