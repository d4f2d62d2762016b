"""What a sender gets back: a receipt now, a delivery or an error later. Named as in `forebay.connect`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from forebay.errors import ForebayError, OutcomeUnknown, UsageError

__all__ = ["Delivered", "Delivery", "PartlyDelivered", "Receipt", "not_yet", "settled"]


@dataclass(frozen=True, slots=True)
class Delivered:
    """What became of the records for one partition."""

    topic: str
    partition: int
    start_offset: int | None
    """Offset of the first record, or None where they were not taken."""
    end_offset: int | None
    """Offset of the last record."""
    count: int
    error: ForebayError | None = None
    """What went wrong. An `OutcomeUnknown` may have been appended; everything else certainly was not."""

    @property
    def ok(self) -> bool:
        """Whether the records are durable, at these offsets."""
        return self.error is None


@dataclass(frozen=True, slots=True)
class Delivery:
    """Records that are durable, and where they are."""

    topic: str
    parts: tuple[Delivered, ...]
    """One per partition that the records went to."""

    @property
    def count(self) -> int:
        """Records in all."""
        return sum(part.count for part in self.parts)

    @property
    def partition(self) -> int:
        """The partition, where there is one."""
        return self._only().partition

    @property
    def start_offset(self) -> int:
        """Offset of the first record, where all went to one partition."""
        offset = self._only().start_offset
        assert offset is not None
        return offset

    @property
    def end_offset(self) -> int:
        """Offset of the last record, where all went to one partition."""
        offset = self._only().end_offset
        assert offset is not None
        return offset

    def _only(self) -> Delivered:
        if len(self.parts) != 1:
            raise UsageError(
                f"the records went to {len(self.parts)} partitions", hint="look at each of `parts`"
            )
        return self.parts[0]


class PartlyDelivered(ForebayError):
    """Some of the partitions that records were sent to took them, others did not."""

    def __init__(self, topic: str, parts: Sequence[Delivered]) -> None:
        failed = [part for part in parts if part.error is not None]
        super().__init__(
            f"{len(failed)} of {len(parts)} partitions of {topic!r} did not take their records: "
            f"{failed[0].error}",
            hint="`parts` says which; send those records again",
        )
        self.topic = topic
        self.parts = tuple(parts)


def settled(topic: str, parts: Sequence[Delivered]) -> Delivery | ForebayError:
    """What a sender learns in the end."""
    errors = [part.error for part in parts if part.error is not None]
    if not errors:
        return Delivery(topic, tuple(parts))
    return errors[0] if len(parts) == 1 else PartlyDelivered(topic, parts)


class Receipt:
    """Becomes a `Delivery` once the records are durable. Await it, or `result(timeout)`."""

    def __init__(self, seen: Callable[[object], None]) -> None:
        self._future: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._seen = seen

    def __await__(self) -> Generator[object, None, Delivery]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> Delivery:
        """The delivery; raises what went wrong, or `OutcomeUnknown` where the time is up."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._future), timeout)
        except TimeoutError:
            raise not_yet(timeout) from None
        except ForebayError:
            self._seen(self)
            raise

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._future.done()

    def settle(self, outcome: Delivery | ForebayError) -> None:
        """Tell the sender."""
        if self._future.done():
            return
        if isinstance(outcome, Delivery):
            self._future.set_result(outcome)
        else:
            self._future.set_exception(outcome)
            self._future.exception()  # Nobody is obliged to look: the producer's close raises it then.


def not_yet(timeout: float | None) -> OutcomeUnknown:
    """The error of a receipt that was asked too early."""
    return OutcomeUnknown(
        "send", reason=f"not durable after {timeout} s", hint="ask the receipt again, it goes on"
    )
