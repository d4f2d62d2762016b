"""What opening a store found, and did about it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["RecoveryReport"]


@dataclass(slots=True)
class RecoveryReport:
    """Everything that was not as it should be, in numbers. All zero after a clean shutdown."""

    entries_replayed: int = 0
    """WAL entries put back into open segments."""
    entries_covered: int = 0
    """WAL entries left alone, because a durable segment has them."""
    entries_expired: int = 0
    """WAL entries left out, because time retention would have taken them at once; recorded as dropped."""
    sequence_gaps: int = 0
    """WAL entries that neither a file nor a segment has: damaged, or refused for want of space."""
    torn_bytes: int = 0
    """Bytes behind the last good frame of a log: writes that a crash cut short. None was acknowledged."""
    damaged_ranges: int = 0
    """Ranges of a log that are damaged, with good frames behind them."""
    damaged_bytes: int = 0
    unknown_frames: int = 0
    """Frames of a type that this release does not know."""
    segments_quarantined: int = 0
    """Segments whose footer cannot be read."""
    segments_lost: list[int] = field(default_factory=list)
    """Segments that somebody still needed and whose file is gone or unreadable."""
    strays_removed: int = 0
    """Files that were about to be deleted, or were written twice."""
    temporary_removed: int = 0
    checkpoints_damaged: int = 0
    redelivery_possible: bool = False
    """Acknowledgements may have been lost to damage; what they spoke of is delivered again."""
    quarantined: list[str] = field(default_factory=list)
    """Files where damaged bytes were put aside."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing was damaged. A torn tail is no damage."""
        return not (
            self.damaged_ranges
            or self.unknown_frames
            or self.segments_quarantined
            or self.segments_lost
            or self.checkpoints_damaged
        )
