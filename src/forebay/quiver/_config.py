"""What can be set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.errors import UsageError
from forebay.formats.quiver_wal import CODECS

__all__ = ["QuiverConfig"]

_RANGES = {
    "segment_bytes": (1_024, 1 << 30),
    "segment_open_ms": (1, 86_400_000),
    "segment_hold_ms": (0, 60_000),
    "streams_max": (1, 10_000),
    "wal_bytes_max": (65_536, 1 << 44),
    "wal_file_bytes": (4_096, 1 << 32),
    "wal_spare_files": (0, 64),
    "flush_interval_ms": (0, 60_000),
    "pending_bytes_max": (65_536, 1 << 32),
    "open_bytes_max": (65_536, 1 << 40),
    "size_cap_bytes": (1 << 18, 1 << 60),
    "headroom_bytes": (0, 1 << 60),
    "ack_file_bytes": (4_096, 1 << 30),
    "checkpoint_interval_ms": (100, 86_400_000),
    "maintenance_interval_ms": (1, 3_600_000),
    "lease_ms": (1, 86_400_000),
    "retry_base_ms": (0, 3_600_000),
    "retry_cap_ms": (0, 86_400_000),
    "maps_max": (1, 10_000),
    "dead_letter_bytes_max": (0, 1 << 50),
}


@dataclass(frozen=True, slots=True)
class QuiverConfig:
    """Settings of one instance."""

    segment_bytes: int = 32 * 1024 * 1024
    """Logical bytes at which an open segment is finalized. 1 KiB to 1 GiB."""
    segment_open_ms: int = 5_000
    """Milliseconds from the first batch of an open segment to its finalize. 1 to a day; batches that came in
    more than half a day apart are in different segments in any case."""
    segment_hold_ms: int = 0
    """Milliseconds for which a finished segment may stay in memory, where every subscriber keeps up and gets
    it there; a file is only written of what was not acknowledged by then. 0 writes each at once."""
    streams_max: int = 64
    """Open segments at once, one per signal type and schema; the oldest is finalized for a further one."""
    segment_codec: str = "none"
    """`none`, `lz4` or `zstd`. Only `none` is read without copying."""
    wal_codec: str = "none"
    """`none`, `lz4` or `zstd`, for the bytes of the WAL."""
    event_time_column: str = "timestamp"
    """Column with event times for the range in the metadata: integers (nanoseconds) or Arrow timestamps."""
    wal_bytes_max: int = 128 * 1024 * 1024
    """Bytes of all WAL files; ingest waits for finalize above it. At least two files."""
    wal_file_bytes: int = 16 * 1024 * 1024
    """Bytes that a WAL file does not pass, unless for one large group."""
    wal_spare_files: int = 4
    """Finished WAL files kept to be written over, which makes syncs about twice as fast. 0 to 64, and never
    more than half of `wal_bytes_max`. At the first opening they are filled with zeros. They should last for
    two segments: one is written while the next one fills the WAL."""
    flush_interval_ms: int = 0
    """Longest pause between two syncs of the WAL. 0 syncs as soon as the previous sync ends, still for all
    who wait. It delays acknowledgements; it never lets one come early."""
    pending_bytes_max: int = 64 * 1024 * 1024
    """Encoded bytes that may wait for the WAL; further callers of `ingest` wait."""
    open_bytes_max: int = 256 * 1024 * 1024
    """Logical bytes in memory that are in no segment file yet; above it, or above two segments where that is
    more, everything open is finalized and further callers of `ingest` wait. 64 KiB to 1 TiB."""
    size_cap_bytes: int = 10 * 1024 * 1024 * 1024
    """Bytes on disk of everything in the directory."""
    size_cap_policy: Literal["backpressure", "drop_oldest"] = "backpressure"
    """What happens at the cap when nothing processed is left to delete."""
    headroom_bytes: int = 0
    """Processed segments kept on purpose, up to so many bytes."""
    retain_ms: int | None = None
    """Milliseconds after ingestion at which a segment goes even if nobody had it. None: never."""
    ack_file_bytes: int = 4 * 1024 * 1024
    """Bytes at which the next ack.log file is begun, with a checkpoint. Never more than a sixteenth of
    `size_cap_bytes`, which must leave room for data beside it."""
    checkpoint_interval_ms: int = 60_000
    """Milliseconds after which a checkpoint is written if there is anything new."""
    maintenance_interval_ms: int = 1_000
    """Milliseconds between two passes of cleanup and retention."""
    lease_ms: int = 60_000
    """Milliseconds that a subscriber has for a segment before it is delivered again."""
    retry_base_ms: int = 1_000
    """Ceiling of the wait after the first nack, in milliseconds; it doubles with every further one."""
    retry_cap_ms: int = 30_000
    """Highest ceiling of that wait."""
    orphan_timeout_ms: int | None = None
    """Milliseconds after which a subscriber is removed that nobody has spoken for since the store was opened:
    what it has not had is no longer kept for it. None: never."""
    maps_max: int = 64
    """Segments kept mapped for readers at once."""
    dead_letter_bytes_max: int = 64 * 1024 * 1024
    """Bytes of rejected and quarantined files that are kept; the oldest go first. Never more than a quarter
    of `size_cap_bytes`: nobody acknowledges them, so they must not shut data out."""

    @property
    def wal_spares_max(self) -> int:
        """Spare WAL files that the bound of the WAL leaves room for."""
        return min(self.wal_spare_files, self.wal_bytes_max // (2 * self.wal_file_bytes))

    @property
    def ack_rotation_bytes(self) -> int:
        """Bytes of an ack.log file."""
        return min(self.ack_file_bytes, self.size_cap_bytes // 16)

    @property
    def aside_bytes_max(self) -> int:
        """Bytes of rejected and quarantined files."""
        return min(self.dead_letter_bytes_max, self.size_cap_bytes // 4)

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"{name} is {value!r}", hint=f"it is {low:,} to {high:,}")
        for name in ("segment_codec", "wal_codec"):
            if getattr(self, name) not in CODECS:
                raise UsageError(f"{name} is {getattr(self, name)!r}", hint=f"one of {', '.join(CODECS)}")
        if self.size_cap_policy not in ("backpressure", "drop_oldest"):
            raise UsageError(
                f"size_cap_policy is {self.size_cap_policy!r}", hint="one of backpressure, drop_oldest"
            )
        for name in ("retain_ms", "orphan_timeout_ms"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} is {value!r}", hint="at least 1, or None")
        if self.wal_bytes_max < 2 * self.wal_file_bytes:
            raise UsageError("wal_bytes_max is below two WAL files", hint="raise it or lower wal_file_bytes")
        need = self.wal_bytes_max + 2 * self.segment_bytes
        if self.size_cap_bytes < need:
            raise UsageError(
                f"size_cap_bytes is {self.size_cap_bytes:,}",
                hint=f"at least wal_bytes_max + 2 segment_bytes = {need:,}",
            )
