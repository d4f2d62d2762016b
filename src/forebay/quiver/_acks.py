"""The acknowledgement log of a running store: records in, state out, checkpoints now and then.

**Invariant.** `state` is what replaying the files would give: a record takes effect when it is durable, never
before. The one exception is `Finalized`, which takes effect with the segment file that is durable already;
its record is kept in `_unrecorded` and goes in front of every later group until it is durable, so that no
segment is ever deleted whose WAL entries could be replayed.

**Checkpoint.** It names the newest log file, not the end of it: records that are replayed twice do no harm,
and nobody has to stop for it. Two checkpoints are kept; log files go when the older of them needs them no
more, so a damaged newest one costs a longer replay and nothing else. A registration gets one at once: damage
to its record alone would leave a subscriber that nobody knows of, and what it had not had would be swept.

**Full disk.** The beginning of a log file is allocated before it is used, so that subscribers can go on, and
with them deletion, when nothing else can be written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from forebay.errors import ForebayError
from forebay.formats import quiver_ack
from forebay.formats.quiver_ack import Finalized, Record
from forebay.formats.quiver_frame import ACK_MAGIC
from forebay.kit.clock import Clock
from forebay.quiver._ack_state import AckState
from forebay.quiver._config import QuiverConfig
from forebay.quiver._disk import Disk, Piece, write_file
from forebay.quiver._errors import from_os_error
from forebay.quiver._group_log import GroupLog, Item
from forebay.quiver._log_files import LogFile, LogSettings
from forebay.quiver._to_the_end import on_its_own

__all__ = ["Acks", "CheckpointFile"]

RECORD_TYPE: Final = 1
RESERVED_BYTES: Final = 256 * 1024
"""Bytes of a log file that are there before they are needed: on a full disk, acknowledgements are what gives
space back, so they must not need any."""


class CheckpointFile:
    """A checkpoint on disk."""

    __slots__ = ("generation", "number", "size")

    def __init__(self, number: int, generation: int, size: int) -> None:
        self.number = number
        self.generation = generation
        self.size = size

    @property
    def name(self) -> str:
        """Where it lies."""
        return f"ack/{self.number:016d}.ckpt"


class Acks:
    """See the module."""

    def __init__(
        self,
        disk: Disk,
        config: QuiverConfig,
        clock: Clock,
        state: AckState,
        on_applied: Callable[[Record], None],
    ) -> None:
        self._disk = disk
        self._config = config
        self._clock = clock
        self._on_applied = on_applied
        self._unrecorded: dict[int, Finalized] = {}
        self._checkpoints: list[CheckpointFile] = []
        self._checkpoint_bytes = 0
        self._next_checkpoint = 1
        self._checkpoint_at = clock.monotonic()
        self._checkpointing = asyncio.Lock()
        self._trimming = asyncio.Lock()
        self.state = state
        self.records_since_checkpoint = 0
        self.log = GroupLog(
            disk,
            LogSettings(
                "ack",
                "ack",
                "log",
                ACK_MAGIC,
                config.ack_rotation_bytes,
                spares_max=1,
                spare_bytes=min(config.ack_rotation_bytes, RESERVED_BYTES),
                is_always_prepared=True,
            ),
            clock,
            on_durable=self._apply,
        )

    @property
    def bytes(self) -> int:
        """Bytes of log files and checkpoints."""
        return self.log.bytes + self._checkpoint_bytes

    @property
    def checkpoint_age_s(self) -> float:
        """Seconds since the last checkpoint."""
        return self._clock.monotonic() - self._checkpoint_at

    def start(
        self,
        files: list[LogFile],
        next_generation: int,
        next_sequence: int,
        checkpoints: list[CheckpointFile],
        next_checkpoint: int,
        spares: list[tuple[str, int]],
    ) -> None:
        """Go on behind what recovery found."""
        self._checkpoints = checkpoints
        self._checkpoint_bytes = sum(each.size for each in checkpoints)
        self._next_checkpoint = next_checkpoint
        self.log.start(files, next_generation, next_sequence, spares)

    async def commit(self, records: Sequence[Record]) -> None:
        """Return once the records are durable and have taken effect."""
        items = [self._append(each) for each in (*self._unrecorded.values(), *records)]
        problem: BaseException | None = None
        for item in items:
            try:
                await item.done
            except Exception as error:
                problem = error
        if problem is not None:
            raise problem

    async def register(self, records: Sequence[Record]) -> None:
        """As `commit`, and have a second copy in a checkpoint. Where none can be written the timer tries."""
        await self.commit(records)
        with contextlib.suppress(ForebayError):
            await self.checkpoint()

    def finalized(self, record: Finalized) -> None:
        """Take note of a segment that is durable; its record follows with the next group."""
        self.state.apply(record)
        self._unrecorded[record.segment] = record

    async def record_finalized(self) -> None:
        """Write what `finalized` noted."""
        if self._unrecorded:
            await self.commit(())

    def _append(self, record: Record) -> Item:
        body = quiver_ack.encode(record)
        return self.log.append(RECORD_TYPE, self._clock.now_ms() * 1_000_000, (body,), len(body), record)

    def _apply(self, group: list[Item]) -> None:
        for item in group:
            record: Record = item.payload
            if isinstance(record, Finalized):
                self._unrecorded.pop(record.segment, None)
            else:
                self.state.apply(record)
                self._on_applied(record)
        self.records_since_checkpoint += len(group)

    # Checkpoints.

    def is_due(self) -> bool:
        """Whether a checkpoint is worth its writing now."""
        if not self.records_since_checkpoint:
            return False
        return len(self.log.files) > 2 or self.checkpoint_age_s * 1000 >= self._config.checkpoint_interval_ms

    async def checkpoint(self) -> None:
        """Write the state down, and let go of what the previous checkpoint does not need."""
        await self._checkpointing.acquire()
        # Once it has its turn it goes on without us: its file counts, and the next one comes behind it.
        await on_its_own(self._checkpoint_in_turn())
        async with self._trimming:
            keep = self._checkpoints[-2:]
            oldest = min(each.generation for each in keep) if len(keep) > 1 else 0
            files = sorted(self.log.files.items())
            await self.log.remove([file for number, file in files if number < oldest])

    async def _checkpoint_in_turn(self) -> None:
        try:
            await self._checkpoint()
        finally:
            self._checkpointing.release()

    async def _checkpoint(self) -> None:
        generation = max(self.log.files, default=1)
        records = self.records_since_checkpoint
        data = quiver_ack.encode_checkpoint(self.state.checkpoint(generation))
        new = CheckpointFile(self._next_checkpoint, generation, len(data))
        self._next_checkpoint += 1
        keep = [*self._checkpoints[-1:], new]
        gone = self._checkpoints[:-1]

        def work() -> list[CheckpointFile]:
            self._write(new.name, data)
            left = []
            for old in gone:
                try:
                    self._disk.remove(old.name)
                except OSError:
                    left.append(old)
            return left

        try:
            left = await self._disk.run("segments", work)
        except OSError as error:
            raise from_os_error("writing a checkpoint", error) from error
        self.records_since_checkpoint -= records
        # What could not be removed counts, and goes with the next one.
        self._checkpoints = [*left, *keep]
        self._checkpoint_bytes = sum(each.size for each in self._checkpoints)
        self._checkpoint_at = self._clock.monotonic()

    def _write(self, name: str, data: Piece) -> None:
        """Make a file durable under its name; nothing of it stays where that fails."""
        temporary = f"{name}.tmp"
        write_file(self._disk, temporary, [data])
        try:
            self._disk.rename(temporary, name)
            self._disk.sync_directory("ack")
        except BaseException:
            self._disk.remove(temporary)
            self._disk.remove(name)
            raise
